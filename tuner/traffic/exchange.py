"""Reads one request and its answer in OpenAI's format. It takes what a trace needs, without the text.

Tokens are counted with the model's own tokenizer file (`tokenizers` library) and chat template. To see which
prompts are equal, blocks of prompts are hashed with a key, each hash together with the blocks before it. The
hashes become numbers in the order of their first appearance. The key is not stored.
"""

import json
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tuner.errors import BadInput


class Tokenizer:
    """A model's tokenizer.json, and the chat template beside it if there is one.

    Without a template, only the contents of the messages are counted. `exact_chat` says whether there is a
    template.
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
        """Whether the model's own chat template is used."""
        return self._template is not None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text; `special` adds what the tokenizer puts around a prompt."""
        return list(self._library.encode(text, add_special_tokens=special).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> list[int]:
        """Token ids of a conversation as the engine sees it, with the beginning of the answer."""
        if self._template is not None:
            names = ("bos_token", "eos_token", "pad_token", "unk_token")
            given = {name: self._config.get(name) or "" for name in names}
            special = {n: str(v.get("content", "") if isinstance(v, dict) else v) for n, v in given.items()}
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


TOKEN_BLOCK = 16  # vLLM's default block size, so that blocks fit those of the engine
MOST_BLOCKS_OF_A_PROMPT = 4_000_000  # 64 million tokens: more is a damaged file

# Without a tokenizer, so many bytes count as one token.
BYTES_PER_TOKEN = 4


class Fingerprints:
    """The numbers of blocks and names of one capture.

    After `destroy`, nothing can be compared with this capture. `most` limits the memory: the hashes that were
    not used for the longest time are forgotten, and get a new number if they come again.
    """

    def __init__(self, *, block_size: int = TOKEN_BLOCK, most: int = 2_000_000) -> None:
        self.block_size = block_size
        self._key = bytearray(secrets.token_bytes(32))
        self._most = most
        self._numbers: OrderedDict[bytes, int] = OrderedDict()
        self._names: dict[str, dict[bytes, int]] = {}
        self._next = 0

    def blocks(self, tokens: Sequence[int], context: str = "") -> list[int]:
        """Numbers of the complete blocks of these tokens. Two blocks have the same number if all tokens up to
        their end are equal.

        `context` is what else the engine's cache depends on (adapter, cache salt). An incomplete last block
        is left out.
        """
        try:
            raw = array("q", tokens).tobytes()
        except (TypeError, OverflowError):
            return []
        return self._chain(raw, 8 * self.block_size, context)

    def text_blocks(self, text: bytes, context: str = "") -> list[int]:
        """The block numbers of a text without a tokenizer: BYTES_PER_TOKEN bytes count as one token."""
        return self._chain(text, BYTES_PER_TOKEN * self.block_size, context)

    def name(self, kind: str, text: str) -> int:
        """The number of a client, session or model, in the order of first appearance. The name itself is not
        stored.
        """
        known = self._names.setdefault(kind, {})
        digest = blake2b(f"{kind}\0{text}".encode("utf-8", "replace"), key=self._key, digest_size=16).digest()
        return known.setdefault(digest, len(known))

    def destroy(self) -> None:
        """Overwrites the key and forgets every hash."""
        for place in range(len(self._key)):
            self._key[place] = 0
        self._numbers.clear()
        self._names.clear()

    def _chain(self, raw: bytes, width: int, context: str) -> list[int]:
        link = blake2b(context.encode("utf-8", "replace"), key=self._key, digest_size=16).digest()
        found: list[int] = []
        for start in range(0, len(raw) - width + 1, width):
            link = blake2b(link + raw[start : start + width], key=self._key, digest_size=16).digest()
            number = self._numbers.get(link)
            if number is None:
                number = self._numbers[link] = self._next
                self._next += 1
                if len(self._numbers) > self._most:
                    self._numbers.popitem(last=False)
            else:
                self._numbers.move_to_end(link)
            found.append(number)
        return found


def runs(ids: Sequence[int]) -> list[list[int]]:
    """Ids as [start, length] runs of consecutive numbers. This is short, because new blocks get consecutive
    numbers.
    """
    packed: list[list[int]] = []
    for one in ids:
        if packed and packed[-1][0] + packed[-1][1] == one:
            packed[-1][1] += 1
        else:
            packed.append([one, 1])
    return packed


def unpacked(packed: Sequence[Sequence[int]]) -> list[int]:
    """The ids in runs. ValueError if they are not pairs of small whole numbers."""
    found: list[int] = []
    for pair in packed:
        start, length = pair
        if type(start) is not int or type(length) is not int or start < 0 or not 0 < length < 10_000_000:
            raise ValueError(f"run {pair!r}")
        if len(found) + length > MOST_BLOCKS_OF_A_PROMPT:
            raise ValueError(f"more than {MOST_BLOCKS_OF_A_PROMPT:,} blocks")
        found.extend(range(start, start + length))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """A request body: the prompt as token ids or text (in memory only), and how it wants to be served.

    `beam` is the width of a beam search, which vLLM takes from `n`; 0: none.
    """

    ids: tuple[int, ...] | None = None
    text: str | None = field(default=None, repr=False)
    messages: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    tools: Any = field(default=None, repr=False)
    prompts: int = 1
    n: int = 1
    beam: int = 0
    max_tokens: int = -1
    priority: int = 0
    model: str = ""
    cache_salt: str = ""
    session: str | None = None
    client: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFacts:
    """What an answer shows about its tokens. `chunks` counts events with text; `text` is used only to count
    tokens.
    """

    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    chunks: int = 0
    text: str = field(default="", repr=False)
    failed: bool = False
    complete: bool = False


SESSION_KEYS = ("session_id", "conversation_id", "conversation", "prompt_cache_key")


def read_request(body: Mapping[str, Any]) -> RequestFacts:
    """Reads the body of a completion, chat completion or response request. Values of a wrong type are
    replaced by the defaults.
    """
    metadata = body.get("metadata") if isinstance(body.get("metadata"), dict) else {}
    holders = (body, metadata or {}, body.get("extra") if isinstance(body.get("extra"), dict) else {})
    session = next(
        (h[k] for h in holders for k in SESSION_KEYS if h and isinstance(h.get(k), str | int)), None
    )
    user = body.get("safety_identifier") or body.get("user")
    most = next(
        (body[k] for k in ("max_completion_tokens", "max_tokens", "max_output_tokens") if body.get(k)), -1
    )
    n = _count(body.get("n"), 1)
    found = RequestFacts(
        n=n,
        beam=max(1, n) if body.get("use_beam_search") else 0,
        max_tokens=_count(most, -1),
        priority=_count(body.get("priority"), 0),
        model=str(body.get("model") or ""),
        cache_salt=str(body.get("cache_salt") or ""),
        session=None if session is None else str(session),
        client=user if isinstance(user, str) and user else None,
        tools=body.get("tools"),
    )
    return _with_prompt(found, body)


def _with_prompt(found: RequestFacts, body: Mapping[str, Any]) -> RequestFacts:
    prompt = body.get("prompt", body.get("input"))
    messages = body.get("messages")
    if messages is None and isinstance(prompt, list) and prompt and all(isinstance(p, dict) for p in prompt):
        messages = prompt
    if isinstance(messages, list):
        kept = tuple(one for one in messages if isinstance(one, dict))
        return replace(found, messages=kept, text="\n".join(plain_text(one) for one in kept))
    if isinstance(prompt, str):
        return replace(found, text=prompt)
    if isinstance(prompt, list) and prompt:
        if all(type(one) is int for one in prompt):
            return replace(found, ids=tuple(prompt))
        first = prompt[0]
        if isinstance(first, list) and all(type(one) is int for one in first):
            return replace(found, ids=tuple(first), prompts=len(prompt))
        if isinstance(first, str):
            return replace(found, text=first, prompts=len(prompt))
    return found


def read_response(data: bytes, content_type: str = "") -> ResponseFacts:
    """Reads an answer: one JSON document or a stream of events, complete or not."""
    if b"data:" in data[:4096] and not data.lstrip().startswith(b"{"):
        return _streamed(data)
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return ResponseFacts(failed=bool(data) and "json" in content_type)
    if not isinstance(document, dict):
        return ResponseFacts(failed=True)
    text = "".join(_choice_text(choice) for choice in _list(document.get("choices")))
    found = ResponseFacts(text=text, chunks=bool(text), failed="error" in document, complete=True)
    return _with_usage(found, document)


def _streamed(data: bytes) -> ResponseFacts:
    """All events; only the last ones if they have the engine's own count and no error came before."""
    tail = data[-4096:]
    if b'"usage":{' in tail.replace(b" ", b"") and b'"error"' not in data:
        found = _events(tail[max(0, tail.find(b"\ndata:")) :] if len(data) > 4096 else data)
        if found.output_tokens is not None:
            return replace(found, chunks=data.count(b"data:"))
    return _events(data)


def _events(data: bytes) -> ResponseFacts:
    found, pieces, chunks = ResponseFacts(), [], 0
    for line in data.replace(b"\r\n", b"\n").split(b"\n"):
        if not line.startswith(b"data:"):
            continue
        payload = line[5:].strip()
        if payload == b"[DONE]":
            found = replace(found, complete=True)
            continue
        try:
            event = json.loads(payload)
        except (ValueError, RecursionError):
            continue
        if not isinstance(event, dict):
            continue
        piece = "".join(_choice_text(choice) for choice in _list(event.get("choices")))
        if event.get("type") == "response.output_text.delta" and isinstance(event.get("delta"), str):
            piece = event["delta"]
        if piece:
            pieces.append(piece)
            chunks += 1
        if event.get("error"):
            found = replace(found, failed=True)
        if event.get("type") == "response.completed" and isinstance(event.get("response"), dict):
            event, found = event["response"], replace(found, complete=True)
        found = _with_usage(found, event)
    return replace(found, text="".join(pieces), chunks=chunks)


def _with_usage(found: ResponseFacts, document: Mapping[str, Any]) -> ResponseFacts:
    usage = document.get("usage")
    if not isinstance(usage, dict):
        return found
    details = usage.get("prompt_tokens_details", usage.get("input_tokens_details"))
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return replace(
        found,
        input_tokens=_known(usage.get("prompt_tokens", usage.get("input_tokens")), found.input_tokens),
        output_tokens=_known(usage.get("completion_tokens", usage.get("output_tokens")), found.output_tokens),
        cached_tokens=_known(cached, found.cached_tokens),
    )


def count_tokens(
    request: RequestFacts, answer: ResponseFacts, prints: Fingerprints, tokenizer: Tokenizer | None
) -> tuple[int | None, int | None, list[int], str]:
    """(prompt tokens, answer tokens, block numbers, source of the blocks); None for a length that is not
    known.

    The engine's own usage is preferred to the tokenizer's count. Blocks are made from token ids (of the
    request or of the tokenizer), otherwise from the bytes of the text. Several prompts of one request are
    counted together, as the engine does.
    """
    ids = request.ids
    if ids is None and tokenizer is not None and request.text is not None:
        if request.messages:
            ids = tuple(tokenizer.encode_chat(request.messages, request.tools))
        else:
            ids = tuple(tokenizer.encode(request.text))
    context = f"{request.model}\0{request.cache_salt}"
    if ids is not None:
        blocks, source = prints.blocks(ids, context), "tokens"
    elif request.text is not None:
        blocks, source = prints.text_blocks(request.text.encode("utf-8", "replace"), context), "bytes"
    else:
        blocks, source = [], "none"
    size = answer.input_tokens if answer.input_tokens is not None else None if ids is None else len(ids)
    out = answer.output_tokens
    if out is None and tokenizer is not None and answer.text:
        out = len(tokenizer.encode(answer.text, special=False))
    return size, out, blocks, source


def _choice_text(choice: Any) -> str:
    if not isinstance(choice, dict):
        return ""
    holder = choice.get("delta", choice.get("message"))
    if isinstance(holder, dict):
        parts = (holder.get("reasoning_content") or holder.get("reasoning"), holder.get("content"))
        calls = json.dumps(holder["tool_calls"]) if holder.get("tool_calls") else ""
        return "".join(part for part in parts if isinstance(part, str)) + calls
    text = choice.get("text")
    return text if isinstance(text, str) else ""


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _count(value: Any, default: int) -> int:
    return value if type(value) is int and abs(value) < 2**31 else default


def _known(value: Any, before: int | None) -> int | None:
    return value if type(value) is int and 0 <= value < 2**31 else before
