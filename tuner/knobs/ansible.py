"""The engines that an Ansible playbook or a list of tasks starts, with its variables filled in.

A variable without a value here becomes one that the shell does not know, which is named where it is needed.
"""

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner import yamltext
from tuner.errors import BadInput
from tuner.knobs import engine_starts, shell
from tuner.knobs.cluster import engines_of, words_in
from tuner.knobs.configfile import environment
from tuner.knobs.engine_starts import FoundEngine

if TYPE_CHECKING:
    from jinja2.sandbox import SandboxedEnvironment

Reader = Callable[[str, str], Sequence[FoundEngine]]
_COMMANDS = ("command", "shell", "raw")
_CONTAINERS = ("docker_container", "podman_container")
_DOCUMENTS = {
    "k8s": ("definition", "resource_definition"), "docker_compose_v2": ("definition",),
    "docker_compose": ("definition",), "helm": ("values", "release_values"),
}  # fmt: skip
_INSIDE = ("pre_tasks", "tasks", "post_tasks", "handlers", "block", "rescue", "always")
_DEPTH = 5
"""How often a text is filled in, where a variable's value has variables itself."""


def engines(text: str, where: str, unit: Reader) -> list[FoundEngine]:
    """The engines of a playbook or of a file of tasks; none where the text is something else. `unit` reads
    the text of a systemd unit.
    """
    if not re.match(r"(?:[ \t\r]*(?:#[^\n]*|---[^\n]*)?\n)*[ \t]*- ", text):
        return []
    try:
        found = [each.value for each in yamltext.documents(text, where)]
    except BadInput:
        return []
    plays = [item for each in found if isinstance(each, list) for item in each if isinstance(item, Mapping)]
    return list(_of_items(plays, {}, {}, where, unit))


def _of_items(
    items: Sequence[Any], scope: Mapping[str, Any], env: Mapping[str, str], where: str, unit: Reader
) -> Iterator[FoundEngine]:
    """The engines of plays, blocks and tasks in their order; `set_fact` holds for those after it."""
    facts: dict[str, Any] = {}
    for item in (each for each in items if isinstance(each, Mapping)):
        files, notes = _files(item.get("vars_files"), where)
        known = {**scope, **facts, **files, **_mapping(item.get("vars"))}
        around = {**env, **environment(_filled(item.get("environment"), known))[0]}
        found: list[FoundEngine] = []
        for key, value in item.items():
            module = str(key).rsplit(".", 1)[-1]
            if module == "set_fact":
                facts |= _mapping(value)
            elif module in _INSIDE and isinstance(value, list):
                found += _of_items(value, known, around, where, unit)
            else:
                arguments = {**_mapping(item.get("args")), **_mapping(value)}
                text = value if isinstance(value, str) else ""
                made = _of_module(
                    module, _filled(text, known), _filled(arguments, known), around, where, unit
                )
                found += [replace(each, name=each.name or str(item.get("name") or module)) for each in made]
        yield from (replace(each, notes=(*notes, *each.notes)) for each in found)


def _of_module(
    module: str, text: Any, given: Mapping[str, Any], env: Mapping[str, str], where: str, unit: Reader
) -> Iterator[FoundEngine]:
    """The engines that one task starts: `given` are its arguments, `text` what it has in their place."""
    if module in _COMMANDS:
        line = text or given.get("cmd") or given.get("_raw_params") or given.get("argv") or ""
        if isinstance(line, list):
            yield from engine_starts.in_words([str(word) for word in line], where, env)
        else:
            own = r"^(?:\s*(?:chdir|creates|removes|executable|stdin)=\S+)+"
            yield from engine_starts.in_script(re.sub(own, "", str(line)), where, env)
    elif module in _CONTAINERS and given:
        words = [word for key in ("entrypoint", "command") for word in words_in(given.get(key), where)]
        image = "" if given.get("entrypoint") else str(given.get("image") or "")
        inner, notes = environment(given.get("env"))
        for each in engine_starts.in_words(words, where, inner, image):
            yield replace(each, name=str(given.get("name") or ""), notes=(*notes, *each.notes))
    elif module in _DOCUMENTS:
        for found in (given.get(key) for key in _DOCUMENTS[module]):
            for document in found if isinstance(found, list) else [found]:
                yield from engines_of(document, where) if isinstance(document, Mapping) else ()
    elif module == "copy" and shell.START.search(content := str(given.get("content") or "")):
        read = (
            unit
            if re.search(r"^\[(?:Service|Container)\]", content, re.MULTILINE)
            else engine_starts.in_script
        )
        yield from read(content, where)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _files(names: Any, where: str) -> tuple[dict[str, Any], list[str]]:
    """The variables of files beside the playbook, and a note for each that cannot be read here."""
    found: dict[str, Any] = {}
    notes: list[str] = []
    for name in names if isinstance(names, list) else [names] if names else []:
        path = Path(where).parent / str(name)
        try:
            found |= _mapping(yamltext.load(yamltext.read(path), str(path)).value)
        except BadInput:
            notes.append(f"vars_files {name} is not read; give its variables")
    return found, notes


def _filled(value: Any, scope: Mapping[str, Any]) -> Any:
    """A value with its templates filled in."""
    if isinstance(value, Mapping):
        return {key: _filled(item, scope) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, scope) for item in value]
    for _ in range(_DEPTH):
        if not isinstance(value, str) or not re.search(r"\{[{%]", value):
            break
        value = _once(value, scope)
    return value


def _once(text: str, scope: Mapping[str, Any]) -> Any:
    from jinja2 import TemplateError

    alone = re.fullmatch(r"\s*\{\{((?:(?!\}\}).)*)\}\}\s*", text, re.DOTALL)
    try:
        if alone:
            found = _jinja().compile_expression(alone[1], undefined_to_none=False)(**scope)
            return found if isinstance(found, list | dict) else str(found)
        return _jinja().from_string(text).render(**scope)
    except (TemplateError, ArithmeticError, TypeError, ValueError):
        first = r"\{[{%]\W*(\w[\w.]*).*?[%}]\}"
        return re.sub(first, lambda found: _unknown(found[1]), text, flags=re.DOTALL)


def _unknown(name: str) -> str:
    return f"{shell.UNKNOWN}{name}{shell.UNKNOWN}"


@lru_cache
def _jinja() -> "SandboxedEnvironment":
    from jinja2 import ChainableUndefined
    from jinja2.sandbox import SandboxedEnvironment

    class Missing(ChainableUndefined):
        """A variable that nothing here gives a value."""

        def __str__(self) -> str:
            return _unknown(self._undefined_name or "a variable")

    def lookup(kind: str, *terms: object, **options: object) -> Missing:
        return Missing(name=str(terms[-1]) if terms else kind)

    made = SandboxedEnvironment(undefined=Missing, keep_trailing_newline=True)
    made.globals |= {"lookup": lookup, "query": lookup, "q": lookup}
    made.filters |= {"quote": lambda text: shlex.quote(str(text)), "to_json": json.dumps, "bool": bool}
    return made
