"""ConfigMaps beside the pods that mount them: start scripts, vLLM's config files, variables."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from tuner.errors import BadInput
from tuner.knobs import engine_starts, shell
from tuner.knobs.configfile import argv_of_mapping, as_list, at, documents
from tuner.knobs.engine_starts import FoundEngine

Reader = Callable[[Mapping[str, Any], str], Iterator[FoundEngine]]
Maps = Mapping[str, Mapping[str, str]]


def engines(found: Sequence[Mapping[str, Any]], where: str, read: Reader) -> Iterator[FoundEngine]:
    """The engines of some documents of one file, each read by `read` with what ConfigMaps of that file give
    it. A ConfigMap that no pod of the file uses is read by itself.
    """
    flat = [
        item for each in found for item in (each.get("items") or [] if each.get("kind") == "List" else [each])
    ]
    maps = {
        str(at(each, "metadata", "name") or ""): _data(each)
        for each in flat
        if each.get("kind") == "ConfigMap"
    }
    used: set[str] = set()
    for document in flat:
        if document.get("kind") != "ConfigMap":
            files: dict[str, str] = {}
            given = _with_maps(document, maps, {}, files, used) if maps else document
            yield from (_with_config(each, files) for each in read(given, where))
    for name, data in maps.items():
        if name not in used:
            yield from _alone(data, where, read)


def _data(document: Mapping[str, Any]) -> dict[str, str]:
    data = document.get("data")
    return {str(key): str(value) for key, value in data.items()} if isinstance(data, Mapping) else {}


def _with_maps(node: Any, maps: Maps, pod: Mapping[str, Any], files: dict[str, str], used: set[str]) -> Any:
    """A part of a document whose containers have the scripts and variables of the ConfigMaps. Adds the files
    that are mounted to `files`, and the names of ConfigMaps to `used`.
    """
    if isinstance(node, list):
        return [_with_maps(each, maps, pod, files, used) for each in node]
    if not isinstance(node, Mapping):
        return node
    inner = node if isinstance(node.get("containers"), list) else pod
    if inner is pod and pod and ("args" in node or "command" in node or "envFrom" in node or "env" in node):
        mounted = _mounted(node, pod, maps, used)
        files |= mounted
        return _container(node, mounted, maps, used)
    return {key: _with_maps(value, maps, inner, files, used) for key, value in node.items()}


def _mounted(
    container: Mapping[str, Any], pod: Mapping[str, Any], maps: Maps, used: set[str]
) -> dict[str, str]:
    """Path → text of the files that a container has of ConfigMaps."""
    found: dict[str, str] = {}
    volumes = {each.get("name"): each for each in pod.get("volumes") or [] if isinstance(each, Mapping)}
    for mount in container.get("volumeMounts") or []:
        volume = volumes.get(mount.get("name"), {})
        sources = [volume, *(at(volume, "projected", "sources") or [])]
        for source in (each["configMap"] for each in sources if isinstance(each.get("configMap"), Mapping)):
            name = str(source.get("name"))
            used |= {name} & maps.keys()
            names = {each.get("key"): each.get("path") for each in source.get("items") or []}
            for key, text in maps.get(name, {}).items():
                path = str(names.get(key, key if not names else ""))
                place = PurePosixPath(str(mount.get("mountPath")))
                if mount.get("subPath") in (None, "", path) and path:
                    found[str(place if mount.get("subPath") else place / path)] = text
    return found


def _container(
    container: Mapping[str, Any], files: Mapping[str, str], maps: Maps, used: set[str]
) -> dict[str, Any]:
    """A container with its variables written out, and a script in place of its path."""
    made: dict[str, Any] = dict(container)
    env, left = list[Any](), list[Any]()
    for item in container.get("envFrom") or []:
        name = at(item, "configMapRef", "name")
        prefix = str(item.get("prefix") or "") if isinstance(item, Mapping) else ""
        env += [{"name": prefix + key, "value": value} for key, value in maps.get(str(name), {}).items()]
        left += [item] * (name not in maps)
        used |= {str(name)} & maps.keys()
    for item in container["env"] if isinstance(container.get("env"), list) else []:
        ref = at(item, "valueFrom", "configMapKeyRef")
        value = maps.get(str(at(ref, "name")), {}).get(str(at(ref, "key")))
        env.append(item if value is None else {"name": item.get("name"), "value": value})
        used |= {str(at(ref, "name"))} & maps.keys()
    if env and not isinstance(container.get("env"), Mapping):
        made |= {"env": env, "envFrom": left}
    words = [str(word) for key in ("command", "args") for word in as_list(container.get(key))]
    for place, word in enumerate(words):
        first = word.split()[0] if word.split() else ""
        script = files.get(first, "")
        if shell.START.search(script):
            rest = [*word.split()[1:], *words[place + 1 :]] if re.search(r"\$\{?[@*0-9]", script) else []
            return {**made, "command": ["sh", "-c", script, first, *rest], "args": []}
    return made


def _alone(data: Mapping[str, str], where: str, read: Reader) -> Iterator[FoundEngine]:
    """The engines of a ConfigMap by itself: its scripts, with its own variables and config files, else its
    config files and arguments.
    """
    env = {
        key: text for key, text in data.items() if re.fullmatch(r"[A-Z][A-Z0-9_]*", key) and "\n" not in text
    }
    names = ", ".join(env)
    notes = (f"variables of the ConfigMap are taken for those of its scripts: {names}",) if names else ()
    scripts = {key: text for key, text in data.items() if shell.START.search(text)}
    for key, text in scripts.items():
        said = notes if any(re.search(rf"\$\{{?{name}\b", text) for name in env) else ()
        for each in engine_starts.in_script(text, where, env):
            kept = {name: value for name, value in each.env.items() if name not in env or said}
            yield _with_config(replace(each, name=f"data.{key}", env=kept, notes=(*said, *each.notes)), data)
    for key, text in data.items() if not scripts else ():
        try:
            found = documents(text, key)
            words = [] if found else shell.split(text, where)
        except BadInput:
            continue
        for document in found:
            yield from (replace(each, name=each.name or f"data.{key}") for each in read(document, where))
        if engine_starts.looks_like_arguments(words):
            yield FoundEngine(where=where, name=f"data.{key}", words=tuple(words))


def _with_config(found: FoundEngine, files: Mapping[str, str]) -> FoundEngine:
    """An engine with the arguments of its `--config` file, where that is one of these files, by path or, in a
    ConfigMap by itself, by name. Its command line overrides them, as in vLLM.
    """
    words = list(found.words)
    place = next((n for n, word in enumerate(words) if re.match(r"--config(?:=|$)", word)), None)
    if place is None:
        return found
    path = words[place].partition("=")[2] or "".join(words[place + 1 : place + 2])
    text = files.get(path, files.get(PurePosixPath(path).name))
    config = documents(text, path) if text is not None else []
    if not config:
        return found
    words[place : place + (1 if "=" in words[place] else 2)] = []
    given = {word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")}
    added = argv_of_mapping({
        key: value for key, value in config[0].items() if "--" + str(key).replace("_", "-") not in given
    })  # fmt: skip
    front = 0 if not words or words[0].startswith("-") else 1
    if front and "--model" in added:  # the positional model counts
        added[added.index("--model") : added.index("--model") + 2] = []
    return replace(found, words=(*words[:front], *added, *words[front:]))
