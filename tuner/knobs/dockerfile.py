"""The engine that a Dockerfile's last image starts, with the values of ARG and ENV filled in."""

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from tuner.errors import BadInput
from tuner.knobs import engine_starts, shell
from tuner.knobs.engine_starts import FoundEngine


@dataclass(slots=True)
class _Stage:
    """An image as far as it was built. `base` is the image outside of the file that it begins with, `files`
    are texts that it was given, by path.
    """

    base: str
    env: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    entrypoint: list[str] | None = None
    command: list[str] = field(default_factory=list)
    by_shell: bool = False
    shell: list[str] = field(default_factory=lambda: ["sh", "-c"])
    files: dict[str, str] = field(default_factory=dict)

    def filled(self, text: str) -> str:
        return shell.expanded(text, {**self.arguments, **self.env})


def engines(text: str, where: str) -> list[FoundEngine]:
    """The engines that the last image starts; none where it starts something else."""
    shared: dict[str, str] = {}
    stages: dict[str, _Stage] = {}
    last = _Stage(base="")
    for name, rest, body in _instructions(text):
        if name == "FROM":
            words = [word for word in shell.expanded(rest, shared).split() if not word.startswith("--")]
            base = words[0] if words else ""
            known = stages.get(base)
            last = _child(known) if known else _Stage(base=base)
            stages[words[2] if len(words) > 2 else str(len(stages))] = last
        elif name == "ARG" and not stages:
            shared |= _pairs(rest, _Stage(base="", arguments=shared), where)
        else:
            _follow(last, name, rest, body, shared, where)
    return _started(last, where)


def _child(parent: _Stage) -> _Stage:
    """A stage that begins with another one: arguments are not inherited."""
    return replace(parent, env=dict(parent.env), arguments={}, files=dict(parent.files))


def _instructions(text: str) -> list[tuple[str, str, str]]:
    """(name, the rest of its line, the text of its here-document) of each instruction."""
    mark = re.match(r"(?:#[^\n]*\n)*#\s*escape\s*=\s*`", text, re.IGNORECASE)
    escape = "`" if mark else r"\\"
    text = text.replace("\r\n", "\n")
    text = re.sub(rf"{escape}[ \t]*\n(?:[ \t]*(?:#[^\n]*)?\n)*", " ", text)
    found, lines = list[tuple[str, str, str]](), iter(text.split("\n"))
    for line in lines:
        name, _, rest = line.strip().partition(" ")
        if not name or name.startswith("#"):
            continue
        body: list[str] = []
        ends = re.findall(r"<<-?\s*['\"]?(\w+)['\"]?", rest) if name.upper() in ("RUN", "COPY", "ADD") else []
        for end in ends:
            for inner in lines:
                if inner.strip() == end:
                    break
                body.append(inner)
        found.append((name.upper(), rest.strip(), "\n".join(body)))
    return found


def _pairs(rest: str, stage: _Stage, where: str) -> dict[str, str]:
    """`A=1 B="two words"`, and the older `A two words`, with variables filled in."""
    literal = rest.replace("\\$", shell.DOLLAR)
    words = shell.split(literal, where, by_shell=False) if "=" in rest.split(" ")[0] else []
    words = words or (["=".join(literal.split(maxsplit=1))] if " " in rest else [])
    pairs = (word.partition("=") for word in words)
    return {name: stage.filled(value).replace(shell.DOLLAR, "$") for name, _, value in pairs}


def _follow(stage: _Stage, name: str, rest: str, body: str, shared: dict[str, str], where: str) -> None:
    if name == "ENV":
        stage.env |= _pairs(rest, stage, where)
    elif name == "ARG":
        plain = re.fullmatch(r"\w+", rest)
        given = {rest: shared[rest]} if plain and rest in shared else _pairs(rest, stage, where)
        stage.arguments |= given
    elif name == "SHELL":
        stage.shell = _list(rest) or stage.shell
    elif name == "ENTRYPOINT":
        stage.entrypoint, stage.command = _list(rest) or [*stage.shell, rest], []
    elif name == "CMD":
        words = _list(rest)
        stage.command, stage.by_shell = words or [rest], not words
    elif name in ("COPY", "ADD") and body:
        stage.files[stage.filled(rest.split()[-1])] = body


def _list(rest: str) -> list[str]:
    """The words of a JSON list; none where Docker hands the text to a shell."""
    try:
        found = json.loads(rest)
    except ValueError:
        return []
    return [str(word) for word in found] if isinstance(found, list) else []


def _started(stage: _Stage, where: str) -> list[FoundEngine]:
    image = "" if stage.entrypoint or not stage.command else stage.base
    command, misread = _command(stage, where)
    words = _with_script([*(stage.entrypoint or []), *command], stage.files)
    used = sorted({name for word in words for name in re.findall(r"\$\{?(\w+)", word)})
    if used and not any(re.fullmatch(r"-[a-z]*c", word) for word in words):
        said = f"Docker fills in nothing in a JSON list: vLLM gets ${', $'.join(used)} as it is"
        misread.append((said, "the value"))
    build = stage.arguments.keys() - stage.env.keys()
    without = "is an ARG, which has no value when the image runs"
    misread += [(f"{name} {without}", f"ENV {name}=…") for name in used if name in build]
    found = engine_starts.in_words(words, where, {**stage.arguments, **stage.env}, image)
    script = next((word for word in words if word.endswith(".sh")), "")
    if not found and script:
        raise BadInput(
            f"{where}: the image starts {script}, which is not in the file; give the vllm command line that"
            " this script runs"
        )
    return [
        replace(
            each,
            env={name: value for name, value in each.env.items() if name not in build},
            misread=(*misread, *each.misread),
        )
        for each in found
    ]


def _command(stage: _Stage, where: str) -> tuple[list[str], list[tuple[str, str]]]:
    """The words of CMD as they were meant, and what Docker makes of them where that is something else."""
    if not stage.by_shell or not stage.command:
        return stage.command, []
    text = stage.command[0]
    starts = shell.START.search(text) is not None and not stage.entrypoint
    if starts or not (stage.entrypoint or engine_starts.is_vllm(stage.base)):
        return [*stage.shell, text], []
    lost = f"CMD is no JSON list, so the entrypoint gets {' '.join(stage.shell)} and one text"
    return shell.split(stage.filled(text), where), [(lost, "CMD as a JSON list")]


def _with_script(words: list[str], files: dict[str, str]) -> list[str]:
    """A command with the text of the script in place of its path, where that is a file of the image."""
    for at, word in enumerate(words):
        for path, text in files.items():
            if PurePosixPath(word) == PurePosixPath(path) and shell.START.search(text):
                return ["sh", "-c", text, *words[at:]]
    return words
