"""Finds where a command starts vLLM: behind shells, container runtimes and wrappers, in a script, or
directly.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from tuner import masking
from tuner.errors import BadInput
from tuner.knobs import shell
from tuner.knobs.catalogue import table

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
_RUNTIMES = ("docker", "podman", "nerdctl")
_OTHER_RUNTIMES = ("apptainer", "singularity", "kubectl", "oc")

# Options of `docker run` that take no value; every other option takes one.
_SWITCHES = frozenset(
    re.split(
        r"\s+",
        "d detach i interactive t tty P publish-all q quiet rm init privileged read-only no-healthcheck"
        " replace oom-kill-disable sig-proxy disable-content-trust rmi env-host http-proxy no-hosts"
        " no-hostname tls-verify passwd help",
    )
)
_OPTIONS_READ = ("e", "env", "entrypoint", "name", "env-file", "rm", "d", "detach", "it", "i", "t")
_IMAGE = re.compile(
    r"vllm|(?:^|/)llm-d(?:-(?:cuda|cpu|xpu|rocm|hpu|aws|gke|dev|gb200)\b[\w-]*)?(?=[:@]|$)", re.IGNORECASE
)
_OTHER_IMAGES = re.compile(
    r"router|sidecar|proxy|gateway|scheduler|exporter|bench|inference-sim|\bui\b|webui", re.IGNORECASE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundEngine:
    """One engine found in a file or a command line, before its arguments are read.

    `words` are vLLM's own arguments, a positional model first. `model` is what the file names beside the
    arguments. `env` holds the variables that are set for the engine. `misread` says, of words that vLLM gets
    otherwise than they were meant, what it gets and what to write; `words` has them as they were meant.
    """

    where: str
    name: str = ""
    words: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None
    notes: tuple[str, ...] = ()
    misread: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Container:
    """What a container runs. `words` come after its image; a given entrypoint is the first of them."""

    image: str
    words: tuple[str, ...]
    name: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    env_files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def in_text(text: str, where: str) -> list[FoundEngine]:
    """The engines that a script, a command line or a line of `ps` starts. Bare arguments are one engine."""
    if "\n" not in text.strip() and _PS.search(text) and shell.START.search(text):
        return in_words(_rejoined(text.split()), where)
    suffix = Path(where).suffix.lower() if where != "command line" else ""
    commands = shell.commands(shell.as_posix(text, suffix), where)
    found = [each for command in commands for each in _in_command(command, where)]
    if not found and len(commands) == 1 and commands[0].words[0].startswith("--"):
        return [FoundEngine(where=where, words=commands[0].words)]
    return found


def in_script(text: str, where: str, env: Mapping[str, str] | None = None) -> Iterator[FoundEngine]:
    """The engines that a script for a shell starts, with these variables in its environment."""
    for command in shell.commands(text, where, env):
        for found in in_words(command.words, where, {**(env or {}), **command.exported}):
            yield replace(found, notes=(*command.notes, *found.notes))


def in_words(
    words: Sequence[str], where: str, env: Mapping[str, str] | None = None, image: str = ""
) -> list[FoundEngine]:
    """The engines that one command line starts. `image` is that of the container in which it runs."""
    variables = dict(env or {})
    command = shell.Command(words=tuple(words), variables=variables, exported=variables)
    if found := list(_in_command(command, where)):
        return found
    return _by_entrypoint(_Container(image=image, words=tuple(words), env=variables), where) if image else []


def looks_like_arguments(words: Sequence[str]) -> bool:
    """Whether words are arguments of vLLM: `--model`, and at least one more of vLLM's flags."""
    flags = {re.split(r"[=\s]", word)[0].replace("_", "-") for word in words if word.startswith("--")}
    return "--model" in flags and bool((flags - {"--model", "--host", "--port"}) & set(table().flags))


def is_vllm(image: str) -> bool:
    """Whether the name of an image shows that its entrypoint is vLLM's server."""
    return bool(_IMAGE.search(image)) and not _OTHER_IMAGES.search(image.rsplit("/", 1)[-1])


def as_meant(found: FoundEngine) -> FoundEngine:
    """The engine with each word as it was meant: an item such as `--dtype auto` gives two words, and blanks
    and quotes that a list item keeps are taken off. vLLM's own parser does none of that.
    """
    words: list[str] = []
    misread = list(found.misread)
    for word in found.words:
        bare = re.sub(r"^(--?[\w.-]+=|)([\"'])(.*)\2$", r"\1\3", word.strip(), flags=re.DOTALL) or word
        joined = re.match(r"(--?[A-Za-z][\w.-]*)\s+([{\[].*[}\]]$)?|--[\w.-]+=\S*\s+--[a-z]", bare, re.DOTALL)
        said = masking.text(word)
        if joined:
            parts = [joined[1], joined[2]] if joined[2] else shell.split(bare, found.where)
            misread.append((f"vLLM gets {said.strip()!r} as one argument", "each word as an item"))
        elif word.isspace():
            misread.append(
                (
                    "a blank after a backslash is an argument and ends the command",
                    "no blank after the backslash",
                )
            )
        elif bare != word and not re.search(r"\d\s+$", word):  # int() takes blanks
            misread.append((f"vLLM gets {said!r} with its blanks and quotes", masking.text(bare)))
        words += parts if joined else [bare]
    return replace(found, words=tuple(words), misread=tuple(misread))


def _in_command(command: shell.Command, where: str) -> Iterator[FoundEngine]:
    words = command.words
    if (container := _container_of(words)) is not None:
        yield from _in_container(container, command, where)
        return
    if (script := _script(words)) is not None:
        text, arguments, misread = script
        inner = {**command.exported, "@": shell.array(arguments)}
        for each in shell.commands(text, where, inner):
            for found in _in_command(each, where):
                yield replace(found, notes=(*command.notes, *found.notes), misread=(*misread, *found.misread))
        return
    if (at := _arguments_at(words)) is not None:
        given = {
            m[1]: m[2] for word in words[:at] if (m := _ASSIGNMENT.fullmatch(word)) and "vllm" not in m[1]
        }
        env = {name: value for name, value in command.exported.items() if name != "@"}
        yield FoundEngine(where=where, words=words[at:], env={**env, **given}, notes=command.notes)
        return
    for word in words:
        if re.search(r"\s", word) and shell.START.search(word):
            substituted = [name[2:-1] for name in shell.unknown(word) if name.startswith("$(")]
            for text in substituted or [word]:
                for each in shell.commands(text, where, command.exported):
                    yield from _in_command(each, where)


def _in_container(container: _Container, command: shell.Command, where: str) -> Iterator[FoundEngine]:
    files, notes = read_env_files(container.env_files)
    notes = (*command.notes, *container.notes, *notes)
    for found in in_words(container.words, where, {**files, **container.env}, container.image):
        yield replace(found, name=container.name, notes=(*notes, *found.notes))


def _by_entrypoint(container: _Container, where: str) -> list[FoundEngine]:
    """vLLM's arguments where the image's own entrypoint starts vLLM."""
    words = container.words[container.words[:1] == ("serve",) :]
    program = words[0].rsplit("/", 1)[-1] if words else ""
    other = words and not words[0].startswith("-") and (words[0].startswith("/") or program in _PROGRAMS)
    if other or not (is_vllm(container.image) or looks_like_arguments(words)):
        return []
    return [FoundEngine(where=where, words=words, env=container.env)]


def _script(words: Sequence[str]) -> tuple[str, tuple[str, ...], tuple[tuple[str, str], ...]] | None:
    """The text after a shell's `-c`, the arguments after it (`$1`, `$2` …), and what is misread where they
    were meant for a part of the text.
    """
    for at, word in enumerate(words):
        if word.rsplit("/", 1)[-1] not in _SHELLS:
            continue
        for position in range(at + 1, len(words) - 1):
            if re.fullmatch(r"-[a-z]*c", words[position]):
                text, after = words[position + 1], words[position + 2 :]
                if re.search(r"\$\{?[@*0-9]", text) or not any(re.match("--?[A-Za-z]", w) for w in after):
                    return text, tuple(after[1:]), ()
                whole = [shlex.quote(w) if re.search(r"[{\"']", w) else w for w in after]
                lost = f"after -c the shell runs only '{text.strip()}', without '{' '.join(after)}'"
                misread = ((masking.text(lost), "the whole script as one item"),)
                return " ".join((text, *whole)), (), misread
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


def read_env_files(paths: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The variables of environment files, and a note for each file that cannot be read here."""
    env: dict[str, str] = {}
    notes: list[str] = []
    for path in paths:
        try:
            text = Path(path.removeprefix("-")).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError):
            notes.append(f"EnvironmentFile {path} is not read; give its variables")
            continue
        for line in text.splitlines():
            if found := re.fullmatch(r"\s*(?:export\s+)?([A-Za-z_]\w*)=(.*)", line):
                env[found[1]] = found[2].strip().strip("\"'")
    return env, tuple(notes)


def _rejoined(words: Sequence[str]) -> list[str]:
    """The words of a `ps` line. `ps` shows no quotes, so a JSON object that has blanks is joined again."""
    found: list[str] = []
    for word in words:
        last = found[-1] if found else ""
        if last.count("{") > last.count("}") or last.count("[") > last.count("]"):
            found[-1] += f" {word}"
        else:
            found.append(word)
    return found


def _container_of(words: Sequence[str]) -> _Container | None:
    """What `docker run …` (podman, nerdctl, apptainer, kubectl) starts, also behind a wrapper. None for
    another command.
    """
    for at, word in enumerate(words):
        program = word.rsplit("/", 1)[-1]
        if program in _OTHER_RUNTIMES and "run" in words[at:]:
            return _run_of_image(words[at + 1 :])
        if program in _RUNTIMES:
            verb = next((i for i in range(at + 1, len(words)) if words[i] in ("run", "create")), None)
            if verb is None or shell.START.search(" ".join(words[at:verb])):
                return None
            return _run(words[verb + 1 :])
    return None


def _run_of_image(words: Sequence[str]) -> _Container | None:
    """What `kubectl run NAME --image=I -- WORDS` or `apptainer run docker://I WORDS` starts."""
    for at, word in enumerate(words):
        if word.startswith(("docker://", "oras://")) or word.endswith(".sif"):
            return _Container(image=word.partition("://")[2] or word, words=tuple(words[at + 1 :]))
    split = words.index("--") if "--" in words else len(words)
    own = " ".join(words[:split])
    image = re.search(r"--image[= ](\S+)", own)
    env = dict(re.findall(r"--env[= ](\w+)=(\S*)", own))
    return _Container(image=image[1], words=tuple(words[split + 1 :]), env=env) if image else None


def _run(words: Sequence[str]) -> _Container | None:
    options, rest = _options(words)
    if not rest:
        return None
    env: dict[str, str] = {}
    notes: list[str] = []
    for value in options.get("e", []) + options.get("env", []):
        name, equals, given = value.partition("=")
        if equals:
            env[name] = given
        else:
            notes.append(f"{name} comes from the environment in which the container is started")
    entry = options.get("entrypoint", [""])[-1]
    if left := [("-" if len(name) == 1 else "--") + name for name in options if name not in _OPTIONS_READ]:
        notes.append(f"these options of the container are not read: {' '.join(left)}")
    return _Container(
        image=rest[0],
        words=(*([entry] if entry else []), *rest[1:]),
        name=options.get("name", [""])[-1],
        env=env,
        env_files=tuple(options.get("env-file", [])),
        notes=tuple(notes),
    )


def _options(words: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """The options with their values, and the words from the image on."""
    found: dict[str, list[str]] = {}
    at = 0
    while at < len(words):
        word = words[at]
        if word.startswith(shell.UNKNOWN) and word.endswith(shell.UNKNOWN) and at + 1 < len(words):
            at += 1  # options in a variable whose value is not known here
            continue
        if not word.startswith("-") or word == "-":
            return found, list(words[at:])
        at += 1
        if word == "--":
            return found, list(words[at:])
        name, equals, value = word.lstrip("-").partition("=")
        if not word.startswith("--") and not equals:
            name, value = _short(name, found)
        if not equals and not value and name not in _SWITCHES and at < len(words):
            value = words[at]
            at += 1
        found.setdefault(name, []).append(value)
    return found, []


def _short(letters: str, found: dict[str, list[str]]) -> tuple[str, str]:
    """The last option of `-itp`, and its value where that follows directly (`-p8000:8000`)."""
    while len(letters) > 1 and letters[0] in _SWITCHES:
        found.setdefault(letters[0], []).append("")
        letters = letters[1:]
    return letters[0], letters[1:]


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


def in_dockerfile(text: str, where: str) -> list[FoundEngine]:
    """The engines that the last image starts; none if it starts something else."""
    shared: dict[str, str] = {}
    stages: dict[str, _Stage] = {}
    last = _Stage(base="")
    for name, rest, body in _instructions(text):
        if name == "FROM":
            words = [word for word in shell.expanded(rest, shared).split() if not word.startswith("--")]
            base = words[0] if words else ""
            known = stages.get(base)
            last = _Stage(base=base)
            if known:  # arguments are not inherited
                last = replace(known, env=dict(known.env), arguments={}, files=dict(known.files))
            stages[words[2] if len(words) > 2 else str(len(stages))] = last
        elif name == "ARG" and not stages:
            shared |= _pairs(rest, _Stage(base="", arguments=shared), where)
        else:
            _follow(last, name, rest, body, shared, where)
    return _started(last, where)


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
    """The words of a JSON list; none if Docker hands the text to a shell."""
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
        said = f"Docker replaces no variable in a JSON list: vLLM gets ${', $'.join(used)} as it is"
        misread.append((said, "the value"))
    build = stage.arguments.keys() - stage.env.keys()
    without = "is an ARG, which has no value when the image runs"
    misread += [(f"{name} {without}", f"ENV {name}=…") for name in used if name in build]
    found = in_words(words, where, {**stage.arguments, **stage.env}, image)
    script = next((word for word in words if word.endswith(".sh")), "")
    if not found and script:
        raise BadInput(
            f"{where}: the image starts the script {script}, whose text is not in the file; give the vllm"
            " command line that this script runs"
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
    """The words of CMD as they were meant, and what Docker makes of them if that is something else."""
    if not stage.by_shell or not stage.command:
        return stage.command, []
    text = stage.command[0]
    starts = shell.START.search(text) is not None and not stage.entrypoint
    if starts or not (stage.entrypoint or is_vllm(stage.base)):
        return [*stage.shell, text], []
    lost = f"CMD is not a JSON list, so the entrypoint gets {' '.join(stage.shell)} and all words as one text"
    return shell.split(stage.filled(text), where), [(lost, "CMD as a JSON list")]


def _with_script(words: list[str], files: dict[str, str]) -> list[str]:
    """A command with the text of the script in place of its path, if that is a file of the image."""
    for at, word in enumerate(words):
        for path, text in files.items():
            if PurePosixPath(word) == PurePosixPath(path) and shell.START.search(text):
                return ["sh", "-c", text, *words[at:]]
    return words
