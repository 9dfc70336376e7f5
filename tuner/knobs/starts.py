"""Where vLLM is started in a command: behind shells, container runtimes and wrappers, in a script or bare."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tuner.errors import BadInput
from tuner.knobs import shell
from tuner.knobs.containers import Container, is_vllm, run_of, starts_vllm
from tuner.knobs.versions import table

_SHELLS = frozenset(("sh", "bash", "dash", "zsh", "ksh", "ash"))
_PROGRAMS = frozenset(
    ("python", "python3", "sleep", "ray", "tail", "cat", "nvidia-smi", "env", "tini", *_SHELLS)
)
_MODULE = re.compile(
    r"vllm[./]entrypoints[./][\w./]*(?:api_server|grpc_server)(?:\.py)?$|openai/api_server\.py$"
)
_PROGRAM = re.compile(r"(?:^|/)vllm$|vllm\.entrypoints\.cli\.main$")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_PS = re.compile(r"^\S+\s+\d+\s+[\d.]+\s+[\d.]+\s+\d+\s+\d+\s|^\s*\d+\s+\S+\s+[\d:-]+\s+/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One engine: `words` are vLLM's own arguments, a positional model first; `env` what is set for it."""

    name: str = ""
    words: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def in_text(text: str, where: str) -> list[Start]:
    """The engines that a script, a command line or a line of `ps` starts; bare arguments are one."""
    if "\n" not in text.strip() and _PS.search(text) and starts_vllm(text.split()):
        return in_words(_rejoined(text.split()), where)
    found = [each for command in shell.commands(text, where) for each in _in_command(command, where)]
    if found or not (words := _only(text, where)):
        return found
    return [Start(words=words)] if words[0].startswith("--") else []


def in_words(
    words: Sequence[str], where: str, env: Mapping[str, str] | None = None, image: str = ""
) -> list[Start]:
    """The engines that one command line starts; `image` is the container's that runs it."""
    variables = dict(env or {})
    command = shell.Command(words=tuple(words), variables=variables, exported=variables)
    if found := list(_in_command(command, where)):
        return found
    container = Container(image=image, words=tuple(words), env=variables)
    return _by_entrypoint(container) if image else []


def looks_like_arguments(words: Sequence[str]) -> bool:
    """Whether words are arguments of vLLM: a model, and a flag that vLLM has beside it."""
    flags = {word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")}
    return "--model" in flags and bool((flags - {"--model", "--host", "--port"}) & set(table().flags))


def _only(text: str, where: str) -> tuple[str, ...]:
    commands = shell.commands(text, where)
    return commands[0].words if len(commands) == 1 else ()


def _in_command(command: shell.Command, where: str) -> Iterator[Start]:
    words = command.words
    if (container := run_of(words)) is not None:
        yield from _in_container(container, command, where)
        return
    if (script := _script(words)) is not None:
        text, arguments = script
        inner = {**command.exported, "@": shell.array(arguments)}
        for each in shell.commands(text, where, inner):
            for start in _in_command(each, where):
                yield replace(start, notes=(*command.notes, *start.notes))
        return
    if (at := _arguments_at(words)) is not None:
        given = {
            m[1]: m[2] for word in words[:at] if (m := _ASSIGNMENT.fullmatch(word)) and "vllm" not in m[1]
        }
        env = {name: value for name, value in command.exported.items() if name != "@"}
        yield Start(words=words[at:], env={**env, **given}, notes=command.notes)
        return
    for word in words:
        if re.search(r"\s", word) and shell.START.search(word):
            for each in shell.commands(word, where, command.exported):
                yield from _in_command(each, where)


def _in_container(container: Container, command: shell.Command, where: str) -> Iterator[Start]:
    files, notes = read_files(container.env_files)
    env = {**files, **container.env}
    notes = (*command.notes, *container.notes, *notes)
    found = in_words(container.words, where, env, container.image)
    for start in found:
        yield replace(start, name=container.name, notes=(*notes, *start.notes))


def _by_entrypoint(container: Container) -> list[Start]:
    """vLLM's arguments where the image's own entrypoint starts it."""
    words = container.words[container.words[:1] == ("serve",) :]
    program = words[0].rsplit("/", 1)[-1] if words else ""
    other = words and not words[0].startswith("-") and (words[0].startswith("/") or program in _PROGRAMS)
    if other or not (is_vllm(container.image) or looks_like_arguments(words)):
        return []
    return [Start(words=words, env=container.env)]


def _script(words: Sequence[str]) -> tuple[str, tuple[str, ...]] | None:
    """The text after a shell's `-c`, and the arguments that follow it ($1 and on)."""
    for at, word in enumerate(words):
        if word.rsplit("/", 1)[-1] not in _SHELLS:
            continue
        for position in range(at + 1, len(words) - 1):
            if re.fullmatch(r"-[a-z]*c", words[position]):
                return words[position + 1], tuple(words[position + 3 :])
            if not words[position].startswith(("-", "+")) and words[position - 1] not in ("-o", "+o"):
                break
    return None


def _arguments_at(words: Sequence[str]) -> int | None:
    for at, word in enumerate(words):
        if _MODULE.search(word):
            return at + 1
        if _PROGRAM.search(word) and tuple(words[at + 1 : at + 2]) == ("serve",):
            return at + 2
    return None


def read_files(paths: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Variables of environment files; a note for each that cannot be read here."""
    env: dict[str, str] = {}
    notes: list[str] = []
    for path in paths:
        try:
            text = Path(path.removeprefix("-")).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError):
            notes.append(f"EnvironmentFile {path} is not read; give what it sets")
            continue
        for line in text.splitlines():
            if found := re.fullmatch(r"\s*(?:export\s+)?([A-Za-z_]\w*)=(.*)", line):
                env[found[1]] = found[2].strip().strip("\"'")
    return env, tuple(notes)


def _rejoined(words: Sequence[str]) -> list[str]:
    """Words of a `ps` line, which has no quotes: an object that was cut at its blanks is one word again."""
    found: list[str] = []
    for word in words:
        if found and (
            found[-1].count("{") > found[-1].count("}") or found[-1].count("[") > found[-1].count("]")
        ):
            found[-1] += f" {word}"
        else:
            found.append(word)
    return found


def checked(found: Sequence[Start], where: str) -> Sequence[Start]:
    """The engines found. BadInput where there are none."""
    if not found:
        raise BadInput(f"{where}: no vLLM is started there ('vllm serve …' or its api_server module)")
    return found
