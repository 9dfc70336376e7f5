"""Arms measured fairly: launched in turns, each round in fresh processes, on the same requests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Literal

from tuner.adapters import adapter_of
from tuner.conclusions import RunCost
from tuner.errors import Aborted, Infeasible
from tuner.knobs.arguments import gpus_held
from tuner.records import Launch, Measurement, Run, Trial
from tuner.tuning.attempt import errors_of, failing, retries_of, unlike
from tuner.tuning.concluding import PLACES
from tuner.tuning.context import ABORTED_RETRIES, Pass, RunContext, RunEvent
from tuner.tuning.study import Prepared
from tuner.tuning.trial import launch

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
            for trial in wanted if repeat % 2 else reversed(wanted):
                self._tell(arms, trial, repeat, (least, most))
                await self._again(trial, repeat)
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
        context = self._context_of(trial)
        study = context.prepared.study
        passes = [Pass(slices=tuple(s for s in study.slices if not s.held_out), purpose="confirm",
                       repeat=repeat)]  # fmt: skip
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

    def _context_of(self, trial: Trial) -> RunContext:
        prepared = self.setups.get(trial.number)
        return self.context if prepared is None else replace(self.context, prepared=prepared)

    def drop(self, trial: Trial, why: str) -> None:
        """Leave an arm out of all further rounds."""
        self.dropped[trial.number] = why
        self.context.tell(RunEvent(kind="note", text=f"dropped from the {self.what}: {why}", trial=trial))

    def _tell(self, arms: Sequence[Trial], trial: Trial, repeat: int, bounds: tuple[int, int]) -> None:
        least, most = bounds
        rounds = max(least, repeat)
        done = sum(self.has(t, r) for t in arms for r in range(1, rounds + 1))
        more = f" (added, up to {most}: the answer is open)" if repeat > least else ""
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


def cost_of(context: RunContext, run: Run, label: str | None = None) -> RunCost:
    """What a run's trials and its confirmation held the node for."""
    facts = context.prepared.facts
    real = adapter_of(facts.kind).uses_gpus(facts.platform)
    ours = [t for t in context.store.trials(run.study_id) if t.run_id == run.id]
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
