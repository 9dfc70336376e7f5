"""What earlier launches and the host tell of the next: patience, a first boot's worth, compiled code."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tuner.adapters import adapter_of
from tuner.engine import boots
from tuner.history.store import Store
from tuner.records import Launch, Study
from tuner.tuning.study import Prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """`ready_timeout_s` as `serve` takes it; `env` is laid under the study's."""

    ready_timeout_s: float = boots.UNKNOWN_S
    env: Mapping[str, str] = field(default_factory=dict)


def learned(store: Store, prepared: Prepared, *, home: Path | None) -> Learned:
    """For a study's next launch. Compiled code is kept under `home`; None: launched on another host."""
    launches = store.launches(prepared.study.id)
    env: Mapping[str, str] = {}
    facts = prepared.facts
    if home is not None and adapter_of(facts.kind).compile_cache:
        root = boots.cache_root(
            home, version=facts.version, platform=facts.platform, gpu_name=facts.gpu_name,
            command=prepared.command,
        )  # fmt: skip
        env = boots.cache_environment(root, facts.kind)
    ready = readied(store, prepared.study, launches)
    return Learned(ready_timeout_s=boots.ready_deadline(ready), env=env)


def readied(store: Store, study: Study, launches: Sequence[Launch]) -> list[float]:
    """After how many seconds engines were ready: the study's own; while these are too few to tell, with those
    of the node's other studies of the same model and engine.
    """
    found = ready_of(launches)
    if len(found) >= boots.ENOUGH:
        return found
    others = [s for s in store.studies(node=study.node, model=study.model) if s.id != study.id]
    alike = [s for s in others if s.engine_version == study.engine_version]
    return found + [t for each in alike for t in ready_of(store.launches(each.id))]


def ready_of(launches: Sequence[Launch]) -> list[float]:
    """The times to ready of those that got there."""
    return [t for each in launches if (t := each.timeline.get("ready_s")) is not None]


def largest_kv(launches: Sequence[Launch]) -> int | None:
    """The largest KV cache in tokens that any of them had; None while none is known."""
    return max((each.kv_tokens for each in launches if each.kv_tokens), default=None)
