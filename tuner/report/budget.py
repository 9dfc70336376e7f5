"""What tuning took, what failed and why, and how far the measurements are to be believed."""

from collections.abc import Sequence
from dataclasses import dataclass

from tuner.records import Launch, Trial, TrialState


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """`trial_seconds` by state of the trial, times its GPUs; launches include the confirmation's. Seconds are
    of wall clock. What a run took in all is in its conclusion.
    """

    trials: dict[str, int]
    trial_seconds: dict[str, float]
    launches: int
    failed_launches: int
    ready_s: float
    measuring_s: float


def spent(trials: Sequence[Trial], launches: Sequence[Launch]) -> Spent:
    """Adds up a study's trials and launches."""
    states = [s.value for s in TrialState if any(t.state is s for t in trials)]
    ready = [each.timeline.get("ready_s", 0.0) for each in launches]
    whole = [(each.ended_at - each.started_at).total_seconds() if each.ended_at else 0.0 for each in launches]
    return Spent(
        trials={s: sum(t.state.value == s for t in trials) for s in states},
        trial_seconds={s: sum(t.gpu_seconds for t in trials if t.state.value == s) for s in states},
        launches=len(launches),
        failed_launches=sum(each.verdict is not None for each in launches),
        ready_s=sum(ready),
        measuring_s=sum(max(0.0, w - r) for w, r in zip(whole, ready, strict=True)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One way in which trials ended badly, with an example in the tuner's words."""

    cause: str
    state: str
    trials: tuple[Trial, ...]
    reason: str


def failures(trials: Sequence[Trial]) -> list[Cause]:
    """What went wrong, the most frequent first; PRUNED trials are no failures."""
    groups: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        if trial.state in (TrialState.INFEASIBLE, TrialState.ABORTED):
            groups.setdefault((trial.cause or "not told", trial.state.value), []).append(trial)
    found = [
        Cause(cause=cause, state=state, trials=tuple(rows), reason=rows[-1].reason or "")
        for (cause, state), rows in groups.items()
    ]
    return sorted(found, key=lambda c: (-len(c.trials), c.cause))


@dataclass(frozen=True, slots=True, kw_only=True)
class Belief:
    """How one measured trial's replay kept to its schedule."""

    trial: Trial
    values: dict[str, float | None]
    failed: tuple[str, ...]
    warnings: tuple[str, ...]


SHOWN = ("lateness_p50_ms", "lateness_p99_ms", "lateness_allowed_ms", "sender_cpu")


def beliefs(trials: Sequence[Trial]) -> list[Belief]:
    """One row per trial that was measured, the latest replay first."""
    return [
        Belief(
            trial=t,
            values={name: m.fidelity.values.get(name) for name in SHOWN},
            failed=m.fidelity.failed,
            warnings=m.fidelity.warnings,
        )
        for t in reversed(trials)
        if (m := t.measurement) is not None and m.fidelity.values
    ]


def worst_lateness(found: Sequence[Belief]) -> float | None:
    """The largest p99 lateness in milliseconds."""
    late = [v for b in found if (v := b.values.get("lateness_p99_ms")) is not None]
    return max(late, default=None)
