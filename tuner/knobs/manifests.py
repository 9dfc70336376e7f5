"""Where running configurations are written down: shell lines and scripts, systemd units, compose files, Helm
values of production-stack and llm-d, KServe and any other Kubernetes manifest, vLLM's own `--config` file.
"""

import os.path
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tuner import yamltext
from tuner.errors import BadInput, nearest
from tuner.knobs import helm, starts
from tuner.knobs.baseline import Imported, from_arguments
from tuner.knobs.cluster import engines_of
from tuner.knobs.configfile import argv_of_mapping, documents
from tuner.knobs.source import Source
from tuner.knobs.versions import table
from tuner.records import EngineFacts


def read(what: str, *, pick: str | None = None, facts: EngineFacts | None = None) -> Imported:
    """The baseline from a file's path, or from a command line or `ps` line given as text.

    A file with several engines needs `pick`, the name of one. BadInput names the file and what is wrong.
    """
    found = sources(what)
    chosen = [source for source in found if pick in (None, source.name)]
    if len(chosen) != 1:
        names = ", ".join(source.name for source in found)
        close = nearest(pick or "", [source.name for source in found])
        raise BadInput(f"{found[0].where}: pick one engine of {names}{close if pick else ''}")
    source = chosen[0]
    made = from_arguments(source.words, env=source.env, source=source.where, name=source.name, facts=facts)
    notes = tuple(dict.fromkeys((*source.notes, *made.notes)))
    return replace(made, model=made.model or source.model, notes=notes)


def sources(what: str) -> tuple[Source, ...]:
    """Every engine in a file, or the one of a command line."""
    path = Path(what).expanduser()
    if os.path.isfile(path):  # False, not an error, for text that is no possible name
        text, where = yamltext.read(path), str(path)
    elif re.fullmatch(r"(?!--)\S+", what):  # a command line of one word starts no model
        raise BadInput(f"there is no file {what}")
    else:
        text, where = what, "command line"
    if not text.strip():
        raise BadInput(f"{where}: it is empty")
    if re.search(r"^\[(?:Service|Container)\]", text, re.MULTILINE):
        return _named(_unit(text, where), where, "unit")
    mappings = documents(text, where) if where != "command line" or "\n" in text else []
    if mappings:
        found = tuple(source for document in mappings for source in _document(document, where))
        if not found:
            raise BadInput(
                f"{where}: no vLLM found in it; known are Helm values, KServe, Deployment and systemd"
            )
        return _unlike(found)
    return _named(starts.checked(starts.in_text(text, where), where), where, "command")


def _named(found: Sequence[starts.Start], where: str, name: str) -> tuple[Source, ...]:
    made = [
        Source(where=where, name=each.name or name, words=each.words, env=each.env, notes=each.notes)
        for each in found
    ]
    if len(made) > 1:
        made = [replace(source, name=_label(source, name)) for source in made]
    return _unlike(made)


def _label(source: Source, otherwise: str) -> str:
    """The container's name, else the model that is served."""
    if source.name != otherwise:
        return source.name
    words = list(source.words)
    for flag in ("--served-model-name", "--model"):
        if flag in words[:-1]:
            return words[words.index(flag) + 1]
    return words[0] if words and not words[0].startswith("-") else otherwise


def _unlike(found: Sequence[Source]) -> tuple[Source, ...]:
    """The same engines, those of one name numbered."""
    often = Counter(source.name for source in found)
    seen: Counter[str] = Counter()
    made = []
    for source in found:
        seen[source.name] += 1
        again = often[source.name] > 1
        made.append(replace(source, name=f"{source.name}-{seen[source.name]}") if again else source)
    return tuple(made)


def _unit(text: str, where: str) -> Sequence[starts.Start]:
    """The engine of a systemd unit or a Podman quadlet."""
    env: dict[str, str] = {}
    files: list[str] = []
    found: dict[str, str] = {}
    text = re.sub(r"^[ \t]*[#;].*\n", "", text, flags=re.MULTILINE)
    for line in text.replace("\\\n", " ").splitlines():
        key, _, value = (part.strip() for part in line.partition("="))
        if key == "Environment":
            env |= dict(pair.split("=", maxsplit=1) for pair in shlex.split(value) if "=" in pair)
        elif key == "EnvironmentFile":
            files.append(value)
        elif key in ("ExecStart", "Exec", "Image", "Entrypoint"):
            found[key] = value or ""
    from_files, notes = starts.read_files(files)
    env = {**env, **from_files}
    command = found.get("ExecStart", "").lstrip("-@:+!") or found.get("Exec", "")
    if not command and "Image" not in found:
        raise BadInput(f"{where}: the unit has no ExecStart")
    try:
        words = shlex.split(command.replace("%%", "%"))
    except ValueError as error:
        raise BadInput(f"{where}: cannot be split into words ({error})") from None
    image = found.get("Image", "") if "Entrypoint" not in found else ""
    words = [*shlex.split(found.get("Entrypoint", "")), *words]
    engines = starts.checked(starts.in_words(_spread(words, env), where, env, image), where)
    return [replace(each, notes=(*notes, *each.notes)) for each in engines]


def _spread(words: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """systemd makes several words of `$NAME` alone, and one of `${NAME}`."""
    made: list[str] = []
    for word in words:
        name = word[1:] if re.fullmatch(r"\$\w+", word) else ""
        made += shlex.split(env[name]) if name in env else [word]
    return made


def _document(document: Mapping[str, Any], where: str) -> Iterator[Source]:
    """The engines of one YAML document, by the first form that it has."""
    if found := list(helm.engines(document, where)) or list(engines_of(document, where)):
        yield from found
        return
    keys = {"--" + str(key).replace("_", "-").removeprefix("no-") for key in document}
    if keys and keys <= set(table().flags) | {"--model-tag"} and len(keys & set(table().flags)) > 1:
        words = argv_of_mapping(document)
        yield Source(where=where, name="config", words=tuple(words))
