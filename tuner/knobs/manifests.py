"""Reads a running configuration from wherever people keep it: shell lines and scripts, systemd units, compose
files, Ansible playbooks, Kubernetes manifests and the ConfigMaps that their pods mount, Helm values, vLLM's
own `--config` file.
"""

import json
import os.path
import re
import shlex
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from tuner import yamltext
from tuner.errors import BadInput, nearest
from tuner.knobs import configfile, engine_starts, shell
from tuner.knobs.baseline import Imported, from_arguments
from tuner.knobs.catalogue import table
from tuner.knobs.cluster import engines_of, words_in
from tuner.knobs.configfile import argv_of_mapping, as_list, at, documents, environment
from tuner.knobs.engine_starts import FoundEngine
from tuner.records import EngineFacts

if TYPE_CHECKING:
    from jinja2.sandbox import SandboxedEnvironment

Reader = Callable[[Mapping[str, Any], str], Iterator[FoundEngine]]
Maps = Mapping[str, Mapping[str, str]]


def _of_documents(found: Sequence[Mapping[str, Any]], where: str, read: Reader) -> Iterator[FoundEngine]:
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
    notes = (f"the scripts of the ConfigMap get its variables: {names}",) if names else ()
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
    """An engine with the arguments of its `--config` file, if that is one of these files, by path or, in a
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


def read(what: str, *, pick: str | None = None, facts: EngineFacts | None = None) -> Imported:
    """The configuration in a file, or in a command line or `ps` line that is given as text.

    `pick` names one engine of a file with several. BadInput names the file and what is wrong.
    """
    found = sources(what)
    chosen = [source for source in found if pick in (None, source.name)]
    if len(chosen) != 1:
        names = ", ".join(source.name for source in found)
        close = nearest(pick or "", [source.name for source in found])
        raise BadInput(
            f"{found[0].where}: pick one engine of {names}{close if pick else ''}"
            " (`tuner baseline import FILE --pick NAME`)"
        )
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
    if plays := _ansible(text, where):
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
        found = tuple(_of_documents(mappings, where, _document))
        if not found:
            raise configfile.without_vllm(text, where)
        return _unlike(found)
    words = shell.START.search(text) or re.search(r"(?m)^\s*--|\brun\b|vllm", text)  # an image starts vLLM
    started = engine_starts.in_text(text, where) if words else ()
    return _named(_some(started, text, where), "command")


def _of_form(text: str, path: Path, where: str) -> tuple[FoundEngine, ...] | None:
    """The engines of a file that its name or its first words tell: Markdown, script, unit, Dockerfile."""
    if path.suffix.lower() in (".md", ".markdown"):
        # The code blocks of a document: shell commands, and YAML.
        fenced = re.findall(r"(?ms)^[ ]*(?:```|~~~)[ ]*(\w*)[^\n]*\n(.*?)^[ ]*(?:```|~~~)", text)
        blocks = [each for language, block in fenced for each in _of_block(language.lower(), block, where)]
        return _named(_some(blocks, text, where), "command")
    image = path.name.lower().startswith(("dockerfile", "containerfile"))
    if not image and path.suffix.lower() in (*shell.BATCH, *shell.SHELL, ".ps1"):
        return _named(_some(engine_starts.in_text(text, where), text, where), "command")
    if re.search(r"^\[(?:Service|Container)\]", text, re.MULTILINE):
        return _named(_unit(text, where), "unit")
    if re.search(r"(?im)^FROM\s+\S+", text) and path.name:
        return _named(_some(engine_starts.in_dockerfile(text, where), text, where), "image")
    return None


def _some(found: Sequence[FoundEngine], text: str, where: str) -> Sequence[FoundEngine]:
    """The engines found. BadInput, saying what the text is, if there is none."""
    if not found:
        raise configfile.without_vllm(text, where)
    return found


_SHELL_BLOCKS = frozenset(
    ("", "sh", "bash", "shell", "console", "zsh", "text", "bat", "batch", "cmd", "powershell", "pwsh", "ps1")
)


def _of_block(language: str, block: str, where: str) -> Sequence[FoundEngine]:
    """The engines of a code block; none if it is neither shell nor YAML."""
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


_COMMANDS = ("command", "shell", "raw")
_CONTAINERS = ("docker_container", "podman_container")
_DOCUMENTS = {
    "k8s": ("definition", "resource_definition"), "docker_compose_v2": ("definition",),
    "docker_compose": ("definition",), "helm": ("values", "release_values"),
}  # fmt: skip
_INSIDE = ("pre_tasks", "tasks", "post_tasks", "handlers", "block", "rescue", "always")
_DEPTH = 5
"""How often a text is filled in, where a variable's value has variables itself."""


def _ansible(text: str, where: str) -> list[FoundEngine]:
    """The engines of a playbook or of a file of tasks; none if the text is something else."""
    if not re.match(r"(?:[ \t\r]*(?:#[^\n]*|---[^\n]*)?\n)*[ \t]*- ", text):
        return []
    try:
        found = [each.value for each in yamltext.documents(text, where)]
    except BadInput:
        return []
    plays = [item for each in found if isinstance(each, list) for item in each if isinstance(item, Mapping)]
    return list(_of_items(plays, {}, {}, where))


def _of_items(
    items: Sequence[Any], scope: Mapping[str, Any], env: Mapping[str, str], where: str
) -> Iterator[FoundEngine]:
    """The engines of plays, blocks and tasks in their order; `set_fact` holds for those after it."""
    facts: dict[str, Any] = {}
    for item in (each for each in items if isinstance(each, Mapping)):
        files, notes = _files(item.get("vars_files"), where)
        known = {**scope, **facts, **files, **_mapping(item.get("vars"))}
        around = {**env, **environment(_with_variables(item.get("environment"), known))[0]}
        found: list[FoundEngine] = []
        for key, value in item.items():
            module = str(key).rsplit(".", 1)[-1]
            if module == "set_fact":
                facts |= _mapping(value)
            elif module in _INSIDE and isinstance(value, list):
                found += _of_items(value, known, around, where)
            else:
                arguments = {**_mapping(item.get("args")), **_mapping(value)}
                text = value if isinstance(value, str) else ""
                filled = _with_variables(text, known), _with_variables(arguments, known)
                made = _of_module(module, *filled, around, where)
                found += [replace(each, name=each.name or str(item.get("name") or module)) for each in made]
        yield from (replace(each, notes=(*notes, *each.notes)) for each in found)


def _of_module(
    module: str, text: Any, given: Mapping[str, Any], env: Mapping[str, str], where: str
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
        is_unit = re.search(r"^\[(?:Service|Container)\]", content, re.MULTILINE)
        yield from (_unit if is_unit else engine_starts.in_script)(content, where)


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


def _with_variables(value: Any, scope: Mapping[str, Any]) -> Any:
    """A value with its templates filled in."""
    if isinstance(value, Mapping):
        return {key: _with_variables(item, scope) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_variables(item, scope) for item in value]
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
