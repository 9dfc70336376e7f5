"""The end of a run: which confirmation it measures, what it concludes, and the profiles that it publishes."""

from collections.abc import Sequence
from dataclasses import asdict, replace

from tuner import masking
from tuner.conclusions import Attribution, Conclusion, PublishedProfile
from tuner.engine.metrics import unproved_knobs
from tuner.knobs.arguments import compile_candidate
from tuner.knobs.catalogue import CATALOGUE
from tuner.measures import many, trials_named
from tuner.profiles import registry
from tuner.records import JSON, Profile, Run, Trial, TrialState
from tuner.report.words import seconds
from tuner.search import trial_view
from tuner.search.acquisition import Predict
from tuner.tuning import quality
from tuner.tuning.attribution import Attributing, attribute, attribution_labels
from tuner.tuning.concluding import remeasured, unconfirmed
from tuner.tuning.confirm import (
    Confirmation,
    asked_of,
    cost_of,
    expected,
    kept,
    label_of,
    launches_of,
    unfinished,
    without_finalists,
)
from tuner.tuning.context import RunContext, RunEvent
from tuner.tuning.finalists import finalists


class Ending:
    """The confirmations of one run. What an interrupted one measured is used again, by the next run too."""

    def __init__(self, context: RunContext, run: Run) -> None:
        self._context, self._run = context, run
        self._going: Confirmation | None = None
        self._done: Confirmation | None = None
        self._owed: Confirmation | None = None  # of an earlier run; the window was too short for it
        self._attribution: Attribution | None = None

    async def what_is_pending(self) -> None:
        """Before new trials: finish a confirmation that was interrupted, if it fits into the window."""
        going = unfinished(self._context, self._run)
        if going is None:
            return
        if (why := self.too_short(going)) is not None:
            self._owed = going
            names = trials_named([t.label for t in going.chosen])
            self._say(f"the confirmation of {names} is still to be done: {why}")
            return
        if going.left:
            self._say(f"the run {going.task}")
        await self._measure(going)

    async def confirm(self) -> str | None:
        """At the end of the search: measure the finalists again, unless that was done. Returns why not, if
        the window is too short.
        """
        chosen = finalists(self._context.prepared, self._trials(), self._run.id)
        done = {t.number for t in self._done.chosen} if self._done else set()
        if self._done is not None and (self.attributing or {t.number for t in chosen} <= done):
            return None
        if not chosen:
            return None
        own = label_of(self._run.id)  # launch folders of a second confirmation of one run have other names
        again = self._done is not None and self._done.label == own
        label = f"{own}.2" if again else own
        if self._owed is not None and {t.number for t in self._owed.chosen} == {t.number for t in chosen}:
            label = self._owed.label  # its repeats are kept
        going = whole = self._confirmation(label, chosen)
        while len(going.chosen) > 1 and going.missing > self._context.budget.left:
            going = self._confirmation(going.label, going.chosen[:-1])
        if (why := self.too_short(going)) is not None:
            self._going = whole
            return why
        await self._measure(going)
        return None

    async def attribute(self, predict: Predict | None) -> None:
        """After a winner was confirmed: find out which knobs give the gain, in the rest of the window."""
        said = self._done.conclusion() if self._done is not None else None
        base = self._done.base if self._done is not None else None
        if said is None or self._done is None or base is None or not said.confirmed:
            return
        winner = next(t for t in self._done.chosen if t.number == said.winner)
        work = Attributing(
            context=self._context, run=self._run, said=said, base=base, winner=winner, label=self._done.label,
            predict=predict,
        )  # fmt: skip
        self._attribution, why = await attribute(work)
        if why:
            self._say(why)

    @property
    def attributing(self) -> bool:
        """Whether this run had begun to find out which knobs of its winner pay: its search is over."""
        return any(launches_of(self._context, label) for label in attribution_labels(self._run.id))

    def too_short(self, going: Confirmation) -> str | None:
        """Why a confirmation does not fit into the rest of the run; None if it does."""
        left, wanted = self._context.budget.left, going.missing
        if wanted > left:
            return f"it needs at least {many(wanted, 'launch')}, but the run may make only {left:.0f} more"
        end = self._run.deadline
        if end is None:
            return None
        _, plan = expected(self._context.prepared, self._context.store)
        needed = going.left * plan.launch_s
        left_s = (end - self._context.clock()).total_seconds()
        if needed <= left_s:
            return None
        took, there = seconds(round(needed)), seconds(round(max(0.0, left_s)))
        return f"it takes about {took}, but only {there} of the window are left"

    async def _measure(self, going: Confirmation) -> None:
        self._going = going
        await going.measure()
        self._done, self._going = going, None

    def _confirmation(self, label: str, chosen: Sequence[Trial]) -> Confirmation:
        return Confirmation(context=self._context, run=self._run, chosen=chosen, label=label)

    def conclusion(self, why: str | None = None) -> Conclusion | None:
        """Publish the profiles and return the conclusion. `why` is why the run ended early or its
        confirmation did not begin; None: neither.
        """
        if self._done is not None:
            return self._published(self._done, why)
        if why is None:
            return self._with_profiles(without_finalists(self._context, self._run), label_of(self._run.id))
        going, trials = self._going or self._owed, self._trials()
        return unconfirmed(
            asked_of(self._context.prepared), self._run, trials, why=why, now=self._context.clock(),
            cost=cost_of(self._context, self._run),
            finalists=going.chosen if going else (), repeats=going.rounds.done(going.arms) if going else 0,
        )  # fmt: skip

    def _published(self, done: Confirmation, why: str | None) -> Conclusion:
        said = done.conclusion()
        if why is not None and self._going is not None:
            done_before = {t.number for t in done.chosen}
            left = [t.label for t in self._going.chosen if t.number not in done_before]
            were = f"{trials_named(left)} {'was' if len(left) == 1 else 'were'} not confirmed: {why}."
            said = replace(said, sentence=f"{said.sentence} {were[0].upper()}{were[1:]}")
        return self._with_profiles(said, done.label)

    def _with_profiles(self, said: Conclusion, label: str) -> Conclusion:
        found = self._attribution
        if found is not None:
            self._context.store.add_attribution(found)
        return replace(said, profiles=publish(self._context, self._run, said, label=label, attribution=found))

    def _trials(self) -> tuple[Trial, ...]:
        return self._context.store.trials(self._run.study_id)

    def _say(self, text: str) -> None:
        self._context.tell(RunEvent(kind="note", text=text))


def summary_of_conclusion(context: RunContext, said: Conclusion) -> dict[str, JSON]:
    """What a run's summary repeats of its conclusion, for readers of earlier releases."""
    study = context.prepared.study
    key: dict[str, JSON] = {"model": study.model, "target": study.node, "workload": study.workload}
    return {
        "verdict": said.verdict,
        "sentence": said.sentence,
        "winner": said.winner,
        "baseline": said.baseline.trial if said.baseline and said.repeats else None,
        "finalists": [a.trial for a in said.finalists if a.dropped is None],
        "dropped": {str(a.trial): a.dropped for a in said.finalists if a.dropped is not None},
        "comparisons": [
            {
                "number": arm.trial, "where": c.where, "metric": c.metric,
                "ratio": None if c.change is None else 1 + c.change, "low": 1 + (c.low or 0.0),
                "high": None if c.high is None else 1 + c.high, "repeats": c.repeats, "rows": 0,
                "verdict": c.word,
            }
            for arm in said.finalists
            for c in arm.changes
        ],
        "demonstration": said.demonstration,
        "drift": list(said.drift),
        "profiles": {
            alias: {"id": each.id, "version": each.version, **key} for alias, each in said.profiles.items()
        },
    }  # fmt: skip


def publish(
    context: RunContext, run: Run, said: Conclusion, *, label: str, attribution: Attribution | None = None
) -> dict[str, PublishedProfile]:
    """Publish what a run concluded; returns the versions by alias. `label`: of the confirmation. Where an
    attribution left knobs out, the challenger is the reduced configuration.
    """
    trials = context.store.trials(run.study_id)
    latest = {t.number: t for t in trial_view.latest(trials)}
    base = latest.get(said.baseline.trial) if said.baseline else None
    if base is None or base.state is not TrialState.COMPLETE:
        base = next((t for t in reversed(trials) if t.is_baseline and t.state is TrialState.COMPLETE), None)
    found = {}
    if base is not None:
        found[registry.BASELINE] = _profile(context, run, said, base, registry.BASELINE, label)
    if said.winner is not None:
        number, own = said.winner, label
        if attribution is not None and attribution.published and attribution.reduced is not None:
            number = attribution.reduced
            labels = attribution_labels(run.id)
            own = next((each for each in labels if kept(context, each, latest[number].id)), label)
        found[registry.CHALLENGER] = _profile(
            context, run, said, latest[number], registry.CHALLENGER, own, attribution
        )
    return {alias: PublishedProfile(id=p.id, version=p.version) for alias, p in found.items()}


def _profile(
    context: RunContext, run: Run, said: Conclusion, trial: Trial, alias: str, label: str,
    attribution: Attribution | None = None,
) -> Profile:  # fmt: skip
    prepared = context.prepared
    compiled = compile_candidate(trial.candidate, prepared.facts, env=prepared.file.engine.env)
    won = alias == registry.CHALLENGER
    arm, rows = said.arm(said.winner if won else trial.number), kept(context, label, trial.id)
    return registry.publish(
        context.store,
        study=prepared.study,
        trial=remeasured(trial, rows) if any(m.purpose == "confirm" for m in rows) else trial,
        argv=masking.arguments((*prepared.fixed, *compiled.argv)),
        env=masking.environment({**prepared.file.engine.env, **compiled.env}),
        evidence={
            "run": run.id,
            "verdict": said.outcome.value if won else "baseline",
            "sentence": said.sentence if won else trial.reason or "what ran before",
            "confirmed": said.confirmed and won,
            "slo_met": bool(arm and arm.slo_met),
            "demonstration": said.demonstration,
            "repeats": len({m.repeat for m in rows}) or said.repeats,
            "changes": [dict(asdict(c)) for c in arm.changes] if arm else [],
            "not_worse": dict(prepared.file.not_worse),
            "unproved": unproved_of(trial),
            "unjudged": list(quality.unjudged(prepared, trial)),
            "quality": "off" if prepared.file.quality == "off" else "on",
            "inherited": {} if trial.is_baseline else dict(prepared.space.inherited),
            **({} if attribution is None else {"attribution": attribution.to_json()}),
        },
        alias=alias,
        reason=f"run {run.id}: {said.outcome_words}",
        now=context.clock(),
    )


def unproved_of(trial: Trial) -> dict[str, JSON]:
    """Knobs of a trial of which nothing shows that the engine took them, and why."""
    names = unproved_knobs(trial.candidate, trial.effective)
    return {name: CATALOGUE[name].unproved or "this engine does not report it" for name in names}
