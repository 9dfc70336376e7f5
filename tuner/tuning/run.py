"""The loop of a run: propose and measure candidates until there is a reason to stop, then confirm."""

import asyncio
import math
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

from tuner.adapters import adapter_of
from tuner.conclusions import Conclusion, Judgement
from tuner.engine import boots
from tuner.engine.failures import KINDS, NODE_FAULTS
from tuner.engine.gpu import Gpus
from tuner.errors import Aborted, StudyFailed
from tuner.history.store import Store
from tuner.knobs.arguments import compile_candidate
from tuner.measures import many, trials_named
from tuner.records import JSON, Candidate, Launch, Run, Study, Trial, TrialState, gpus_held
from tuner.search import trial_view
from tuner.tuning import quality
from tuner.tuning.attempt import MeasureOptions, ScreeningEngine, mends, perform
from tuner.tuning.comparison import Comparing
from tuner.tuning.confirm import after_search_s, estimate_of, expected, unfinished
from tuner.tuning.context import (
    ABORTED_RETRIES,
    OWN_ENGINE,
    RELAUNCHED,
    Executor,
    RunContext,
    RunEvent,
    Tell,
    budget_of,
    held_out_s,
    numbers_of,
    ready_of,
    screens,
    silent,
)
from tuner.tuning.early_stopping import expected_gain, judge_of, reason_to_stop
from tuner.tuning.ending import Ending, summary_of_conclusion
from tuner.tuning.execution import Execution, cancelled, gpus_of, locked, reconcile, register
from tuner.tuning.finalists import finalists, only_screened
from tuner.tuning.next_trial import (
    Seed,
    StudyPredictor,
    fronts_of,
    last_calibration,
    minimal,
    next_number,
    propose,
)
from tuner.tuning.now import path_of, told_live
from tuner.tuning.significance import spread_of
from tuner.tuning.study import Clock, Prepared
from tuner.tuning.upgrade import Upgrading
from tuner.tuning.virtual import on_virtual_time

# Share of a run's window that its confirmation may take. A run whose confirmation would take more only
# searches, since the rest would not hold enough trials to confirm anything.
CONFIRMING = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """When to stop. `trials` bounds this run's trials; `early` lets the stop rule end it before;
    `confirm_only`: no new trials, only the confirmation. `run`: the one that this process was started for.
    """

    trials: int | None = None
    deadline: datetime | None = None
    early: bool = True
    confirm_only: bool = False
    run: str | None = None


def _interrupted(store: Store, study: Study, trial: Trial) -> RunEvent:
    """The note about a trial that was closed; it names another study than ours."""
    whose = "" if trial.study_id == study.id else f"of study {store.study(trial.study_id).name} "
    return RunEvent(kind="note", text=f"{whose}was interrupted: aborted", trial=trial)


def _virtual(context: RunContext, limits: RunLimits) -> tuple[RunContext, RunLimits]:
    """A run and its limits on the virtual clock, which gives it the same window."""
    window = None if limits.deadline is None else limits.deadline - context.clock()
    context = on_virtual_time(context, window)
    return context, replace(limits, deadline=None if window is None else context.clock() + window)


async def tune(
    prepared: Prepared,
    store: Store,
    *,
    home: Path,
    limits: RunLimits,
    clock: Clock,
    tell: Tell = silent,
    seeds: Sequence[Seed] = (),
    work: Executor | None = None,
) -> Run:
    """Tune a study until a limit, or measure its comparison if it has one; returns the finished run. A run
    that was interrupted before is resumed.

    `work` does each launch on another host; None: here. Conflict when another controller holds the study.
    StudyFailed when no candidate can work. Cancelling the task stops the engine, closes the row as ABORTED
    and leaves the run to be resumed.
    """
    context = RunContext(
        prepared=prepared, store=store, home=home, clock=clock, tell=tell, work=work,
        gpus=gpus_of(prepared) if work is None else Gpus(nvml=None),
    )  # fmt: skip
    if prepared.file.engine.clock == "virtual" and work is None:
        context, limits = _virtual(context, limits)
    clock = context.clock
    with locked(home, prepared.study.id):
        study = register(context)
        for trial in reconcile(
            store, home, node=study.node, clock=clock, own=prepared, here=work is None,
            say=lambda sentence: tell(RunEvent(kind="note", text=sentence)),
        ):  # fmt: skip
            tell(_interrupted(store, study, trial))
        if (over := cancelled(store, limits.run, clock)) is not None:
            return over
        run = store.open_run(
            prepared.study.id, trials_limit=0 if limits.confirm_only else limits.trials,
            deadline=limits.deadline, now=clock(), pid=os.getpid(), host=socket.gethostname(),
        )  # fmt: skip
        seeds = (*fronts_of(store, prepared, run.started_at), *seeds)
        start = last_calibration(store, prepared, run.started_at)
        predictor = StudyPredictor(prepared=prepared, start=start)
        told = told_live(
            home, run.id, prepared.plan, tell, clock, lambda: estimate_of(context, run),
            held_out_s=held_out_s(prepared),
        )  # fmt: skip
        context = replace(
            context,
            budget=budget_of(run, context.launches()),
            tell=lambda event: told(replace(event, run=run.id)),
        )
        try:
            if (plan := prepared.comparison) is not None:
                kind = Comparing if plan.upgrade is None else Upgrading
                return await kind(context, run).to_the_end()
            return await _Loop(context, run, limits, seeds, predictor).to_the_end()
        finally:
            path_of(home, run.id).unlink(missing_ok=True)


class _Loop(Execution):
    """One run. All of its state is in the store, except the running engine and what is computed from history:
    each step reads it anew.
    """

    def __init__(
        self,
        context: RunContext,
        run: Run,
        limits: RunLimits,
        seeds: Sequence[Seed],
        predictor: StudyPredictor,
    ) -> None:
        super().__init__(context, run)
        self._limits, self._seeds = limits, seeds
        self._predictor = predictor
        self._live = ScreeningEngine(context)
        self._ending = Ending(context, run)

    async def work(self) -> tuple[str, str | None]:
        """Search and confirm."""
        if (idle := idle_of(self._context.prepared)) is not None:
            self._tell("note", idle)
        await self._guarded(self._ending.what_is_pending())
        try:
            reason = self._over() or await self._search()
        finally:
            await self._live.close()
        self._tell("note", reason if self._limits.confirm_only else f"the search ends: {reason}")
        why = await self._guarded(self._ending.confirm())
        known = self._predictor.calibrated(self._trials())
        await self._guarded(self._ending.attribute(known.predict if known else None))
        return reason, why

    def _over(self) -> str | None:
        """Why nothing is to be searched; None: there is."""
        searched = bool(numbers_of(self._trials(), self._run.id))
        if self._limits.confirm_only and not searched:
            return "this run only confirms, without a search"
        if self._ending.attributing:
            return "the search had ended before the run was interrupted"
        return "no more trials were asked for" if self._limits.confirm_only else None

    def conclusion(self, why: str | None) -> Conclusion | None:
        """The conclusion of the confirmation; its profiles are published."""
        return self._ending.conclusion(why)

    def summary(self, said: Conclusion | None) -> dict[str, JSON]:
        """Calibration, live limits, GPU time, first boots, and what readers of earlier releases expect."""
        trials = self._trials()
        known = self._predictor.calibrated(trials)
        summary = summary_of(self._context.prepared, self._run.id, trials, self._live)
        calibrated = (
            "calibrated" if known and known.calibration else "uncalibrated: the baseline did not serve"
        )
        trust = calibrated if known else "not used"
        summary |= {
            "calibration": known.calibration.to_json() if known and known.calibration else None,
            "predictor": self._predictor.why_not or trust,
            "quality": quality.summary(self._context.prepared, trials),
        }
        summary |= summary_of_conclusion(self._context, said) if said else {}
        ours = [each for each in self._context.launches() if each.started_at >= self._run.started_at]
        return summary | {"first_boots": boots.about_first([each.timeline for each in ours])}

    async def _search(self) -> str:
        while True:
            if (cut := self._cut()) is not None:
                raise cut
            trials = self._trials()
            reason = self._reason(trials)
            trial = await self._next(trials) if reason is None else self._relaunch(trials)
            if trial is None:
                return reason or "there is no new candidate left that may work"
            self._tell("started", trial.origin, trial)
            earlier = [t for t in trials if t.number == trial.number]
            how = self._how(trial, trials)
            if how.live is None:
                await self._live.close()
            done = await self._guarded(perform(self._context, trial, earlier, how))
            self._tell("finished", done.reason or "", done)
            self._check_world([*earlier, done])
            check_start(self._context.prepared, self._run, self._trials(), self._context.launches())

    def _how(self, trial: Trial, trials: Sequence[Trial]) -> MeasureOptions:
        """The baseline, OWN_ENGINE and candidates that cannot be screened get an engine of their own, which
        then screens others; a second try and a rung of the ladder get one for themselves alone.
        """
        excused = {"stopped", "controller", "node_lost", "gate", "disk"}
        alone = any(t.cause not in excused for t in trials if t.number == trial.number)
        unproved = bool(trials) and not ready_of(self._context.launches())
        climbs = self._context.prepared.file.sampler == "ladder"
        live = None if alone or unproved or climbs or not self._live.possible else self._live
        prepared, judge = self._context.prepared, None
        before = [t for t in trials if t.number < trial.number]
        searched = not trial.is_baseline and trial.origin != RELAUNCHED
        limit = self._limits.trials  # one number is left to measure it again once it was screened
        room = limit is None or self._done(before) + self._due(before) + 2 <= limit
        shares = trial.origin not in OWN_ENGINE and live is not None and room
        screened = searched and shares and screens(prepared, before)
        if searched and not climbs:
            judge = judge_of(prepared, trials, screened=screened)
        return MeasureOptions(
            live=live, own=not screened, defaults=trial_view.defaults_of(trials), judge=judge
        )

    def _relaunch(self, trials: Sequence[Trial]) -> Trial | None:
        """At the end of a search: finalists that were only screened are measured in engines of their own,
        if time, trials and launches are left for that.
        """
        last = max(trials, key=lambda t: (t.number, t.attempt), default=None)
        if last is not None and last.state is TrialState.ABORTED and last.origin == RELAUNCHED:
            return self._start(last.number, last.attempt + 1, last.candidate, last.seed, last.origin)
        found = finalists(self._context.prepared, trials, self._run.id)
        left = only_screened(found)
        if not left:
            return None
        if (why := self._no_relaunch(trials, len(found))) is not None:
            named = trials_named([t.label for t in left])
            self._tell("note", f"{named} will not be relaunched before the confirmation: {why}")
            return None
        chosen = left[0]
        candidate = minimal(self._context.prepared.space, trials, chosen.candidate)
        return self._start(next_number(trials), 0, candidate, chosen.seed, RELAUNCHED)

    def _no_relaunch(self, trials: Sequence[Trial], count: int) -> str | None:
        """Why no finalist of `count` can be relaunched before their confirmation; None: one can."""
        limit, end = self._limits.trials, self._limits.deadline
        if limit is not None and self._done(trials) >= limit:
            return "no trial is left for it"
        if self._context.budget.left < 1:
            return "no launch is left for it"
        _, plan = expected(self._context.prepared, self._context.store)
        needed = replace(plan, finalists=count).seconds + plan.launch_s
        if end is not None and self._context.clock() + timedelta(seconds=needed) >= end:
            return "the window has no time for both"
        return None

    def _reason(self, trials: Sequence[Trial]) -> str | None:
        if self._context.budget.left < 1:
            return f"the budget of {many(self._context.budget.most, 'launch')} is spent"
        if trials and trials[-1].state is TrialState.ABORTED and not self._is_over():
            return None
        return reason_to_stop(
            trials if self._limits.early and self._context.prepared.file.sampler != "ladder" else [],
            self._context.prepared.study.objectives,
            self._context.prepared.study.slo,
            done=self._done(trials),
            kept=self._due(trials),
            limit=self._limits.trials,
            now=self._context.clock(),
            deadline=self._limits.deadline,
            needed_s=self._needed_s(trials),
            expected_gain=lambda: expected_gain(self._context.prepared, trials, self._predictor),
            noise=_noise(trials, self._context.prepared.study.objectives),
        )

    def _done(self, trials: Sequence[Trial]) -> int:
        """Trial numbers of this run so far."""
        return len(numbers_of(trials, self._run.id))

    def _due(self, trials: Sequence[Trial]) -> int:
        """Trial numbers reserved for finalists that were only screened: each is measured once more."""
        return (
            0
            if self._limits.trials is None
            else len(only_screened(finalists(self._context.prepared, trials, self._run.id)))
        )

    def _needed_s(self, trials: Sequence[Trial]) -> float:
        """Another trial, and the confirmation where the window has room for one at all."""
        done = [t for t in trials if t.state is TrialState.COMPLETE]
        if not done:
            return 0.0
        spans = [(t.ended_at - t.started_at).total_seconds() if t.ended_at else 0.0 for t in done]
        end = self._limits.deadline  # where no confirmation fits, a longer run of the same study confirms
        window = math.inf if end is None else (end - self._run.started_at).total_seconds()
        _, plan = expected(self._context.prepared, self._context.store)
        going = unfinished(self._context, self._run)
        confirm_s = after_search_s(self._context, self._run, going, plan)
        if confirm_s:
            confirm_s += plan.launch_s  # the relaunch of a finalist
        return sum(spans) / len(spans) + (confirm_s if confirm_s <= CONFIRMING * window else 0.0)

    async def _next(self, trials: Sequence[Trial]) -> Trial | None:
        """The row of the next attempt: an aborted number again, or a new suggestion."""
        prepared = self._context.prepared
        last = max(trials, key=lambda t: (t.number, t.attempt), default=None)
        if last is not None and last.state is TrialState.ABORTED:
            return self._start(last.number, last.attempt + 1, last.candidate, last.seed, last.origin)
        if (base := never_started(trials, self._run.id)) is not None:
            return self._start(base.number, base.attempt + 1, base.candidate, base.seed, base.origin)
        found = await asyncio.to_thread(
            propose, prepared, trials, self._seeds, self._predictor, again=self._baseline_is_due(trials)
        )
        if found is None:
            return None
        return self._start(next_number(trials), 0, found.candidate, found.seed, found.origin)

    def _baseline_is_due(self, trials: Sequence[Trial]) -> bool:
        """Whether a run begins with the baseline although the study has one: the last conclusion found that
        the machine had changed, or the baseline's engine ran and did not serve the traffic.
        """
        if not trials or self._done(trials):
            return False
        if trial_view.baseline_of(trials) is None:
            return any(t.is_baseline and t.measurement for t in trials)
        said = self._context.store.conclusions(self._context.prepared.study.id)
        return bool(said) and said[-1].outcome is Judgement.NOT_TRUSTED

    def _start(self, number: int, attempt: int, candidate: Candidate, seed: int, origin: str) -> Trial:
        return self._context.store.start_trial(
            study_id=self._context.prepared.study.id,
            run_id=self._run.id,
            candidate=candidate,
            number=number,
            attempt=attempt,
            seed=seed,
            origin=origin,
            now=self._context.clock(),
            directory=str(self._context.directory(number, str(attempt))),
        )

    def _check_world(self, attempts: Sequence[Trial]) -> None:
        """End the run when one number was aborted too often: the node, not the candidate, must be mended."""
        if attempts[-1].state is not TrialState.ABORTED:
            return
        ours = [
            t
            for t in attempts
            if t.run_id == self._run.id and t.cause not in ("stopped", "controller", "budget")
        ]
        last = attempts[-1]
        if len(ours) <= ABORTED_RETRIES and last.cause != "hard_fault":
            return
        store, node = self._context.store, self._context.prepared.node
        if last.cause in NODE_FAULTS:
            store.set_node_state(node.name, "fault")
        raise Aborted(
            f"trial {last.number} was aborted {many(len(ours), 'time')}. The last reason: {last.reason}."
            + (
                f" Node {node.name} is in state fault now"
                if last.cause in NODE_FAULTS
                else " Correct this, then start the run again"
            ),
            cause=last.cause or "aborted",
        )


def check_start(prepared: Prepared, run: Run, trials: Sequence[Trial], launches: Sequence[Launch]) -> None:
    """StudyFailed if two candidates of a run failed at start-up for one cause that no knob can mend."""
    ours = [t for t in trials if t.run_id == run.id]
    ready = any("ready_s" in each.timeline for each in launches if each.started_at >= run.started_at)
    last = None if ready or any(t.measurements for t in ours) else hopeless(prepared, ours)
    if last is not None:
        raise StudyFailed(f"no candidate can start: {last.reason}", cause=last.cause or "crashed")


def hopeless(prepared: Prepared, trials: Sequence[Trial]) -> Trial | None:
    """The second candidate that failed for a cause that no knob of the study can mend.

    `trials` are those of one run in which no engine was ready yet.
    """
    ended = [t for t in trials if t.state is TrialState.INFEASIBLE and t.cause in KINDS]
    for number, trial in enumerate(ended):
        alike = [t for t in ended[:number] if _root(t) == _root(trial) and t.candidate != trial.candidate]
        if alike and not mends(prepared, trial.cause or "", trial.reason or ""):
            return trial
    return None


def never_started(trials: Sequence[Trial], run_id: str) -> Trial | None:
    """The failed baseline that a run measures again, if no earlier run measured any engine of the study: the
    fault may have been mended since. None: no.
    """
    if any(t.measurements or t.run_id == run_id for t in trials):
        return None
    bases = [t for t in trials if t.is_baseline and t.state is TrialState.INFEASIBLE and t.cause in KINDS]
    return max(bases, key=lambda t: (t.number, t.attempt), default=None)


def _root(trial: Trial) -> tuple[str | None, str]:
    """The cause and text of a failure without numbers: sizes, ports and processes differ."""
    return trial.cause, re.sub(r"0x[0-9a-f]+|\d[\d.,]*", "#", trial.reason or "")


def _noise(trials: Sequence[Trial], objectives: Sequence[str]) -> float | None:
    """The relative noise of one measurement by the baseline's repetitions, at least 1 %, if there are any."""
    again = [
        t.measurement.values
        for t in trials
        if t.is_baseline and t.state is TrialState.COMPLETE and t.measurement
    ]
    spreads = [spread_of([[values.get(name, math.inf) for values in again]]) for name in objectives]
    found = [spread.share for spread in spreads if spread.freedom]
    return max(0.01, sum(found) / len(found)) if found else None


def summary_of(
    prepared: Prepared, run_id: str, trials: Sequence[Trial], live: ScreeningEngine
) -> dict[str, JSON]:
    """A run's summary beside its conclusion, by its own of the study's trials: live limits, and the time that
    these held the node, times their GPUs. `gpus` are the baseline's; 0: that time is no GPU time.
    """
    ours = [t for t in trials if t.run_id == run_id]
    screened = [t for t in ours if t.screened]
    with_gpus = adapter_of(prepared.facts.kind).uses_gpus(prepared.facts.platform)
    own = compile_candidate(prepared.baseline, prepared.facts, env=prepared.file.engine.env).argv
    return {
        "screened": len(screened),
        "live_limits": list(live.failures) or ("used" if screened else "not used"),
        "gpu_seconds": round(sum(t.gpu_seconds for t in ours), 1),
        "gpus": gpus_held((*prepared.fixed, *own)) if with_gpus else 0,
        "idle_gpus": idle_of(prepared),
    }


def idle_of(prepared: Prepared) -> str | None:
    """A sentence on GPUs that today's configuration leaves idle; None if it uses all."""
    own = compile_candidate(prepared.baseline, prepared.facts, env=prepared.file.engine.env).argv
    facts, used = prepared.facts, gpus_held((*prepared.fixed, *own))
    there = facts.gpu_count
    if not adapter_of(facts.kind).uses_gpus(facts.platform) or used >= there:
        return None
    return (
        f"the baseline runs on {used} of {there} GPUs. To use all of them, add "
        f"tensor_parallel_size or data_parallel_size to the space or to the baseline"
    )
