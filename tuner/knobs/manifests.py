"""Reads a running configuration from wherever people keep it: shell lines and scripts, systemd units, compose
files, Kubernetes manifests, Helm values, vLLM's own `--config` file.
"""

import os.path
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tuner.errors import BadInput, nearest
from tuner.knobs import ansible, config_maps, configfile, engine_starts, shell
from tuner.knobs.baseline import Imported, from_arguments
from tuner.knobs.catalogue import table
from tuner.knobs.cluster import engines_of
from tuner.knobs.configfile import argv_of_mapping, documents
from tuner.knobs.engine_starts import FoundEngine
from tuner.records import EngineFacts


def read(what: str, *, pick: str | None = None, facts: EngineFacts | None = None) -> Imported:
    """The configuration in a file, or in a command line or `ps` line that is given as text.

    `pick` names one engine of a file with several. BadInput names the file and what is wrong.
    """
    found = sources(what)
    chosen = [source for source in found if pick in (None, source.name)]
    if len(chosen) != 1:
        names = ", ".join(source.name for source in found)
        close = nearest(pick or "", [source.name for source in found])
        raise BadInput(f"{found[0].where}: pick one engine of {names}{close if pick else ''}")
    source = chosen[0]
    made = from_arguments(source.words, env=source.env, source=source.where, name=source.name, facts=facts)
    misread = [f"{what}; write {fix}" for what, fix in source.misread]
    notes = tuple(dict.fromkeys((*source.notes, *misread, *made.notes)))
    return replace(made, model=made.model or source.model, notes=notes)


def sources(what: str) -> tuple[FoundEngine, ...]:
    """Every engine in a file, or the one of a command line."""
    return tuple(engine_starts.as_meant(each) for each in _engines(what))


def _engines(what: str) -> tuple[FoundEngine, ...]:
    path = Path(what).expanduser()
    if os.path.exists(path) and what.strip():  # a text that cannot be a file's name gives False
        text, where = configfile.text_of(path), str(path)
    elif re.fullmatch(r"(?!--)\S+", what):  # one word is not a command line
        url = "; a server's URL begins with http://" if re.match(r"[\w.-]+:\d+\b|\w+://", what) else ""
        raise BadInput(f"there is no file {what}{url}")
    else:
        text, where = what, "command line"
    if not text.strip():
        raise BadInput(f"{where}: it is empty; give {configfile.READ}")
    if plays := ansible.engines(text, where, _unit):
        return _unlike(plays)
    if (found := _of_form(text, path if where != "command line" else Path(), where)) is not None:
        return found
    try:
        mappings = documents(text, where) if where != "command line" or "\n" in text else []
    except BadInput:
        if "{{" in text:
            raise configfile.without_vllm(text, where) from None
        raise
    if mappings:
        found = tuple(config_maps.engines(mappings, where, _document))
        if not found:
            raise configfile.without_vllm(text, where)
        return _unlike(found)
    words = shell.START.search(text) or re.search(r"(?m)^\s*--|\brun\b|vllm", text)  # an image starts vLLM
    started = engine_starts.in_text(text, where) if words else ()
    return _named(_some(started, text, where), "command")


def _of_form(text: str, path: Path, where: str) -> tuple[FoundEngine, ...] | None:
    """The engines of a file that its name or its first words tell: Markdown, script, unit, Dockerfile."""
    if path.suffix.lower() in (".md", ".markdown"):
        return _named(_markdown(text, where), "command")
    image = path.name.lower().startswith(("dockerfile", "containerfile"))
    if not image and path.suffix.lower() in (*shell.BATCH, *shell.SHELL, ".ps1"):
        return _named(_some(engine_starts.in_text(text, where), text, where), "command")
    if re.search(r"^\[(?:Service|Container)\]", text, re.MULTILINE):
        return _named(_unit(text, where), "unit")
    if re.search(r"(?im)^FROM\s+\S+", text) and path.name:
        return _named(_some(engine_starts.in_dockerfile(text, where), text, where), "image")
    return None


def _some(found: Sequence[FoundEngine], text: str, where: str) -> Sequence[FoundEngine]:
    """The engines found. BadInput, saying what the text is, where there is none."""
    if not found:
        raise configfile.without_vllm(text, where)
    return found


def _markdown(text: str, where: str) -> Sequence[FoundEngine]:
    """The engines that the code blocks of a document start: shell commands, and YAML."""
    fenced = re.findall(r"(?ms)^[ ]*(?:```|~~~)[ ]*(\w*)[^\n]*\n(.*?)^[ ]*(?:```|~~~)", text)
    found = [each for language, block in fenced for each in _of_block(language.lower(), block, where)]
    return _some(found, text, where)


_SHELL_BLOCKS = frozenset(
    ("", "sh", "bash", "shell", "console", "zsh", "text", "bat", "batch", "cmd", "powershell", "pwsh", "ps1")
)


def _of_block(language: str, block: str, where: str) -> Sequence[FoundEngine]:
    """The engines of a code block; none where it is neither shell nor YAML."""
    try:
        if language in ("yaml", "yml"):
            return [
                each
                for document in documents(textwrap.dedent(block), "")
                for each in _document(document, where)
            ]
        if language in _SHELL_BLOCKS:
            return engine_starts.in_text(re.sub(r"(?m)^\s*[$#>] (?=\S)", "", block), where)
    except BadInput:
        pass  # not what it is called
    return ()


def _named(found: Sequence[FoundEngine], name: str) -> tuple[FoundEngine, ...]:
    made = [each if each.name else replace(each, name=name) for each in found]
    if len(made) > 1:
        made = [replace(each, name=_label(each, name)) for each in made]
    return _unlike(made)


def _label(source: FoundEngine, otherwise: str) -> str:
    """The container's name, else the model that is served."""
    if source.name != otherwise:
        return source.name
    words = list(source.words)
    for flag in ("--served-model-name", "--model"):
        if flag in words[:-1]:
            return words[words.index(flag) + 1]
    return words[0] if words and not words[0].startswith("-") else otherwise


def _unlike(found: Sequence[FoundEngine]) -> tuple[FoundEngine, ...]:
    """The same engines; those that share a name are numbered."""
    often = Counter(each.name for each in found)
    seen: Counter[str] = Counter()
    made = []
    for each in found:
        seen[each.name] += 1
        made.append(replace(each, name=f"{each.name}-{seen[each.name]}") if often[each.name] > 1 else each)
    return tuple(made)


def _unit(text: str, where: str) -> Sequence[FoundEngine]:
    """The engine of a systemd unit or a Podman quadlet."""
    env: dict[str, str] = {}
    files: list[str] = []
    found: dict[str, str] = {}
    text = re.sub(r"^[ \t]*[#;].*\n", "", text, flags=re.MULTILINE)
    for line in text.replace("\\\n", " ").splitlines():
        key, _, value = (part.strip() for part in line.partition("="))
        if key == "Environment":
            env |= dict(pair.split("=", maxsplit=1) for pair in _split(value, where) if "=" in pair)
        elif key == "EnvironmentFile":
            files.append(value)
        elif key in ("ExecStart", "Exec", "Image", "Entrypoint"):
            found[key] = value or ""
    from_files, notes = engine_starts.read_env_files(files)
    env = {**env, **from_files}
    command = found.get("ExecStart", "").lstrip("-@:+!") or found.get("Exec", "")
    if not command and "Image" not in found:
        raise BadInput(f"{where}: the unit has no ExecStart")
    image = found.get("Image", "") if "Entrypoint" not in found else ""
    started = [*_split(found.get("Entrypoint", ""), where), *_split(command.replace("%%", "%"), where)]
    words = [part for word in started for part in _filled(word, env, where)]
    engines = _some(engine_starts.in_words(words, where, env, image), text, where)
    return [replace(each, notes=(*notes, *each.notes)) for each in engines]


def _split(line: str, where: str) -> list[str]:
    return shell.split(line, where, by_shell=False)


def _filled(word: str, env: Mapping[str, str], where: str) -> list[str]:
    """systemd makes several words of `$NAME`, and one word of `${NAME}`, which is filled in later."""
    name = word[1:] if re.fullmatch(r"\$\w+", word) else ""
    return _split(env[name], where) if name in env else [word]


def _document(document: Mapping[str, Any], where: str) -> Iterator[FoundEngine]:
    """The engines of one YAML document, by the first form that it has."""
    if found := list(engines_of(document, where)):
        yield from found
        return
    keys = {"--" + str(key).replace("_", "-").removeprefix("no-") for key in document}
    if keys <= set(table().flags) | {"--model-tag"} and keys - {"--model", "--model-tag", "--host", "--port"}:
        words = argv_of_mapping(document)
        yield FoundEngine(where=where, name="config", words=tuple(words))
