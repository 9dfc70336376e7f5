"""Profiles in the formats that deploy pipelines read: sorted, with provenance, without time stamps."""

import json
import shlex
from collections.abc import Callable, Mapping
from types import MappingProxyType

import yaml

from tuner.errors import BadInput, nearest
from tuner.profiles.flags import as_mapping
from tuner.records import JSON, Profile

NAME = "vllm-config-tuner"


def provenance(profile: Profile) -> dict[str, str]:
    """Where a profile comes from: the same words in every format."""
    return {
        "model": profile.key.model,
        "target": profile.key.target,
        "workload": profile.key.workload,
        "version": str(profile.version),
        "engine-version": profile.engine_version,
        "gpu-class": profile.gpu_class,
        "study": profile.study_id,
        "trial": "" if profile.trial_id is None else str(profile.trial_id),
        "sha256": profile.digest,
    }


def header(profile: Profile, *more: str) -> str:
    """The provenance as comment lines."""
    told = [f"{name}: {value}" for name, value in provenance(profile).items() if value]
    return "".join(f"# {' '.join(line.split())}\n" for line in (f"Written by {NAME}", *told, *more))


def to_yaml(value: JSON) -> str:
    """YAML in block style, keys sorted, long strings unbroken."""
    return str(
        yaml.safe_dump(value, sort_keys=True, default_flow_style=False, width=10**6, allow_unicode=True)
    )


def _vllm_yaml(profile: Profile) -> str:
    needed = [f"needs in the environment: {name}={value}" for name, value in sorted(profile.env.items())]
    use = "use: vllm serve MODEL --config FILE (two words; --config=FILE is ignored by vLLM)"
    values = as_mapping(profile.argv)
    return header(profile, use, *needed) + (to_yaml(values) if values else "{}\n")


def _args(profile: Profile) -> str:
    return shlex.join(profile.argv) + "\n"


def env_lines(env: Mapping[str, str]) -> list[str]:
    """`NAME=value` lines. BadInput for a value with a line break."""
    for name, value in env.items():
        if "\n" in value or "\r" in value:
            raise BadInput(f"environment variable {name} has a line break: an env file cannot hold it")
    return [f"{name}={value}" for name, value in sorted(env.items())]


def _env(profile: Profile) -> str:
    lines = env_lines({"VLLM_ADDITIONAL_ARGS": shlex.join(profile.argv), **profile.env})
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


def _json(profile: Profile) -> str:
    return json.dumps(as_json(profile), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


FORMATS: Mapping[str, Callable[[Profile], str]] = MappingProxyType(
    {"vllm-yaml": _vllm_yaml, "args": _args, "env": _env, "json": _json}
)


def render(profile: Profile, format: str) -> str:
    """A profile's text in one of `FORMATS`. BadInput names the nearest format."""
    try:
        writer = FORMATS[format]
    except KeyError:
        known = ", ".join(FORMATS)
        raise BadInput(f"there is no format '{format}'{nearest(format, FORMATS)}: {known}") from None
    return writer(profile)
