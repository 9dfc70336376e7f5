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
    entry, command, misread = stage.entrypoint or [], stage.command, list[tuple[str, str]]()
    image = "" if entry or not command else stage.base
    if stage.by_shell and command:
        by_shell = shell.START.search(command[0]) is not None and not entry
        meant = not by_shell and (entry or engine_starts.is_vllm(stage.base))
        command = shell.split(stage.filled(command[0]), where) if meant else [*stage.shell, *command]
        if meant:
            lost = f"CMD is no JSON list, so the entrypoint gets {' '.join(stage.shell)} and one text"
            misread.append((lost, "CMD as a JSON list"))
    words = [*entry, *command]
    files = {path: text for path, text in stage.files.items() if shell.START.search(text)}
    for at, word in enumerate(words):
        text = next((files[path] for path in files if _same(path, word)), None)
        if text is not None:
            words = ["sh", "-c", text, *words[at:]]
            break
    used = sorted({name for word in words for name in re.findall(r"\$\{?(\w+)", word)})
    if used and not any(re.fullmatch(r"-[a-z]*c", word) for word in words):
        said = f"Docker fills in nothing in a JSON list: vLLM gets ${', $'.join(used)} as it is"
        misread.append((said, "the value"))
    only = [name for name in used if name in stage.arguments.keys() - stage.env.keys()]
    misread += [
        (f"{name} is an ARG, which has no value when the image runs", f"ENV {name}=…") for name in only
    ]
    found = engine_starts.in_words(words, where, {**stage.arguments, **stage.env}, image)
    script = next((word for word in words if word.endswith(".sh")), "")
    if not found and script:
        raise BadInput(
            f"{where}: the image starts {script}, which is not in the file; give the vllm command line that"
            " this script runs"
        )
    build = stage.arguments.keys() - stage.env.keys()
    return [
        replace(
            each,
            env={name: value for name, value in each.env.items() if name not in build},
            misread=(*misread, *each.misread),
        )
        for each in found
    ]


def _same(path: str, word: str) -> bool:
    """Whether a word of the command names a file of the image; a folder ends in a slash."""
    return PurePosixPath(word) == PurePosixPath(path)
