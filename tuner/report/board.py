"""What reports and pages show of a study: front and baseline, the winner, what tuning cost, what failed."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import combinations

import numpy as np

from tuner.conclusions import Arm, Attribution, Conclusion, Difference
from tuner.errors import NotFound
from tuner.history.store import Store
from tuner.measures import many, measure_of, trials_named
from tuner.records import Launch, Measurement, Study, Trial, TrialState
from tuner.report.card import AnswerCard, cards, key_of
from tuner.report.charts import MARKED, Cloud, Guides, Point, scatter
from tuner.report.explain import gave
from tuner.report.words import knobs, measured, published, trial_state
from tuner.search import pareto

SHOWN = ("slo_attainment", "request_rps", "failed", "preemptions", "prefix_hit_rate", "ready_s")
MAX_CHARTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """One row of the front's table: a trial by its first measurement, and `arm` by the confirmation."""

    trial: Trial
    kind: str
    arm: Arm | None

    def first(self, name: str) -> float | None:
        """Its first measurement, of the search."""
        return values(self.trial).get(name)

    def confirmed(self, name: str) -> float | None:
        """Its value by the repeats of the confirmation; None where it was not measured again."""
        return self.arm.confirmed.get(name) if self.arm else None

    def change(self, name: str) -> Difference | None:
        """The difference from the baseline that the confirmation found."""
        return self.arm.change(name) if self.arm else None


@dataclass(frozen=True, kw_only=True)
class Board:
    """The trials of a study, with their front, baseline and winner.

    `conclusion` is what the newest run concluded; `confirmation` the newest conclusion that has a
    confirmation: the same, unless the newest run confirmed nothing. `winner` is the confirmation's.
    """

    study: Study
    trials: tuple[Trial, ...]
    base: Trial | None
    front: tuple[Trial, ...]
    conclusion: Conclusion | None
    confirmation: Conclusion | None
    attribution: Attribution | None = None

    @property
    def winner(self) -> int | None:
        """The number of the trial that the confirmation chose."""
        return self.confirmation.winner if self.confirmation else None

    @property
    def cards(self) -> tuple[AnswerCard, ...]:
        """The answer of the newest run: one card, or one for each arm of a comparison; none before it."""
        if self.conclusion is None:
            return ()
        return cards(self.conclusion, key_of(self.study), gave=gave(self.attribution))

    @property
    def published(self) -> str:
        """The sentence on the winner beside the front; empty where there is none."""
        return published(self.confirmation, self.chosen_on_front) if self.confirmation else ""

    @property
    def screened(self) -> str:
        """The sentence on trials that the front leaves out; empty where there is none."""
        own = {knobs(t.candidate) for t in self.trials if not t.screened}
        left = sorted({t.number for t in self.trials if t.screened and knobs(t.candidate) not in own})
        if not left:
            return ""
        named = trials_named(left) if len(left) < 10 else f"{len(left)} trials"
        was = "were" if left[1:] else "was"
        return f"{named} {was} only screened in a running engine; the front shows relaunched trials"

    @property
    def columns(self) -> list[str]:
        """The measurements that tables show: objectives first."""
        objectives = self.study.objectives
        return [*objectives, *(name for name in SHOWN if name not in objectives)]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The pairs of objectives that are drawn against each other."""
        return list(combinations(self.study.objectives, 2))[:MAX_CHARTS]

    @property
    def chosen(self) -> Trial | None:
        """The winner, if it is not the baseline."""
        found = (t for t in reversed(self.trials) if t.number == self.winner and t.measurement)
        return next((t for t in found if t.state is TrialState.COMPLETE and not t.is_baseline), None)

    @property
    def chosen_on_front(self) -> bool:
        """Whether the winner is on the front, which is of first measurements."""
        return self.chosen is not None and any(t.id == self.chosen.id for t in self.front)

    @cached_property
    def on_front(self) -> frozenset[int]:
        """The ids of the trials on the front."""
        return frozenset(t.id for t in self.front)

    def kind(self, trial: Trial) -> str:
        """baseline, winner, front or other."""
        if trial.is_baseline:
            return "baseline"
        if trial.number == self.winner and trial.state is TrialState.COMPLETE:
            return "winner"
        return "front" if trial.id in self.on_front else "other"

    def beside(self) -> list[Beside]:
        """The baseline first, then the winner where it is not on the front, then the front."""
        rows = [
            *([self.base] if self.base else []),
            *([self.chosen] if self.chosen and not self.chosen_on_front else []),
            *(t for t in self.front if not t.is_baseline),
        ]
        found = self.confirmation
        return [Beside(trial=t, kind=self.kind(t), arm=found.arm(t.number) if found else None) for t in rows]

    def drawing(self, x: str, y: str, href: Callable[[Trial], str]) -> str:
        """The picture of two measurements, with the SLO's limits and the noise; many trials are dots."""
        if len(self.trials) <= MARKED:
            return scatter(self._points(self.trials, x, y, href), x, y, guides=self.guides(x, y))
        done = [values(t) for t in self.trials if t.state is TrialState.COMPLETE]
        pairs = np.array([(v[x], v[y]) for v in done if x in v and y in v]).reshape(-1, 2)
        cloud = Cloud(kind="", x=pairs[:, 0], y=pairs[:, 1], title=many(len(pairs), "trial"))
        return scatter(self.marked_points(x, y, href), x, y, clouds=[cloud], guides=self.guides(x, y))

    def marked_points(
        self, x: str, y: str, href: Callable[[Trial], str], also: Collection[int] = ()
    ) -> list[Point]:
        """The front, the baseline, the winner, and the trials `also`, with their numbers as words."""
        named = {t.id for t in self.front} | ({self.base.id} if self.base else set())
        wanted = {*also, self.winner}
        return self._points([t for t in self.trials if t.id in named or t.number in wanted], x, y, href)

    def _points(self, trials: Sequence[Trial], x: str, y: str, href: Callable[[Trial], str]) -> list[Point]:
        crowd = len(self.trials) - len(self.front) > MARKED
        found = []
        for trial in trials:
            numbers = values(trial)
            if trial.state is not TrialState.COMPLETE or x not in numbers or y not in numbers:
                continue
            kind = self.kind(trial)
            whole = kind in ("baseline", "winner") or (kind == "front" and not crowd)
            label = self._words(trial, kind, numbers) if whole else _short(trial, x, y)
            found.append(
                Point(
                    x=numbers[x], y=numbers[y], kind=kind, label=label, href=href(trial),
                    front=trial.id in self.on_front, name=self._name(trial, kind),
                )
            )  # fmt: skip
        return found

    def _name(self, trial: Trial, kind: str) -> str:
        """What a mark is called: an arm of a comparison by its name."""
        arm = self.confirmation.arm(trial.number) if self.confirmation else None
        return (arm.name if arm else None) or {"baseline": "today"}.get(kind, str(trial.number))

    def guides(self, x: str, y: str) -> Guides:
        """The SLO's limits of two measurements, and the noise around baseline and winner, where known."""
        limits = [getattr(self.study.slo, limit) if (limit := measure_of(n).limit) else None for n in (x, y)]
        shares = {n.metric: n.share for n in self.confirmation.noise} if self.confirmation else {}
        wide, high = shares.get(x), shares.get(y)
        noise = []
        for trial in (self.base, self.chosen) if wide is not None and high is not None else ():
            numbers = values(trial)
            if math.isfinite(numbers.get(x, math.nan)) and math.isfinite(numbers.get(y, math.nan)):
                noise.append((numbers[x], numbers[y], wide or 0.0, high or 0.0))
        return Guides(x_limit=limits[0], y_limit=limits[1], noise=noise)

    def _words(self, trial: Trial, kind: str, numbers: Mapping[str, float]) -> str:
        name = {"baseline": " (baseline)", "winner": " (winner)"}.get(kind, "")
        told = [f"{n} {measured(n, numbers[n])}" for n in self.columns if n in numbers]
        return "\n".join([f"trial {trial.number}{name}: {knobs(trial.candidate)}", *told])


def _short(trial: Trial, x: str, y: str) -> str:
    numbers = values(trial)
    told = "\n".join(f"{name} {measured(name, numbers[name])}" for name in (x, y))
    return f"trial {trial.number}: {knobs(trial.candidate)}\n{told}"


def values(trial: Trial | None) -> Mapping[str, float]:
    """The values of a trial that the search saw; empty for none."""
    return trial.measurement.values if trial is not None and trial.measurement else {}


def board(
    study: Study,
    trials: Sequence[Trial],
    conclusions: Sequence[Conclusion],
    attribution: Attribution | None = None,
) -> Board:
    """The board of a study. `conclusions` are those of its runs, the oldest first; `attribution` tells what
    each knob of the newest one's winner gives."""
    newest = conclusions[-1] if conclusions else None
    return Board(
        study=study,
        trials=tuple(trials),
        base=next((t for t in reversed(trials) if t.is_baseline and t.measurement), None),
        front=pareto.front(trials, study.objectives),
        conclusion=newest,
        confirmation=next((c for c in reversed(conclusions) if c.measured_again), newest),
        attribution=attribution,
    )


def attempts_of(
    study: Study, trials: Sequence[Trial], number: int, attempt: int | None
) -> tuple[Trial, list[Trial]]:
    """A trial (its last attempt unless one is named), and all its attempts. NotFound says what there is."""
    attempts = [t for t in trials if t.number == number]
    if not attempts:
        last = max((t.number for t in trials), default=None)
        raise NotFound(f"study {study.name} has no trial {number}; its last trial is {last}")
    found = [t for t in attempts if attempt in (None, t.attempt)]
    if not found:
        there = ", ".join(str(t.attempt) for t in attempts)
        raise NotFound(f"trial {number} of study {study.name} has no attempt {attempt}, only {there}")
    return found[-1], attempts


def board_of(store: Store, study: Study) -> Board:
    """The board of a study as the history has it."""
    said = store.conclusions(study.id)
    found = store.attribution(said[-1].run_id) if said else None
    return board(study, store.trials(study.id), said, found)


def baselines(base: Trial | None, trial: Trial, launches: Sequence[Launch]) -> list[Measurement | None]:
    """For each measurement of a trial the baseline's beside it: of the same kind and repeat, and of several
    nights' the one whose launch began nearest in time.
    """
    begun = {launch.id: launch.started_at.timestamp() for launch in launches}
    known = base.measurements if base is not None and base.id != trial.id else ()

    def nearest(measured: Measurement) -> Measurement | None:
        at = begun.get(measured.launch_id or "", math.inf)
        same = (m for m in reversed(known) if (m.purpose, m.repeat) == (measured.purpose, measured.repeat))
        return min(same, key=lambda m: abs(begun.get(m.launch_id or "", -math.inf) - at), default=None)

    return [nearest(measured) for measured in trial.measurements]


def measured_at(trial: Trial, launches: Sequence[Launch]) -> list[datetime | None]:
    """When the launch of each measurement began, if several nights measured the trial again; else None."""
    begun = {launch.id: launch.started_at for launch in launches}
    named = [(m.purpose, m.repeat) for m in trial.measurements]
    several = len(set(named)) < len(named)
    return [begun.get(m.launch_id or "") if several else None for m in trial.measurements]


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


def spent(trials: Sequence[Trial], launches: Sequence[Launch], stopped: Collection[str] = ()) -> Spent:
    """Adds up a study's trials and launches. `stopped` are the ids of `Store.stopped_runs`."""
    said = [(trial_state(t, stopped), t) for t in trials]
    states = sorted({state for state, _ in said}, key=["interrupted", *TrialState].index)
    return Spent(
        trials={s: sum(state == s for state, _ in said) for s in states},
        trial_seconds={s: sum(t.gpu_seconds for state, t in said if state == s) for s in states},
        launches=len(launches),
        failed_launches=sum(each.verdict is not None for each in launches),
        ready_s=sum(each.timeline.get("ready_s", 0.0) for each in launches),
        measuring_s=sum(each.measuring_s or 0.0 for each in launches),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One cause of failed trials, with an example."""

    cause: str
    state: str
    trials: tuple[Trial, ...]
    reason: str


def failures(trials: Sequence[Trial]) -> list[Cause]:
    """The causes of failed trials, the most frequent first. PRUNED trials did not fail, nor did those
    that the user stopped.
    """
    groups: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        if trial.state in (TrialState.INFEASIBLE, TrialState.ABORTED) and trial.cause != "stopped":
            groups.setdefault((trial.cause or "not known", trial.state.value), []).append(trial)
    found = [
        Cause(cause=cause, state=state, trials=tuple(rows), reason=rows[-1].reason or "")
        for (cause, state), rows in groups.items()
    ]
    return sorted(found, key=lambda c: (-len(c.trials), c.cause))


@dataclass(frozen=True, slots=True, kw_only=True)
class Belief:
    """How well one replay of a trial kept its schedule. `when` is empty for a replay of the search."""

    trial: Trial
    when: str
    values: dict[str, float | None]
    failed: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def doubts(self) -> tuple[str, ...]:
        """The checks that failed, then the warnings."""
        return self.failed + self.warnings


WHEN = {"confirm": "confirmation", "held_out": "held-out slice"}
LATENESS = ("lateness_p50_ms", "lateness_p99_ms", "lateness_allowed_ms", "sender_cpu")


def beliefs(trials: Sequence[Trial]) -> list[Belief]:
    """One row per replay, those of the confirmation too; the latest trial first."""
    return [
        Belief(
            trial=t,
            when="" if m.purpose == "search" else f"{WHEN[m.purpose]}, repeat {m.repeat}",
            values={name: m.fidelity.values.get(name) for name in LATENESS},
            failed=m.fidelity.failed,
            warnings=m.fidelity.warnings,
        )
        for t in reversed(trials)
        for place, m in enumerate(t.measurements)
        if m.fidelity.values and not any(_same_replay(m, other) for other in t.measurements[:place])
    ]


def _same_replay(one: Measurement, other: Measurement) -> bool:
    """Whether two measurements are of one replay, which may count for the search and for a comparison."""
    return one.launch_id is not None and (one.launch_id, one.fidelity) == (other.launch_id, other.fidelity)


def worst_lateness(found: Sequence[Belief]) -> float | None:
    """The largest p99 lateness in milliseconds."""
    late = [v for b in found if (v := b.values.get("lateness_p99_ms")) is not None]
    return max(late, default=None)
