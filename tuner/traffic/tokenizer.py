"""Counting tokens with the model's own file (`tokenizers` library) and its chat template."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tuner.errors import BadInput


class Tokenizer:
    """A model's tokenizer.json, and the chat template beside it if there is one.

    Without a template only the messages' contents are counted; `exact_chat` shows which of the two it is.
    """

    def __init__(self, path: str | Path) -> None:
        """`path` is tokenizer.json or the directory that holds it. BadInput when it cannot be used."""
        given = Path(path)
        file = given / "tokenizer.json" if given.is_dir() else given
        if not file.is_file():
            raise BadInput(
                f"{file}: no such tokenizer file; give the model's tokenizer.json or its directory"
            )
        try:
            from tokenizers import Tokenizer as Library
        except ImportError as error:
            raise BadInput(
                "a tokenizer needs the extra 'capture': pip install 'vllm-config-tuner[capture]'"
            ) from error
        try:
            self._library = Library.from_file(str(file))
        except Exception as error:  # the library raises bare Exception for a bad file
            raise BadInput(f"{file}: not a tokenizer file: {error}") from error
        self.name = file.parent.name or file.name
        self._config = _config(file.parent)
        source = _template(file.parent, self._config)
        sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self._template = None if source is None else sandbox.from_string(source)

    @property
    def exact_chat(self) -> bool:
        """Whether messages are rendered by the model's own template."""
        return self._template is not None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text; `special` adds what the tokenizer puts around a prompt."""
        return list(self._library.encode(text, add_special_tokens=special).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> list[int]:
        """Token ids of a conversation as the engine would see it, the answer's opening included."""
        if self._template is not None:
            names = ("bos_token", "eos_token", "pad_token", "unk_token")
            special = {name: _token_text(self._config.get(name)) for name in names}
            try:
                text = self._template.render(
                    messages=messages, tools=tools, add_generation_prompt=True, **special
                )
                return self.encode(text, special=False)
            except (TemplateError, TypeError, ValueError):
                pass
        return self.encode("\n".join(plain_text(one) for one in messages))


def plain_text(message: Mapping[str, Any]) -> str:
    """The text of one message, its parts joined; parts that are not text are left out."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return f"{message.get('role', '')}: {content or ''}"


def _config(directory: Path) -> Mapping[str, Any]:
    try:
        found = json.loads((directory / "tokenizer_config.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _template(directory: Path, config: Mapping[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _token_text(value: Any) -> str:
    return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")
