"""The file TUNER_HOME/nodes/NAME.yaml: the hooks that take production off a node and bring it back.

A hook of the kind `kubectl` is the command `python -m tuner.fleet.hooks VERB RESOURCE`. It scales by the
Kubernetes API, with the service account of its pod, else the kubeconfig (`pip install 'vllm-config-
tuner[kubernetes]'`).
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BeforeValidator, ValidationInfo, field_validator, model_validator

from tuner import masking, yamltext
from tuner.errors import BadInput, Unavailable, nearest
from tuner.records import JSON
from tuner.settings import NAME

TIMEOUT_S, MOST_S = 300.0, 86_400
SECTIONS = ("handover", "engine", "engines", "models")
"""Keys of a node's file; `service.study_requests.NodeFile` checks what all but `handover` hold."""
KINDS = ("command", "systemd", "kubectl")
FORMS = {
    "systemd": ("a unit's name such as vllm.service", r"[A-Za-z0-9:_.@\\-]+"),
    "kubectl": ("NAMESPACE/deployment/NAME", r"[a-z0-9.-]+/(deployment|statefulset)s?/[a-z0-9.-]+"),
}
"""What each kind of hook expects, in words and as a pattern."""
IDLE = ("0", "inactive", "failed")
"""The answers of `ask` where production does not run; then it is not started afterwards either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """One service of production on a node, as commands. `drain` takes it off, `restore` brings it back,
    `ready` ends with 0 once it serves again. `ask` prints its state, which `restore` may use as `{answer}`.
    `timeout_s` limits each of drain and restore (ready included).
    """

    kind: str
    name: str
    drain: tuple[str, ...]
    restore: tuple[str, ...]
    ready: tuple[str, ...] = ()
    ask: tuple[str, ...] = ()
    timeout_s: float = TIMEOUT_S

    def expects(self, answer: str) -> bool:
        """Whether an answer of `ask` can be understood."""
        return bool(re.fullmatch(r"\d+|active|inactive|failed|activating|deactivating|reloading", answer))

    def is_idle(self, answer: str) -> bool:
        return answer in IDLE


def path_of(home: Path, node: str) -> Path:
    """The path of a node's file. BadInput for a name that cannot be a file name."""
    if not re.fullmatch(NAME, node):
        raise BadInput(f"node '{node}': a name has letters, digits, '.', '_' and '-'")
    return home / "nodes" / f"{node}.yaml"


def hooks(home: Path, node: str) -> tuple[Hook, ...]:
    """The hooks of a node in the order of draining; none if there is no file."""
    path = path_of(home, node)
    return parse(document(path), str(path))


def document(path: Path) -> dict[str, JSON]:
    """The sections of a node's file; none if there is no file. BadInput names an unknown key."""
    if not path.is_file():
        return {}
    return _sections(yamltext.load(yamltext.read(path), str(path)).value, str(path))


def _sections(found: object, where: str) -> dict[str, JSON]:
    if not isinstance(found, dict):
        raise BadInput(f"{where}: give a mapping with the keys {', '.join(SECTIONS)}")
    for key in found:
        if key not in SECTIONS:
            raise BadInput(f"{where}: unknown key '{key}'{nearest(str(key), SECTIONS)}")
    return found


def parse(found: object, where: str) -> tuple[Hook, ...]:
    """The hooks of a node's file. BadInput names the entry, the key and the nearest right one."""
    entries = _sections(found, where).get("handover", [])
    if not isinstance(entries, list):
        raise BadInput(f"{where}: handover: give a list of hooks")
    return tuple(_hook(item, f"{where}: handover[{n}]") for n, item in enumerate(entries))


def write(home: Path, node: str, sections: Mapping[str, JSON]) -> tuple[Hook, ...]:
    """Check sections and write them into a node's file; its other sections stay. Only the owner can
    read it.
    """
    path = path_of(home, node)
    whole = {**document(path), **sections}
    found = parse(whole, str(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.touch(mode=0o600)
        partial.write_text(yaml.safe_dump(whole, sort_keys=False))
        os.replace(partial, path)
    except OSError as error:
        raise Unavailable(f"cannot write {path}: {error.strerror or error}") from error
    return found


def _hook(item: object, where: str) -> Hook:
    file = yamltext.validated(HookFile, item, where)
    if file.command is not None:
        drain = file.command["drain"]
        name = f"command {Path(drain[0]).name}"
        shape = Hook(kind="command", name=name, drain=drain, restore=file.command["restore"])
    elif file.systemd is not None:
        shape = _unit(file.systemd)
    else:
        shape = _scaled(str(file.kubectl))
    return replace(shape, ready=file.ready or shape.ready, timeout_s=file.timeout_s)


def command(value: object) -> tuple[str, ...]:
    """A command as a list of words; no shell reads it. ValueError if it is none or holds a secret."""
    if not isinstance(value, list) or not value or not all(isinstance(word, str) and word for word in value):
        raise ValueError("give a list of words such as [systemctl, stop, vllm]")
    for word, shown in zip(value, masking.arguments(value), strict=True):
        if word != shown:
            name = shown.partition("=")[0]
            raise ValueError(f"'{name}' looks like a secret; let the command read it from a file")
    return tuple(value)


Words = Annotated[tuple[str, ...], BeforeValidator(command)]


class HookFile(yamltext.Section):
    """One hook as written in a node's file."""

    command: dict[str, Words] | None = None
    systemd: str | None = None
    kubectl: str | None = None
    ready: Words = ()
    timeout_s: float = TIMEOUT_S

    @model_validator(mode="before")
    @classmethod
    def _one_kind(cls, value: object) -> object:
        if not isinstance(value, dict) or sum(kind in value for kind in KINDS) != 1:
            raise ValueError(f"give exactly one of the keys {', '.join(KINDS)}")
        return value

    @field_validator("command", mode="before")
    @classmethod
    def _both(cls, value: object) -> object:
        if not isinstance(value, dict) or set(value) != {"drain", "restore"}:
            raise ValueError("give the keys drain and restore, each with a list of words")
        return value

    @field_validator("systemd", "kubectl", mode="before")
    @classmethod
    def _word(cls, value: object, info: ValidationInfo) -> object:
        form, pattern = FORMS[str(info.field_name)]
        if not isinstance(value, str) or not re.fullmatch(pattern, value) or value.startswith("-"):
            raise ValueError(f"give {form}, not {value!r}")
        return value

    @field_validator("timeout_s", mode="before")
    @classmethod
    def _seconds(cls, value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MOST_S:
            raise ValueError(f"give a number of seconds above 0 and at most {MOST_S}, not {value!r}")
        return value


def _unit(unit: str) -> Hook:
    return Hook(
        kind="systemd",
        name=f"systemd unit {unit}",
        ask=("systemctl", "show", "--property=ActiveState", "--value", unit),
        drain=("systemctl", "stop", unit),
        restore=("systemctl", "start", unit),
        ready=("systemctl", "is-active", "--quiet", unit),
    )


def _scaled(name: str) -> Hook:
    scaling = (sys.executable, "-m", "tuner.fleet.hooks")
    return Hook(
        kind="kubectl",
        name=f"Kubernetes {name}",
        ask=(*scaling, "ask", name),
        drain=(*scaling, "scale", name, "0"),
        restore=(*scaling, "scale", name, "{answer}"),
        ready=(*scaling, "ready", name),
    )


RESOURCES = {"deployment": "deployment", "statefulset": "stateful_set"}
API_TIMEOUT_S = 20
PROBLEM = 1


def scaling(words: Sequence[str]) -> int:
    """Run `ask`, `scale N` or `ready` for NAMESPACE/KIND/NAME. The answer is on standard output; a problem is
    on standard error with exit code 1.
    """
    verb, resource, *rest = words
    namespace, kind, name = resource.split("/")
    suffix = RESOURCES[kind.removesuffix("s")]
    try:
        return _do(verb, _api(), suffix, {"name": name, "namespace": namespace}, rest)
    except Exception as error:  # the client's errors have no common ancestor
        said = getattr(error, "reason", None) or str(error)
        print(f"{resource}: {' '.join(str(said).split())}", file=sys.stderr)
        return PROBLEM


def _do(verb: str, api: Any, suffix: str, which: dict[str, str], rest: Sequence[str]) -> int:
    where = {**which, "_request_timeout": API_TIMEOUT_S}
    if verb == "scale":
        body = {"spec": {"replicas": int(rest[0])}}
        getattr(api, f"patch_namespaced_{suffix}_scale")(body=body, **where)
        return 0
    found = getattr(api, f"read_namespaced_{suffix}")(**where)
    if verb == "ask":
        print(found.spec.replicas)
        return 0
    status = found.status
    seen = (status.observed_generation or 0) >= found.metadata.generation
    ready, updated = status.ready_replicas or 0, status.updated_replicas or 0
    if seen and ready == updated == found.spec.replicas == (status.replicas or 0):
        return 0
    print(f"{ready} of {found.spec.replicas} replicas are ready", file=sys.stderr)
    return PROBLEM


def _api() -> Any:
    import kubernetes

    client: Any = kubernetes  # an extra, without types
    try:
        client.config.load_incluster_config()
    except client.config.ConfigException:
        client.config.load_kube_config()
    return client.client.AppsV1Api()


if __name__ == "__main__":
    sys.exit(scaling(sys.argv[1:]))
