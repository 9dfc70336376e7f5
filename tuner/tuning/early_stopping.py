"""When to stop: a replay whose result can no longer matter, and a search that can gain no more.

A replay is stopped when the requests so far bound what it can still reach, and even that changes nothing. So
it never stops a trial that would have added hypervolume, or that the policy would have picked.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tuner.errors import BadInput
from tuner.measures import is_maximized, many, measure_of
from tuner.metrics import LATENCY_MS, counted, is_good, statistic
from tuner.records import Outcome, Slice, Slo, Trial, TrialState
from tuner.replay import outcomes
from tuner.replay.plan import slice_rows
from tuner.search import acquisition, trial_view
from tuner.tuning.next_trial import StudyPredictor, next_number, view_of
from tuner.tuning.study import Prepared

Array = NDArray[np.float64]

# How much better another trial must be to stop a replay for sure: about the noise of one measurement
# (`NOISE`).
EPSILON = 0.03


class RunningReplay(Protocol):
    """A replay while it runs; `waiting_s` are the scheduled times of the requests in flight."""

    @property
    def slice(self) -> Slice: ...
    @property
    def now_s(self) -> float: ...
    @property
    def outcomes(self) -> Sequence[Outcome]: ...
    @property
    def waiting_s(self) -> Sequence[float]: ...


class Rows:
    """Collects ended requests; each is computed once."""

    def __init__(self, slo: Slo, kinds: Sequence[str], outcomes: Iterable[Outcome] = ()) -> None:
        self._slo = slo
        self._kinds = tuple(kinds)
        self._table: list[tuple[float, ...]] = []
        self.add(outcomes)

    def add(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in counted(outcomes):
            values = (LATENCY_MS[kind](outcome) for kind in self._kinds)
            self._table.append((float(outcome.row), float(is_good(outcome, self._slo)), *values))

    def __len__(self) -> int:
        return len(self._table)

    def columns(self) -> "Columns":
        table = np.array(self._table, dtype=np.float64).reshape(-1, 2 + len(self._kinds))
        table = table[np.argsort(table[:, 0], kind="stable")]
        latency = {kind: table[:, 2 + i] for i, kind in enumerate(self._kinds)}
        return Columns(row=table[:, 0].astype(np.int64), good=table[:, 1], latency=latency)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """Ended requests by row: good (1 or 0), and milliseconds per kind (+inf failed, NaN none)."""

    row: NDArray[np.int64]
    good: Array
    latency: Mapping[str, Array]

    def take(self, mask: NDArray[np.bool_]) -> "Columns":
        latency = {kind: values[mask] for kind, values in self.latency.items()}
        return Columns(row=self.row[mask], good=self.good[mask], latency=latency)

    def among(self, other: "Columns") -> "Columns":
        """The rows that the other one has too."""
        return self.take(np.isin(self.row, other.row, assume_unique=True))

    def fold(self, name: str) -> float:
        """A measurement of these rows; rates are per row, since only ratios of the same rows are taken."""
        if (latency := measure_of(name).latency) is not None:
            return statistic(self.latency[latency[0]], latency[1])
        rate = name in ("goodput_rps", "slo_attainment") and len(self.good)
        return float(self.good.mean()) if rate else math.nan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rival:
    """A finished trial that a replay is compared with: its values, and its requests if they are still
    there.
    """

    label: str
    values: Mapping[str, float]
    columns: Columns | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """What a replay is compared with.

    `planned` counts the requests of all slices and `window_s` sums their windows. `corner` holds the worst
    value of each objective that still counts (`trial_view.corner_of`). `epsilon` is how much better another
    trial must be. `by_slo`: the SLO decides the winner, else the front does.
    """

    objectives: tuple[str, ...]
    slo: Slo
    planned: int
    window_s: float
    corner: Mapping[str, float]
    rivals: tuple[Rival, ...] = ()
    epsilon: float = EPSILON
    by_slo: bool = True

    @property
    def kinds(self) -> tuple[str, ...]:
        """The latencies that the objectives speak of."""
        return tuple(dict.fromkeys(found[0] for n in self.objectives if (found := measure_of(n).latency)))

    def rows(self, outcomes: Iterable[Outcome] = ()) -> Rows:
        return Rows(self.slo, self.kinds, outcomes)


def bounds(case: Case, ended: Columns, ages_s: Sequence[float] = (), cancelled: int = 0) -> dict[str, float]:
    """The best value that each objective (and the SLO's attainment) can still end at.

    Requests in flight take at least their age; requests to come might take no time and be good.
    """
    late = sum(case.slo.e2e_ms is not None and age * 1e3 > case.slo.e2e_ms for age in ages_s)
    open_ = max(case.planned - len(ended.row) - cancelled, 0)
    possible = float(ended.good.sum()) + open_ - late
    found = {
        "slo_attainment": possible / max(len(ended.row) + open_, 1),
        "goodput_rps": possible / case.window_s,
    }
    for name in case.objectives:
        kind, share = measure_of(name).latency or ("", None)
        if share is not None:
            ages = [age * 1e3 for age in ages_s] if kind == "e2e" else []
            rest = np.zeros(max(open_ - len(ages), 0))
            found[name] = statistic(np.concatenate([ended.latency[kind], ages, rest]), share)
    return found


def curtail(case: Case, best: Mapping[str, float]) -> str | None:
    """Why the rest of the replay changes nothing, or None. It never stops a trial that would add hypervolume
    or that the policy would pick.
    """
    if any(name not in best for name in case.objectives):
        return None
    for rival in case.rivals:
        if all(_worse(name, best[name], rival.values.get(name), case.epsilon) for name in case.objectives):
            return f"trial {rival.label} is certain to be better in every objective"
    if not case.by_slo:  # a knee or a weighted best may lie anywhere on the front
        return None
    outside = [n for n in case.objectives if _worse(n, best[n], case.corner.get(n), 0.0)]
    if not outside or _may_be_picked(case, best):
        return None
    name, worst = outside[0], case.corner[outside[0]]
    return (
        f"{name} will certainly be worse than the reference point ({worst:.4g}), and the SLO policy cannot"
        " pick this trial"
    )


def _worse(name: str, best: float, rival: float | None, margin: float) -> bool:
    """Whether even the best possible value is worse than the rival's by more than the margin."""
    if rival is None or math.isnan(best):
        return False
    return best < rival * (1 - margin) if is_maximized(name) else best > rival * (1 + margin)


def _may_be_picked(case: Case, best: Mapping[str, float]) -> bool:
    """Whether the SLO policy could still pick it: it can reach the attainment, with more goodput than every
    trial that does. While no trial reaches it, the policy picks the nearest one.
    """
    nearest = max((r.values.get("slo_attainment", 0.0) for r in case.rivals), default=0.0)
    if best["slo_attainment"] < case.slo.attainment:
        return best["slo_attainment"] >= nearest and nearest < case.slo.attainment
    meeting = [r for r in case.rivals if r.values.get("slo_attainment", 0.0) >= case.slo.attainment]
    top = max((r.values.get("goodput_rps", 0.0) for r in meeting), default=0.0)
    return best["goodput_rps"] > top * (1 - case.epsilon)


def estimate(case: Case, ended: Columns, cancelled: int = 0) -> dict[str, float]:
    """What the objectives would have ended at: the first rival's values times the ratio on the same rows,
    never better than what is still possible. Empty if there is no rival to scale from.
    """
    best = bounds(case, ended, (), cancelled)
    for columns, values in ((r.columns, r.values) for r in case.rivals if r.columns):
        mine, theirs = ended.among(columns), columns.among(ended)
        folds = {n: (mine.fold(n), theirs.fold(n)) for n in case.objectives}
        if all(0 < fold < math.inf for pair in folds.values() for fold in pair):
            scaled = {n: values[n] * a / b for n, (a, b) in folds.items()}
            return {n: (min if is_maximized(n) else max)(v, best.get(n, v)) for n, v in scaled.items()}
    return {}


class Judge:
    """Follows a replay and says when to stop it; a replay takes it as its `judge`.

    It runs in the sender's thread, so it is cheap: each request is computed once, and it looks after every
    hundredth of the plan.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self._rows = case.rows()
        self._taken: dict[str, int] = {}
        self._looked = 0
        self._ended = self._rows.columns()

    def __call__(self, partial: RunningReplay) -> str | None:
        before = self._taken.get(partial.slice.name, 0)
        self._rows.add(partial.outcomes[before:])
        self._taken[partial.slice.name] = len(partial.outcomes)
        total = sum(self._taken.values())
        if total - self._looked < max(self.case.planned / 100, 1):
            return None
        self._looked = total
        ages = [partial.now_s - at for at in partial.waiting_s if at < partial.now_s]
        return self.look(self._rows.columns(), ages)

    def look(self, ended: Columns, ages_s: Sequence[float]) -> str | None:
        """Why to stop, by what has ended so far and the ages of what is in flight; None to go on."""
        self._ended = ended
        return curtail(self.case, bounds(self.case, ended, ages_s, self._cancelled))

    @property
    def _cancelled(self) -> int:
        return sum(self._taken.values()) - len(self._rows)

    def estimate(self) -> dict[str, float]:
        """What the objectives would have ended at (see `estimate`), as of the last look."""
        return estimate(self.case, self._ended, self._cancelled)


# Trials that a search makes at least before it may end because nothing more is gained: its seeds and a few
# proposals by expected gain.
MINIMUM = 12

# Trials in a row that must have added less than the noise: while every second proposal adds something, ten
# misses in a row come about once in a thousand.
WINDOW = 10

# Relative noise of one measurement while the baseline was measured once only.
NOISE = 0.03


def reason_to_stop(
    trials: Sequence[Trial],
    objectives: Sequence[str],
    slo: Slo,
    *,
    done: int,
    limit: int | None = None,
    kept: int = 0,
    now: datetime | None = None,
    deadline: datetime | None = None,
    needed_s: float = 0.0,
    expected_gain: Callable[[], float | None] = lambda: None,
    noise: float | None = None,
) -> str | None:
    """Why the search ends, in one sentence; None to go on.

    `done` counts the trials of this run and `limit` bounds it, less what is `kept` to relaunch screened
    finalists. `needed_s` is what another trial and the confirmation take before `deadline`. `expected_gain`
    returns the largest expected gain of any candidate, as a share of the hypervolume (None: not known).
    `noise` is the relative noise of one measurement (see `spread_of`).
    """
    if limit is not None and done + kept >= limit:
        left = f" ({kept} kept to relaunch screened finalists)" if kept else ""
        return f"the budget of {many(limit, 'trial')} is spent{left}"
    if now is not None and deadline is not None and now + timedelta(seconds=needed_s) >= deadline:
        return f"the window ends at {deadline:%H:%M}, too soon for another trial and the confirmation"
    scale = trial_view.scale_of(trials, objectives, slo)
    finished = [t for t in trial_view.latest(trials) if t.state is not TrialState.RUNNING]
    searched = [t for t in finished if not t.is_baseline]
    if len(searched) < max(MINIMUM, WINDOW) or scale is None:
        return None
    recent = {t.number for t in searched[-WINDOW:]}
    before = trial_view.covered([t for t in finished if t.number not in recent], scale)
    after = trial_view.covered(finished, scale)
    floor = noise_volume(finished, scale, NOISE if noise is None else noise)
    if after - before > floor:
        return None
    expected = expected_gain()
    if expected is not None and expected * after > floor:
        return None
    hope = (
        ""
        if expected is None
        else f", and no other candidate is expected to add more than {expected * after:.3g}"
    )
    return (
        f"the last {WINDOW} trials increased the hypervolume of the front by {after - before:.3g}, "
        f"less than the noise of the measurements ({floor:.3g}){hope}"
    )


def noise_volume(trials: Sequence[Trial], scale: trial_view.Scale, noise: float) -> float:
    """How much hypervolume the front would gain if one objective were better by `noise`, mean over
    objectives.
    """
    found = trial_view.measured(trials, scale.objectives)
    if not found:
        return 0.0
    costs = scale.costs(trial_view.values_of(found, scale.objectives))
    corner = np.array(scale.corner)
    lucky = [trial_view.volume(costs - noise * np.abs(costs) * one, corner) for one in np.eye(len(corner))]
    return float(np.mean(lucky)) - trial_view.volume(costs, corner)


# Trials that a running replay is compared with, the newest of the front first. Each keeps all its requests in
# memory and costs a comparison at every look, in the process that also sends.
RIVALS = 6


# How much better than a screened trial another one must be to stop it: three times the usual margin, since
# screened and relaunched measurements of one candidate differ by more than two relaunched ones.
SCREENED_EPSILON = 0.10


def judge_of(prepared: Prepared, trials: Sequence[Trial], *, screened: bool) -> Judge | None:
    """What stops the next replay early; None while no baseline is measured."""
    case = case_of(prepared, trials, screened=screened, columns=_columns)
    return None if case is None else Judge(case)


def case_of(
    prepared: Prepared,
    trials: Sequence[Trial],
    *,
    screened: bool,
    columns: Callable[[Case, Trial], Columns | None],
) -> Case | None:
    """What the next replay is compared with; `columns` finds the requests of an earlier trial. None while no
    baseline is measured.
    """
    study, file = prepared.study, prepared.file
    base = trial_view.baseline_of(trials)
    if base is None or base.measurement is None:
        return None
    values = [base.measurement.values.get(n, math.inf) for n in study.objectives]
    corner = trial_view.corner_of(study.objectives, values, study.slo)
    leaders = trial_view.front(trials, study.objectives, screened=True)[::-1][:RIVALS]
    epsilon = SCREENED_EPSILON if screened else EPSILON
    case = Case(
        objectives=study.objectives,
        slo=study.slo,
        planned=sum(len(slice_rows(prepared.trace, s)) for s in study.searched_slices),
        window_s=sum(s.duration_s for s in study.searched_slices) / file.speed,
        corner=dict(zip(study.objectives, corner, strict=True)),
        epsilon=epsilon,
        by_slo=file.winner == "slo",
    )
    rivals = [
        Rival(label=t.label, values=t.measurement.values, columns=columns(case, t))
        for t in leaders
        if t.measurement
    ]
    return replace(case, rivals=tuple(rivals))


def _columns(case: Case, trial: Trial) -> Columns | None:
    """The requests of a trial; None if their files were cleared away or cannot be read."""
    rows = case.rows()
    for part in trial.measurement.slices if trial.measurement else ():
        if part.outcomes_file is None:
            return None
        try:
            rows.add(outcomes.read(part.outcomes_file))
        except BadInput:
            return None
    return rows.columns() if len(rows) else None


def expected_gain(prepared: Prepared, trials: Sequence[Trial], predictor: StudyPredictor) -> float | None:
    """The most hypervolume that a new candidate is expected to add, as a share of what the front covers. None
    if the simulator has less than half of the weight.
    """
    known, view = predictor.calibrated(trials), view_of(prepared, trials)
    state = view.problem(known.predict if known else None)
    covered = 0.0 if state is None else trial_view.covered(trials, state.scale)
    if state is None or covered <= 0:
        return None
    seed, at = prepared.study.seed, view.encoding.candidate
    rng = np.random.default_rng(trial_view.derive(seed, next_number(trials), "gain"))
    new = lambda point: view.is_new(at(point), prepared.known_failure)  # noqa: E731
    points, gains, trusted = acquisition.scored(state, seed, new, rng)
    return float(gains.max()) / covered if points and trusted else None
