"""The profiles that a run publishes: today's configuration where it served, the winner when there is one."""

from dataclasses import asdict

from tuner import masking
from tuner.conclusions import Arm, Conclusion, PublishedProfile
from tuner.engine import effective
from tuner.knobs.arguments import compile_candidate
from tuner.knobs.catalogue import CATALOGUE
from tuner.profiles import registry
from tuner.records import JSON, Profile, Run, Trial, TrialState
from tuner.search import trial_view
from tuner.tuning import quality
from tuner.tuning.concluding import remeasured
from tuner.tuning.confirm import kept
from tuner.tuning.trial import Bench


def publish(bench: Bench, run: Run, said: Conclusion, *, label: str) -> dict[str, PublishedProfile]:
    """Publish what a run concluded; returns the versions by alias. `label`: of the confirmation."""
    trials = bench.store.trials(run.study_id)
    latest = {t.number: t for t in trial_view.latest(trials)}
    base = latest.get(said.baseline.trial) if said.baseline else None
    if base is None or base.state is not TrialState.COMPLETE:
        base = next((t for t in reversed(trials) if t.is_baseline and t.state is TrialState.COMPLETE), None)
    found = {}
    if base is not None:
        found[registry.BASELINE] = _profile(bench, run, said, base, registry.BASELINE, label)
    if said.winner is not None:
        found[registry.CHALLENGER] = _profile(
            bench, run, said, latest[said.winner], registry.CHALLENGER, label
        )
    return {alias: PublishedProfile(id=p.id, version=p.version) for alias, p in found.items()}


def _profile(bench: Bench, run: Run, said: Conclusion, trial: Trial, alias: str, label: str) -> Profile:
    prepared = bench.prepared
    compiled = compile_candidate(trial.candidate, prepared.facts, env=prepared.file.engine.env)
    arm, rows = said.arm(trial.number), kept(bench, label, trial.id)
    return registry.publish(
        bench.store,
        study=prepared.study,
        trial=remeasured(trial, rows) if any(m.purpose == "confirm" for m in rows) else trial,
        argv=masking.arguments((*prepared.fixed, *compiled.argv)),
        env=masking.environment({**prepared.file.engine.env, **compiled.env}),
        evidence=_evidence(bench, run, said, trial, arm, alias),
        alias=alias,
        reason=f"run {run.id}: {said.outcome.value}",
        now=bench.clock(),
    )


def _evidence(
    bench: Bench, run: Run, said: Conclusion, trial: Trial, arm: Arm | None, alias: str
) -> dict[str, JSON]:
    won = alias == registry.CHALLENGER
    return {
        "run": run.id,
        "verdict": said.outcome.value if won else "baseline",
        "sentence": said.sentence if won else trial.reason or "what ran before",
        "confirmed": said.confirmed and won,
        "slo_met": bool(arm and arm.slo_met),
        "demonstration": said.demonstration,
        "repeats": said.repeats,
        "changes": [dict(asdict(c)) for c in arm.changes] if arm else [],
        "not_worse": dict(bench.prepared.file.not_worse),
        "unproved": unproved_of(trial),
        "unjudged": list(quality.unjudged(bench.prepared, trial)),
        "quality": "off" if bench.prepared.file.quality == "off" else "on",
        "inherited": {} if trial.is_baseline else dict(bench.prepared.space.inherited),
    }


def unproved_of(trial: Trial) -> dict[str, JSON]:
    """Knobs of a trial of which nothing shows that the engine took them, and why."""
    names = effective.unproved(trial.candidate, trial.effective)
    return {name: CATALOGUE[name].unproved or "this engine does not report it" for name in names}
