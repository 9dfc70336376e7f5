"""Profiles as the values and manifests of what runs engines: Helm charts, KServe, Kustomize, systemd.

Switches that are off go as `--no-…` arguments and never as `false`: charts drop a false value in silence.
"""

import re
import shlex
from collections.abc import Mapping, Sequence

from tuner.errors import BadInput
from tuner.profiles.flags import Flag, plain, split
from tuner.records import JSON, Profile

PRODUCTION_STACK = {
    "enable-prefix-caching": ("enablePrefixCaching", bool),
    "enable-chunked-prefill": ("enableChunkedPrefill", bool),
    "max-model-len": ("maxModelLen", int),
    "dtype": ("dtype", str),
    "tensor-parallel-size": ("tensorParallelSize", int),
    "max-num-seqs": ("maxNumSeqs", int),
    "gpu-memory-utilization": ("gpuMemoryUtilization", float),
}
"""vLLM's flag → the key of the chart's `vllmConfig` and its type; all others go to `extraArgs`."""
LARGEST = 10**6
"""From here on Helm writes numbers with an exponent, which vLLM does not read: these go to `extraArgs`."""
TENSOR, DATA, LOCAL = "tensor-parallel-size", "data-parallel-size", "data-parallel-size-local"


def slug(text: str, limit: int = 63) -> str:
    """A name that Kubernetes takes: lower case, digits and dashes."""
    found = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:limit].strip("-")
    return found or "model"


def label(text: str) -> str:
    """A label value that Kubernetes takes."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:63].strip("-._")


def labels(profile: Profile) -> dict[str, JSON]:
    """Labels that tell a profile in a cluster."""
    return {
        "app.kubernetes.io/managed-by": "vllm-config-tuner",
        "vllm-config-tuner/target": label(profile.key.target),
        "vllm-config-tuner/version": str(profile.version),
        "vllm-config-tuner/workload": label(profile.key.workload),
    }


def annotations(profile: Profile) -> dict[str, JSON]:
    """Where a profile comes from, in full."""
    return {
        "vllm-config-tuner/engine-version": profile.engine_version,
        "vllm-config-tuner/model": profile.key.model,
        "vllm-config-tuner/sha256": profile.digest,
        "vllm-config-tuner/study": profile.study_id,
    }


def literal(text: str) -> str:
    """A text that Kubernetes gives on as it is: `$(NAME)` would be replaced there."""
    return text.replace("$(", "$$(")


def environment(env: Mapping[str, str]) -> list[JSON]:
    """An `env` list, by name."""
    return [{"name": name, "value": literal(value)} for name, value in sorted(env.items())]


def words(flags: Sequence[Flag]) -> list[str]:
    """The arguments that flags are written as."""
    return [word for flag in flags for word in (f"--{flag.name}", *flag.words)]


def _args(flags: Sequence[Flag]) -> list[JSON]:
    return [literal(word) for word in words(flags)]


def by_name(profile: Profile) -> list[Flag]:
    """A profile's flags, sorted."""
    return sorted(split(profile.argv), key=lambda flag: flag.name)


def _sizes(flags: Sequence[Flag], *names: str) -> tuple[dict[str, int], list[Flag]]:
    """Parallel sizes by flag, and the other flags: charts with a place of their own for them add them."""
    sizes: dict[str, int] = {}
    for flag in flags:
        value = plain(flag.words[0]) if flag.name in names and len(flag.words) == 1 else None
        if isinstance(value, int):
            sizes[flag.name] = value
    return sizes, [flag for flag in flags if flag.name not in sizes]


def _uri(model: str) -> str | None:
    """Where a chart loads the model from; None for a path on some machine."""
    if "://" in model:
        return model
    return None if model.startswith(("/", ".", "~")) else f"hf://{model}"


def _typed(flag: Flag) -> tuple[str, JSON] | None:
    if flag.name not in PRODUCTION_STACK:
        return None
    key, kind = PRODUCTION_STACK[flag.name]
    if kind is bool:
        return None if flag.words else (key, True)
    if len(flag.words) != 1:
        return None
    value = plain(flag.words[0])
    if isinstance(value, int | float) and not 1 / LARGEST < abs(value) < LARGEST:
        return None
    fits = isinstance(value, int | float) if kind is float else isinstance(value, kind)
    return (key, value) if fits else None


def production_stack(profile: Profile) -> JSON:
    """Values of the vLLM production-stack chart: one entry of `servingEngineSpec.modelSpec`.

    The chart turns the prefix cache off wherever `enablePrefixCaching` is missing; vLLM has it on by default
    (V0, pinned by VLLM_USE_V1=0, has it off).
    """
    config: dict[str, JSON] = {}
    rest: list[Flag] = []
    for flag in by_name(profile):
        found = _typed(flag)
        if found is None:
            rest.append(flag)
        else:
            config[found[0]] = found[1]
    if not any(flag.name.endswith("enable-prefix-caching") for flag in rest):
        config.setdefault("enablePrefixCaching", profile.env.get("VLLM_USE_V1") != "0")
    if rest:
        config["extraArgs"] = _args(rest)
    entry: dict[str, JSON] = {
        "name": slug(profile.key.model),
        "modelURL": profile.key.model,
        "annotations": annotations(profile),
        "vllmConfig": config,
    }
    if profile.env:
        entry["env"] = environment(profile.env)
    return {"servingEngineSpec": {"modelSpec": [entry]}}


def llm_d(profile: Profile) -> JSON:
    """Values of the llm-d modelservice chart, for its decode pods."""
    sizes, rest = _sizes(by_name(profile), TENSOR, DATA, LOCAL)
    container: dict[str, JSON] = {"name": "vllm", "modelCommand": "vllmServe", "args": _args(rest)}
    if profile.env:
        container["env"] = environment(profile.env)
    decode: dict[str, JSON] = {"containers": [container]}
    parallelism: dict[str, JSON] = {"tensor": sizes[TENSOR]} if TENSOR in sizes else {}
    if DATA in sizes or LOCAL in sizes:  # the chart counts GPUs by dataLocal, whose default is 1
        data = sizes.get(DATA, sizes.get(LOCAL, 1))
        parallelism |= {"data": data, "dataLocal": sizes.get(LOCAL, data)}
    if parallelism:
        decode["parallelism"] = parallelism
    values: dict[str, JSON] = {"decode": decode}
    if (uri := _uri(profile.key.model)) is not None:
        values["modelArtifacts"] = {"name": profile.key.model, "uri": uri}
    return values


def kserve(profile: Profile) -> JSON:
    """A KServe LLMInferenceService. Its presets start vLLM from a script that reads VLLM_ADDITIONAL_ARGS."""
    uri = _uri(profile.key.model)
    if uri is None:
        raise BadInput(f"KServe needs a model URI (hf://, pvc://, s3://): '{profile.key.model}' is a path")
    sizes, rest = _sizes(by_name(profile), TENSOR)
    env = {"VLLM_ADDITIONAL_ARGS": shlex.join(words(rest)), **profile.env}
    spec: dict[str, JSON] = {
        "model": {"name": profile.key.model, "uri": uri},
        "template": {"containers": [{"name": "main", "env": environment(env)}]},
    }
    if sizes:
        spec["parallelism"] = {"tensor": sizes[TENSOR]}
    return {
        "apiVersion": "serving.kserve.io/v1alpha2",
        "kind": "LLMInferenceService",
        "metadata": _metadata(profile),
        "spec": spec,
    }


def _metadata(profile: Profile) -> dict[str, JSON]:
    name = f"vllm-{slug(profile.key.model, 58)}"
    return {"name": name, "labels": labels(profile), "annotations": annotations(profile)}


def kustomize(profile: Profile) -> JSON:
    """A strategic-merge patch of a Deployment whose container is called `vllm`."""
    container: dict[str, JSON] = {
        "name": "vllm",
        "command": ["vllm", "serve"],
        "args": [literal(profile.key.model), *_args(by_name(profile))],
    }
    if profile.env:
        container["env"] = environment(profile.env)
    template: dict[str, JSON] = {
        "metadata": {"annotations": annotations(profile)},
        "spec": {"containers": [container]},
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": f"vllm-{slug(profile.key.model, 58)}"},
        "spec": {"template": template},
    }


def configmap(profile: Profile, files: Mapping[str, str]) -> JSON:
    """A ConfigMap that holds a profile's files."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(profile),
        "data": dict(sorted(files.items())),
    }


def systemd(profile: Profile) -> str:
    """A drop-in that sets the environment; the unit's ExecStart ends with `$VLLM_ADDITIONAL_ARGS`."""
    env = {"VLLM_ADDITIONAL_ARGS": shlex.join(words(by_name(profile))), **profile.env}
    lines = [f'Environment="{name}={_systemd_quoted(name, value)}"' for name, value in sorted(env.items())]
    return "\n".join(["[Service]", *lines]) + "\n"


def _systemd_quoted(name: str, value: str) -> str:
    if "\n" in value or "\r" in value:
        raise BadInput(f"environment variable {name} has a line break: a unit file cannot hold it")
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
