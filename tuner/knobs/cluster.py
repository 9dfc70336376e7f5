"""Engines in compose files and Kubernetes manifests: every kind that has containers, KServe, and scripts in
any other YAML file.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tuner.errors import BadInput
from tuner.knobs import shell, starts
from tuner.knobs.configfile import argv_of_mapping
from tuner.knobs.containers import is_vllm
from tuner.knobs.source import Source, at, environment, walk

_SERVER = (
    "model-name",
    "model-id",
    "model-dir",
    "backend",
    "http-port",
    "grpc-port",
    "enable-docs-url",
    "workers",
)
"""Arguments of KServe's Hugging Face server that are not vLLM's."""


def engines_of(document: Mapping[str, Any], where: str) -> Iterator[Source]:
    """The engines of one document, by the first form that it has."""
    if isinstance(document.get("services"), Mapping):
        yield from _compose(document["services"], where)
        return
    if document.get("kind") == "List":
        for item in document.get("items") or []:
            yield from engines_of(item, where)
        return
    found = list(_containers(document, where))
    yield from found or _scripts(document, where)


def _compose(services: Mapping[str, Any], where: str) -> Iterator[Source]:
    for name, service in services.items():
        if not isinstance(service, Mapping):
            continue
        env, notes = environment(service.get("environment"))
        files = service.get("env_file") or []
        paths = [
            str(at(item, "path") or item) for item in ([files] if isinstance(files, str | Mapping) else files)
        ]
        from_files, more = starts.read_files(paths)
        env = {key: shell.expanded(value, {}).replace("$$", "$") for key, value in env.items()}
        raw = [word for key in ("entrypoint", "command") for word in _split(service.get(key), where)]
        filled = [shell.expanded(word.replace("$$", shell.DOLLAR), {}) for word in raw]
        words = words_of([word.replace(shell.DOLLAR, "$") for word in filled], where)
        image = "" if service.get("entrypoint") else str(service.get("image", ""))
        image = image or ("" if service.get("entrypoint") or not service.get("build") else str(name))
        for start in starts.in_words(words, where, {**from_files, **env}, image):
            said = (*notes, *more, *start.notes)
            yield Source(where=where, name=str(name), words=start.words, env=start.env, notes=said)


def _split(raw: object, where: str) -> list[str]:
    """Words of a compose command: a list as it is, a text as a shell splits it (`$` is compose's own)."""
    if isinstance(raw, list):
        return [str(word) for word in raw]
    hidden = str(raw or "").replace("$", shell.DOLLAR)
    return [
        word.replace(shell.DOLLAR, "$")
        for command in shell.commands(hidden.replace("\n", " "), where)
        for word in command.words
    ]


def _containers(document: Mapping[str, Any], where: str) -> Iterator[Source]:
    """Every engine in a list of containers, wherever it stands, and KServe's predictor without one."""
    name = str(at(document, "metadata", "name") or document.get("kind") or "engine")
    predictor = at(document, "spec", "predictor", "model")
    if isinstance(predictor, Mapping):
        yield from _predictor(predictor, where, name)
    for path, value in walk(document):
        if path[-1:] != ("containers",) or not isinstance(value, list):
            continue
        extra, model, notes = _of_service(document, path)
        found = [
            (container, start)
            for container in value
            if isinstance(container, Mapping)
            for start in container_starts(container, where, always=bool(model))
        ]
        for container, start in found:
            role = next((part for part in path if part in ("prefill", "worker")), "")
            role = role or next(
                (part.removesuffix("Template") for part in path if part.endswith("erTemplate")), ""
            )
            label = name + (f"/{role}" if role else "")
            label += f"/{container.get('name', '')}" if len(value) > 1 and len(found) > 1 else ""
            said = (*notes, *_environments(container), *start.notes)
            yield Source(
                where=where, name=label, words=(*start.words, *extra), env=start.env, model=model, notes=said
            )


def container_starts(
    container: Mapping[str, Any], where: str, *, always: bool = False
) -> Sequence[starts.Start]:
    """The engines that one container starts; `always`: its image is vLLM's, whatever it is called."""
    env, notes = environment(container.get("env"))
    command = [str(word) for word in _list(container.get("command"))]
    args = [str(word) for word in _list(container.get("args"))]
    words = words_of([*command, *args], where)
    image = str(container.get("image") or "")
    if command:
        image = ""
    elif always or (container.get("name") in ("vllm", "kserve-container") and not image):
        image = "vllm"
    elif image and not is_vllm(image) and not starts.looks_like_arguments(words):
        image = ""
    found = starts.in_words(words, where, env, image)
    if not found and command and is_vllm(str(container.get("image") or "")) and _named_only(command, args):
        raise BadInput(
            f"{where}: container {container.get('name')} starts '{' '.join(command)}', which is not in the"
            " file; give the command line that it ends in"
        )
    return [
        starts.Start(name=each.name, words=each.words, env=each.env, notes=(*notes, *each.notes))
        for each in found
    ]


def _named_only(command: Sequence[str], args: Sequence[str]) -> bool:
    """Whether a command is a script of the image, of which nothing is known."""
    return any(word.endswith(".sh") for word in (*command, *args))


def _list(raw: object) -> list[Any]:
    return raw if isinstance(raw, list) else [] if raw is None else [raw]


def _environments(container: Mapping[str, Any]) -> list[str]:
    names = [
        str(at(item, kind, "name"))
        for item in _list(container.get("envFrom"))
        for kind in ("configMapRef", "secretRef")
        if at(item, kind, "name")
    ]
    return [f"envFrom {', '.join(names)} is not read; give what it sets"] if names else []


def _predictor(raw: Mapping[str, Any], where: str, name: str) -> Iterator[Source]:
    """KServe's `predictor.model`: the runtime that it names has the rest of the command line."""
    form = str(at(raw, "modelFormat", "name") or "")
    if form.lower() not in ("vllm", "huggingface") and not container_starts(raw, where):
        return
    env, notes = environment(raw.get("env"))
    words, model = _server(words_of([str(word) for word in _list(raw.get("args"))], where))
    if raw.get("runtime"):
        notes = (*notes, f"what the runtime {raw['runtime']} sets by itself is not in this file")
    model = model or local_model(raw.get("storageUri"))
    yield Source(
        where=where, name=name, words=tuple(words), env=env, model=model, notes=(*notes, *_environments(raw))
    )


def _server(words: Sequence[str]) -> tuple[list[str], str | None]:
    """Arguments without those of the Hugging Face server itself, and the model that these name."""
    kept: list[str] = []
    model: str | None = None
    taken = ""
    for word in words:
        flag, equals, value = word.partition("=")
        name = flag.lstrip("-").replace("_", "-")
        if taken and not word.startswith("--"):
            model = word if taken == "model-id" else model
            taken = ""
        elif word.startswith("--") and name in _SERVER:
            model = value if name == "model-id" and equals else model
            taken = "" if equals else name
        else:
            taken = ""
            kept.append(word)
    return kept, model


def _of_service(
    document: Mapping[str, Any], path: Sequence[str]
) -> tuple[list[str], str | None, tuple[str, ...]]:
    """What a KServe LLMInferenceService says outside its containers: parallelism, model, offloading."""
    if document.get("kind") not in ("LLMInferenceService", "LLMInferenceServiceConfig"):
        return [], None, ()
    spec = document.get("spec") or {}
    part = spec.get("prefill", {}) if "prefill" in path else spec
    sizes = part.get("parallelism") or {}
    wanted = {f"{kind}_parallel_size": sizes.get(kind) for kind in ("tensor", "pipeline", "data")}
    wanted["data_parallel_size_local"] = sizes.get("dataLocal")
    wanted["enable_expert_parallel"] = True if sizes.get("expert") else None
    notes: tuple[str, ...] = ()
    if spec.get("kvCacheOffloading"):
        notes = ("kvCacheOffloading becomes a --kv-transfer-config of KServe's own; it is left out",)
    model = at(spec, "model", "uri") or at(spec, "model", "name")
    return argv_of_mapping(wanted), local_model(model) or "", notes


def local_model(uri: object) -> str | None:
    """A model's name or path; None for where only the cluster finds it."""
    named = re.sub(r"^hf://", "", str(uri or ""))
    return None if not named or re.match(r"[a-z0-9+]+:", named) else named


def words_of(args: Sequence[str], where: str) -> list[str]:
    """Arguments as words: an item such as `--max-num-seqs 8` is two of them, a command line is many."""
    words: list[str] = []
    for place, arg in enumerate(args):
        after_c = place > 0 and re.fullmatch(r"-[a-z]*c", args[place - 1]) is not None
        flag = re.match(r"(--?[A-Za-z][\w.-]*)\s+([{\[].*)$", arg.strip(), re.DOTALL)
        line = re.match(r"--?[A-Za-z][\w.-]*(?:=\S*)?\s", arg.strip()) or shell.START.search(arg)
        if after_c or not re.search(r"\s", arg.strip()) or not line:
            words.append(arg)
        elif flag and flag[2].rstrip().endswith(("}", "]")):
            words += [flag[1], flag[2].strip()]
        else:
            words += [
                word for each in shell.commands(arg.replace("$", shell.DOLLAR), where) for word in each.words
            ]
    return [word.replace(shell.DOLLAR, "$") for word in words]


def _scripts(document: Mapping[str, Any], where: str) -> Iterator[Source]:
    """Scripts in any text of a document (`run:`, ConfigMaps), and `engine_kwargs` of Ray Serve."""
    for path, value in walk(document):
        if path[-1:] == ("engine_kwargs",) and isinstance(value, Mapping):
            yield Source(where=where, name="engine_kwargs", words=tuple(argv_of_mapping(value)))
        if not isinstance(value, str) or not shell.START.search(value):
            continue
        beside = at(document, *path[:-1]) if path else None
        env, _ = environment(at(beside, "envs") or at(beside, "env"))
        for command in shell.commands(value, where, env):
            for start in starts.in_words(command.words, where, {**env, **command.exported}):
                notes = (*command.notes, *start.notes)
                yield Source(where=where, name=".".join(path), words=start.words, env=start.env, notes=notes)
