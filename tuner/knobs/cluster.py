"""Engines in YAML files: compose files, Kubernetes manifests of any kind with containers, KServe, Helm values
of production-stack and llm-d, and scripts inside any other YAML file.

The rules of a chart are those of its templates: production-stack's helm/templates/deployment-vllm-multi.yaml
and ray-cluster.yaml, llm-d-modelservice's templates/_helpers.tpl. A note says what a chart adds or ignores.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tuner.errors import BadInput
from tuner.knobs import engine_starts, shell
from tuner.knobs.configfile import argv_of_mapping, as_list, at, environment, walk
from tuner.knobs.engine_starts import FoundEngine, is_vllm
from tuner.records import canonical_json

# Arguments of KServe's Hugging Face server that are not vLLM's.
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


def engines_of(document: Mapping[str, Any], where: str) -> Iterator[FoundEngine]:
    """The engines of one document. The first form that fits is taken: Helm values, compose, list, containers,
    scripts.
    """
    if found := list(_values(document, where)):
        yield from found
        return
    if isinstance(document.get("services"), Mapping):
        yield from _compose(document["services"], where)
        return
    if document.get("kind") == "List":
        for item in document.get("items") or []:
            yield from engines_of(item, where)
        return
    found = list(_containers(document, where))
    yield from found or _scripts(document, where)


def _compose(services: Mapping[str, Any], where: str) -> Iterator[FoundEngine]:
    dotenv, _ = engine_starts.read_env_files([str(Path(where).parent / ".env")])
    for name, service in services.items():
        if not isinstance(service, Mapping):
            continue
        env, notes = environment(service.get("environment"))
        files = service.get("env_file") or []
        files = [files] if isinstance(files, str | Mapping) else files
        from_files, more = engine_starts.read_env_files([str(at(item, "path") or item) for item in files])
        env = {key: shell.expanded(value, dotenv).replace("$$", "$") for key, value in env.items()}
        raw = [word for key in ("entrypoint", "command") for word in words_in(service.get(key), where)]
        filled = [shell.expanded(word.replace("$$", shell.DOLLAR), dotenv) for word in raw]
        lists = {key: service[key] for key in ("entrypoint", "command") if isinstance(service.get(key), list)}
        misread = [each for key, items in lists.items() for each in _refused(key, items)]
        words = words_of([word.replace(shell.DOLLAR, "$") for word in filled], where)
        image = str(service.get("image") or (name if service.get("build") else ""))
        image = "" if service.get("entrypoint") else image
        for found in engine_starts.in_words(words, where, {**from_files, **env}, image):
            said = (*notes, *more, *found.notes)
            yield replace(found, name=str(name), notes=said, misread=(*misread, *found.misread))


def _refused(key: str, raw: object) -> Iterator[tuple[str, str]]:
    """What of a list of arguments Kubernetes and compose refuse: a text in its place, and items of another
    kind.
    """
    if isinstance(raw, str):
        yield f"{key} is one text, but Kubernetes needs a list", f"{key} as a list of words"
    for item in raw if isinstance(raw, list) else ():
        if not isinstance(item, str):
            value = canonical_json(item)
            yield f"{key} has the item {value}, which is not text and is refused", f'"{value}"'


def words_in(raw: object, where: str) -> list[str]:
    """Words of a compose command: a list as it is, a text as a shell splits it."""
    if isinstance(raw, list):
        return [str(word) for word in raw]
    return shell.split(str(raw or "").replace("\n", " "), where)


def _containers(document: Mapping[str, Any], where: str) -> Iterator[FoundEngine]:
    """Every engine in a list of containers, wherever the list is, and KServe's predictor without one."""
    name = str(at(document, "metadata", "name") or document.get("kind") or "engine")
    predictor = at(document, "spec", "predictor", "model")
    if isinstance(predictor, Mapping):
        yield from _predictor(predictor, where, name)
    for path, value in walk(document):
        if path[-1:] != ("containers",) or not isinstance(value, list):
            continue
        extra, model, notes = _of_service(document, path)
        found = [
            (container, engine)
            for container in value
            if isinstance(container, Mapping)
            for engine in container_starts(container, where, always=bool(model))
        ]
        for container, engine in found:
            role = next((part for part in path if part in ("prefill", "worker")), "")
            role = role or next(
                (part.removesuffix("Template") for part in path if part.endswith("erTemplate")), ""
            )
            label = name + (f"/{role}" if role else "")
            label += f"/{container.get('name', '')}" if len(value) > 1 and len(found) > 1 else ""
            said = (*notes, *_environments(container), *engine.notes)
            yield replace(engine, name=label, words=(*engine.words, *extra), model=model, notes=said)


def container_starts(container: Mapping[str, Any], where: str, *, always: bool = False) -> list[FoundEngine]:
    """The engines that one container starts. `always`: its image is vLLM's, whatever its name is."""
    env, notes = environment(container.get("env"))
    command = [str(word) for word in as_list(container.get("command"))]
    args = [str(word) for word in as_list(container.get("args"))]
    words = words_of([*command, *args], where)
    image = str(container.get("image") or "")
    if command:
        image = ""
    elif always or (container.get("name") in ("vllm", "kserve-container") and not image):
        image = "vllm"
    elif image and not is_vllm(image) and not engine_starts.looks_like_arguments(words):
        image = ""
    found = engine_starts.in_words(words, where, env, image)
    is_script = any(word.endswith(".sh") for word in (*command, *args))  # of the image: unknown here
    if not found and command and is_script and is_vllm(str(container.get("image") or "")):
        raise BadInput(
            f"{where}: container {container.get('name')} starts the script '{' '.join(command)}', whose text"
            " is not in the file; give the vllm command line that this script runs"
        )
    misread = [each for key in ("command", "args") for each in _refused(key, container.get(key))]
    return [replace(e, notes=(*notes, *e.notes), misread=(*misread, *e.misread)) for e in found]


def _environments(container: Mapping[str, Any]) -> list[str]:
    names = [
        str(at(item, kind, "name"))
        for item in as_list(container.get("envFrom"))
        for kind in ("configMapRef", "secretRef")
        if at(item, kind, "name")
    ]
    return [f"envFrom {', '.join(names)} is not read; give its variables"] if names else []


def _predictor(raw: Mapping[str, Any], where: str, name: str) -> Iterator[FoundEngine]:
    """The engine of KServe's `predictor.model`. The runtime that it names adds arguments that are not in the
    file.
    """
    form = str(at(raw, "modelFormat", "name") or "")
    if form.lower() not in ("vllm", "huggingface") and not container_starts(raw, where):
        return
    env, notes = environment(raw.get("env"))
    words, model = _server(words_of([str(word) for word in as_list(raw.get("args"))], where))
    if raw.get("runtime"):
        notes = (*notes, f"the settings of the runtime {raw['runtime']} are not in this file")
    model = model or local_model(raw.get("storageUri"))
    yield FoundEngine(
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
    """What a KServe LLMInferenceService sets outside its containers: parallelism, model, offloading."""
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
        notes = ("KServe makes its own --kv-transfer-config from kvCacheOffloading; it is left out",)
    model = at(spec, "model", "uri") or at(spec, "model", "name")
    return argv_of_mapping(wanted), local_model(model) or "", notes


def local_model(uri: object) -> str | None:
    """A model's name or path; None for an address that only the cluster can read."""
    named = re.sub(r"^hf://", "", str(uri or ""))
    return None if not named or re.match(r"[a-z0-9+]+:", named) else named


def words_of(args: Sequence[str], where: str) -> list[str]:
    """Arguments as words: an item that is a command line gives many."""
    words: list[str] = []
    for place, arg in enumerate(args):
        after_c = place > 0 and re.fullmatch(r"-[a-z]*c", args[place - 1]) is not None
        line = not after_c and re.search(r"\s", arg.strip()) and shell.START.search(arg)
        words += shell.split(arg, where) if line else [arg]
    return words


def _scripts(document: Mapping[str, Any], where: str) -> Iterator[FoundEngine]:
    """Scripts in any text of a document (`run:`, ConfigMaps), and `engine_kwargs` of Ray Serve."""
    for path, value in walk(document):
        if path[-1:] == ("engine_kwargs",) and isinstance(value, Mapping):
            loaded = at(document, *path[:-1], "model_loading_config")
            model = at(loaded, "model_source") or at(loaded, "model_id")
            words = tuple(argv_of_mapping(value))
            yield FoundEngine(where=where, name="engine_kwargs", words=words, model=model)
        if not isinstance(value, str) or not shell.START.search(value):
            continue
        beside = at(document, *path[:-1]) if path else None
        env, _ = environment(at(beside, "envs") or at(beside, "env"))
        for found in engine_starts.in_script(value, where, env):
            yield replace(found, name=".".join(path))


# Keys of production-stack's `vllmConfig` that its Deployment writes as flags; it ignores all others.
STACK = {
    "enableChunkedPrefill": "enable-chunked-prefill",
    "enablePrefixCaching": "enable-prefix-caching",
    "maxModelLen": "max-model-len",
    "dtype": "dtype",
    "tensorParallelSize": "tensor-parallel-size",
    "maxNumSeqs": "max-num-seqs",
    "gpuMemoryUtilization": "gpu-memory-utilization",
    "maxLoras": "max-loras",
    "runner": "runner",
    "convert": "convert",
}
_RAY = {**STACK, "pipelineParallelSize": "pipeline-parallel-size"}
_OWN = ("v0", "v1", "extraArgs", "prometheusMultiprocDir")


def _values(document: Mapping[str, Any], where: str) -> Iterator[FoundEngine]:
    """The engines of a Helm values file; none if the document is something else."""
    specs = at(document, "servingEngineSpec", "modelSpec")
    if isinstance(specs, list):
        shared, notes = environment(at(document, "servingEngineSpec", "env"))
        for spec in specs:
            if isinstance(spec, Mapping) and spec.get("enabled") is not False:
                yield _production_stack(spec, where, shared, notes)
        return
    for role in ("decode", "prefill"):
        part = document.get(role)
        if isinstance(part, Mapping) and isinstance(part.get("containers"), list):
            yield from _llm_d(document, role, where)
    if "kind" in document:
        return
    image = document.get("image")
    if isinstance(image, Mapping) and image.get("repository"):
        yield from _image_values(document, image, where)
    for chart in [each for each in document.values() if isinstance(each, Mapping)]:  # of an umbrella chart
        yield from _values(chart, where)


def _image_values(document: Mapping[str, Any], image: Mapping[str, Any], where: str) -> Iterator[FoundEngine]:
    """The engine of values that name an image, with its command (vLLM's own chart) or arguments."""
    container = {
        "image": f"{image['repository']}:{image.get('tag') or 'latest'}",
        "command": image.get("command") or document.get("command"),
        "args": [*as_list(document.get("args")), *as_list(document.get("extraArgs"))],
        "env": document.get("env"),
    }
    model = local_model(document.get("model"))
    yield from (replace(e, name="values", model=model) for e in container_starts(container, where))


def _production_stack(
    spec: Mapping[str, Any], where: str, shared: Mapping[str, str], said: Sequence[str]
) -> FoundEngine:
    config = dict(spec.get("vllmConfig") or {})
    ray = at(spec, "raySpec", "enabled") is True
    env, more = environment(spec.get("env"))
    words, notes = _config(config, ray)
    if not ray and str(config.get("v0")) == "1":
        env = {"VLLM_USE_V1": "0", **env}
    if ray and "v1" in config:
        env = {"VLLM_USE_V1": str(config["v1"]), **env}
    extra = words_of([str(word) for word in config.get("extraArgs") or []], where)
    return FoundEngine(
        where=where,
        name=str(spec.get("name", "model")),
        words=(*_switches(spec, ray), *words, *extra, *_after(spec)),
        env={**shared, **env},
        model=spec.get("modelURL"),
        notes=(*notes, *said, *more, *_unread(spec)),
    )


def _config(config: Mapping[str, Any], ray: bool) -> tuple[list[str], list[str]]:
    """`vllmConfig` as the chart writes it. A Deployment turns the prefix cache off unless the values turn it
    on.
    """
    words: list[str] = []
    notes: list[str] = []
    for key, flag in (_RAY if ray else STACK).items():
        if key in config and not (ray and key in ("runner", "convert")):
            value = config[key]
            switch = key.startswith("enable")
            if not (switch and ray and key == "enablePrefixCaching" and not value):
                words += argv_of_mapping({flag: bool(value) if switch else value})
    if config and not ray and "enablePrefixCaching" not in config:
        words.append("--no-enable-prefix-caching")
        notes.append("vllmConfig has no enablePrefixCaching: the chart starts vLLM with the prefix cache off")
    for key in config:
        if key in ("v1", "enableLMCache") and not ray:
            notes.append(f"vllmConfig.{key} is an option of the chart itself and is left out")
        elif key not in _OWN and key not in (_RAY if ray else STACK):
            notes.append(f"vllmConfig.{key} is not a key that the chart reads; it is left out")
    return words, notes


def _switches(spec: Mapping[str, Any], ray: bool) -> list[str]:
    words = ["--distributed-executor-backend", "ray"] if ray else []
    words += ["--enable-lora"] if spec.get("enableLoRA") else []
    words += ["--enable-auto-tool-choice"] if spec.get("enableTool") else []
    return words + (["--tool-call-parser", str(spec["toolCallParser"])] if spec.get("toolCallParser") else [])


def _after(spec: Mapping[str, Any]) -> list[str]:
    words = ["--revision", str(spec["modelRevision"])] if spec.get("modelRevision") else []
    cache = spec.get("lmcacheConfig") or {}
    if cache.get("enabled"):
        v0 = str(at(spec, "vllmConfig", "v0")) == "1"
        kind = "LMCacheConnector" if v0 and "enablePD" not in cache else "LMCacheConnectorV1"
        transfer = {"kv_connector": kind, "kv_role": cache.get("kvRole") or "kv_both"}
        words += ["--kv-transfer-config", canonical_json(transfer)]
    return words


def _unread(spec: Mapping[str, Any]) -> list[str]:
    secret = at(spec, "envFromSecret", "name")
    notes = {
        "lmcacheConfig: the chart also sets LMCACHE_… variables, which are left out": at(
            spec, "lmcacheConfig", "enabled"
        ),
        "chatTemplate lies in the chart's own volume and is left out": spec.get("chatTemplate"),
        f"envFromSecret {secret} is not read": secret,
    }
    return [note for note, applies in notes.items() if applies]


def _llm_d(document: Mapping[str, Any], role: str, where: str) -> Iterator[FoundEngine]:
    part = document[role]
    if part.get("create") is False:
        return
    name = str(at(document, "modelArtifacts", "name") or "")
    uri = str(at(document, "modelArtifacts", "uri") or "").replace("{{ .Values.modelArtifacts.name }}", name)
    model = local_model(uri) or name or None
    containers = [item for item in part["containers"] if isinstance(item, Mapping)]
    for found in (_llm_d_container(document, part, container, where) for container in containers):
        if found is not None:
            yield replace(found, name=role, model=model)
            return


def _llm_d_container(
    document: Mapping[str, Any], part: Mapping[str, Any], container: Mapping[str, Any], where: str
) -> FoundEngine | None:
    """The engine that the chart renders. A `custom` command (the default) is used unchanged, with the sizes
    in variables. The two other commands get the sizes and the tracing before the container's own words.
    """
    sizes = _sizes(part.get("parallelism") or {})
    if container.get("modelCommand") not in ("vllmServe", "imageDefault"):
        variables = {
            "TP_SIZE": sizes.get("tensor_parallel_size"),
            "DP_SIZE": sizes.get("data_parallel_size"),
            "DP_SIZE_LOCAL": sizes.get("data_parallel_size_local"),
        }
        listed = [{"name": name, "value": str(size or 1)} for name, size in variables.items()]
        env = [*listed, *(container.get("env") or [])]
        for found in container_starts({**container, "env": env}, where)[:1]:
            kept = {name: value for name, value in found.env.items() if name not in variables}
            return replace(found, env=kept)
        return None
    tracing = document.get("tracing") or {}
    words = argv_of_mapping(sizes)
    if tracing.get("enabled"):
        words += ["--otlp-traces-endpoint", str(tracing.get("otlpEndpoint", "http://otel-collector:4317"))]
        words += ["--collect-detailed-traces", str(at(tracing, "vllm", "collectDetailedTraces") or "all")]
    words += words_of([str(word) for word in container.get("args") or []], where)
    given, notes = environment(container.get("env"))
    return FoundEngine(where=where, words=tuple(words), env=given, notes=notes)


def _sizes(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes as the chart computes them: data is dataLocal x workers unless given; a size of 1 is left
    out.
    """
    given = {key: int(raw.get(key) or 0) for key in ("tensor", "data", "dataLocal", "workers")}
    workers = given["workers"] or 1
    data = given["data"] or (given["dataLocal"] or 1) * workers
    local = given["dataLocal"] or data // workers
    sizes = {
        "tensor_parallel_size": given["tensor"],
        "data_parallel_size": data,
        "data_parallel_size_local": local,
    }
    return {key: value for key, value in sizes.items() if value > 1}
