"""The confirmation: finalists and baseline measured again in turns, also on the held-out slice. Each round
launches every arm once, in a fresh process, on the same requests.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Literal

from tuner.adapters import adapter_of
from tuner.conclusions import Conclusion, Judgement, RunCost
from tuner.errors import Aborted, Infeasible
from tuner.history.store import Store
from tuner.measures import many, trials_named
from tuner.records import JSON, Launch, Measurement, Run, Trial, TrialState
from tuner.search import trial_view
from tuner.tuning.attempt import errors_of, failing, retries_of, unlike
from tuner.tuning.concluding import (
    PLACES,
    Repeats,
    Spreads,
    WinnerCriteria,
    baseline_of,
    conclude,
    is_open,
    noise_before,
    nothing_served,
    unmeasured,
)
from tuner.tuning.context import (
    ABORTED_RETRIES,
    Pass,
    RunContext,
    RunEstimate,
    RunEvent,
    numbers_of,
    usual_launch_s,
    usual_replays_s,
)
from tuner.tuning.finalists import finalists, left_out
from tuner.tuning.study import Prepared
from tuner.tuning.trial import launch
from tuner.tuning.winner import policy

# Rounds that a comparison is worth where the launches that a run may make are too few for the plan's.
LEAST_ROUNDS = 2

# Why no further round is measured: it would not help, or a limit is reached.
End = Literal["decided", "rounds", "window", "launches"]
ENDS: Mapping[End, str] = {
    "decided": "another round cannot show more",
    "rounds": "all {rounds} rounds are used",
    "window": "the window has no time for another round",
    "launches": "too few launches of the run are left for another round",
}


@dataclass(slots=True, kw_only=True)
class Rounds:
    """The rounds of some arms; an arm is a trial. A round launches each arm once, every other round in
    reverse order, so that a machine that drifts does no arm a favour.

    `label` names the launches' folders: what was measured before an interruption is used again. `dropped`
    tells why an arm left. `setups` maps a trial number to its engine, if that is not the study's.
    """

    context: RunContext
    run: Run
    label: str
    dropped: dict[int, str]
    setups: dict[int, Prepared] = field(default_factory=dict)
    what: str = "confirmation"

    async def measure(
        self, arms: Sequence[Trial], *, least: int, most: int, left: Callable[[], Sequence[Trial]]
    ) -> End:
        """Launch the arms in turns, `least` times each, then those that are `left` until there are none,
        `most` rounds are done, or another round does not fit.
        """
        for repeat in range(1, most + 1):
            if repeat > least and not (arms := left()):
                return "decided"
            if repeat > least and not self._fits(len(arms)):
                return "window"
            wanted = [t for t in arms if t.number not in self.dropped and not self.has(t, repeat)]
            if repeat > LEAST_ROUNDS and self.context.budget.left < len(wanted):
                return "launches"
            try:
                for trial in wanted if repeat % 2 else reversed(wanted):
                    self._tell(arms, trial, repeat, (least, most))
                    await self._again(trial, repeat)
            except Aborted as error:  # a round that was added may stay half done: those before it are whole
                if repeat > least and error.cause == "budget":
                    return "launches"
                raise
        return "rounds" if left() else "decided"

    def _fits(self, arms: int) -> bool:
        """Whether another round ends before the window does."""
        if self.run.deadline is None:
            return True
        spans = [
            (each.ended_at - each.started_at).total_seconds()
            for each in launches_of(self.context, self.label)
            if each.ended_at is not None
        ]
        needed = arms * fmean(spans) if spans else 0.0
        return (self.run.deadline - self.context.clock()).total_seconds() >= needed

    async def _again(self, trial: Trial, repeat: int) -> None:
        context = replace(self.context, prepared=self.setups.get(trial.number, self.context.prepared))
        study = context.prepared.study
        passes = [Pass(slices=study.searched_slices, purpose="confirm", repeat=repeat)]
        if held_out := tuple(s for s in study.slices if s.held_out):
            passes.append(Pass(slices=held_out, purpose="held_out", repeat=repeat))
        for attempt in range(ABORTED_RETRIES + 1):
            folder = context.directory(trial.number, folder_of(self.label, repeat, attempt))
            try:
                launched = await launch(context, trial, passes, folder)
            except Infeasible as error:
                if attempt < retries_of(error):
                    continue
                self.drop(trial, str(error))
                return
            except Aborted:
                if attempt == ABORTED_RETRIES:
                    raise
                continue
            if said := unlike(trial.candidate, launched.launch.effective):
                self.drop(trial, said)
                return
            for measurement in launched.measurements:
                context.store.add_measurement(trial.id, measurement)
            return

    def drop(self, trial: Trial, why: str) -> None:
        """Leave an arm out of all further rounds."""
        self.dropped[trial.number] = why
        self.context.tell(RunEvent(kind="note", text=f"dropped from the {self.what}: {why}", trial=trial))

    def _tell(self, arms: Sequence[Trial], trial: Trial, repeat: int, bounds: tuple[int, int]) -> None:
        least, most = bounds
        repeats = [self.repeats(each) for each in arms]
        rounds = max(repeat, self.reach(repeats, least))
        done = sum(r in each for each in repeats for r in range(1, rounds + 1))
        more = f" (added, because the result is open; at most {most})" if repeat > least else ""
        total = len(arms) * rounds
        text = f"{self.what}: launch {done + 1} of {total}, repeat {repeat} of {rounds}{more}"
        event = RunEvent(kind="confirm", text=text, stage=self.what, done=done, total=total, trial=trial)
        self.context.tell(event)

    def reach(self, repeats: Sequence[Collection[int]], least: int) -> int:
        """How many of the `least` rounds the run's launches are enough for, if these repeats of each arm are
        measured already.
        """
        made = sum(r in each for each in repeats for r in range(1, least + 1))
        return math.floor(min(least, (made + self.context.budget.left) // len(repeats)))

    def done(self, arms: Sequence[Trial]) -> int:
        """How many rounds are measured of every arm."""
        repeats, repeat = [self.repeats(trial) for trial in arms], 0
        while arms and all(repeat + 1 in each for each in repeats):
            repeat += 1
        return repeat

    def measured(self, arms: Sequence[Trial]) -> tuple[dict[int, Sequence[Measurement]], dict[int, str]]:
        """(what was measured so far by trial number, why the others left): an arm of which too many requests
        failed did not serve the traffic.
        """
        found, dropped = dict[int, Sequence[Measurement]](), dict(self.dropped)
        for trial in arms:
            rows = kept(self.context, self.label, trial.id)
            reason = next((said for m in rows if (said := not_serving(m))), None)
            if reason is not None:
                dropped.setdefault(trial.number, reason)
            if rows and trial.number not in dropped:
                found[trial.number] = rows
        return found, dropped

    def has(self, trial: Trial, repeat: int) -> bool:
        """Whether one repeat of an arm is measured."""
        return repeat in self.repeats(trial)

    def repeats(self, trial: Trial) -> set[int]:
        """The repeats of an arm that are measured, on every kind of slice that the study has."""
        wanted = PLACES if any(s.held_out for s in self.context.prepared.study.slices) else PLACES[:1]
        found = {(m.repeat, m.purpose) for m in kept(self.context, self.label, trial.id)}
        return {repeat for repeat, _ in found if all((repeat, each) in found for each in wanted)}


def not_serving(measurement: Measurement) -> str | None:
    """Why a repeat does not serve the traffic, and where; None if it does."""
    if failing(measurement.values) is None:
        return None
    said = failing(measurement.values, errors_of(measurement))
    return f"on the held-out slice {said}" if said and measurement.purpose == "held_out" else said


def folder_of(label: str, repeat: int, attempt: int) -> str:
    """The end of the name of a launch's folder (`concluding.noise_before` reads it)."""
    return f"confirm-{label}-{repeat}-{attempt}"


def label_of(run_id: str) -> str:
    """The label of the rounds of a run; later runs that finish them keep the label."""
    return run_id[:8]


def launches_of(context: RunContext, label: str) -> list[Launch]:
    """The launches of some rounds."""
    return [each for each in context.launches() if each.directory and f"-confirm-{label}-" in each.directory]


def kept(context: RunContext, label: str, trial_id: int) -> list[Measurement]:
    """What some rounds measured of a trial, by repeat; of a repeat that was done again, the last."""
    ours = {each.id for each in launches_of(context, label)}
    found = [m for m in context.store.trial(trial_id).measurements if m.purpose in PLACES]
    last = {(m.repeat, m.purpose): m for m in found if m.launch_id in ours}
    return [last[key] for key in sorted(last)]


def cost_of(context: RunContext, run: Run) -> RunCost:
    """What a run's launches used the node for. The run is the study's newest."""
    facts = context.prepared.facts
    real = adapter_of(facts.kind).uses_gpus(facts.platform)
    made = [each for each in context.launches() if each.started_at >= run.started_at]
    return RunCost.of(made, gpus=context.gpus_held(context.prepared.baseline) if real else 0)


def asked_of(prepared: Prepared) -> WinnerCriteria:
    """The study's rules for its winner."""
    return WinnerCriteria(
        study=prepared.study, plan=prepared.plan, policy=policy(prepared), not_worse=prepared.file.not_worse
    )


def repeats_for_ten_percent(prepared: Prepared, store: Store | None) -> dict[str, JSON]:
    """By metric: how often each configuration is to be launched on this node to show a difference of 10 %, by
    what earlier confirmations saw (None: more than a hundred times). Empty while there were none.
    """
    asked = asked_of(prepared)
    known = noise_before(store, asked) if store is not None else {}
    return {
        name: asked.repeats_for_ten_percent(spread)
        for name in asked.metrics
        if (spread := known.get((name, "confirm"))) is not None and spread.freedom
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A confirmation before it is begun: `rounds` launches of each of the finalists and, unless it did not
    serve the traffic, the `baseline`, up to `most` while the answer is open; each takes about `launch_s`.
    """

    finalists: int
    baseline: bool
    rounds: int
    most: int
    launch_s: float

    @property
    def arms(self) -> int:
        """The launches of a round."""
        return self.finalists + self.baseline

    @property
    def round_s(self) -> float:
        """About how long a round takes."""
        return self.arms * self.launch_s

    @property
    def seconds(self) -> float:
        """About how long it takes where the first rounds decide."""
        return self.rounds * self.round_s

    def within(self, launches: float) -> "Planned":
        """The same by at most so many launches: a run confirms fewer finalists if it cannot launch each arm
        `LEAST_ROUNDS` times, and then makes fewer rounds. It makes none if even one finalist is too many.
        """
        least, count = min(LEAST_ROUNDS, self.rounds), self.finalists
        if (1 + self.baseline) * least > launches:
            return replace(self, finalists=0, rounds=0, most=0)
        while count > 1 and (count + self.baseline) * least > launches:
            count -= 1
        enough = math.floor(min(self.most, launches // (count + self.baseline)))
        return replace(self, finalists=count, rounds=min(self.rounds, enough), most=enough)


def estimate_of(context: RunContext, run: Run) -> RunEstimate | None:
    """How long the parts of a run take, by what is known now; None on a virtual clock. A confirmation that
    comes before the search, or is done, is not counted again, unless there are other finalists by now.
    """
    prepared = context.prepared
    if prepared.file.engine.clock == "virtual":
        return None
    known, plan = expected(prepared, context.store)
    window = None if run.deadline is None else (run.deadline - context.clock()).total_seconds()
    known = replace(known, window_s=window)
    if prepared.comparison is not None:
        return known
    going = unfinished(context, run)
    if going is None or not going.left:
        return replace(known, confirm_s=after_search_s(context, run, going, plan))
    search = 0.0
    if going.label != label_of(run.id) and not numbers_of(context.store.trials(run.study_id), run.id):
        search = math.inf if run.trials_limit is None else run.trials_limit * known.trial_s
    return replace(known, confirm_s=going.left * plan.launch_s, search_s=search)


def after_search_s(context: RunContext, run: Run, going: "Confirmation | None", plan: Planned) -> float:
    """About how long the confirmation after the search takes. 0: launches for it are not left, or the one
    that was finished before the search (`going`) has the finalists by now.
    """
    left, done = context.budget.left, set[int]()
    if going is not None and not going.left:
        done = {t.number for t in going.chosen}
    chosen = finalists(context.prepared, context.store.trials(run.study_id), run.id) if done else []
    same = done and {t.number for t in chosen} <= done
    none = same or left < min(LEAST_ROUNDS, plan.rounds) * (1 + plan.baseline)
    return 0.0 if none else plan.within(left).seconds


def expected(prepared: Prepared, store: Store | None) -> tuple[RunEstimate, Planned]:
    """(how long the parts of a run take, the planned confirmation), by what launches took so far."""
    launch_s, (searched, every) = usual_launch_s(store, prepared), usual_replays_s(store, prepared)
    bases = [t for t in store.trials(prepared.study.id) if t.is_baseline] if store else []
    failed = trial_view.baseline_of(bases) is None and any(t.state is TrialState.INFEASIBLE for t in bases)
    plan = Planned(
        finalists=prepared.plan.finalists, baseline=not failed, rounds=prepared.plan.repeats,
        most=prepared.plan.most, launch_s=every + launch_s,
    )  # fmt: skip
    estimate = RunEstimate(
        trial_s=searched + launch_s, confirm_s=plan.seconds, confirm_launch_s=plan.launch_s
    )
    return estimate, plan


@dataclass(slots=True, kw_only=True)
class Confirmation:
    """The confirmation of some finalists. `label` names its launches' folders: what was measured before it
    was interrupted is used again. `dropped` tells why a finalist (or the baseline) left it.
    """

    context: RunContext
    run: Run
    chosen: Sequence[Trial]
    label: str
    dropped: dict[int, str] = field(default_factory=dict)
    rounds: Rounds = field(init=False)
    _earlier: Spreads | None = None

    def __post_init__(self) -> None:
        self.rounds = Rounds(context=self.context, run=self.run, label=self.label, dropped=self.dropped)

    @property
    def base(self) -> Trial | None:
        """Today's configuration as the search measured it; None if it did not serve."""
        return trial_view.baseline_of(self.context.store.trials(self.run.study_id))

    @property
    def arms(self) -> list[Trial]:
        """What is measured: the baseline, where it served, and the finalists."""
        return [*([base] if (base := self.base) else []), *self.chosen]

    def so_far(self) -> Repeats:
        """What was measured so far, without trials of which too many requests failed."""
        trials = self.context.store.trials(self.run.study_id)
        measured, dropped = self.rounds.measured(self.arms)
        if self._earlier is None:
            asked = asked_of(self.context.prepared)
            self._earlier = noise_before(self.context.store, asked, without=self.label)
        return Repeats(
            base=trial_view.baseline_of(trials) or baseline_of(trials), finalists=self.chosen,
            measured=measured, dropped=dropped, earlier=self._earlier,
        )  # fmt: skip

    async def measure(self) -> None:
        """Launch baseline and finalists in turns until the answer is clear, the plan's limit is reached, or
        another round does not fit into the window.
        """
        asked, plan = asked_of(self.context.prepared), self.context.prepared.plan

        def left() -> list[Trial]:
            return self.arms if is_open(asked, self.so_far()) else []

        end = await self.rounds.measure(self.arms, least=plan.repeats, most=plan.most, left=left)
        if end in ("window", "launches"):
            done = many(self.rounds.done(self.arms), "repeat")
            self.context.tell(RunEvent(kind="note", text=f"the confirmation ends after {done}: {ENDS[end]}"))

    @property
    def missing(self) -> int:
        """The fewest launches with which it is done, or begins."""
        return _missing(self._repeats, min(LEAST_ROUNDS, self.context.prepared.plan.repeats))

    @property
    def left(self) -> int:
        """The launches that it still makes if no repeat is added, by the launches that the run may make."""
        wanted, repeats = self.context.prepared.plan.repeats, self._repeats
        least = min(LEAST_ROUNDS, wanted)
        return _missing(repeats, max(least, self.rounds.reach(repeats, wanted)) if repeats else least)

    @property
    def _repeats(self) -> list[set[int]]:
        return [self.rounds.repeats(trial) for trial in self.arms]

    @property
    def task(self) -> str:
        """What is to be done first, as the predicate of a sentence about the run."""
        names = trials_named([t.label for t in self.chosen])
        if launches_of(self.context, self.label):
            return f"first finishes the interrupted confirmation of {names}"
        return f"first confirms {names}; this confirmation has not begun yet"

    def conclusion(self) -> Conclusion:
        """The conclusion of a confirmation that was measured to its end."""
        asked, now = asked_of(self.context.prepared), self.context.clock()
        cost = cost_of(self.context, self.run)
        return conclude(asked, self.run, self.so_far(), cost, now)


def _missing(repeats: Sequence[Collection[int]], rounds: int) -> int:
    """How many launches so many rounds need, if these repeats of each arm are measured already."""
    return sum(r not in each for each in repeats for r in range(1, rounds + 1))


def without_finalists(context: RunContext, run: Run) -> Conclusion:
    """The conclusion where nothing is left to be measured again."""
    prepared, trials = context.prepared, context.store.trials(run.study_id)
    outcome, sentence = Judgement.NOTHING_SERVED, nothing_served(trials)
    if reasons := left_out(prepared, trials):
        outcome = Judgement.BASELINE_STAYS
        sentence = f"Today's configuration stays, because no trial is left as a finalist. {' '.join(reasons)}"
    return unmeasured(
        asked_of(prepared), run, trials, outcome=outcome, sentence=sentence, cost=cost_of(context, run),
        now=context.clock(),
    )  # fmt: skip


def begun(context: RunContext, label: str, run_id: str) -> list[Trial]:
    """The finalists of a confirmation that a run began, by its launches, and those that it had not launched
    yet; empty if it launched nothing.
    """
    folders = [each.directory or "" for each in launches_of(context, label)]
    if not folders:
        return []
    numbers = {int(folder.rsplit("/", 1)[-1].split("-", 1)[0]) for folder in folders}
    trials = context.store.trials(context.prepared.study.id)
    chosen = [t for t in trial_view.latest(trials) if t.number in numbers and not t.is_baseline]
    more = [t for t in finalists(context.prepared, trials, run_id) if t.number not in numbers]
    return [*chosen, *more][: max(context.prepared.plan.finalists, len(chosen))]


def unfinished(context: RunContext, run: Run) -> Confirmation | None:
    """The confirmation that a run finishes before its search: its own, if it was interrupted there, or one
    that earlier runs left. The run may have measured it by now. None: there is none.
    """
    own = label_of(run.id)
    found = (own, ours) if (ours := begun(context, own, run.id)) else pending(context)
    if found is None:
        return None
    return Confirmation(context=context, run=run, label=found[0], chosen=found[1])


def pending(context: RunContext) -> tuple[str, list[Trial]] | None:
    """The confirmation that earlier runs of the study could not end: (its label, its finalists); None if
    nothing is left to be done. A run that lost its process names no finalists, but its launches do. Runs that
    began no confirmation leave the one before them to be done.
    """
    label, numbers, study = None, set[int](), context.prepared.study.id
    said = {each.run_id: each for each in context.store.conclusions(study)}
    for run in context.store.runs(study):
        found = said.get(run.id)
        if found is None or (found.outcome is Judgement.NOTHING_SERVED and not found.finalists):
            continue
        if found.outcome is not Judgement.NOT_CONFIRMED:
            break
        own = label_of(run.id)
        if launches_of(context, f"{own}.2"):
            own = f"{own}.2"
        ours = {arm.trial for arm in found.finalists} or {t.number for t in begun(context, own, run.id)}
        if ours and numbers and ours != numbers:
            break
        if ours:
            label, numbers = own, ours
    if label is None:
        return None
    left = [t for t in trial_view.latest(context.store.trials(study)) if t.number in numbers]
    return (label, left) if left else None
