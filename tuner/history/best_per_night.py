"""What was best on which night, what had changed, how sure that is: pure functions over RunBest records."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta, tzinfo
from itertools import combinations
from statistics import median
from typing import Literal

from tuner.conclusions import Judgement
from tuner.history.entities import RunBest
from tuner.measures import direction_of, many, number
from tuner.records import Candidate, Run

NOON = timedelta(hours=12)

# How many nights a trend looks back at most.
TREND = 92
Kind = Literal["knob", "engine", "traffic", "gpu", "argument", "environment"]
Compared = Literal["first", "better", "worse", "same", "not comparable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing that differs; None as a side: not set there."""

    kind: Kind
    name: str
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What an engine ran with, and on what. `arguments` are the fixed arguments, which are no knobs."""

    engine_version: str
    trace_digest: str
    gpu_class: str
    candidate: Candidate
    arguments: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Night:
    """What one run shows of its night, for one node and workload; all numbers are of that run.

    `newest`: a page that has one point per night shows this run. `runs`: how many runs the night had.
    `date` is that of the evening, because a night goes from noon to noon. `step` is the change of the value
    since the night before, (after − before) / before. `compared` judges it, beyond noise. It is "not
    comparable" if engine, trace or GPU changed in between, or if a run is not to be trusted. `regression`:
    the value is worse, and only the knobs or the machine can be the cause.
    """

    date: date
    best: RunBest
    newest: bool
    runs: int
    changes: tuple[Change, ...]
    step: float | None
    compared: Compared

    @property
    def regression(self) -> bool:
        return self.compared == "worse"

    @property
    def sure(self) -> str:
        """How sure the value is, in words."""
        best = self.best
        kind = " (a demonstration)" if best.demonstration else ""
        if not _concluded(best):
            return f"not confirmed{kind}, one measurement"
        if best.outcome is Judgement.BASELINE_STAYS and best.baseline is None:
            return f"one measurement{kind}"
        said = "confirmed" if best.confirmed else "measured again"
        said = "not to be trusted" if best.outcome is Judgement.NOT_TRUSTED else said
        repeats = many(best.repeats, "repeat")
        return f"{said}{kind}, {repeats}, {number(best.low)} to {number(best.high)}"


def change_of(before: float, after: float) -> float | None:
    """(after − before) / before; None if it is not a number (a zero or an infinity)."""
    if before <= 0 or not (math.isfinite(before) and math.isfinite(after)):
        return None
    return (after - before) / before


def changes(before: Configuration | RunBest, after: Configuration | RunBest) -> tuple[Change, ...]:
    """All that differs between two configurations: engine, traffic, GPU, knobs, arguments, environment."""
    single: tuple[tuple[Kind, str, str, str], ...] = (
        ("engine", "version", before.engine_version, after.engine_version),
        ("traffic", "trace", before.trace_digest[:12], after.trace_digest[:12]),
        ("gpu", "class", before.gpu_class, after.gpu_class),
    )
    found = [Change(kind=kind, name=name, before=a, after=b) for kind, name, a, b in single if a != b]
    found += _named("knob", before.candidate, after.candidate)
    if isinstance(before, Configuration) and isinstance(after, Configuration):
        found += _named("argument", before.arguments, after.arguments)
        found += _named("environment", before.environment, after.environment)
    return tuple(found)


def _named(kind: Kind, before: Mapping[str, object], after: Mapping[str, object]) -> list[Change]:
    if before is after:
        return []
    sides = [{name: str(value) for name, value in each.items()} for each in (before, after)]
    pairs = [(name, sides[0].get(name), sides[1].get(name)) for name in sorted({*before, *after})]
    return [Change(kind=kind, name=name, before=a, after=b) for name, a, b in pairs if a != b]


def night_of(run: Run | RunBest, zone: tzinfo = UTC) -> date:
    """The evening of the night in which a run ended; 01:00 belongs to the evening before."""
    return (run.at.astimezone(zone) - NOON).date()


def _concluded(best: RunBest) -> bool:
    """Whether the run reached a verdict."""
    return best.outcome not in (None, Judgement.NOT_CONFIRMED, Judgement.NOTHING_SERVED)


def measured(best: RunBest) -> bool:
    """Whether the run's result has the metric that was asked for."""
    return not math.isnan(best.value)


def without_value(bests: Sequence[RunBest]) -> int:
    """How many of these runs ended with a result that does not have the metric: they have no row."""
    return sum(best.ended_at is not None and not measured(best) for best in bests)


def _newest(of_night: Sequence[RunBest]) -> RunBest:
    """The newest run that concluded; without one the newest that ended; else the newest. The metric plays no
    part, so that all metrics of a night come from one run.
    """
    return max(reversed(of_night), key=lambda b: (_concluded(b), b.ended_at is not None, b.at))


def _compare(before: RunBest, after: RunBest, step: float | None, tolerance: float) -> Compared:
    overlap = before.low <= after.high and after.low <= before.high
    spread = before.repeats > 1 and after.repeats > 1 and overlap
    if step is None or abs(step) <= tolerance or spread:
        return "same"
    return "better" if (step > 0) == (direction_of(after.metric) == "maximize") else "worse"


def _comparable(before: RunBest, after: RunBest, changed: Sequence[Change]) -> bool:
    """Whether nothing but knobs differs, and neither run's machine changed under it."""
    trusted = all(best.outcome is not Judgement.NOT_TRUSTED for best in (before, after))
    return trusted and all(change.kind == "knob" for change in changed)


def nights(bests: Sequence[RunBest], *, zone: tzinfo = UTC, tolerance: float = 0.05) -> tuple[Night, ...]:
    """One Night per evening, model, node and workload that had a run: that of its newest run."""
    return tuple(night for night in rows(bests, zone=zone, tolerance=tolerance) if night.newest)


def newest_runs(bests: Sequence[RunBest], *, zone: tzinfo = UTC) -> tuple[RunBest, ...]:
    """The newest run of each night of each place, the oldest night first; also one without a value."""
    return tuple(_newest(of_night) for place in _evenings(bests, zone) for _, of_night in place)


def _evenings(bests: Sequence[RunBest], zone: tzinfo) -> list[list[tuple[date, list[RunBest]]]]:
    """The runs of each evening, the first evening first, for each model, node and workload."""
    groups: dict[tuple[str, str, str], dict[date, list[RunBest]]] = {}
    for best in bests:
        place = groups.setdefault((best.model, best.node, best.workload), {})
        place.setdefault(night_of(best, zone), []).append(best)
    return [sorted(place.items()) for place in groups.values()]


def rows(bests: Sequence[RunBest], *, zone: tzinfo = UTC, tolerance: float = 0.05) -> tuple[Night, ...]:
    """A Night per run, the oldest first, beside the night before: no row changes when a later run ends.

    A run without a value has no row. If it is the newest of its night, no other run stands in for it.
    `tolerance` is the relative change that counts as none. If both nights were confirmed, overlapping
    repeats count as no change, too.
    """
    found: list[Night] = []
    for place in _evenings(bests, zone):
        earlier: list[Sequence[RunBest]] = []
        for evening, of_night in place:
            newest = _newest(of_night)
            for best in filter(measured, of_night):
                changed, step, compared = _since(_before(earlier, best), best, tolerance)
                night = Night(
                    date=evening,
                    best=best,
                    newest=best is newest,
                    runs=len(of_night),
                    changes=changed,
                    step=step,
                    compared=compared,
                )
                found.append(night)
            earlier.append(of_night)
    return tuple(sorted(found, key=lambda night: (night.date, night.best.node, night.best.workload)))


def _before(earlier: Sequence[Sequence[RunBest]], best: RunBest) -> RunBest | None:
    """What the last night that showed a value showed. A run that ended is compared with such runs alone: what
    another one shows may still change.
    """
    for of_night in reversed(earlier):
        known = [each for each in of_night if each.ended_at is not None or best.ended_at is None]
        if known and measured(newest := _newest(known)):
            return newest
    return None


def _since(
    before: RunBest | None, best: RunBest, tolerance: float
) -> tuple[tuple[Change, ...], float | None, Compared]:
    """The `changes`, `step` and `compared` of a Night, whose night before showed `before`."""
    if before is None:
        return (), None, "first"
    step, changed = change_of(before.value, best.value), changes(before, best)
    if not _comparable(before, best, changed):
        return changed, step, "not comparable"
    return changed, step, _compare(before, best, step, tolerance)


def trend(found: Sequence[Night]) -> float | None:
    """Median relative change per night (Theil–Sen on log values) of one place's last comparable nights; None
    with fewer than three such nights.
    """
    comparable: list[Night] = []
    for night in found:
        if night.compared == "not comparable":
            comparable = []
        comparable.append(night)
    points = [(night.date, night.best.value) for night in comparable[-TREND:] if night.best.value > 0]
    if len(points) < 3:
        return None
    slopes = [math.log(b / a) / (end - begin).days for (begin, a), (end, b) in combinations(points, 2)]
    return math.expm1(median(slopes))


def moment(text: str) -> datetime:
    """A date or time as people write it, in UTC if it names no zone. ValueError for anything else."""
    found = datetime.fromisoformat(text)
    return found if found.tzinfo else found.replace(tzinfo=UTC)
