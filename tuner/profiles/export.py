"""Profiles in the formats that deploy pipelines read: sorted, with provenance, without time stamps.

A format is added here alone: a function that writes a profile, under `@export_format`.
"""

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import yaml

from tuner.errors import BadInput, nearest
from tuner.masking import MASK
from tuner.profiles import charts
from tuner.profiles.flags import as_mapping, split
from tuner.records import JSON, Profile

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
    """Where a profile comes from: the same words in every format; the trial by its number in the study."""
    trial = profile.evidence.get("trial_number", profile.trial_id)
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
    return shlex.join(charts.words(charts.by_name(profile)))


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
        "for the entry of your modelSpec (Helm replaces lists whole): its vllmConfig must hold no other keys"
    )
    return header(profile, told) + to_yaml(charts.production_stack(profile))


@export_format("helm-llm-d")
def _llm_d(profile: Profile) -> str:
    told = "merge into your decode container: Helm replaces lists whole"
    return header(profile, told) + to_yaml(charts.llm_d(profile))


@export_format("kserve")
def _kserve(profile: Profile) -> str:
    return header(profile) + to_yaml(charts.kserve(profile))


@export_format("kustomize")
def _kustomize(profile: Profile) -> str:
    told = "patches: [{path: FILE, target: {kind: Deployment, name: YOURS}}]; replaces command and args whole"
    return header(profile, told) + to_yaml(charts.kustomize(profile))


@export_format("configmap")
def _configmap(profile: Profile) -> str:
    files = {"vllm.yaml": _vllm_yaml(profile), "args": _args(profile), "profile.json": _json(profile)}
    return header(profile) + to_yaml(charts.configmap(profile, files))


@export_format("systemd", TEXT)
def _systemd(profile: Profile) -> str:
    told = "for vllm.service.d/; its unit has: ExecStart=… vllm serve MODEL $VLLM_ADDITIONAL_ARGS"
    return header(profile, told) + charts.systemd(profile)


def render(profile: Profile, format: str) -> str:
    """A profile's text in one of `FORMATS`. BadInput names the nearest one."""
    writer = format_of(format).write
    if format == "json":
        return writer(profile)
    names = sorted(name for name, value in profile.env.items() if MASK in value)
    flags = [flag for flag in split(profile.argv) if any(MASK in word for word in flag.words)]
    kept = [flag for flag in split(profile.argv) if flag not in flags]
    missing = {"in the environment": names, "as arguments": [f"--{flag.name}" for flag in flags]}
    lines = (
        f"# needs {where}, not kept here: {', '.join(what)}\n" for where, what in missing.items() if what
    )
    argv = tuple(word for flag in kept for word in (f"--{flag.name}", *flag.words)) if flags else profile.argv
    env = {name: value for name, value in profile.env.items() if name not in names}
    return ("" if format == "args" else "".join(lines)) + writer(replace(profile, argv=argv, env=env))
