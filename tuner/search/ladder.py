"""The hand method of the tuning guides: one knob up by steps until the tail worsens, then the next knob."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tuner.measures import MAXIMIZED
from tuner.records import Candidate, Trial, TrialState, Value
from tuner.search import told
from tuner.search.encoding import Encoding, Space, encode

KNOBS = ("max_num_seqs", "max_num_batched_tokens")
WORSE = 0.05
"""Relative worsening of the tail that ends a climb."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One row of the ladder's table; `kept` when the climb went on from here."""

    number: int
    knob: str
    value: Value
    throughput: float | None
    tail: float | None
    kept: bool
    why: str


def climb(
    space: Space,
    trials: Sequence[Trial],
    *,
    baseline: Candidate,
    known: Callable[[Candidate], str | None],
    knobs: Sequence[str] = KNOBS,
    throughput: str = "goodput_rps",
    tail: str = "e2e_p95_ms",
) -> tuple[Candidate | None, tuple[Rung, ...]]:
    """(the next candidate, the table so far); None when every climb has ended. A function of history.

    A step doubles the knob (the next level at or above twice the value). It is kept while throughput rises
    and the tail does not worsen by more than 5 %; a failure ends the climb as well.
    """
    measured = {t.candidate: t for t in told.latest(trials) if t.state is not TrialState.RUNNING}
    first = told.baseline_of(trials)
    if first is None:
        return (baseline if not measured else None), ()
    encoding = encode(space, {**first.effective, **first.candidate})
    best = first
    table: list[Rung] = []
    for knob in (k for k in knobs if k in encoding.names):
        while (step := _step(encoding, best.candidate, knob)) is not None:
            if known(step) is not None:
                break
            if step not in measured:
                return step, tuple(table)
            rung = _judge(measured[step], best, knob, throughput, tail)
            table.append(rung)
            if not rung.kept:
                break
            best = measured[step]
    return None, tuple(table)


def _step(encoding: Encoding, candidate: Candidate, knob: str) -> Candidate | None:
    """The candidate with the knob at the first level at or above twice its value; None at the top."""
    levels = encoding.levels[encoding.names.index(knob)]
    now = candidate.get(knob, encoding.defaults.get(knob))
    numbers = [v for v in levels if isinstance(v, int | float) and not isinstance(v, bool)]
    if not isinstance(now, int | float) or isinstance(now, bool):
        return None
    higher = sorted(v for v in numbers if v >= 2 * now) or sorted(v for v in numbers if v > now)
    return encoding.space.canonical(Candidate({**candidate, knob: higher[0]})) if higher else None


def _judge(trial: Trial, best: Trial, knob: str, throughput: str, tail: str) -> Rung:
    mine, theirs = _values(trial), _values(best)
    got, had = mine.get(throughput), theirs.get(throughput)
    late, was = mine.get(tail), theirs.get(tail)
    kept, why = False, trial.reason or "it failed"
    if trial.state is TrialState.COMPLETE and None not in (got, had, late, was):
        gain = _better(throughput, got or 0.0, had or 0.0)
        worse = (late or 0.0) > (was or 0.0) * (1 + WORSE)
        kept = gain and not worse
        why = "the tail worsens" if worse else "goes on" if gain else f"{throughput} no longer rises"
    return Rung(
        number=trial.number,
        knob=knob,
        value=trial.candidate.get(knob),
        throughput=got,
        tail=late,
        kept=kept,
        why=why,
    )


def _better(name: str, mine: float, theirs: float) -> bool:
    return mine > theirs if name in MAXIMIZED else mine < theirs


def _values(trial: Trial) -> Mapping[str, float]:
    return trial.measurement.values if trial.measurement else {}
