"""What the search learns from failures: candidates that it does not launch, and the step back after a lack of
memory.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from tuner.records import Candidate, Trial, TrialState, Value
from tuner.search import trial_view
from tuner.search.encoding import Encoding, Point

# Knob → +1 where a larger level makes the failure worse, −1 where it makes it better.
Direction = Mapping[str, int]

# What asks for more device memory.
OOM: Direction = {
    "gpu_memory_utilization": 1,
    "kv_cache_memory_bytes": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_cudagraph_capture_size": 1,
    "num_gpu_blocks_override": 1,
}

# What leaves less room for the KV cache.
KV: Direction = {
    "gpu_memory_utilization": -1,
    "kv_cache_memory_bytes": -1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_cudagraph_capture_size": 1,
    "num_gpu_blocks_override": -1,
}

# Which levels to move, in this order, after a failure of a kind.
BACK_OFF: Mapping[str, tuple[tuple[str, int], ...]] = {
    "oom": (("gpu_memory_utilization", -1), ("max_num_batched_tokens", -1), ("max_num_seqs", -1)),
    "kv": (("gpu_memory_utilization", 1), ("max_num_batched_tokens", -1), ("max_num_seqs", -1)),
}


def failures(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    return tuple(t for t in trial_view.latest(trials) if t.state is TrialState.INFEASIBLE)


def kind_of(trial: Trial) -> str | None:
    """`oom` or `kv` for a lack of memory, None for any other failure."""
    violated = {key: value for key, value in trial_view.margins(trial).items() if value > 0}
    return next((key for key in ("oom", "kv") if key in violated), None)


class Regions:
    """The candidates that a study's failures rule out."""

    def __init__(self, encoding: Encoding, trials: Sequence[Trial]) -> None:
        self._encoding = encoding
        self._walls: list[tuple[Trial, Point, Direction]] = []
        for trial in failures(trials):
            kind, point = kind_of(trial), encoding.point(trial.candidate)
            if kind is not None and point is not None:
                self._walls.append((trial, point, OOM if kind == "oom" else KV))
        self._banned = _banned_values(encoding, trials)

    def reason(self, point: Point) -> str | None:
        """Why a point is known to fail, or None."""
        for name, values, index in zip(self._encoding.names, self._encoding.levels, point, strict=True):
            found = self._banned.get((name, repr(values[index])))
            if found:
                return f"{name} {values[index]} failed in trials {found}"
        for trial, wall, direction in self._walls:
            if self._behind(point, wall, direction):
                why = trial.cause or "memory"
                return f"asks for at least as much as trial {trial.number}, which failed: {why}"
        return None

    def _behind(self, point: Point, wall: Point, direction: Direction) -> bool:
        """Whether a point asks for at least as much as the failed one in every knob that matters, and has the
        same level in all others.
        """
        for name, mine, theirs in zip(self._encoding.names, point, wall, strict=True):
            if mine != theirs and (mine - theirs) * direction.get(name, 0) <= 0:
                return False
        return True


def _banned_values(encoding: Encoding, trials: Sequence[Trial]) -> dict[tuple[str, str], str]:
    """Levels that failed ≥ 2 times for one cause other than memory and never worked, where they are the
    one best explanation of that cause; with the numbers of the trials that say so.
    """
    worked = Counter[tuple[str, str]]()
    failed: dict[str, dict[tuple[str, str], list[int]]] = {}
    for trial in trial_view.latest(trials):
        items = _items(encoding, trial.candidate)
        if trial.state in (TrialState.COMPLETE, TrialState.PRUNED):
            worked.update(items)
        elif trial.state is TrialState.INFEASIBLE and kind_of(trial) is None:
            for item in items:
                failed.setdefault(trial.cause or "error", {}).setdefault(item, []).append(trial.number)
    banned: dict[tuple[str, str], str] = {}
    for counts in failed.values():
        suspects = {item: numbers for item, numbers in counts.items() if not worked[item]}
        most = max((len(n) for n in suspects.values()), default=0)
        best = [item for item, numbers in suspects.items() if len(numbers) == most]
        if most >= 2 and len(best) == 1:
            banned[best[0]] = ", ".join(map(str, suspects[best[0]]))
    return banned


def _items(encoding: Encoding, candidate: Mapping[str, Value]) -> list[tuple[str, str]]:
    return [(name, repr(value)) for name, value in candidate.items() if name in encoding.names]


def back_off(encoding: Encoding, trials: Sequence[Trial]) -> tuple[Candidate, ...]:
    """Steps back from the newest failure for lack of memory, nearest first; empty once one was tried.

    A failure of a lone candidate is followed by at most one such proposal.
    """
    last = max(trial_view.latest(trials), key=lambda t: t.number, default=None)
    if last is None or last.state is not TrialState.INFEASIBLE or last.origin == "back-off":
        return ()
    kind, point = kind_of(last), encoding.point(last.candidate)
    if kind is None or point is None:
        return ()
    steps = 2 if trial_view.margins(last)[kind] > 0.5 else 1
    found = []
    for name, sign in BACK_OFF[kind]:
        if name in encoding.names:
            knob = encoding.names.index(name)
            index = min(max(point[knob] + sign * steps, 0), len(encoding.levels[knob]) - 1)
            if index != point[knob]:
                found.append(encoding.candidate((*point[:knob], index, *point[knob + 1 :])))
    return tuple(found)
