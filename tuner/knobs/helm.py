"""Values of Helm charts as the engines that the charts make of them.

Facts of the charts' templates: production-stack (helm/templates/deployment-vllm-multi.yaml, ray-cluster.yaml)
and llm-d-modelservice (templates/_helpers.tpl). What a chart adds or ignores of its own accord is said.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tuner.knobs.cluster import container_starts, local_model, words_of
from tuner.knobs.configfile import argv_of_mapping
from tuner.knobs.source import Source, at, environment
from tuner.records import canonical_json

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
"""Keys of production-stack's `vllmConfig` that its Deployment writes as flags; it ignores all others."""
_RAY = {**STACK, "pipelineParallelSize": "pipeline-parallel-size"}
_OWN = ("v0", "v1", "extraArgs", "prometheusMultiprocDir")


def engines(document: Mapping[str, Any], where: str) -> Iterator[Source]:
    """The engines of a values file; none where it is another's."""
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


def _production_stack(
    spec: Mapping[str, Any], where: str, shared: Mapping[str, str], said: Sequence[str]
) -> Source:
    config = dict(spec.get("vllmConfig") or {})
    ray = at(spec, "raySpec", "enabled") is True
    env, more = environment(spec.get("env"))
    words, notes = _config(config, ray)
    if not ray and str(config.get("v0")) == "1":
        env = {"VLLM_USE_V1": "0", **env}
    if ray and "v1" in config:
        env = {"VLLM_USE_V1": str(config["v1"]), **env}
    extra = words_of([str(word) for word in config.get("extraArgs") or []], where)
    return Source(
        where=where,
        name=str(spec.get("name", "model")),
        words=(*_switches(spec, ray), *words, *extra, *_after(spec)),
        env={**shared, **env},
        model=spec.get("modelURL"),
        notes=(*notes, *said, *more, *_unread(spec)),
    )


def _config(config: Mapping[str, Any], ray: bool) -> tuple[list[str], list[str]]:
    """`vllmConfig` as the chart writes it: a Deployment turns the prefix cache off unless it is asked for."""
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
            notes.append(f"vllmConfig.{key} is the chart's own and is left out")
        elif key not in _OWN and key not in (_RAY if ray else STACK):
            notes.append(f"vllmConfig.{key} is no key that the chart reads; it is left out")
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
    notes = []
    if at(spec, "lmcacheConfig", "enabled"):
        notes.append("lmcacheConfig: the chart also sets LMCACHE_… variables, which are left out")
    if spec.get("chatTemplate"):
        notes.append("chatTemplate lies in the chart's own volume and is left out")
    if name := at(spec, "envFromSecret", "name"):
        notes.append(f"envFromSecret {name} is not read")
    return notes


def _llm_d(document: Mapping[str, Any], role: str, where: str) -> Iterator[Source]:
    part = document[role]
    if part.get("create") is False:
        return
    name = str(at(document, "modelArtifacts", "name") or "")
    uri = str(at(document, "modelArtifacts", "uri") or "").replace("{{ .Values.modelArtifacts.name }}", name)
    model = local_model(uri) or name or None
    containers = [item for item in part["containers"] if isinstance(item, Mapping)]
    for container in containers:
        start = _llm_d_container(document, part, container, where)
        if start is not None:
            words, env, notes = start
            yield Source(where=where, name=role, words=words, env=env, model=model, notes=notes)
            return


def _llm_d_container(
    document: Mapping[str, Any], part: Mapping[str, Any], container: Mapping[str, Any], where: str
) -> tuple[tuple[str, ...], Mapping[str, str], tuple[str, ...]] | None:
    """vLLM's arguments as the chart renders them. A `custom` command (the default) is taken as it is, with
    the sizes in variables; the two others get the sizes and the tracing before the container's own words."""
    sizes = _sizes(part.get("parallelism") or {})
    env, notes = environment(container.get("env"))
    if container.get("modelCommand") not in ("vllmServe", "imageDefault"):
        variables = [
            {"name": name, "value": str(sizes.get(key) or 1)}
            for name, key in (
                ("TP_SIZE", "tensor_parallel_size"),
                ("DP_SIZE", "data_parallel_size"),
                ("DP_SIZE_LOCAL", "data_parallel_size_local"),
            )
        ]
        listed = [*variables, *(container.get("env") or [])]
        found = container_starts({**container, "env": listed}, where)
        if not found:
            return None
        start = found[0]
        kept = {
            key: value
            for key, value in start.env.items()
            if key not in ("TP_SIZE", "DP_SIZE", "DP_SIZE_LOCAL")
        }
        return start.words, kept, start.notes
    tracing = document.get("tracing") or {}
    words = argv_of_mapping(sizes)
    if tracing.get("enabled"):
        words += ["--otlp-traces-endpoint", str(tracing.get("otlpEndpoint", "http://otel-collector:4317"))]
        words += ["--collect-detailed-traces", str(at(tracing, "vllm", "collectDetailedTraces") or "all")]
    args = words_of([str(word) for word in container.get("args") or []], where)
    return (*words, *args), env, notes


def _sizes(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The chart's arithmetic: data is dataLocal x workers unless given; a size of 1 is not written."""
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
