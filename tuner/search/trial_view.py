"""A study's trials as the search sees them, one for each number: a point of flat integers, with objectives
as costs. Also the Pareto front of trials and its hypervolume.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Protocol, TypeGuard

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tuner.measures import NAMES, class_of, is_maximized, measure_of
from tuner.records import Candidate, Slo, Trial, TrialState, Value, Violation, last_attempts


class Space(Protocol):
    """What the search needs of a space: ordered levels, what is inside, and the canonical form."""

    @property
    def levels(self) -> Mapping[str, tuple[Value, ...]]: ...

    def contains(self, candidate: Candidate) -> bool: ...

    def canonical(self, candidate: Candidate) -> Candidate: ...


# One index for each knob, in the order of their names.
Point = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """Turns candidates into points and back. Trials store values and no points, so the levels of a space may
    change between runs. `defaults` is the baseline, `own` what an engine runs with that is not asked for a
    knob, as far as known.
    """

    space: Space
    names: tuple[str, ...]
    levels: tuple[tuple[Value, ...], ...]
    defaults: "Defaults"
    own: Mapping[str, Value]

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many levels each knob has."""
        return tuple(len(values) for values in self.levels)

    @property
    def size(self) -> int:
        """The number of points, inactive duplicates included."""
        return math.prod(self.sizes)

    def candidate(self, point: Sequence[int]) -> Candidate:
        """The canonical candidate at a point."""
        pairs = zip(self.names, self.levels, point, strict=True)
        return self.space.canonical(Candidate({name: values[int(i)] for name, values, i in pairs}))

    def point(self, candidate: Mapping[str, Value]) -> Point | None:
        """The place of a candidate; None when it has no place. A number that is not in the list gets the
        nearest level.

        A knob that is not set is at the engine's default if that is known, otherwise at None or level 0.
        """
        found = []
        for name, values in zip(self.names, self.levels, strict=True):
            own = self.budget(candidate) if name == BUDGET else None
            value = candidate.get(name, own)
            index = _place(value, values) if name in candidate or own else self._default(name, values)
            if index is None:
                return None
            found.append(index)
        return tuple(found)

    def _default(self, name: str, values: tuple[Value, ...]) -> int:
        placed = _place(self.own[name], values) if name in self.own else None
        if placed is not None:
            return placed
        return values.index(None) if None in values else 0

    @property
    def first(self) -> Point | None:
        """Where the baseline lies; None if it is outside the space."""
        return replace(self, own=self.defaults).point({})

    def budget(self, asked: Mapping[str, Value]) -> Value:
        """The max_num_batched_tokens of a fresh engine that is asked for everything except this knob. None:
        no launch of the study has shown it.
        """
        shown, uncut = self.defaults.budgets, self.defaults.uncut
        if shown is None or BUDGET not in self.own:
            return self.own.get(BUDGET)
        whole = {**self.own, **{name: value for name, value in asked.items() if value is not None}}
        if any(whole.get(name) != self.defaults.get(name) for name in MODES):
            return None
        seqs, length = whole.get(SEQS), whole.get(LENGTH)
        if seqs in shown:
            return shown[seqs]
        if not (isinstance(uncut, int) and isinstance(seqs, int) and isinstance(length, int)):
            return None
        return uncut if uncut <= seqs * length else None

    def completed(self, candidate: Mapping[str, Value]) -> Candidate:
        """What the engine would run: the candidate over the known defaults, without what is then inactive.
        The key of « the same ».
        """
        return self._filled(self.space.canonical(self._filled(candidate)))

    def _filled(self, candidate: Mapping[str, Value]) -> Candidate:
        known = {name: self.own[name] for name in self.names if name in self.own}
        asked = {
            name: known[name] if value is None and name in known else value
            for name, value in candidate.items()
        }
        whole = {**known, **asked}
        if BUDGET in known and candidate.get(BUDGET) is None:
            whole[BUDGET] = self.budget(whole)
        return Candidate({name: _plain(value) for name, value in whole.items()})


def encode(space: Space, defaults: Mapping[str, Value], unset: Iterable[str] = ()) -> Encoding:
    """The encoding of a space; `defaults` is the baseline's effective configuration, as far as known. The
    engine's own value is not known of `unset`, nor of a knob that the baseline sets and the space may leave
    unset.
    """
    names = tuple(sorted(name for name, values in space.levels.items() if len(values) > 0))
    known = defaults if isinstance(defaults, Defaults) else Defaults(defaults)
    unknown = {*unset, *(name for name in known.asked if None in space.levels.get(name, ()))}
    own = {name: value for name, value in known.items() if name not in unknown}
    levels = tuple(tuple(space.levels[n]) for n in names)
    return Encoding(space=space, names=names, levels=levels, defaults=known, own=own)


def _plain(value: Value) -> Value:
    """8.0 and 8 are one value to the engine; True and 1 are not."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def is_number(value: Value) -> TypeGuard[int | float]:
    """True is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _place(value: Value, values: tuple[Value, ...]) -> int | None:
    """Index of the value, the nearest number (on a log scale where both are positive), or None."""
    for index, level in enumerate(values):
        if level == value and isinstance(level, bool) == isinstance(value, bool):
            return index
    numbers = [(i, level) for i, level in enumerate(values) if is_number(level)]
    if not numbers or not is_number(value):
        return None
    return min(numbers, key=lambda number: (_distance(number[1], value), number[0]))[0]


def _distance(level: float, value: float) -> float:
    if level > 0 and value > 0:
        return abs(math.log(level / value))
    return math.inf if level == 0 else abs(level - value) * 1e6


# Constraint value of a check that a trial never reached: it counts as kept, with some room.
UNREACHED = -0.3

# Constraint keys, the same for every trial, as Optuna's samplers require.
KEYS = ("kv", "oom", "err")


def latest(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """The last attempt of every number, in order of number, without those that ABORTED."""
    return tuple(t for t in last_attempts(trials) if t.state is not TrialState.ABORTED)


def baseline_of(trials: Sequence[Trial]) -> Trial | None:
    """The baseline that the search compares with: the newest one that completed as the first trial of a run.
    If no run began with one, the first one that completed. None: none completed.
    """
    whole = latest(trials)
    first: dict[str, int] = {}
    for trial in whole:
        first.setdefault(trial.run_id, trial.number)
    done = [t for t in whole if t.is_baseline and t.state is TrialState.COMPLETE and t.measurement]
    fresh = [t for t in done if first[t.run_id] == t.number]
    if fresh:
        return fresh[-1]
    return done[0] if done else None


# Knobs that the engine derives from other knobs: the baseline's value says nothing of another candidate's.
DERIVED = ("max_cudagraph_capture_size", "cudagraph_capture_sizes")


# vLLM's own BUDGET follows SEQS: it is cut to SEQS prompts of LENGTH. MODES change it too.
BUDGET, SEQS, LENGTH = "max_num_batched_tokens", "max_num_seqs", "max_model_len"
MODES = (LENGTH, "enable_chunked_prefill", "performance_mode")


class Defaults(dict[str, Value]):
    """A baseline's whole configuration: what it sets (`asked`), and the engine's own values as far as known.

    `budgets` are the engine's own BUDGET by SEQS, as the launches of the study showed it; None if the
    baseline sets it, or its engine does not report what it depends on. `uncut` is the one that was not cut,
    None if no launch showed it.
    """

    asked: Mapping[str, Value] = MappingProxyType({})
    budgets: Mapping[Value, int] | None = None
    uncut: int | None = None


def defaults_of(trials: Sequence[Trial]) -> Defaults:
    """The baseline's whole configuration: the knobs that it sets, and the engine's own values as far as
    known.
    """
    base = _introduced(trials)
    found = Defaults() if base is None else Defaults({**own_of(trials), **base.candidate})
    if base is not None:
        found.asked = base.candidate
    if base is None or BUDGET in base.candidate or not {BUDGET, SEQS, LENGTH} <= base.effective.keys():
        return found
    found.budgets = budgets = {}
    for trial in latest(trials):
        ran = trial.effective
        alike = all(ran.get(name) == base.effective.get(name) for name in MODES)
        budget, seqs, length = ran.get(BUDGET), ran.get(SEQS), ran.get(LENGTH)
        if trial.screened or BUDGET in trial.candidate or not alike or not isinstance(budget, int):
            continue
        budgets[seqs] = budget
        if isinstance(seqs, int) and isinstance(length, int) and budget != seqs * length:
            found.uncut = budget
    return found


def _introduced(trials: Sequence[Trial]) -> Trial | None:
    """The first baseline whose engine reported its configuration, whether or not it served the traffic."""
    return next((t for t in latest(trials) if t.is_baseline and t.effective), None)


def own_of(trials: Sequence[Trial]) -> Mapping[str, Value]:
    """The engine's own values of the knobs that the baseline does not set, as its engine reported them. vLLM
    preempts by recomputing unless it is asked for something else.
    """
    base = _introduced(trials)
    if base is None:
        return {}
    found = {"preemption": "recompute", **base.effective}
    return {name: value for name, value in found.items() if name not in {*base.candidate, *DERIVED}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Objectives as costs, in units of the baseline's; lower is better.

    `corner` is the point that hypervolume is measured from, as costs (see `corner_of`). `maximized` names
    what is better when larger.
    """

    objectives: tuple[str, ...]
    baseline: tuple[float, ...]
    units: tuple[float, ...]
    corner: tuple[float, ...] = ()
    maximized: frozenset[str] = frozenset()

    @property
    def signed_units(self) -> NDArray[np.float64]:
        """The unit of each objective, negative if larger is better."""
        pairs = zip(self.objectives, self.units, strict=True)
        return np.array([-unit if name in self.maximized else unit for name, unit in pairs])

    def costs(self, values: ArrayLike) -> NDArray[np.float64]:
        """Costs of measurement values, in order of the objectives on the last axis, any shape before it."""
        return np.asarray(values, np.float64) / self.signed_units

    def ratios(self, values: ArrayLike) -> NDArray[np.float64]:
        """How far values are from the baseline's; lower is better, 0 is equal, FAR is the largest. For a
        measurement this is a difference of logarithms (0.1 is about 10 %). For any other value it is a
        difference in units of the baseline's value.
        """
        raw = np.asarray(values, dtype=np.float64)
        found = np.empty_like(raw)
        for column, (name, base) in enumerate(zip(self.objectives, self.baseline, strict=True)):
            sign = -1.0 if name in self.maximized else 1.0
            if name in NAMES:
                found[..., column] = sign * np.log(np.maximum(raw[..., column], 1e-9) / max(base, 1e-9))
            else:
                found[..., column] = sign * (raw[..., column] - base) / self.units[column]
        return np.clip(np.nan_to_num(found, nan=FAR), -FAR, FAR)

    def costs_at(self, ratios: NDArray[np.float64]) -> NDArray[np.float64]:
        """The costs of what `ratios` gives."""
        values = np.empty_like(ratios)
        for column, (name, base) in enumerate(zip(self.objectives, self.baseline, strict=True)):
            apart = ratios[..., column] * (-1.0 if name in self.maximized else 1.0)
            values[..., column] = base * np.exp(apart) if name in NAMES else base + apart * self.units[column]
        return self.costs(values)


# How much better or worse than the baseline (a factor of 20) still makes a difference.
FAR = 3.0

# How many times worse than the baseline an objective may be and still count. Less room is worth nothing to
# a configuration that halves one latency for twice another, as the winner on a real H100 did
# (docs/search.md).
ROOM = 2.0


def corner_of(
    objectives: Sequence[str], baseline: Sequence[float], slo: Slo, maximized: frozenset[str] | None = None
) -> tuple[float, ...]:
    """The worst values that still count, in order of the objectives. For a latency, this is the SLO's limit
    or ROOM times the baseline's value, whichever is larger. For an objective that is maximised, it is a
    share of the baseline's value. `baseline` has the values.
    """
    up = frozenset(filter(is_maximized, objectives)) if maximized is None else maximized
    slos = [(name, slo.of((class_of(name),))) for name in objectives]
    limits = (getattr(its, measure_of(name).limit or "", None) or -math.inf for name, its in slos)
    return tuple(
        value - abs(value) * (1 - 1 / ROOM) if name in up else max(value + abs(value) * (ROOM - 1), limit)
        for name, value, limit in zip(objectives, baseline, limits, strict=True)
    )


def scale(
    objectives: Sequence[str], baseline: Sequence[float], slo: Slo, maximized: frozenset[str] | None = None
) -> Scale:
    """The scale that the baseline's objective values (in order of the objectives) and the SLO set."""
    up = frozenset(filter(is_maximized, objectives)) if maximized is None else maximized
    units = tuple(abs(v) if 0 < abs(v) < math.inf else 1.0 for v in baseline)
    raw = Scale(objectives=tuple(objectives), baseline=tuple(baseline), units=units, maximized=up)
    corner = raw.costs(corner_of(objectives, baseline, slo, up))
    return replace(raw, corner=tuple(float(c) for c in corner))


def scale_of(trials: Sequence[Trial], objectives: Sequence[str], slo: Slo) -> Scale | None:
    """A study's scale. Its baseline sets it: `baseline_of`, or else a baseline of which too many requests
    failed. If that one has no finite value of every objective, the first trial that has one sets the scale.
    None if there is no such trial.
    """
    ended = [t for t in latest(trials) if t.state in (TrialState.COMPLETE, TrialState.INFEASIBLE)]
    base = baseline_of(trials)
    ended.sort(key=lambda t: (t is not base, not t.is_baseline))
    rows = (objective_values(t, objectives) for t in ended)
    found = next((r for r in rows if r is not None and all(map(math.isfinite, r))), None)
    return None if found is None else scale(objectives, found, slo)


def objective_values(
    trial: Trial, objectives: Sequence[str], kinds: Sequence[str] = ("full",)
) -> tuple[float, ...] | None:
    """A trial's objectives; None if it lacks one or was not measured in full (or by one of `kinds`)."""
    measured = trial.measurement
    if measured is None or measured.kind not in kinds:
        return None
    found = tuple(measured.values.get(name, math.nan) for name in objectives)
    return None if any(math.isnan(v) for v in found) else found


def margins(trial: Trial) -> dict[str, float]:
    """Constraint values by key, > 0 violated. An INFEASIBLE trial always violates at least one."""
    found = {key: _margin(trial.violation, key) for key in KEYS}
    if trial.state is TrialState.INFEASIBLE and max(found.values()) <= 0:
        found["err"] = 1.0
    return found


def _margin(violation: Violation, key: str) -> float:
    value: float | None = getattr(violation, key)
    return UNREACHED if value is None or math.isnan(value) else min(max(value, -1.0), 10.0)


def derive(seed: int, number: int, purpose: str) -> int:
    """A 31-bit random state that depends on nothing else, the same in every process."""
    text = f"{seed}:{number}:{purpose}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 33


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedTrial:
    """One trial as a sampler sees it. `values` are its objectives, measured in full or estimated (`kind`);
    None if it has none. `constraints` has a value > 0 exactly if it failed.
    """

    point: Point
    state: TrialState
    values: tuple[float, ...] | None = None
    kind: str = "full"
    constraints: Mapping[str, float] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return any(value > 0 for value in self.constraints.values())


def encode_trials(
    encoding: Encoding, trials: Sequence[Trial], objectives: Sequence[str]
) -> list[EncodedTrial]:
    """Trials as samplers see them, in order of number: no aborted attempts, no candidates outside the
    space.
    """
    found = []
    for trial in latest(trials):
        point = encoding.point(trial.candidate)
        if point is None:
            continue
        values = objective_values(trial, objectives, ("full", "estimate"))
        kind = "full" if trial.measurement is None else trial.measurement.kind
        constraints = {} if trial.state is TrialState.RUNNING else margins(trial)
        found.append(
            EncodedTrial(point=point, state=trial.state, values=values, kind=kind, constraints=constraints)
        )
    return found


Matrix = NDArray[np.float64]


def non_dominated(costs: Matrix) -> NDArray[np.bool_]:
    """Mask of the rows that no other row beats in every column; of equal rows the first is kept."""
    keep = np.zeros(len(costs), dtype=bool)
    kept, count = np.empty_like(costs), 0
    # In this order nothing is beaten by a later row, so each meets only what was kept before it.
    for i in np.lexsort(costs.T[::-1]):
        if not np.all(kept[:count] <= costs[i], axis=1).any():
            keep[i] = True
            kept[count] = costs[i]
            count += 1
    return keep


def measured(trials: Sequence[Trial], objectives: Sequence[str]) -> tuple[Trial, ...]:
    """COMPLETE trials with every objective measured in full. A screened one counts until its candidate is
    measured in an engine of its own, since the best of many screened ones is best partly by chance.
    """
    complete = [t for t in latest(trials) if t.state is TrialState.COMPLETE]
    whole = [t for t in complete if objective_values(t, objectives) is not None]
    own = {t.candidate for t in whole if not t.screened}
    return tuple(t for t in whole if not t.screened or t.candidate not in own)


def values_of(trials: Sequence[Trial], objectives: Sequence[str]) -> Matrix:
    """Objective values of trials that were measured in full: trials × objectives."""
    found = [objective_values(trial, objectives) or () for trial in trials]
    return np.array(found, np.float64).reshape(-1, len(objectives))


def front(trials: Sequence[Trial], objectives: Sequence[str], *, screened: bool = False) -> tuple[Trial, ...]:
    """The COMPLETE trials that no other beats in every objective, in order of number. With `screened`, also
    those that were only screened.
    """
    found = [t for t in measured(trials, objectives) if screened or not t.screened]
    signs = [-1.0 if is_maximized(name) else 1.0 for name in objectives]
    keep = non_dominated(values_of(found, objectives) * signs)
    return tuple(t for t, kept in zip(found, keep, strict=True) if kept)


def promotable(
    trials: Sequence[Trial], scale: Scale | None, key: Callable[[Candidate], str]
) -> tuple[float, Trial | None]:
    """(a share, the screened trial whose relaunch would add most volume). The share is this volume divided
    by all that is covered by what was measured. (0, None) if nothing was screened.

    A trial is left out once its candidate (by `key`) was relaunched or its relaunch failed.
    """
    if scale is None:
        return 0.0, None
    objectives, corner = scale.objectives, np.array(scale.corner)
    settled = {key(t.candidate) for t in latest(trials) if not t.screened}
    everything = measured(trials, objectives)
    rows = scale.costs(values_of(everything, objectives))
    base = rows[[i for i, t in enumerate(everything) if not t.screened]]
    have, whole = volume(base, corner), volume(rows, corner)
    found = [
        (volume(np.vstack([base, row]), corner) - have, trial)
        for trial, row in zip(everything, rows, strict=True)
        if trial.screened and key(trial.candidate) not in settled
    ]
    gain, best = max(found, key=lambda each: each[0], default=(0.0, None))
    return (0.0, None) if best is None or whole <= 0 else (gain / whole, best)


def hypervolume(points: ArrayLike, scale: Scale) -> float:
    """The volume between the scale's corner and points, in units of the baseline's objectives. `points` are
    raw objective values.
    """
    costs = scale.costs(np.asarray(points, dtype=np.float64).reshape(-1, len(scale.objectives)))
    return volume(costs, np.array(scale.corner))


def covered(trials: Sequence[Trial], scale: Scale) -> float:
    """The hypervolume of everything measured in full, screened trials included."""
    return hypervolume(values_of(measured(trials, scale.objectives), scale.objectives), scale)


def volume(costs: Matrix, reference: Matrix) -> float:
    """Exact hypervolume of rows to be minimised, below a reference corner."""
    inside = costs[np.all(costs < reference, axis=1)]
    if not len(inside):
        return 0.0
    inside = inside[non_dominated(inside)]
    if inside.shape[1] == 1:
        return float(reference[0] - inside.min())
    return _slices(inside[np.argsort(inside[:, -1])], reference)


def _slices(rows: Matrix, reference: Matrix) -> float:
    """Sum over slabs of the last column of the volume of what has entered by then."""
    edges = np.append(rows[:, -1], reference[-1])
    if rows.shape[1] == 2:
        best = np.minimum.accumulate(rows[:, 0])
        return float(np.sum((reference[0] - best) * np.diff(edges)))
    total = 0.0
    for i in range(len(rows)):
        depth = edges[i + 1] - edges[i]
        if depth > 0:
            total += float(depth) * volume(rows[: i + 1, :-1], reference[:-1])
    return total
