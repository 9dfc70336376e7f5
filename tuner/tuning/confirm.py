"""The confirmation: finalists and baseline measured again in turns, also on the held-out slice. Each round
launches every arm once, in a fresh process, on the same requests.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Literal

from tuner.adapters import adapter_of
from tuner.conclusions import Conclusion, Judgement, RunCost
from tuner.errors import Aborted, Infeasible
from tuner.history.store import Store
from tuner.knobs.arguments import gpus_held
from tuner.records import JSON, Launch, Measurement, Run, Trial
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
    replays_s,
    usual_launch_s,
)
from tuner.tuning.finalists import left_out
from tuner.tuning.study import Prepared
from tuner.tuning.trial import launch
from tuner.tuning.winner import policy

# Rounds that a comparison is worth where the launches that a run may make are too few for the plan's.
LEAST_ROUNDS = 2

# Why no further round is measured: the answer is clear, or a limit is reached.
End = Literal["decided", "rounds", "window", "launches"]


@dataclass(slots=True, kw_only=True)
class Rounds:
    """The rounds of some arms; an arm is a trial. A round launches each arm once, every other round in
    reverse order, so that a machine that drifts does no arm a favour.

    `label` names the launches' folders: what was measured before an interruption is used again. `dropped`
    tells why an arm left. `setups` maps a trial number to its engine, where that is not the study's.
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
        rounds = max(least, repeat)
        done = sum(self.has(t, r) for t in arms for r in range(1, rounds + 1))
        more = f" (added, because the answer is open; at most {most})" if repeat > least else ""
        total = len(arms) * rounds
        text = f"{self.what}: launch {done + 1} of {total}, repeat {repeat} of {rounds}{more}"
        self.context.tell(RunEvent(kind="confirm", text=text, done=done, total=total, trial=trial))

    def done(self, arms: Sequence[Trial]) -> int:
        """How many rounds are measured of every arm."""
        repeat = 0
        while arms and all(self.has(t, repeat + 1) for t in arms):
            repeat += 1
        return repeat

    def measured(self, arms: Sequence[Trial]) -> tuple[dict[int, Sequence[Measurement]], dict[int, str]]:
        """(what was measured so far by trial number, why the others left): an arm of which too many requests
        failed did not serve the traffic.
        """
        found, dropped = dict[int, Sequence[Measurement]](), dict(self.dropped)
        for trial in arms:
            rows = kept(self.context, self.label, trial.id)
            reason = next((said for m in rows if (said := failing(m.values, errors_of(m)))), None)
            if reason is not None:
                dropped.setdefault(trial.number, reason)
            if rows and trial.number not in dropped:
                found[trial.number] = rows
        return found, dropped

    def has(self, trial: Trial, repeat: int) -> bool:
        """Whether one repeat of an arm is measured, on every kind of slice that the study has."""
        wanted = PLACES if any(s.held_out for s in self.context.prepared.study.slices) else PLACES[:1]
        found = kept(self.context, self.label, trial.id)
        return {m.purpose for m in found if m.repeat == repeat} >= set(wanted)


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


def is_searched(trial: Trial) -> bool:
    """Whether a trial is one of the search: those of an attribution lie in folders of rounds."""
    return "-confirm-" not in (trial.directory or "")


def cost_of(context: RunContext, run: Run, label: str | None = None) -> RunCost:
    """What a run's search and some rounds held the node for (default: its confirmation)."""
    facts = context.prepared.facts
    real = adapter_of(facts.kind).uses_gpus(facts.platform)
    ours = [t for t in context.store.trials(run.study_id) if t.run_id == run.id and is_searched(t)]
    search = sum(t.gpu_seconds / (1 if real else context.gpus_held(t.candidate)) for t in ours)
    spans = [
        max(0.0, (each.ended_at - each.started_at).total_seconds()) * (gpus_held(each.argv) if real else 1)
        for each in launches_of(context, label or label_of(run.id))
        if each.ended_at is not None
    ]
    return RunCost(
        search_s=round(search, 1),
        confirm_s=round(sum(spans), 1),
        gpus=context.gpus_held(context.prepared.baseline) if real else 0,
    )


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
    """A confirmation before it is begun: `rounds` launches of each of the baseline and the finalists, up to
    `most` while the answer is open; `round_s` is about how long each of these rounds takes.
    """

    arms: int
    rounds: int
    most: int
    round_s: float

    @property
    def seconds(self) -> float:
        """About how long it takes where the first rounds decide."""
        return self.rounds * self.round_s


def planned(prepared: Prepared, launch_s: float, finalists: int | None = None) -> Planned:
    """The confirmation of so many finalists (default: the plan's), by the seconds of a launch."""
    plan = prepared.plan
    arms = 1 + (plan.finalists if finalists is None else finalists)
    each = replays_s(prepared, prepared.study.slices) + launch_s
    return Planned(arms=arms, rounds=plan.repeats, most=plan.most, round_s=arms * each)


def estimate_of(context: RunContext, run: Run) -> RunEstimate | None:
    """How long the parts of a run take, by what is known now; None on a virtual clock."""
    if context.prepared.file.engine.clock == "virtual":
        return None
    window = None if run.deadline is None else (run.deadline - context.clock()).total_seconds()
    return replace(expected(context.prepared, context.store)[0], window_s=window)


def expected(prepared: Prepared, store: Store | None) -> tuple[RunEstimate, Planned]:
    """(how long the parts of a run take, the planned confirmation), by what launches took so far."""
    launch_s = usual_launch_s(store, prepared)
    plan = planned(prepared, launch_s)
    estimate = RunEstimate(
        trial_s=replays_s(prepared, prepared.study.searched_slices) + launch_s,
        confirm_s=plan.seconds,
        confirm_launch_s=plan.round_s / plan.arms,
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
    _earlier: Spreads = field(init=False)
    rounds: Rounds = field(init=False)

    def __post_init__(self) -> None:
        asked = asked_of(self.context.prepared)
        self.rounds = Rounds(context=self.context, run=self.run, label=self.label, dropped=self.dropped)
        self._earlier = noise_before(self.context.store, asked, without=self.label)

    @property
    def base(self) -> Trial | None:
        """Today's configuration as the search measured it first; None where it did not serve."""
        return trial_view.baseline_of(self.context.store.trials(self.run.study_id))

    @property
    def arms(self) -> list[Trial]:
        """What is measured: the baseline, where it served, and the finalists."""
        return [*([base] if (base := self.base) else []), *self.chosen]

    def so_far(self) -> Repeats:
        """What was measured so far, without trials of which too many requests failed."""
        trials = self.context.store.trials(self.run.study_id)
        measured, dropped = self.rounds.measured(self.arms)
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

        await self.rounds.measure(self.arms, least=plan.repeats, most=plan.most, left=left)

    @property
    def missing(self) -> int:
        """The fewest launches with which it is done, or begins."""
        least = min(LEAST_ROUNDS, self.context.prepared.plan.repeats)
        return sum(not self.rounds.has(t, r) for t in self.arms for r in range(1, least + 1))

    def conclusion(self) -> Conclusion:
        """The conclusion of a confirmation that was measured to its end."""
        asked, now = asked_of(self.context.prepared), self.context.clock()
        cost = cost_of(self.context, self.run, self.label)
        return conclude(asked, self.run, self.so_far(), cost, now)


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


def pending(context: RunContext) -> tuple[str, list[Trial]] | None:
    """The confirmation that earlier runs of the study could not end: (its label, its finalists); None where
    the last conclusion leaves nothing to be done.
    """
    label, numbers = None, list[int]()
    for said in reversed(context.store.conclusions(context.prepared.study.id)):
        ours = [arm.trial for arm in said.finalists]
        if said.outcome is not Judgement.NOT_CONFIRMED or not ours or (numbers and ours != numbers):
            break
        label, numbers = label_of(said.run_id), ours
        if launches_of(context, f"{label}.2"):
            label = f"{label}.2"
    if label is None:
        return None
    latest = {t.number: t for t in trial_view.latest(context.store.trials(context.prepared.study.id))}
    return label, [latest[n] for n in numbers if n in latest]
