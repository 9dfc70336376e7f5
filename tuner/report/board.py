"""What reports and pages show of a study: front and baseline, the winner, what tuning cost, what failed."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import cached_property
from itertools import chain, combinations, zip_longest
from pathlib import Path

import numpy as np

from tuner.conclusions import Arm, Attribution, Conclusion, Difference
from tuner.errors import NotFound
from tuner.history.store import Store
from tuner.measures import many, measure_of, trials_named
from tuner.records import (
    JSON,
    Candidate,
    Launch,
    Measurement,
    Study,
    Trial,
    TrialState,
    label_in,
    last_attempts,
    of_attribution,
)
from tuner.report.card import AnswerCard, cards
from tuner.report.charts import MARKED, Cloud, Guides, Point, scatter
from tuner.report.words import PASSES, configuration, knobs, measured, pass_name, published
from tuner.search import trial_view

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
        """Its value by the repeats of the confirmation; None if it was not measured again."""
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
        return cards(self.conclusion, attribution=self.attribution)

    @property
    def named(self) -> dict[str, JSON]:
        """The study, as programs read it beside the front."""
        study = self.study
        return {"id": study.id, "name": study.name, "objectives": list(study.objectives)}

    def found(self) -> dict[str, JSON]:
        """What programs read of the runs: the newest one's verdict and conclusion, the confirmation."""
        said, confirmed = self.conclusion, self.confirmation
        return {
            "verdict": {} if said is None else {"verdict": said.verdict, "sentence": said.sentence},
            "winner": self.winner,
            "conclusion": None if said is None else said.to_json(),
            "confirmation": None if confirmed is None else confirmed.to_json(),
        }

    def configuration(self, trial: Trial) -> Candidate:
        """What a trial's engine was asked for."""
        return configuration(trial, self.study, self.trials)

    @property
    def published(self) -> str:
        """The sentence on the winner beside the front; empty if there is none."""
        said = self.confirmation
        told = self._as_good_as_front or (self.chosen is not None and self.chosen.screened)
        return published(said, told, self.attribution) if said else ""

    @property
    def sources(self) -> str:
        """What first and confirmed values are of; empty if nothing was measured again."""
        said = self.confirmation
        if said is None or not said.measured_again:
            return ""
        again = many(said.repeats, "repeat") + (" together" if said.repeats > 1 else "")
        once = "the first launch of each arm" if self.study.compares else "one measurement of the search"
        first = f"First values are from {once}, confirmed values from {again}."
        reduced, found = self.attribution.reduced if self.attribution else None, dict[str, list[str]]()
        for trial in filter(self._measured_elsewhere, trial_view.latest(self.trials)):
            whose = "The newest run" if self._measured_by_newest(trial) else "Another run"
            whose = "The attribution" if trial.number == reduced else whose
            found.setdefault(whose, []).append(trial.label)
        told = [f"{whose} measured {trials_named(named)} again" for whose, named in sorted(found.items())]
        return f"{first} {'. '.join(told)}; `tuner trial show` prints these repeats." if told else first

    def _measured_elsewhere(self, trial: Trial) -> bool:
        """Whether a trial has repeats, but none in the confirmation that is shown."""
        if all(m.purpose != "confirm" for m in trial.measurements):
            return False
        arm = self.row(trial).arm
        return arm is None or not arm.measured_again

    def _measured_by_newest(self, trial: Trial) -> bool:
        """Whether the newest run measured a trial again, although its confirmation is not the one shown."""
        said = self.conclusion
        if said is None or said is self.confirmation:
            return False
        arm, folder = said.arm(trial.number), f"-confirm-{said.run_id[:8]}"
        return (arm is not None and arm.measured_again) or any(folder in m.folder for m in trial.measurements)

    @property
    def screened(self) -> str:
        """What the front says of trials without a launch of their own in the search; empty if there is
        none.
        """
        unmeasured = (TrialState.RUNNING, TrialState.ABORTED)
        own = {knobs(t.candidate) for t in self.trials if not t.screened and t.state not in unmeasured}
        found = {t.number: t.label for t in self.trials if t.screened and knobs(t.candidate) not in own}
        shown = {row.trial.number: row.trial.label for row in self.beside() if row.trial.screened}
        left = [found[number] for number in sorted(found.keys() - shown)]
        said = []
        if left:
            named = trials_named(left) if len(left) < 10 else f"{len(left)} trials"
            said.append(
                f"The search only screened {named} in a running engine; the front shows relaunched trials."
            )
        if shown:
            was = "were" if len(shown) > 1 else "was"
            said.append(
                f"{trials_named([*shown.values()]).capitalize()} {was} confirmed without a relaunch:"
                " the first values are from a running engine."
            )
        return " ".join(said)

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

    @property
    def _as_good_as_front(self) -> bool:
        """Whether the winner, or a trial with the same first measurement, is on the front."""
        names = self.study.objectives
        own = trial_view.objective_values(self.chosen, names) if self.chosen else None
        return self.chosen_on_front or any(trial_view.objective_values(t, names) == own for t in self.front)

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
        """The baseline first, then the winner if it is not on the front, then the front, then finalists
        that were confirmed without a relaunch.
        """
        chosen = [self.chosen] if self.chosen and not self.chosen_on_front else []
        again = [t for t in trial_view.latest(self.trials) if t.screened and t not in chosen]
        rows = [
            *([self.base] if self.base else []),
            *chosen,
            *(t for t in self.front if not t.is_baseline),
        ]
        screened = [row for row in map(self.row, again) if row.arm is not None and row.arm.measured_again]
        return [*map(self.row, rows), *(replace(row, kind="finalist") for row in screened)]

    @cached_property
    def _last_attempts(self) -> dict[int, int]:
        """The last attempt of each number."""
        return {t.number: t.attempt for t in last_attempts(self.trials)}

    def row(self, trial: Trial) -> Beside:
        """A trial by its first measurement. If it was measured again, also by the confirmation, which
        measures the last attempt.
        """
        again = self.confirmation if trial.attempt == self._last_attempts.get(trial.number) else None
        arm = again.arm(trial.number) if again else None
        return Beside(trial=trial, kind=self.kind(trial), arm=arm)

    def rows(self) -> list[dict[str, object]]:
        """The same for programs; a value that is not finite is None."""
        names = self.study.objectives

        def finite(value: float | None) -> float | None:
            return value if value is not None and math.isfinite(value) else None

        return [
            {
                "trial": row.trial.number,
                "role": row.kind,
                "first": {n: finite(row.first(n)) for n in names},
                "confirmed": {n: finite(row.confirmed(n)) for n in names if row.confirmed(n) is not None},
                "changes": [asdict(c) for n in names if (c := row.change(n)) is not None],
            }
            for row in self.beside()
        ]

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
            label = self._words(trial, kind, self.columns) if whole else self._words(trial, "", (x, y))
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
        return (arm.name if arm else None) or {"baseline": "today"}.get(kind, trial.label)

    def guides(self, x: str, y: str) -> Guides:
        """The SLO's limits of two measurements, and the noise around baseline and winner, if it is known."""
        limits = [getattr(self.study.slo, limit) if (limit := measure_of(n).limit) else None for n in (x, y)]
        shares = {n.metric: n.share for n in self.confirmation.noise} if self.confirmation else {}
        wide, high = shares.get(x), shares.get(y)
        noise = []
        for trial in (self.base, self.chosen) if wide is not None and high is not None else ():
            numbers = values(trial)
            if math.isfinite(numbers.get(x, math.nan)) and math.isfinite(numbers.get(y, math.nan)):
                noise.append((numbers[x], numbers[y], wide or 0.0, high or 0.0))
        return Guides(x_limit=limits[0], y_limit=limits[1], noise=noise)

    def _words(self, trial: Trial, kind: str, names: Iterable[str]) -> str:
        name, numbers = {"baseline": " (baseline)", "winner": " (winner)"}.get(kind, ""), values(trial)
        told = [f"{n} {measured(n, numbers[n])}" for n in names if n in numbers]
        return "\n".join([f"trial {trial.label}{name}: {knobs(self.configuration(trial))}", *told])


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
        base=trial_view.baseline_of(trials)
        or next((t for t in reversed(trials) if t.is_baseline and t.measurement), None),
        front=trial_view.front(trials, study.objectives),
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
    nights' the one of the same run, or else the one whose launch began nearest in time.
    """
    began = {launch.id: launch for launch in launches}
    known = base.measurements if base is not None and base.id != trial.id else ()

    def at(measured: Measurement) -> tuple[str, float]:
        launch = began.get(measured.launch_id or "")
        run = (label_in(launch.directory if launch else None) or "").partition(".")[0]
        return run, launch.started_at.timestamp() if launch else 0.0

    def nearest(measured: Measurement) -> Measurement | None:
        run, begun = at(measured)
        same = (m for m in reversed(known) if (m.purpose, m.repeat) == (measured.purpose, measured.repeat))
        found = [(m, *at(m)) for m in same]
        return min(found, key=lambda f: (f[1] != run, abs(f[2] - begun)), default=(None,))[0]

    return [nearest(measured) for measured in trial.measurements]


def measured_at(
    trial: Trial | None, shown: Sequence[Measurement | None], launches: Sequence[Launch]
) -> list[datetime | None]:
    """When the launches of some measurements of a trial began, if several nights measured it again; else
    None.
    """
    begun = {launch.id: launch.started_at for launch in launches}
    named = [(m.purpose, m.repeat) for m in trial.measurements] if trial is not None else []
    several = len(set(named)) < len(named)
    return [begun.get(m.launch_id or "") if several and m is not None else None for m in shown]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """`trials` counts the attempts that ended, `trial_seconds` their time, times its GPUs, by state; launches
    include the confirmation's. Seconds are of wall clock. What a run took in all is in its conclusion.
    """

    trials: dict[str, int]
    trial_seconds: dict[str, float]
    launches: int
    failed_launches: int
    ready_s: float
    measuring_s: float


def spent(trials: Sequence[Trial], launches: Sequence[Launch]) -> Spent:
    """Adds up a study's trials and launches. How long an attempt took is known at its end."""
    there = {t.state for t in trials} - {TrialState.RUNNING}
    states = [state for state in TrialState if state in there]
    return Spent(
        trials={s.value: sum(t.state is s for t in trials) for s in states},
        trial_seconds={s.value: sum(t.gpu_seconds for t in trials if t.state is s) for s in states},
        launches=len(launches),
        failed_launches=sum(each.verdict not in (None, "stopped") for each in launches),
        ready_s=sum(each.timeline.get("ready_s", 0.0) for each in launches),
        measuring_s=sum(each.measuring_s or 0.0 for each in launches),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One cause of failed attempts, with an example; `state` is "confirmation" or "last comparison" for
    launches of that.
    """

    cause: str
    state: str
    trials: tuple[Trial, ...]
    reason: str


def failures(trials: Sequence[Trial], launches: Sequence[Launch] = ()) -> list[Cause]:
    """The causes of failed attempts and of failed launches of the confirmation, the most frequent first.
    PRUNED trials did not fail, nor did what the user stopped.
    """
    groups: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        if trial.state in (TrialState.INFEASIBLE, TrialState.ABORTED) and trial.cause != "stopped":
            groups.setdefault((trial.cause or "not known", trial.state.value), []).append(trial)
    last = {t.number: t for t in trials}
    for launch in launches:
        number, again, _ = Path(launch.directory or "").name.partition("-confirm-")
        cause, _, reason = (launch.verdict or "stopped").partition(": ")
        measured = last.get(int(number)) if again and number.isdecimal() else None
        if measured is not None and cause != "stopped":
            stage = "last comparison" if of_attribution(launch.directory) else "confirmation"
            groups.setdefault((cause, stage), []).append(replace(measured, reason=reason))
    found = [
        Cause(cause=cause, state=state, trials=tuple(rows), reason=rows[-1].reason or "")
        for (cause, state), rows in groups.items()
    ]
    return sorted(found, key=lambda c: (-len(c.trials), c.cause))


@dataclass(frozen=True, slots=True, kw_only=True)
class Belief:
    """How well one replay kept its schedule. `name` is that of its trial, and of its pass if that is none of
    the search; `doubts` are the checks that failed, then the warnings.
    """

    name: str
    values: dict[str, float | None]
    doubts: tuple[str, ...]


LATENESS = ("lateness_p50_ms", "lateness_p99_ms", "lateness_allowed_ms", "sender_cpu")


def beliefs(study: Study, trials: Sequence[Trial], launches: Sequence[Launch] = ()) -> list[Belief]:
    """One row per replay, those of the confirmation too; the latest trial first."""
    return [
        Belief(
            name=_replay_name(study, t, m, at),
            values={name: m.fidelity.values.get(name) for name in LATENESS},
            doubts=m.fidelity.failed + m.fidelity.warnings,
        )
        for t in reversed(trials)
        for place, (m, at) in enumerate(
            zip(t.measurements, measured_at(t, t.measurements, launches), strict=True)
        )
        if m.fidelity.values and not any(_same_replay(m, other) for other in t.measurements[:place])
    ]


def _replay_name(study: Study, trial: Trial, found: Measurement, at: datetime | None) -> str:
    """`trial 3.1 (confirmation 2)`; if several nights measured the trial again, with the time."""
    of = [name] if (name := pass_name(found, study)) != PASSES["search"] else []
    of += [f"{at:%Y-%m-%d %H:%M} UTC"] if at is not None else []
    return f"trial {trial.label}" + (f" ({', '.join(of)})" if of else "")


NAMED = 20
"""The most replays that are named beside a warning."""


def warnings(found: Sequence[Belief]) -> list[str]:
    """The warnings about some replays, the most frequent first, each once: `requests were sent 2.4 to 10.8 ms
    late at p99 (2 replays: trial 5, trial 3.1)`. Warnings that differ only in their numbers are one.
    """
    groups: dict[tuple[str, ...], list[tuple[list[str], str]]] = {}
    for belief in found:
        for doubt in belief.doubts:
            words, numbers = tuple(_NUMBER.split(doubt)), _NUMBER.findall(doubt)
            groups.setdefault(words, []).append((numbers, belief.name))
    told = []
    for words, rows in sorted(groups.items(), key=lambda group: -len(group[1])):
        spans = [_span(each) for each in zip(*(numbers for numbers, _ in rows), strict=True)]
        text = "".join(chain.from_iterable(zip_longest(words, spans, fillvalue="")))
        names = [name for _, name in rows]
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        told.append(f"{text} ({many(len(names), 'replay')}: {', '.join(names[:NAMED])}{more})")
    return told


_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def _span(numbers: Sequence[str]) -> str:
    """The least and the largest of some numbers as they are written: `2.4 to 10.8`."""
    least, most = min(numbers, key=float), max(numbers, key=float)
    return least if float(least) == float(most) else f"{least} to {most}"


def _same_replay(one: Measurement, other: Measurement) -> bool:
    """Whether two measurements are of one replay, which may count for the search and for a comparison."""
    return one.launch_id is not None and (one.launch_id, one.fidelity) == (other.launch_id, other.fidelity)


def worst_lateness(found: Sequence[Belief]) -> float | None:
    """The largest p99 lateness in milliseconds."""
    late = [v for b in found if (v := b.values.get("lateness_p99_ms")) is not None]
    return max(late, default=None)
