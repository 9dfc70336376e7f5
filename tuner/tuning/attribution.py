"""Finds out which knobs of a confirmed winner pay. Each knob is set back by itself, in the simulator if it
is sure and otherwise in a launch. Knobs that do not pay are left out of the published profile.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from tuner.conclusions import Attribution, Conclusion, Difference, KnobGain, Word, node_seconds
from tuner.errors import EngineError
from tuner.measures import is_maximized, many
from tuner.records import ATTRIBUTED, Candidate, Launch, Prediction, Run, Trial, TrialState, measures_again
from tuner.report.explain import mechanism, sentence_of
from tuner.search.acquisition import Predict
from tuner.simulator.options import plain_arguments
from tuner.tuning.attempt import MeasureOptions, perform
from tuner.tuning.concluding import Repeats, WinnerCriteria, differences, noise_before, spreads_of
from tuner.tuning.confirm import (
    LEAST_ROUNDS,
    Rounds,
    asked_of,
    cost_of,
    folder_of,
    kept,
    label_of,
    launches_of,
)
from tuner.tuning.context import RunContext
from tuner.tuning.finalists import worse_by
from tuner.tuning.next_trial import next_number
from tuner.tuning.significance import LEAST

# A knob of which the simulator expects less than this (a share, in every objective) is inert; a loss of more
# than SURE without it is sure. What lies between is measured: the calibrated simulator is a few per cent off.
INERT, SURE = 0.01, 0.10

# A knob is worth 5 %: it is kept where one launch without it is worse by more. All that is left out may lose
# PAYS at most in the last comparison, which goes on while it may lose something (`LEAST`).
WORTH, PAYS = 0.05, 0.03

UNSEEN = ("dtype", "optimization_level", "prefix_caching_hash_algo", "disable_cascade_attn")
"""Arguments that the simulator takes and does not act on."""

MOST_ROUNDS = 4
"""Of the last comparison."""

WORSE = "the reduced configuration was worse in the last comparison"
OPEN = "the last comparison left open whether the reduced configuration is worse"


@dataclass(slots=True, kw_only=True)
class Attributing:
    """The attribution of one run's winner. `said` is the confirmation's conclusion, `base` today's
    configuration, `label` names the confirmation's launches; `predict` None: there is no simulator.
    """

    context: RunContext
    run: Run
    said: Conclusion
    base: Trial
    winner: Trial
    label: str
    predict: Predict | None
    _asked: WinnerCriteria = field(init=False)
    _used: int = 0

    def __post_init__(self) -> None:
        self._asked = asked_of(self.context.prepared)

    @property
    def own(self) -> tuple[str, str]:
        """The labels of the attribution's own launches: of the first last comparison, and of a second one."""
        return attribution_labels(self.run.id)

    @property
    def names(self) -> list[str]:
        """The knobs in which the winner differs from today's configuration."""
        today, won = self.base.candidate, self.winner.candidate
        return [n for n in sorted({*today, *won}) if (n in today, today.get(n)) != (n in won, won.get(n))]

    async def find(self) -> Attribution | None:
        """The attribution; None if there is nothing to attribute or the study does not ask."""
        if self.context.prepared.plan.attribution <= 0 or not self.names:
            return None
        room, only = self.launches_left(), self._known(self.names[0]) if len(self.names) == 1 else None
        if room < self._needed and (only is None or not only.kept):
            limits = self._limits()
            by = f"; the limit is {min(limits, key=lambda name: limits[name])}" if limits else ""
            left = f"it may make {many(max(0, room), 'launch')}, but it needs {self._needed}{by}"
            return self._record((), why=f"the run did not find out which knobs give the gain ({left})")
        gains = await self._gains()
        while (lost := self._lost(_dropped(gains))) is not None:
            gains = self._restored(gains, lost.last)
        if not _dropped(gains):
            return self._record(gains)
        found = await self._last(gains, self.own[0])
        if found.published or not found.last:
            return found
        fewer = self._restored(gains, found.last)
        if not _dropped(fewer) or self._room < self._needed:
            return found
        return await self._last(fewer, self.own[1])

    async def _gains(self) -> list[KnobGain]:
        """What each knob gives: first those that take no launch, then the others one after the other. A
        launch leaves out what gave nothing so far too. So the second of two knobs that do the same is kept,
        and the last launch that lost nothing is one of the reduced configuration.
        """
        known = {name: gain for name in self.names if (gain := self._known(name)) is not None}
        gains = self._together(list(known.values()))
        for name in sorted(set(self.names) - set(known), key=self._promise):
            gains.append(await self._asked_for(name, gains))
        return sorted(gains, key=lambda gain: gain.name)

    def _promise(self, name: str) -> tuple[float, str]:
        """Sorts knobs by how near to the winner the search came with today's value: a knob with which it came
        near most likely gives nothing, and is asked for first. The last needs no launch if no other pays.
        """
        trials = [t for t in self.context.store.trials(self.run.study_id) if not measures_again(t.directory)]
        today = [t for t in trials if t.candidate.get(name) == self.base.candidate.get(name)]
        return min((self._behind(t) for t in today), default=math.inf), name

    def _behind(self, trial: Trial) -> float:
        """By how much a trial is worse than the winner, in the objective that loses most, as searched."""
        if trial.measurement is None or self.winner.measurement is None:
            return math.inf
        won, then = self.winner.measurement.values, trial.measurement.values
        names = [name for name in self._asked.study.objectives if won.get(name) and name in then]
        return max((worse_by(name, won[name], then[name]) for name in names), default=math.inf)

    def _lost(self, names: Sequence[str]) -> Attribution | None:
        """The attribution of an earlier run that found the winner worse without these knobs."""
        store, reduced = self.context.store, self.without(names)
        numbers = {t.number for t in store.trials(self.run.study_id) if t.candidate == reduced}
        earlier = [store.attribution(r.id) for r in store.runs(self.run.study_id) if r.id != self.run.id]
        for found in earlier:
            if found is None or found.winner != self.winner.number or found.reduced not in numbers:
                continue
            if _is_worse(found.last):
                return found
        return None

    def _restored(self, gains: Sequence[KnobGain], last: Sequence[Difference]) -> list[KnobGain]:
        """What is left out after the `last` comparison did not show the reduced configuration to be as good.
        One launch without a knob may mislead more than the simulator, so the measured knobs are kept; where
        all or none were measured, the one that gave most.
        """
        dropped = [g for g in gains if not g.kept]
        asked = [g for g in dropped if g.how != "not asked"] or dropped
        suspects = [g for g in asked if g.how == "measured"]
        if len(suspects) in (0, len(dropped)):
            suspects = [max(asked, key=lambda g: _loss_of(g.gains))]
        return [_suspected(g, dropped, suspects, last) if g in suspects else g for g in gains]

    @property
    def search_s(self) -> float:
        """What this run's search used the node for."""
        return cost_of(self.context, self.run).search_s

    @property
    def earlier_search_s(self) -> float:
        """The same of the earlier run whose winner this run confirms, if that run did not ask itself."""
        store, earlier = self.context.store, self.winner.run_id
        if earlier == self.run.id or store.attribution(earlier) is not None:
            return 0.0
        said = store.conclusion(earlier)
        return said.cost.search_s if said is not None else 0.0

    @property
    def _needed(self) -> int:
        """Launches of the last comparison. The reduced configuration's own trial is one of them where no
        slice is held out.
        """
        return 2 * LEAST_ROUNDS + any(s.held_out for s in self.context.prepared.study.slices)

    def launches_left(self) -> int:
        """How many launches there may be, those made before an interruption included."""
        return math.floor(min(self._limits().values(), default=0))

    def _limits(self) -> dict[str, float]:
        """How many launches the share of the search, the run's own limit and its window leave."""
        made = self._made
        confirming = [each for each in launches_of(self.context, self.label) if each.whole_s is not None]
        if not (used_s := self._node_seconds(confirming)):
            return {}
        each, share = used_s / len(confirming), self.context.prepared.plan.attribution
        search_s = self.search_s + self.earlier_search_s
        limits = {
            f"the plan's attribution ({100 * share:g} % of the search's time)": search_s * share / each,
            "the number of launches of the run": made + self.context.budget.left,
        }
        if self.run.deadline is not None:
            left_s = (self.run.deadline - self.context.clock()).total_seconds()
            whole_s = fmean(each.whole_s or 0.0 for each in confirming)
            limits["the end of the run's window"] = made + left_s / whole_s
        return limits

    def _node_seconds(self, launches: Sequence[Launch]) -> float:
        return node_seconds(launches, gpus=self.said.cost.gpus > 0)

    @property
    def _made(self) -> int:
        return sum(len(launches_of(self.context, label)) for label in self.own)

    @property
    def _room(self) -> int:
        """How many more launches there is room for."""
        return self.launches_left() - self._made

    def without(self, names: Sequence[str]) -> Candidate:
        """The winner with some knobs as today's configuration has them."""
        today = self.base.candidate
        left = {name: value for name, value in self.winner.candidate.items() if name not in names}
        return Candidate({**left, **{name: today[name] for name in names if name in today}})

    def _known(self, name: str) -> KnobGain | None:
        """What a knob gives, where that takes no launch."""
        found, candidate = self._unasked(name), self.without([name])
        arm = self.said.arm(self.winner.number)
        if arm is not None and name not in arm.changed:
            return replace(found, kept=False, why="the engine uses this value by default")
        if candidate == self.base.candidate:
            return self._all_that_differs(found)
        if (broken := self.context.prepared.known_failure(candidate)) is not None:
            return replace(found, why=f"without it {broken}")
        return self._simulated(found, candidate)

    def _all_that_differs(self, gain: KnobGain) -> KnobGain:
        """A knob without which the winner is today's configuration: the confirmation measured that."""
        arm = self.said.arm(self.winner.number)
        gains = tuple(c for c in arm.changes if c.where == "confirm") if arm is not None else ()
        return replace(
            gain, how="measured", gains=gains, why="it is the only difference from today's configuration"
        )

    def _unasked(self, name: str) -> KnobGain:
        today, won = self.base.candidate, self.winner.candidate
        return KnobGain(name=name, before=today.get(name), value=won.get(name), how="not asked", kept=True)

    async def _asked_for(self, name: str, so_far: Sequence[KnobGain]) -> KnobGain:
        """What a knob gives by a launch without it and without what gives nothing so far, unless an earlier
        run knows or there is no room.
        """
        found, left = self._unasked(name), [*_dropped(so_far), name]
        if self.without(left) == self.base.candidate:
            return self._all_that_differs(found)
        if (lost := self._lost(left)) is not None:
            gains = tuple(_turned(d) for d in lost.last if d.where == "confirm")
            why = f"an earlier run measured the winner without {', '.join(left)}"
            return replace(found, how="measured", gains=gains, why=why)
        # The launch of the knob that was left out last is the reduced configuration's first.
        last = self._needed - any(g.how == "measured" and not g.kept for g in so_far)
        if self._used + 1 + last > self.launches_left():
            return replace(found, why="the time that the plan gives to attribution is used up")
        self._used += 1
        return await self._measured(found, self.without(left))

    def _simulated(self, gain: KnobGain, candidate: Candidate) -> KnobGain | None:
        """The simulator's answer; None if it is not sure."""
        if self.predict is None or not (gain.name in _seen() or gain.name == "preemption"):
            return None
        whole, less = self.predict([self.winner.candidate, candidate])
        if not less.feasible:
            return replace(gain, how="predicted", why="without it the simulator expects failures")
        gains = self._expected(less, whole)
        found = replace(gain, how="predicted", gains=gains, mechanism=mechanism(less.values, whole.values))
        if gains and all(abs(d.change or 0.0) < INERT for d in gains):
            return replace(found, kept=False, why="nothing changes without it")
        return found if _loss_of(gains) > SURE else None

    def _expected(self, less: Prediction, whole: Prediction) -> tuple[Difference, ...]:
        """The winner against the winner without a knob, as predicted."""
        found = []
        for name in self._asked.study.objectives:
            before, after = less.values.get(name), whole.values.get(name)
            if not before or after is None or not (math.isfinite(before) and math.isfinite(after)):
                continue
            change, reach = (after - before) / before, 2 * whole.spread.get(name, 0.1)
            low, high = sorted((after / before) ** (1 + off) - 1 for off in (-reach, reach))
            better = (change > 0) == is_maximized(name)
            found.append(Difference(
                metric=name, before=before, after=after, change=change, low=low, high=high, repeats=0,
                word="open" if abs(change) < INERT or reach >= 1 else "better" if better else "worse",
            ))  # fmt: skip
        return tuple(found)

    async def _measured(self, gain: KnobGain, candidate: Candidate) -> KnobGain:
        """One launch without the knob, beside the winner's launches of the confirmation."""
        trial = await self._trial(candidate, f"without {gain.name}", self.own[0])
        if trial.state is not TrialState.COMPLETE or trial.measurement is None:
            return replace(gain, how="measured", why=f"without it: {trial.reason}")
        own = replace(trial.measurement, purpose="confirm", repeat=1)
        rows = [m for m in kept(self.context, self.label, self.winner.id) if m.purpose == "confirm"]
        earlier = noise_before(self.context.store, self._asked)
        found = Repeats(
            base=trial, finalists=[self.winner], earlier=earlier, dropped={},
            measured={trial.number: [own], self.winner.number: rows},
        )  # fmt: skip
        gains = differences(self._asked, found, self.winner, spreads_of(self._asked, found))
        pays = _loss_of(gains) > WORTH
        told = ""
        if pays and self.predict is not None:
            whole, less = self.predict([self.winner.candidate, candidate])
            told = mechanism(less.values, whole.values)
        why = "" if pays else "nothing is worse without it"
        return replace(gain, how="measured", kept=pays, gains=gains, mechanism=told, why=why)

    async def _trial(self, candidate: Candidate, origin: str, label: str) -> Trial:
        """A trial of the study, launched under a label of the attribution, unless it was already."""
        store, study, folder = self.context.store, self.context.prepared.study, folder_of(label, 1, 0)
        trials = store.trials(study.id)
        for done in trials:
            ours = done.run_id == self.run.id and (done.directory or "").endswith(folder)
            ended = done.state in (TrialState.COMPLETE, TrialState.INFEASIBLE)
            if ours and ended and done.candidate == candidate:
                return done
        number = next_number(trials)
        trial = store.start_trial(
            study_id=study.id, run_id=self.run.id, candidate=candidate, number=number, attempt=0, seed=0,
            origin=origin, now=self.context.clock(), directory=str(self.context.directory(number, folder)),
        )  # fmt: skip
        return await perform(self.context, trial, [], MeasureOptions(folder=folder))

    def _together(self, gains: Sequence[KnobGain]) -> list[KnobGain]:
        """Knobs that do nothing alone may do something together: while the simulator expects the reduced
        configuration to be worse, the knob whose return helps most is kept.
        """
        found = {g.name: g for g in gains}
        while self.predict is not None:
            dropped = [name for name, g in found.items() if not g.kept]
            whole = self.predict([self.winner.candidate])[0]
            if not dropped or self._loss(whole, self.without(dropped)) <= PAYS / 2:
                break
            back = min(dropped, key=lambda n: self._loss(whole, self.without([d for d in dropped if d != n])))
            others = ", ".join(d for d in dropped if d != back)
            found[back] = replace(
                found[back], kept=True, why=f"it gives a part of the gain if {others} is left out"
            )
        return list(found.values())

    def _loss(self, whole: Prediction, candidate: Candidate) -> float:
        assert self.predict is not None
        less = self.predict([candidate])[0]
        if not less.feasible:
            return math.inf
        return _loss_of(self._expected(less, whole))

    async def _last(self, gains: Sequence[KnobGain], label: str) -> Attribution:
        """The reduced configuration beside the winner in turns; it is published only if it is not worse."""
        trial = await self._trial(self.without(_dropped(gains)), "reduced", label)
        if trial.state is not TrialState.COMPLETE or trial.measurement is None:
            return self._record(gains, reduced=trial, why=f"the reduced configuration failed: {trial.reason}")
        if not any(s.held_out for s in self.context.prepared.study.slices):
            again = replace(trial.measurement, purpose="confirm", repeat=1)
            self.context.store.add_measurement(trial.id, again)
        rounds = Rounds(context=self.context, run=self.run, label=label, dropped={}, what="last comparison")
        arms = [self.winner, trial]

        def left() -> list[Trial]:
            last = self._differences(rounds, arms)
            if _is_worse(last) or _worst(last) <= LEAST:
                return []
            return arms if self._room >= len(arms) else [trial][: self._room]

        await rounds.measure(arms, least=LEAST_ROUNDS, most=MOST_ROUNDS, left=left)
        last = self._differences(rounds, arms)
        why = ""
        if _is_worse(last):
            why = WORSE
        elif not last or _worst(last) > PAYS:
            why = OPEN
        return self._record(gains, reduced=trial, last=last, published=not why, why=why)

    def _differences(self, rounds: Rounds, arms: Sequence[Trial]) -> tuple[Difference, ...]:
        """The reduced configuration against the winner, whose launches of the confirmation count too; only
        launches in turns are paired.
        """
        measured, dropped = rounds.measured(arms)
        earlier = noise_before(self.context.store, self._asked, without=rounds.label)
        found = Repeats(base=arms[0], finalists=arms[1:], measured=measured, dropped=dropped, earlier=earlier)
        spreads, number = spreads_of(self._asked, found), self.winner.number
        if number in measured:
            more = [*measured[number], *kept(self.context, self.label, self.winner.id)]
            found = replace(found, measured={**measured, number: more})
        return differences(self._asked, found, arms[1], spreads)

    def _record(
        self, gains: Sequence[KnobGain], *, reduced: Trial | None = None, last: Sequence[Difference] = (),
        published: bool = False, why: str = "",
    ) -> Attribution:  # fmt: skip
        if not published:
            gains = [g if g.kept else replace(g, kept=True, why=f"{g.why}; {why}") for g in gains]
        own = [each for label in self.own for each in launches_of(self.context, label)]
        found = Attribution(
            run_id=self.run.id, study_id=self.run.study_id, at=self.context.clock(),
            winner=self.winner.number, reduced=reduced.number if reduced else None, published=published,
            knobs=tuple(gains), last=tuple(last), seconds=self._node_seconds(own),
            search_s=self.search_s, earlier_search_s=self.earlier_search_s,
        )  # fmt: skip
        return replace(found, sentence=sentence_of(found, why))


def _dropped(gains: Sequence[KnobGain]) -> list[str]:
    return [g.name for g in gains if not g.kept]


def _worst(last: Sequence[Difference]) -> float:
    """By how much the reduced configuration is worse, in the metric that loses most, as measured."""
    ours = [d for d in last if d.where == "confirm" and d.before and d.after is not None]
    return max((worse_by(d.metric, d.before or 0.0, d.after or 0.0) for d in ours), default=0.0)


def _is_worse(last: Sequence[Difference]) -> bool:
    return any(d.word == "worse" for d in last)


def _suspected(
    gain: KnobGain, dropped: Sequence[KnobGain], suspects: Sequence[KnobGain], last: Sequence[Difference]
) -> KnobGain:
    """A knob that is kept, because the winner without all that was left out was not shown to be as good. If
    it was worse, and no other knob is suspected, that is what the knob gives.
    """
    alone = gain.why
    if gain.how == "measured":
        alone = "one launch without it was not worse"
    elif gain.how == "predicted":
        alone = "the simulator expects no gain from it"
    if not _is_worse(last):
        why = f"{alone}, but it is not certain that the reduced configuration is as good"
        return replace(gain, kept=True, why=why)
    others = ", ".join(g.name for g in dropped if g.name != gain.name)
    why = f"{alone}, but the winner without it{others and ' and '}{others} was worse"
    if len(suspects) > 1:
        return replace(gain, kept=True, why=why)
    gains = tuple(_turned(d) for d in last if d.where == "confirm")
    return replace(gain, kept=True, how="measured", gains=gains, why=why)


def _turned(found: Difference) -> Difference:
    """The same difference the other way round: what the winner gives against a reduced configuration."""

    def turned(change: float | None) -> float | None:
        return None if change is None or change <= -1 else 1 / (1 + change) - 1

    words: dict[Word, Word] = {"better": "worse", "worse": "better", "open": "open"}
    return replace(
        found, before=found.after, after=found.before, change=turned(found.change), within=None,
        low=-1.0 if found.high is None else turned(found.high), high=turned(found.low),
        word=words[found.word],
    )  # fmt: skip


def _loss_of(changes: Sequence[Difference]) -> float:
    """By how much the winner without a knob is worse, in the objective that loses most."""
    return max((worse_by(d.metric, d.after, d.before) for d in changes if d.after and d.before), default=0.0)


def attribution_labels(run_id: str) -> tuple[str, str]:
    """The labels of the launches with which a run attributes its winner (`records.ATTRIBUTED`)."""
    first, second = ATTRIBUTED
    return f"{label_of(run_id)}{first}", f"{label_of(run_id)}{second}"


def _seen() -> frozenset[str]:
    """The knobs that the simulator acts on."""
    return frozenset(plain_arguments()) - frozenset(UNSEEN)


async def attribute(work: Attributing) -> tuple[Attribution | None, str]:
    """(the attribution, why there is none). A failing launch ends it, and leaves the winner as it is."""
    try:
        return await work.find(), ""
    except EngineError as error:
        return None, f"the run could not find out which knobs give the gain: {error}"
