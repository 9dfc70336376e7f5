"""By what a replay is judged while it runs: the study's trials so far, as a case for `search.judge`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from tuner.errors import BadInput
from tuner.records import Slice, Trial
from tuner.replay import outcomes
from tuner.search import early_stopping, pareto, trial_view
from tuner.search.early_stopping import Case, Columns, Judge, Rival
from tuner.traffic import slices
from tuner.traffic.trace import Trace
from tuner.tuning.study import Prepared

RIVALS = 6
SCREENED_EPSILON = 0.10
"""Screened trials are held against others with this margin: they differ from relaunched ones by so much."""
PEAK_S = 5.0
"""Seconds of the replay that count as its peak: the busiest such stretch."""


def judge_of(prepared: Prepared, trials: Sequence[Trial], *, screened: bool) -> Judge | None:
    """The judge of the next replay; None while there is no baseline to hold it against."""
    case = case_of(prepared, trials, screened=screened, columns=_columns)
    return None if case is None else Judge(case)


def case_of(
    prepared: Prepared,
    trials: Sequence[Trial],
    *,
    screened: bool,
    columns: Callable[[Case, Trial], Columns | None],
) -> Case | None:
    """By what the next replay is judged; `columns` finds the requests of an earlier trial. None while there
    is no baseline to hold it against.
    """
    study = prepared.study
    base = trial_view.baseline_of(trials)
    if base is None or base.measurement is None:
        return None
    values = base.measurement.values
    corner = trial_view.corner_of(
        study.objectives, [values.get(n, math.inf) for n in study.objectives], study.slo
    )
    searched = tuple(s for s in study.slices if not s.held_out)
    leaders = pareto.leaders(trials, study.objectives, RIVALS)
    epsilon = SCREENED_EPSILON if screened else early_stopping.EPSILON
    case = Case(
        objectives=study.objectives,
        slo=study.slo,
        planned=sum(len(slices.rows(prepared.trace, s)) for s in searched),
        window_s=sum(s.duration_s for s in searched) / prepared.file.speed,
        corner=dict(zip(study.objectives, corner, strict=True)),
        peak=peak(prepared.trace, searched, prepared.file.speed),
        rungs=tuple((share, max(margin, epsilon)) for share, margin in early_stopping.RUNGS),
        epsilon=epsilon,
        by_slo=prepared.file.winner == "slo",
    )
    rivals = [
        Rival(number=t.number, values=t.measurement.values, columns=columns(case, t))
        for t in leaders
        if t.measurement
    ]
    return replace(case, rivals=tuple(rivals))


def _columns(case: Case, trial: Trial) -> Columns | None:
    """The requests of a trial; None where their files are gone (cleared away) or unreadable."""
    rows = case.rows()
    for part in trial.measurement.slices if trial.measurement else ():
        if part.outcomes_file is None:
            return None
        try:
            rows.add(outcomes.read(part.outcomes_file))
        except BadInput:
            return None
    return rows.columns() if len(rows) else None


def peak(trace: Trace, searched: Sequence[Slice], speed: float) -> frozenset[int]:
    """The rows that arrive in the busiest stretch of PEAK_S (of replay time) of the slices."""
    best: np.ndarray = np.empty(0, np.int64)
    for part in searched:
        rows = slices.rows(trace, part)
        at = trace.arrival_s[rows] / speed
        ends = np.searchsorted(at, at + PEAK_S, side="left")
        if len(rows):
            first = int(np.argmax(ends - np.arange(len(at))))
            found = rows[first : int(ends[first])]
            best = found if len(found) > len(best) else best
    return frozenset(int(row) for row in best)
