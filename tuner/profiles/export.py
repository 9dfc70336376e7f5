"""Profiles in the formats that deploy pipelines read: flags, Helm charts, KServe, Kustomize, systemd. The
output is sorted, names the profile it was made from, and has no time stamps.

A format is added here alone: a function that writes a profile, under `@export_format`. A switch that is off
is written as a `--no-…` argument and never as `false`, because charts drop a false value without a message.
"""

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import yaml

from tuner.errors import BadInput, nearest
from tuner.masking import MASK
from tuner.records import JSON, Profile, attempt_name


@dataclass(frozen=True, slots=True)
class Flag:
    """One long flag without its dashes, spelled with dashes, and the words after it."""

    name: str
    words: tuple[str, ...] = ()


def split_flags(argv: Sequence[str]) -> tuple[Flag, ...]:
    """The flags of an argument list, in its order. BadInput for a word before any flag, or a repeat."""
    found: list[Flag] = []
    for word in argv:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            found.append(Flag(name.replace("_", "-"), (value,) if equals else ()))
        elif not found:
            raise BadInput(f"argument '{word}' belongs to no flag: the profile cannot be exported")
        else:
            found[-1] = Flag(found[-1].name, (*found[-1].words, word))
    seen: set[str] = set()
    for flag in found:
        if flag.name in seen:
            raise BadInput(f"flag --{flag.name} is there twice: the profile cannot be exported")
        seen.add(flag.name)
    return tuple(found)


def plain(word: str) -> JSON:
    """A word as a JSON number if that prints as the same word, else the word itself."""
    try:
        value = json.loads(word)
    except ValueError:
        return word
    return value if isinstance(value, int | float) and str(value) == word else word


def as_mapping(argv: Sequence[str]) -> dict[str, JSON]:
    """Flag → true, a value or a list, sorted; a switch that is off keeps its `no-…: true` form.

    vLLM before 0.28 drops every `false` of a config file, and later ones drop it under an underscore key.
    """
    found = {flag.name: [plain(word) for word in flag.words] for flag in split_flags(argv)}
    return {
        name: words if len(words) > 1 else words[0] if words else True
        for name, words in sorted(found.items())
    }


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


def _argument_list(flags: Sequence[Flag]) -> list[JSON]:
    return [literal(word) for word in words(flags)]


def by_name(profile: Profile) -> list[Flag]:
    """A profile's flags, sorted."""
    return sorted(split_flags(profile.argv), key=lambda flag: flag.name)


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
        config["extraArgs"] = _argument_list(rest)
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
    container: dict[str, JSON] = {"name": "vllm", "modelCommand": "vllmServe", "args": _argument_list(rest)}
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
        "args": [literal(profile.key.model), *_argument_list(by_name(profile))],
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


NAME = "vllm-config-tuner"
YAML, TEXT = "application/yaml", "text/plain; charset=utf-8"
R = TypeVar("R", bound=Callable[[Profile], str])


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFormat:
    """A format that a profile is exported in: what users call it, its media type, and what writes it."""

    name: str
    media: str
    write: Callable[[Profile], str]


FORMATS: dict[str, ExportFormat] = {}
"""Every format by its name. The command line, the API and its OpenAPI read this."""


def export_format(name: str, media: str = YAML) -> Callable[[R], R]:
    """Registers the function that writes a profile in a format."""

    def registered(write: R) -> R:
        FORMATS[name] = ExportFormat(name=name, media=media, write=write)
        return write

    return registered


def format_of(name: str) -> ExportFormat:
    """A format by its name. BadInput names the nearest one."""
    if name not in FORMATS:
        raise BadInput(f"there is no format '{name}'{nearest(name, FORMATS)}: {', '.join(FORMATS)}")
    return FORMATS[name]


def provenance(profile: Profile) -> dict[str, str]:
    """Where a profile comes from: the same words in every format; the trial by its name in the study."""
    number, attempt = (profile.evidence.get(f"trial_{name}") for name in ("number", "attempt"))
    trial: int | str | None = profile.trial_id
    if isinstance(number, int):
        trial = attempt_name(number, attempt if isinstance(attempt, int) else None)
    return {
        "model": profile.key.model,
        "target": profile.key.target,
        "workload": profile.key.workload,
        "version": str(profile.version),
        "engine-version": profile.engine_version,
        "gpu-class": profile.gpu_class,
        "study": profile.study_id,
        "trial": "" if trial is None else str(trial),
        "sha256": profile.digest,
    }


def header(profile: Profile, *more: str) -> str:
    """The provenance as comment lines."""
    told = [f"{name}: {value}" for name, value in provenance(profile).items() if value]
    return "".join(f"# {' '.join(line.split())}\n" for line in (f"Written by {NAME}", *told, *more))


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, so that a diff shows their lines."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def to_yaml(value: JSON) -> str:
    """YAML in block style, keys sorted, long strings unbroken."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=False, width=10**6, allow_unicode=True)
    return str(text)


@export_format("vllm-yaml")
def _vllm_yaml(profile: Profile) -> str:
    needed = [f"needs in the environment: {name}={value}" for name, value in sorted(profile.env.items())]
    use = "use: vllm serve MODEL --config FILE (two words; --config=FILE is ignored by vLLM)"
    values = as_mapping(profile.argv)
    return header(profile, use, *needed) + (to_yaml(values) if values else "{}\n")


def _arguments(profile: Profile) -> str:
    return shlex.join(words(by_name(profile)))


@export_format("args", TEXT)
def _args(profile: Profile) -> str:
    return _arguments(profile) + "\n"


def env_lines(env: Mapping[str, str]) -> list[str]:
    """`NAME=value` lines. BadInput for a value with a line break."""
    for name, value in env.items():
        if "\n" in value or "\r" in value:
            raise BadInput(f"environment variable {name} has a line break: an env file cannot hold it")
    return [f"{name}={value}" for name, value in sorted(env.items())]


@export_format("env", TEXT)
def _env(profile: Profile) -> str:
    lines = env_lines({"VLLM_ADDITIONAL_ARGS": _arguments(profile), **profile.env})
    return header(profile) + "".join(f"{line}\n" for line in lines)


def as_json(profile: Profile) -> dict[str, JSON]:
    """A profile as JSON, for the `json` format and the HTTP API; no time stamps."""
    return {
        "id": profile.id,
        "model": profile.key.model,
        "target": profile.key.target,
        "workload": profile.key.workload,
        "version": profile.version,
        "engine_version": profile.engine_version,
        "gpu_class": profile.gpu_class,
        "candidate": dict(profile.candidate),
        "argv": list(profile.argv),
        "env": dict(profile.env),
        "study_id": profile.study_id,
        "trial_id": profile.trial_id,
        "evidence": dict(profile.evidence),
        "digest": profile.digest,
    }


@export_format("json", "application/json")
def _json(profile: Profile) -> str:
    return json.dumps(as_json(profile), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


@export_format("helm-production-stack")
def _production_stack(profile: Profile) -> str:
    told = (
        "for the entry of your modelSpec (Helm replaces a whole list); its vllmConfig must have no other keys"
    )
    return header(profile, told) + to_yaml(production_stack(profile))


@export_format("helm-llm-d")
def _llm_d(profile: Profile) -> str:
    told = "merge into your decode container: Helm replaces lists whole"
    return header(profile, told) + to_yaml(llm_d(profile))


@export_format("kserve")
def _kserve(profile: Profile) -> str:
    return header(profile) + to_yaml(kserve(profile))


@export_format("kustomize")
def _kustomize(profile: Profile) -> str:
    told = "patches: [{path: FILE, target: {kind: Deployment, name: YOURS}}]; it replaces command and args"
    return header(profile, told) + to_yaml(kustomize(profile))


@export_format("configmap")
def _configmap(profile: Profile) -> str:
    files = {"vllm.yaml": _vllm_yaml(profile), "args": _args(profile), "profile.json": _json(profile)}
    return header(profile) + to_yaml(configmap(profile, files))


@export_format("systemd", TEXT)
def _systemd(profile: Profile) -> str:
    told = "for vllm.service.d/; its unit has: ExecStart=… vllm serve MODEL $VLLM_ADDITIONAL_ARGS"
    return header(profile, told) + systemd(profile)


def render(profile: Profile, format: str) -> str:
    """A profile's text in one of `FORMATS`. BadInput names the nearest one."""
    writer = format_of(format).write
    if format == "json":
        return writer(profile)
    names = sorted(name for name, value in profile.env.items() if MASK in value)
    flags = [flag for flag in split_flags(profile.argv) if any(MASK in word for word in flag.words)]
    kept = [flag for flag in split_flags(profile.argv) if flag not in flags]
    missing = {"in the environment": names, "as arguments": [f"--{flag.name}" for flag in flags]}
    lines = (
        f"# needs {where} (not kept here): {', '.join(what)}\n" for where, what in missing.items() if what
    )
    argv = tuple(word for flag in kept for word in (f"--{flag.name}", *flag.words)) if flags else profile.argv
    env = {name: value for name, value in profile.env.items() if name not in names}
    return ("" if format == "args" else "".join(lines)) + writer(replace(profile, argv=argv, env=env))
