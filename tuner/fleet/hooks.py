"""How production gives a node up and takes it back: TUNER_HOME/nodes/NAME.yaml, checked when read."""

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from tuner import masking, yamltext
from tuner.errors import BadInput, Unavailable, nearest
from tuner.records import JSON
from tuner.settings import NAME

TIMEOUT_S, MOST_S = 300.0, 86_400
SECTIONS = ("handover", "engine", "models")
"""Keys of a node's file; `service.engines` checks what `engine` and `models` hold."""
IDLE = ("0", "inactive", "failed")
"""What `ask` answers when production does not run there, so that it is not started afterwards either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """One thing that serves on a node. `ask` prints its state, which `restore` may use as `{answer}`; `ready`
    ends with 0 once it serves again. `timeout_s` bounds each of drain and restore (ready included).
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
    """Where a node's hooks are written. BadInput for a name that cannot be a file's."""
    if not re.fullmatch(NAME, node):
        raise BadInput(f"node '{node}': a name has letters, digits, '.', '_' and '-'")
    return home / "nodes" / f"{node}.yaml"


def hooks(home: Path, node: str) -> tuple[Hook, ...]:
    """The hooks of a node in the order of draining; none when no file was written."""
    path = path_of(home, node)
    return parse(document(path), str(path))


def document(path: Path) -> dict[str, JSON]:
    """What a node's file says, by section; nothing where there is none. BadInput names an unknown key."""
    if not path.is_file():
        return {}
    return _sections(yamltext.load(yamltext.read(path), str(path)).value, str(path))


def _sections(found: object, where: str) -> dict[str, JSON]:
    if not isinstance(found, dict):
        raise BadInput(f"{where}: a mapping with the keys {', '.join(SECTIONS)} is expected")
    for key in found:
        if key not in SECTIONS:
            raise BadInput(f"{where}: unknown key '{key}'{nearest(str(key), SECTIONS)}")
    return found


def parse(found: object, where: str) -> tuple[Hook, ...]:
    """The hooks of a node's file. BadInput names the entry, the key and the nearest right one."""
    entries = _sections(found, where).get("handover", [])
    if not isinstance(entries, list):
        raise BadInput(f"{where}: handover: a list of hooks is expected")
    return tuple(_hook(item, f"{where}: handover[{n}]") for n, item in enumerate(entries))


def write(home: Path, node: str, sections: Mapping[str, JSON]) -> tuple[Hook, ...]:
    """Check and keep sections of a node's file beside what else it says; readable by its owner alone."""
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
    if not isinstance(item, dict) or len(kinds := [key for key in item if key in KINDS]) != 1:
        raise BadInput(f"{where}: give exactly one of {', '.join(KINDS)}")
    kind = kinds[0]
    for key in item:
        if key not in (kind, "timeout_s", "ready"):
            raise BadInput(f"{where}: unknown key '{key}'{nearest(str(key), (*KINDS, 'timeout_s', 'ready'))}")
    timeout_s = item.get("timeout_s", TIMEOUT_S)
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s <= MOST_S:
        raise BadInput(f"{where}: timeout_s: seconds above 0, at most {MOST_S}, not {timeout_s!r}")
    ready = command(item["ready"], f"{where}: ready") if "ready" in item else ()
    return KINDS[kind](item[kind], where, float(timeout_s), ready)


def command(value: object, where: str) -> tuple[str, ...]:
    """A command as a list of words; no shell reads it, and no secret may stand in it."""
    if not isinstance(value, list) or not value or not all(isinstance(word, str) and word for word in value):
        raise BadInput(f"{where}: a list of words such as [systemctl, stop, vllm] is expected")
    for word, shown in zip(value, masking.arguments(value), strict=True):
        if word != shown:
            name = shown.partition("=")[0]
            raise BadInput(f"{where}: '{name}' looks like a secret; let the command read it from a file")
    return tuple(value)


def _from_command(value: object, where: str, timeout_s: float, ready: tuple[str, ...]) -> Hook:
    if not isinstance(value, dict) or set(value) != {"drain", "restore"}:
        raise BadInput(f"{where}: command: give drain and restore, each a list of words")
    drain = command(value["drain"], f"{where}: drain")
    restore = command(value["restore"], f"{where}: restore")
    name = f"command {Path(drain[0]).name}"
    return Hook(kind="command", name=name, drain=drain, restore=restore, ready=ready, timeout_s=timeout_s)


def _from_unit(value: object, where: str, timeout_s: float, ready: tuple[str, ...]) -> Hook:
    unit = _word(value, where, "systemd", r"[A-Za-z0-9:_.@\\-]+")
    return Hook(
        kind="systemd",
        name=f"systemd unit {unit}",
        ask=("systemctl", "show", "--property=ActiveState", "--value", unit),
        drain=("systemctl", "stop", unit),
        restore=("systemctl", "start", unit),
        ready=ready or ("systemctl", "is-active", "--quiet", unit),
        timeout_s=timeout_s,
    )


def _from_kubectl(value: object, where: str, timeout_s: float, ready: tuple[str, ...]) -> Hook:
    name = _word(value, where, "kubectl", r"[a-z0-9.-]+/(deployment|statefulset)s?/[a-z0-9.-]+")
    scaling = (sys.executable, "-m", "tuner.fleet.scaling")
    return Hook(
        kind="kubectl",
        name=f"Kubernetes {name}",
        ask=(*scaling, "ask", name),
        drain=(*scaling, "scale", name, "0"),
        restore=(*scaling, "scale", name, "{answer}"),
        ready=ready or (*scaling, "ready", name),
        timeout_s=timeout_s,
    )


def _word(value: object, where: str, key: str, pattern: str) -> str:
    if not isinstance(value, str) or not re.fullmatch(pattern, value) or value.startswith("-"):
        form = "NAMESPACE/deployment/NAME" if key == "kubectl" else "a unit's name such as vllm.service"
        raise BadInput(f"{where}: {key}: {form} is expected, not {value!r}")
    return value


KINDS: Mapping[str, Callable[[object, str, float, tuple[str, ...]], Hook]] = {
    "command": _from_command,
    "systemd": _from_unit,
    "kubectl": _from_kubectl,
}
