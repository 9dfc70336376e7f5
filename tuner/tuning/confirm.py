"""Finalists and the baseline again, interleaved, each time in a fresh process, and on a held-out slice."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product, takewhile

from tuner import masking
from tuner.engine import effective
from tuner.errors import Aborted, BadInput, Infeasible
from tuner.knobs.arguments import compile_candidate
from tuner.knobs.catalogue import CATALOGUE
from tuner.profiles import registry
from tuner.records import JSON, Measurement, Outcome, Profile, Run, Study, Trial, TrialState
from tuner.replay import outcomes
from tuner.replay.plan import Plan
from tuner.replay.speed import TOLERANCE
from tuner.search import pareto, stopping
from tuner.search.compare import Comparison, Passes, compare, pooled, pooled_noise, student
from tuner.search.compare import verdict as verdict_of
from tuner.tuning import capacity
from tuner.tuning.attempt import failing, retries_of, unlike
from tuner.tuning.calibrated_predictor import RELAUNCHED, policy
from tuner.tuning.events import Event
from tuner.tuning.next_trial import key_of, winner
from tuner.tuning.study import Prepared
from tuner.tuning.trial import ABORTED_RETRIES, Bench, Pass, launch
from tuner.tuning.verdict import Compared, Verdict, judge

LEVEL = 0.95
WHERE = ("confirm", "held_out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """What a run concluded: `summary` is kept with the run, `profile` is the challenger, if any."""

    summary: Mapping[str, JSON]
    profile: Profile | None


def launches_of(plan: Plan) -> int:
    """How many launches a confirmation takes at most."""
    return plan.repeats * (1 + plan.finalists)


async def confirm(bench: Bench, run: Run) -> Confirmation:
    """Measure the finalists against the baseline, give the verdict and publish the profiles.

    What an interrupted confirmation of the same run measured already is used again.
    """
    trials = bench.store.trials(bench.prepared.study.id)
    chosen = finalists(bench.prepared, trials, run.id)
    if not chosen:
        _today(bench, run)
        return Confirmation(summary={"verdict": "no verdict", "sentence": _nothing(trials)}, profile=None)
    base = next((t for t in trials if t.is_baseline and t.state is TrialState.COMPLETE), None)
    entrants = [*([base] if base else []), *chosen]
    dropped: dict[int, str] = {}
    for repeat in range(1, bench.prepared.plan.repeats + 1):
        for trial in entrants if repeat % 2 else reversed(entrants):
            if trial.number not in dropped and not _has(bench, run, trial.id, repeat):
                await _again(bench, run, trial, repeat, dropped)
    measured = {t.number: _fresh(bench, run, t.id) for t in entrants if t.number not in dropped}
    for number in list(measured):
        if reason := next((said for m in measured[number] if (said := failing(m.values))), None):
            dropped[number] = reason
            del measured[number]
    return _conclude(bench, run, base, [t for t in chosen if t.number not in dropped], measured, dropped)


def finalists(prepared: Prepared, trials: Sequence[Trial], run_id: str) -> list[Trial]:
    """The policy's choice, then its choice without that one: the baseline is not among them. Screened trials
    are, until they were relaunched or the run has made relaunches enough at its end.
    """
    left, found = [t for t in trials if not t.is_baseline], list[Trial]()
    key = key_of(prepared, trials)
    count = prepared.plan.finalists
    ours = [t for t in trials if t.run_id == run_id and t.state is not TrialState.ABORTED]
    made = list(takewhile(lambda t: t.origin == RELAUNCHED, reversed(ours)))
    if len(made) > count:
        left = [t for t in left if not t.screened]
    while len(found) < count:
        best = winner(prepared, left, key)
        if best is None:
            break
        found.append(best)
        left = [t for t in left if key(t.candidate) != key(best.candidate)]
    return found


def _nothing(trials: Sequence[Trial]) -> str:
    reasons = sorted({t.reason for t in trials if t.reason and not t.is_baseline})
    return "No candidate completed" + (f": {'; '.join(reasons[:3])}." if reasons else ".")


async def _again(bench: Bench, run: Run, trial: Trial, repeat: int, dropped: dict[int, str]) -> None:
    study = bench.prepared.study
    searched = tuple(s for s in study.slices if not s.held_out)
    held_out = tuple(s for s in study.slices if s.held_out)
    passes = [Pass(slices=searched, purpose="confirm", repeat=repeat)]
    if held_out:
        passes.append(Pass(slices=held_out, purpose="held_out", repeat=repeat))
    bench.tell(Event(kind="confirm", text=f"measured again, repeat {repeat}", trial=trial))
    for attempt in range(ABORTED_RETRIES + 1):
        directory = bench.directory(trial.number, f"confirm-{run.id[:8]}-{repeat}-{attempt}")
        try:
            launched = await launch(bench, trial, passes, directory)
        except Infeasible as error:
            if attempt < retries_of(error):
                continue
            dropped[trial.number] = str(error)
            bench.tell(Event(kind="note", text=f"dropped from the finalists: {error}", trial=trial))
            return
        except Aborted:
            if attempt == ABORTED_RETRIES:
                raise
            continue
        if said := unlike(trial.candidate, launched.launch.effective):
            dropped[trial.number] = said
            bench.tell(Event(kind="note", text=f"dropped from the finalists: {said}", trial=trial))
            return
        for measurement in launched.measurements:
            bench.store.add_measurement(trial.id, measurement)
        return


def _fresh(bench: Bench, run: Run, trial_id: int) -> list[Measurement]:
    """The confirmation's measurements of a trial that were made in this run, by repeat; of a repeat that was
    interrupted and done again, the last.
    """
    ours = {each.id for each in bench.store.launches(run.study_id) if each.started_at >= run.started_at}
    found = [
        m for m in bench.store.trial(trial_id).measurements if m.purpose in WHERE and m.launch_id in ours
    ]
    last = {(m.repeat, m.purpose): m for m in found}
    return [last[key] for key in sorted(last)]


def _has(bench: Bench, run: Run, trial_id: int, repeat: int) -> bool:
    wanted = WHERE if any(s.held_out for s in bench.prepared.study.slices) else WHERE[:1]
    return {m.purpose for m in _fresh(bench, run, trial_id) if m.repeat == repeat} >= set(wanted)


def _conclude(
    bench: Bench,
    run: Run,
    base: Trial | None,
    entered: Sequence[Trial],
    measured: Mapping[int, Sequence[Measurement]],
    dropped: Mapping[int, str],
) -> Confirmation:
    if not entered:
        sentence = "Every finalist failed when it was measured again: " + "; ".join(dropped.values()) + "."
        return Confirmation(summary={"verdict": "no verdict", "sentence": sentence}, profile=None)
    study = bench.prepared.study
    base = base if base and base.number in measured else None
    again = [_remeasured(t, measured[t.number]) for t in [*([base] if base else []), *entered]]
    chosen = pareto.choose(again, policy(bench.prepared), study.slo, study.objectives)
    assumed = 0.0 if bench.prepared.plan.demonstration else stopping.NOISE
    compared = comparisons(study, base.number, measured, assumed=assumed) if base else []
    verdict = judge(chosen, base, compared, study.slo, demonstration=bench.prepared.plan.demonstration)
    profiles = _publish(bench, run, chosen, verdict)
    challenger = profiles.get("challenger")
    summary: dict[str, JSON] = {
        "verdict": verdict.word,
        "sentence": verdict.sentence,
        "winner": chosen.number if verdict.wins else None,
        "baseline": base.number if base else None,
        "finalists": [t.number for t in entered],
        "dropped": {str(number): reason for number, reason in dropped.items()},
        "comparisons": [row(*each) for each in compared],
        "demonstration": bench.prepared.plan.demonstration,
        "profiles": {alias: _profile_row(p) for alias, p in profiles.items()},
    }
    return Confirmation(summary=summary, profile=challenger)


def _remeasured(trial: Trial, measured: Sequence[Measurement]) -> Trial:
    """The trial with the medians of its confirmation in place of the search's one measurement."""
    rows = [m.values for m in measured if m.purpose == "confirm"]
    names = set.intersection(*(set(r) for r in rows))
    values = {name: statistics.median(r[name] for r in rows) for name in sorted(names)}
    return replace(trial, screened=False, measurements=(Measurement(values=values),))


def comparisons(
    study: Study, base: int, measured: Mapping[int, Sequence[Measurement]], *, assumed: float = 0.0
) -> list[Compared]:
    """Every finalist against the baseline in every objective, on the slices that were searched and, where
    there is one, on the held-out slice. All of them are the family that the verdict rests on, and the repeats
    of all entrants tell the noise; `assumed` is that of one measurement where nothing was repeated.
    """
    family = (len(measured) - 1) * len(study.objectives)
    found: list[Compared] = []
    for where in WHERE:
        there = {number: [m for m in rows if m.purpose == where] for number, rows in measured.items()}
        if not all(there.values()):
            continue
        passes = {number: _passes(rows) for number, rows in there.items()}
        for number, name in product([n for n in there if n != base], study.objectives):
            made: Comparison | None
            try:
                noise = pooled_noise(list(passes.values()), name, slo=study.slo)
                noise = noise if noise[1] else (assumed, 0)
                made = _by_request(study, name, (passes[base], passes[number]), family, noise)
            except BadInput:  # an objective of the engine's own numbers has no rows to pair
                said = {n: [m.values[name] for m in rows if name in m.values] for n, rows in there.items()}
                everybody = list(said.values())
                made = by_repeats(name, said[base], said[number], everybody=everybody, family=family)
            found += [(number, where, made)] if made is not None else []
    return found


def _by_request(
    study: Study, name: str, pair: tuple[Passes, Passes], family: int, noise: tuple[float, int]
) -> Comparison:
    return compare(
        *pair, name, slo=study.slo, seed=study.seed, level=LEVEL, family=family, noise=noise[0],
        freedom=noise[1] or None,
    )  # fmt: skip


def by_repeats(
    name: str,
    base: Sequence[float],
    other: Sequence[float],
    *,
    everybody: Sequence[Sequence[float]] = (),
    family: int = 1,
) -> Comparison | None:
    """Compare a number of whole replays: Student's interval of the mean log ratio by the noise of everybody's
    repeats (default: of these two), unbounded without any; of `max_speed` no less than it is told to. None
    where nothing pairs.
    """
    logs = [math.log(b / a) for a, b in zip(base, other, strict=False) if a > 0 and b > 0]
    if not logs:
        return None
    centre, reach = statistics.fmean(logs), math.inf
    noise, freedom = pooled(everybody or (base, other))
    if freedom:
        reach = student(1 - (1 - LEVEL) / family / 2, freedom) * noise * math.sqrt(2 / len(logs))
    if name == capacity.NAME:
        reach = max(reach, math.log1p(TOLERANCE))
    low, high = centre - reach, centre + reach
    return Comparison(
        metric=name, base=statistics.fmean(base), other=statistics.fmean(other), log_ratio=centre, low=low,
        high=high, level=LEVEL, repeats=len(logs), rows=0, verdict=verdict_of(name, low, high),
    )  # fmt: skip


def _passes(measured: Sequence[Measurement]) -> list[Mapping[str, Sequence[Outcome]]]:
    return [
        {part.name: outcomes.read(part.outcomes_file) for part in m.slices if part.outcomes_file}
        for m in measured
    ]


def row(number: int, where: str, comparison: Comparison) -> dict[str, JSON]:
    """One comparison as JSON: ratios of the finalist to the baseline, null where infinite."""
    return {
        "number": number,
        "where": where,
        "metric": comparison.metric,
        "ratio": _ratio(comparison.log_ratio),
        "low": _ratio(comparison.low),
        "high": _ratio(comparison.high),
        "repeats": comparison.repeats,
        "rows": comparison.rows,
        "verdict": comparison.verdict,
    }


def _ratio(log_ratio: float) -> float | None:
    if not -700 < log_ratio < 700:
        return None
    return round(math.exp(log_ratio), 6)


def _publish(bench: Bench, run: Run, chosen: Trial, verdict: Verdict) -> dict[str, Profile]:
    """The baseline's profile always, the challenger's when it won; their aliases move."""
    found = _today(bench, run)
    if verdict.wins:
        found[registry.CHALLENGER] = _profile(bench, run, chosen, registry.CHALLENGER, verdict)
    return found


def _today(bench: Bench, run: Run) -> dict[str, Profile]:
    """What runs today as a profile, whether or not it served this traffic."""
    trials = bench.store.trials(run.study_id)
    decided = (TrialState.COMPLETE, TrialState.INFEASIBLE)
    base = next((t for t in reversed(trials) if t.is_baseline and t.state in decided), None)
    if base is None:
        return {}
    verdict = Verdict(word="baseline", sentence=base.reason or "what ran before", wins=False)
    return {registry.BASELINE: _profile(bench, run, base, registry.BASELINE, verdict)}


def _profile(bench: Bench, run: Run, trial: Trial, alias: str, verdict: Verdict) -> Profile:
    prepared = bench.prepared
    compiled = compile_candidate(trial.candidate, prepared.facts, env=prepared.file.engine.env)
    return registry.publish(
        bench.store,
        study=prepared.study,
        trial=trial,
        argv=masking.arguments((*prepared.fixed, *compiled.argv)),
        env=masking.environment({**prepared.file.engine.env, **compiled.env}),
        evidence={
            "run": run.id,
            "verdict": verdict.word,
            "sentence": verdict.sentence,
            "confirmed": verdict.confirmed and alias == registry.CHALLENGER,
            "slo_met": pareto.meets(trial, prepared.study.slo),
            "demonstration": prepared.plan.demonstration,
            "repeats": prepared.plan.repeats,
            "unproved": unproved_of(trial),
            "inherited": {} if trial.is_baseline else dict(prepared.space.inherited),
        },
        alias=alias,
        reason=f"run {run.id}: {verdict.word}",
        now=bench.clock(),
    )


def unproved_of(trial: Trial) -> dict[str, JSON]:
    """Knobs of a trial of which nothing shows that the engine took them, and why."""
    names = effective.unproved(trial.candidate, trial.effective)
    return {name: CATALOGUE[name].unproved or "this engine does not report it" for name in names}


def _profile_row(profile: Profile) -> JSON:
    return {
        "id": profile.id,
        "version": profile.version,
        "model": profile.key.model,
        "target": profile.key.target,
        "workload": profile.key.workload,
    }
