"""The confirmation: finalists and baseline measured again in turns, each time in a fresh process, also on the
held-out slice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from tuner.conclusions import Conclusion, Judgement
from tuner.history.store import Store
from tuner.records import JSON, Launch, Run, Trial
from tuner.search import trial_view
from tuner.search.compare import repeats_needed
from tuner.tuning.concluding import (
    LEVEL,
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
from tuner.tuning.context import RunContext, ready_of
from tuner.tuning.finalists import left_out
from tuner.tuning.next_trial import LAUNCH_S, SETTLE_S, policy
from tuner.tuning.rounds import Rounds, cost_of, label_of, launches_of
from tuner.tuning.study import Prepared


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
    alpha, arms = (1 - LEVEL) / asked.family(prepared.plan.finalists), 1 + prepared.plan.finalists
    return {
        name: repeats_needed(spread, alpha=alpha, arms=arms, earlier=spread.freedom)
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


def planned(prepared: Prepared, launches: Sequence[Launch], finalists: int | None = None) -> Planned:
    """The confirmation of so many finalists (default: the plan's), by how long engines took to be ready."""
    plan, ready = prepared.plan, ready_of(launches)
    slices = prepared.study.slices
    replay = sum(s.duration_s for s in slices) / prepared.file.speed
    replay += len(slices) * (plan.load_warmup_s + min(SETTLE_S, plan.warmup_limit_s + plan.tail_limit_s))
    arms = 1 + (plan.finalists if finalists is None else finalists)
    each = replay + (median(ready) if ready else LAUNCH_S)
    return Planned(arms=arms, rounds=plan.repeats, most=plan.most, round_s=arms * each)


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
    _rounds: Rounds = field(init=False)

    def __post_init__(self) -> None:
        asked = asked_of(self.context.prepared)
        self._rounds = Rounds(context=self.context, run=self.run, label=self.label, dropped=self.dropped)
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
        measured, dropped = self._rounds.measured(self.arms)
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

        await self._rounds.measure(self.arms, least=plan.repeats, most=plan.most, left=left)

    def rounds_done(self) -> int:
        """How many repeats are measured of the baseline and every finalist."""
        return self._rounds.done(self.arms)

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
        sentence = f"Today's configuration stays: no trial is left as a finalist. {' '.join(reasons)}"
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
