"""Where running configurations are written down: a shell line, a systemd unit, Helm values of
production-stack and llm-d, KServe and plain Kubernetes manifests.
Each becomes a command line for `baseline.from_command`.
"""

import os.path
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tuner import yamltext
from tuner.errors import BadInput, nearest
from tuner.knobs.baseline import Imported, from_command
from tuner.knobs.configfile import argv_of_mapping, documents
from tuner.records import EngineFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One engine found in a file: its words, what else is known of it, and where."""

    where: str
    name: str
    words: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None
    notes: tuple[str, ...] = ()


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
    made = from_command(source.words, env=source.env, source=source.where, name=source.name, facts=facts)
    return replace(made, model=made.model or source.model, notes=(*source.notes, *made.notes))


def sources(what: str) -> tuple[Source, ...]:
    """Every engine in a file, or the one of a command line."""
    path = Path(what).expanduser()
    if os.path.isfile(path):  # False, not an error, for text that is no possible name
        text, where = yamltext.read(path), str(path)
    elif re.fullmatch(r"(?!--)\S+", what):  # a command line of one word starts no model
        raise BadInput(f"there is no file {what}")
    else:
        text, where = what, "command line"
    if re.search(r"^\[Service\]", text, re.MULTILINE):
        return (_systemd(text, where),)
    mappings = documents(text, where) if where != "command line" or "\n" in text else []
    if mappings:
        found = tuple(source for document in mappings for source in _manifest(document, where))
        if not found:
            raise BadInput(
                f"{where}: no vLLM found in it; known are Helm values, KServe, Deployment and systemd"
            )
        return found
    words = _split(text, where)
    if not any("vllm" in word for word in words) and not words[0].startswith("--"):
        raise BadInput(f"{where}: no vLLM is started there ('vllm serve …' or its api_server module)")
    return (Source(where=where, name="command", words=words),)


def _split(text: str, where: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(text.replace("\\\n", " ")))
    except ValueError as error:
        raise BadInput(f"{where}: cannot be split into words ({error})") from None
    if not words:
        raise BadInput(f"{where}: it is empty")
    return words


def _systemd(text: str, where: str) -> Source:
    env: dict[str, str] = {}
    command, notes = "", []
    for line in text.replace("\\\n", " ").splitlines():
        key, _, value = (part.strip() for part in line.partition("="))
        if key == "Environment":
            env |= dict(pair.split("=", maxsplit=1) for pair in shlex.split(value) if "=" in pair)
        elif key == "EnvironmentFile":
            notes.append(f"EnvironmentFile {value} is not read; give what it sets")
        elif key == "ExecStart" and value:
            command = value.lstrip("-@:+!")
    if not command:
        raise BadInput(f"{where}: the unit has no ExecStart")
    words = _split(command.replace("%%", "%"), where)
    return Source(where=where, name="unit", words=words, env=env, notes=tuple(notes))


def _manifest(document: Mapping[str, Any], where: str) -> Iterator[Source]:
    """The engines of one YAML document, by the first form that it has."""
    specs = _at(document, "servingEngineSpec", "modelSpec")
    if isinstance(specs, list):
        yield from (_production_stack(spec, where) for spec in specs if isinstance(spec, dict))
        return
    roles = [role for role in ("decode", "prefill") if isinstance(_at(document, role, "containers"), list)]
    if roles:
        yield from (_llm_d(document, role, where) for role in roles)
        return
    name = str(_at(document, "metadata", "name") or document.get("kind") or "engine")
    predictor = _at(document, "spec", "predictor", "model")
    if isinstance(predictor, dict):
        yield _container(predictor, where, name, model=predictor.get("storageUri"))
        return
    extra = argv_of_mapping(_parallel(_at(document, "spec", "parallelism")))
    model = _at(document, "spec", "model", "uri") or _at(document, "spec", "model", "name")
    for path in (("spec", "predictor"), ("spec", "template", "spec"), ("spec", "template"), ("spec",)):
        containers = _at(document, *path, "containers")
        if isinstance(containers, list):
            for container in containers:
                if _is_engine(container):
                    label = name if len(containers) == 1 else f"{name}/{container.get('name', '')}"
                    yield _container(container, where, label, model=model, extra=extra)
            return


def _production_stack(spec: Mapping[str, Any], where: str) -> Source:
    config = dict(spec.get("vllmConfig") or {})
    extra = [str(word) for word in config.pop("extraArgs", None) or []]
    notes = []
    for key in ("v1", "enableLMCache"):
        if key in config:
            notes.append(f"vllmConfig.{key} is the chart's own and is left out")
            config.pop(key)
    words = ("vllm", "serve", str(spec.get("modelURL", "")), *argv_of_mapping(config), *_words(extra, where))
    env, more = _environment(spec.get("env"))
    return Source(
        where=where,
        name=str(spec.get("name", "model")),
        words=words,
        env=env,
        model=spec.get("modelURL"),
        notes=(*notes, *more),
    )


def _llm_d(document: Mapping[str, Any], role: str, where: str) -> Source:
    part = document[role]
    container = next((item for item in part["containers"] if _is_engine(item)), part["containers"][0])
    model = _at(document, "modelArtifacts", "name") or _at(document, "modelArtifacts", "uri")
    return _container(
        container, where, role, model=model, extra=argv_of_mapping(_parallel(part.get("parallelism")))
    )


def _parallel(raw: object) -> dict[str, Any]:
    sizes = raw if isinstance(raw, dict) else {}
    return {
        f"{kind}_parallel_size": sizes[kind] for kind in ("tensor", "pipeline", "data") if sizes.get(kind)
    }


def _container(
    raw: Mapping[str, Any], where: str, name: str, *, model: object = None, extra: Sequence[str] = ()
) -> Source:
    env, notes = _environment(raw.get("env"))
    command = [str(word) for word in raw.get("command") or []]
    args = _words([str(word) for word in raw.get("args") or []], where)
    joined = [*command, *args]
    if "-c" not in joined:
        joined += extra
    elif extra:
        notes = (*notes, f"parallelism ({' '.join(extra)}) is set beside a shell script and was left out")
    named = re.sub(r"^hf://", "", str(model or ""))
    local = None if not named or re.match(r"[a-z0-9]+:", named) else named
    return Source(where=where, name=name, words=tuple(joined), env=env, model=local, notes=notes)


def _words(args: Sequence[str], where: str) -> list[str]:
    """Arguments as words; an item such as `--max-num-seqs 8` is two of them."""
    words: list[str] = []
    for arg in args:
        spaced = re.match(r"--?[A-Za-z][\w.-]*\s", arg)
        words += _split(arg, where) if spaced else [arg]
    return words


def _environment(raw: object) -> tuple[dict[str, str], tuple[str, ...]]:
    env: dict[str, str] = {}
    notes: list[str] = []
    for item in raw if isinstance(raw, list) else []:
        if isinstance(item, dict) and "value" in item:
            env[str(item.get("name"))] = str(item["value"])
        elif isinstance(item, dict):
            notes.append(f"{item.get('name')} comes from elsewhere in the cluster and is left out")
    return env, tuple(notes)


def _is_engine(container: object) -> bool:
    if not isinstance(container, dict):
        return False
    text = " ".join(str(container.get(key, "")) for key in ("image", "command", "args", "modelCommand"))
    return "vllm" in text or container.get("name") in ("vllm", "main", "kserve-container")


def _at(document: object, *path: str) -> Any:
    for key in path:
        if not isinstance(document, Mapping):
            return None
        document = document.get(key)
    return document
