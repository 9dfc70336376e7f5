"""A run's conclusion from the measurements of its confirmation, and the noise of earlier nights."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache

from tuner.conclusions import Arm, Conclusion, Difference, Judgement, Noise, RunCost, Where, saving
from tuner.engine.metrics import same_value
from tuner.errors import BadInput
from tuner.history.store import Store
from tuner.measures import counts_requests, is_maximized, many, trials_named
from tuner.records import JSON, Measurement, Outcome, Run, Study, Trial, TrialState, Value, label_in
from tuner.replay import outcomes
from tuner.replay.plan import Plan
from tuner.search import trial_view
from tuner.tuning.finalists import Verdict, exceeding, judge
from tuner.tuning.significance import (
    SOUGHT,
    Comparison,
    Passes,
    Spread,
    compare,
    compare_values,
    drifted,
    repeats_needed,
    spread_of,
    together,
)
from tuner.tuning.trial import MAX_SPEED, SPEED_TOLERANCE
from tuner.tuning.winner import Policy, pick

LEVEL = 0.95
GOOD = "slo_attainment"

# An interval that reaches this many times the baseline's value is shown without an upper end.
ENDLESS = 1e4

PLACES: tuple[Where, ...] = ("confirm", "held_out")

# (metric, where) → noise between launches.
Spreads = Mapping[tuple[str, Where], Spread]


@dataclass(frozen=True, slots=True, kw_only=True)
class WinnerCriteria:
    """A study's rules for its winner, and its plan. `not_worse` maps metric → share."""

    study: Study
    plan: Plan
    policy: Policy
    not_worse: Mapping[str, float]

    @property
    def metrics(self) -> tuple[str, ...]:
        """What finalists are compared in: the objectives, then what may not be worse."""
        return tuple(dict.fromkeys((*self.study.objectives, *self.not_worse)))

    @property
    def looks(self) -> int:
        """How often a confirmation may look at its answer; each look may find a winner by chance."""
        return self.plan.most - self.plan.repeats + 1

    def family(self, finalists: int) -> int:
        """How many comparisons a verdict rests on (Bonferroni)."""
        return max(1, finalists) * len(self.metrics) * self.looks

    def repeats_for_ten_percent(self, spread: Spread) -> int | None:
        """How often the next confirmation launches each configuration to show a difference of 10 %, by the
        noise that is known then (None: not known, or more than a hundred times).
        """
        alpha, arms = (1 - LEVEL) / self.family(self.plan.finalists), 1 + self.plan.finalists
        return repeats_needed(spread, alpha=alpha, arms=arms, earlier=spread.freedom)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """What a confirmation measured so far. `measured` maps trial number → measurements by repeat, without the
    `dropped`; `base` is None if no baseline completed; `earlier` is the node's noise before this run.
    """

    base: Trial | None
    finalists: Sequence[Trial]
    measured: Mapping[int, Sequence[Measurement]]
    dropped: Mapping[int, str]
    earlier: Spreads

    @property
    def served(self) -> list[Trial]:
        """The finalists that served every repeat."""
        return [t for t in self.finalists if t.number in self.measured]

    @property
    def compared(self) -> Trial | None:
        """The baseline, if it served every repeat too."""
        return self.base if self.base is not None and self.base.number in self.measured else None


def conclude(asked: WinnerCriteria, run: Run, found: Repeats, cost: RunCost, now: datetime) -> Conclusion:
    """The conclusion of a confirmation that was measured to its end. No profile is published yet."""
    spreads = spreads_of(asked, found)
    base, arms = arms_of(asked, found, spreads)
    if found.served:  # the sentence is about the policy's choice, so every surface shows that arm first
        chosen = choose(asked, found, arms)
        arms.sort(key=lambda arm: arm.trial != chosen)
    repeats = min((max(m.repeat for m in rows) for rows in found.measured.values()), default=0)
    drift = drifts(asked, found, spreads)
    verdict = _verdict(asked, found, base, arms, drift)
    winner = next((arm for arm in arms if arm.trial == verdict.winner), None)
    return Conclusion(
        run_id=run.id, study_id=run.study_id, at=now, outcome=verdict.outcome, sentence=verdict.sentence,
        winner=verdict.winner, nearest=verdict.nearest, baseline=base, finalists=tuple(arms),
        attainment=asked.study.slo.attainment, noise=noises(asked, found, spreads), drift=drift, cost=cost,
        repeats=repeats, demonstration=asked.plan.demonstration,
        saving=saving(winner, asked.study.spec.get("price_per_gpu_hour"), cost),
    )  # fmt: skip


def _verdict(
    asked: WinnerCriteria, found: Repeats, base: Arm | None, arms: Sequence[Arm], drift: Sequence[str]
) -> Verdict:
    if not found.served:
        reasons = "; ".join(found.dropped[t.number] for t in found.finalists if t.number in found.dropped)
        sentence = f"Every finalist failed when it was measured again: {reasons}."
        return Verdict(outcome=Judgement.NOTHING_SERVED, sentence=sentence)
    number = choose(asked, found, arms)
    chosen = next(a for a in (*arms, *([base] if base else [])) if a.trial == number)
    today = base or Arm(trial=-1, candidate=chosen.candidate, dropped="it was never measured")
    return judge(
        today, [a for a in arms if a.dropped is None], chosen, attainment=asked.study.slo.attainment,
        drift=drift, not_worse=asked.not_worse, demonstration=asked.plan.demonstration,
    )  # fmt: skip


def choose(asked: WinnerCriteria, found: Repeats, arms: Sequence[Arm]) -> int:
    """The trial that the study's policy picks by the repeats; what `not_worse` forbids is left out while
    there is anything else.
    """
    forbidden = {a.trial for a in arms if exceeding(a, asked.not_worse)}
    entered = [*([found.compared] if found.compared else []), *found.served]
    again = [remeasured(t, found.measured[t.number]) for t in entered]
    allowed = [t for t in again if t.number not in forbidden] or again
    return pick(allowed, asked.policy, asked.study.slo, asked.study.objectives).number


def is_open(asked: WinnerCriteria, found: Repeats) -> bool:
    """Whether more repeats could still show a gain: the trial that the policy chooses is better in no
    objective yet, and an interval holds a gain of 10 % or has no end.
    """
    spreads = spreads_of(asked, found)
    if not found.served or found.compared is None or drifts(asked, found, spreads):
        return False
    _, arms = arms_of(asked, found, spreads)
    wanted, chosen = asked.study.objectives, choose(asked, found, arms)
    ours = [(a.trial, c) for a in arms for c in a.changes if c.where == "confirm" and c.metric in wanted]
    stays = found.compared.number == chosen
    if any(c.word == "better" and (stays or number == chosen) for number, c in ours):
        return False
    return any(_may_gain(c) for _, c in ours)


def _may_gain(found: Difference) -> bool:
    """Whether the interval holds a gain of 10 % or has no end on that side."""
    if is_maximized(found.metric):
        return found.high is None or found.high >= SOUGHT
    return found.low is None or found.low <= 1 / (1 + SOUGHT) - 1


def arms_of(asked: WinnerCriteria, found: Repeats, spreads: Spreads) -> tuple[Arm | None, list[Arm]]:
    """(the baseline, the finalists) with their numbers and the finalists' differences."""
    base = found.base
    arms = [_arm(asked, found, t, changes=differences(asked, found, t, spreads)) for t in found.finalists]
    return (None if base is None else _arm(asked, found, base, changes=())), arms


def _arm(asked: WinnerCriteria, found: Repeats, trial: Trial, *, changes: tuple[Difference, ...]) -> Arm:
    every = found.measured.get(trial.number, ())
    rows, held_out = ([m for m in every if m.purpose == where] for where in PLACES)
    good = mean_of(GOOD, rows)
    first = trial.measurement.values if trial.measurement else {}
    dropped = found.dropped.get(trial.number)
    if dropped is None and trial.state is not TrialState.COMPLETE:
        dropped = trial.reason or "it did not serve the traffic"
    return Arm(
        trial=trial.number,
        attempt=trial.attempt,
        candidate=trial.candidate,
        changed={} if found.base is None or trial is found.base else changed(found.base, trial),
        dropped=dropped,
        attainment=good,
        misses_slo_by=None if good is None else max(0.0, asked.study.slo.attainment - good),
        searched={name: finite(first[name]) for name in asked.metrics if name in first},
        confirmed={n: v for n in asked.metrics if (v := mean_of(n, rows)) is not None},
        held_out={n: v for n in (*asked.metrics, GOOD) if (v := mean_of(n, held_out)) is not None},
        changes=changes,
    )


def changed(base: Trial, trial: Trial) -> dict[str, tuple[Value, Value]]:
    """The knobs that differ from today's configuration: name → (before, after). Both are values in effect
    if both engines tell theirs, since an engine may cut what was asked for.
    """
    today, then = {**base.effective, **base.candidate}, {**trial.effective, **trial.candidate}
    told = {
        name: (base.effective[name], trial.effective[name])
        for name in set(base.effective) & set(trial.effective)
    }
    names = sorted({*base.candidate, *trial.candidate})
    pairs = {name: told.get(name, (today.get(name), then.get(name))) for name in names}
    return {name: pair for name, pair in pairs.items() if not same_value(*pair)}


def differences(
    asked: WinnerCriteria, found: Repeats, trial: Trial, spreads: Spreads
) -> tuple[Difference, ...]:
    """One finalist against the baseline in every metric, on the slices that were searched and, if there is
    one, on the held-out slice.
    """
    base = found.compared
    if base is None or trial.number not in found.measured:
        return ()
    made = []
    for where in PLACES:
        pair = [[m for m in found.measured[t.number] if m.purpose == where] for t in (base, trial)]
        if not all(pair):
            continue
        for name in asked.metrics:
            spread = spreads[name, where]
            comparison = _compared(asked, name, pair[0], pair[1], spread, asked.family(len(found.finalists)))
            if comparison is not None:
                made.append(_difference(comparison, where, mean_of(name, pair[0]), mean_of(name, pair[1])))
    return tuple(made)


def _compared(
    asked: WinnerCriteria,
    name: str,
    base: Sequence[Measurement],
    other: Sequence[Measurement],
    spread: Spread,
    family: int,
) -> Comparison | None:
    """By request where rows tell the metric, else by the numbers of whole replays."""
    study = asked.study
    try:
        return compare(
            _passes(base), _passes(other), name, spread=spread, slo=study.slo, seed=study.seed, level=LEVEL,
            family=family, metrics=len(asked.metrics),
        )  # fmt: skip
    except BadInput:  # an objective of the engine's own numbers has no rows to pair
        values = [[m.values[name] for m in rows if name in m.values] for rows in (base, other)]
        least = math.log1p(SPEED_TOLERANCE) if name == MAX_SPEED else 0.0
        return compare_values(
            name, *values, spread=spread, level=LEVEL, family=family, metrics=len(asked.metrics), least=least
        )


def _passes(measured: Sequence[Measurement]) -> Passes:
    return [{s.name: _read(s.outcomes_file) for s in m.slices if s.outcomes_file} for m in measured]


@lru_cache(maxsize=64)
def _read(path: str) -> Sequence[Outcome]:
    """A file of outcomes; each look at an answer reads all of them, and they do not change."""
    return outcomes.read(path)


def _difference(made: Comparison, where: Where, before: float | None, after: float | None) -> Difference:
    change = finite(made.change)
    if before and after is not None:
        change = (after - before) / before
    low, high = (math.expm1(v) if v < math.log(ENDLESS) else None for v in (made.low, made.high))
    return Difference(
        metric=made.metric, where=where, before=before, after=after, change=change,
        low=-1.0 if low is None else low, high=high, word=made.word, repeats=made.repeats,
        within=finite(made.within),
    )  # fmt: skip


def finite(value: float) -> float | None:
    """The number, or None if it is infinite or none."""
    return float(value) if math.isfinite(value) else None


def mean_of(name: str, measured: Sequence[Measurement]) -> float | None:
    """One number for the repeats of one configuration. A number that counts requests is computed from all
    repeats together, so that goodput and the share within the SLO agree. Any other number is the geometric
    mean. None if it was not measured or is not finite.
    """
    rows = [m.values for m in measured if name in m.values]
    values = [each[name] for each in rows]
    if not values or not all(map(math.isfinite, values)):
        return None
    if name.endswith(GOOD):
        counts = [each.get(name.removesuffix(GOOD) + "requests", 0.0) for each in rows]
        return statistics.fmean(values, counts if all(counts) else None)
    if counts_requests(name) or min(values) <= 0 or min(values) == max(values):
        return statistics.fmean(values)
    return statistics.geometric_mean(values)


def remeasured(trial: Trial, measured: Sequence[Measurement]) -> Trial:
    """The trial with what its repeats say in place of the search's one measurement."""
    rows = [m for m in measured if m.purpose == "confirm"]
    names = set.intersection(*(set(m.values) for m in rows))
    means = {name: mean_of(name, rows) for name in sorted(names)}
    values = {name: math.inf if mean is None else mean for name, mean in means.items()}
    return replace(trial, screened=False, measurements=(Measurement(values=values),))


def spreads_of(asked: WinnerCriteria, found: Repeats) -> Spreads:
    """The noise between launches that intervals use: of all repeats of this run, and of earlier ones."""
    spreads = {}
    for where in PLACES:
        groups = [[m for m in rows if m.purpose == where] for rows in found.measured.values()]
        for name in asked.metrics:
            own = spread_of([[m.values[name] for m in rows if name in m.values] for rows in groups])
            spreads[name, where] = together(own, found.earlier.get((name, where), Spread()))
    return spreads


def noises(asked: WinnerCriteria, found: Repeats, spreads: Spreads) -> tuple[Noise, ...]:
    """The noise per metric as it is kept, with how many repeats would show 10 %."""
    rows = {n: [m for m in each if m.purpose == "confirm"] for n, each in found.measured.items()}
    launches = sum(len(each) for each in rows.values())
    said = []
    for name in asked.metrics:
        spread, earlier = spreads[name, "confirm"], found.earlier.get((name, "confirm"), Spread())
        said.append(
            Noise(
                metric=name, share=spread.share if spread.freedom else None, launches=launches,
                earlier=earlier.freedom, repeats_needed=asked.repeats_for_ten_percent(spread),
            )
        )  # fmt: skip
    return tuple(said)


def drifts(asked: WinnerCriteria, found: Repeats, spreads: Spreads) -> tuple[str, ...]:
    """One sentence for each objective in which the baseline's repeats are not what its search measured, and
    for the objective that changed most; the largest change first. Empty if no objective drifted.
    """
    base = found.compared
    if base is None or base.measurement is None:
        return ()
    rows = [m for m in found.measured[base.number] if m.purpose == "confirm"]
    told, sure = dict[str, float](), set[str]()
    for name in asked.study.objectives:
        before, again = base.measurement.values.get(name), [m.values[name] for m in rows if name in m.values]
        if before is None:
            continue
        change = drifted(before, again, spreads[name, "confirm"], metrics=len(asked.study.objectives))
        if change is not None:
            sure.add(name)
        after = mean_of(name, rows) or before * (1 + (change or 0.0))
        if 0 < before < math.inf and after > 0:
            told[name] = math.log(after / before)
    if not sure:
        return ()
    most = sorted(told, key=lambda name: -abs(told[name]))
    return tuple(
        _drift(name, base.measurement, rows, math.expm1(told[name]), spreads[name, "confirm"])
        for name in most
        if name in sure or name == most[0]
    )


def _drift(name: str, first: Measurement, rows: Sequence[Measurement], change: float, spread: Spread) -> str:
    before = first.values[name]
    word = "better" if (change > 0) == is_maximized(name) else "worse"
    noise = f"{spread.share:.1%}" if spread.freedom else "not known"
    return (
        f"the baseline's {name} was {before:,.4g} in the search and {before * (1 + change):,.4g} in the"
        f" confirmation ({change:+.0%}, {word}; noise between launches {noise})".replace("-", "−")
        + _clocks(first, rows)
    )


def _clocks(before: Measurement, after: Sequence[Measurement]) -> str:
    """The GPUs' clocks and throttling then and now, where they tell."""
    said = []
    for name, words, unit, factor in (
        ("gpu_clock_min_mhz", "lowest clock", " MHz", 1.0),
        ("gpu_throttled", "throttled", " % of the time", 100.0),
        ("gpu_temperature_max_c", "hottest", " °C", 1.0),
    ):
        then = before.fidelity.values.get(name)
        now = [v for m in after if (v := m.fidelity.values.get(name)) is not None]
        if then is not None and now:
            said.append(f"{words} {then * factor:,.0f} → {statistics.fmean(now) * factor:,.0f}{unit}")
    return f" [{', '.join(said)}]" if said else ""


def unmeasured(
    asked: WinnerCriteria, run: Run, trials: Sequence[Trial], *, outcome: Judgement, sentence: str,
    cost: RunCost, now: datetime, finalists: Sequence[Trial] = (), repeats: int = 0,
) -> Conclusion:  # fmt: skip
    """What a run concludes that did not measure its finalists again, or not to the end."""
    found = Repeats(base=baseline_of(trials), finalists=finalists, measured={}, dropped={}, earlier={})
    today, arms = arms_of(asked, found, {})
    return Conclusion(
        run_id=run.id, study_id=run.study_id, at=now, outcome=outcome, sentence=sentence, baseline=today,
        finalists=tuple(arms), attainment=asked.study.slo.attainment, cost=cost, repeats=repeats,
        demonstration=asked.plan.demonstration,
    )  # fmt: skip


def unconfirmed(
    asked: WinnerCriteria, run: Run, trials: Sequence[Trial], *, why: str, cost: RunCost, now: datetime,
    finalists: Sequence[Trial] = (), repeats: int = 0,
) -> Conclusion | None:  # fmt: skip
    """What a run concludes that was ended before its finalists were measured again to the end; None if it
    has no trial. With `finalists` the study's next run measures these first.
    """
    ours = [t for t in trials if t.run_id == run.id]
    if not ours and not finalists:
        return None
    served = [t for t in trial_view.latest(ours) if t.state is TrialState.COMPLETE and not t.is_baseline]
    outcome, sentence = Judgement.NOT_CONFIRMED, f"Not confirmed: {why}."
    if finalists:
        names = trials_named([t.label for t in finalists])
        done = f" after {repeats} of {many(max(repeats, asked.plan.repeats), 'repeat')}" if repeats else ""
        sentence = f"Not confirmed: {why}{done}. The next run first measures {names} again."
    elif not served:
        outcome, sentence = Judgement.NOTHING_SERVED, nothing_served(trials, why)
    return unmeasured(
        asked, run, trials, outcome=outcome, sentence=sentence, cost=cost, now=now, finalists=finalists,
        repeats=repeats,
    )  # fmt: skip


def nothing_served(trials: Sequence[Trial], why: str = "") -> str:
    """Why there is no finalist."""
    reasons = sorted({t.reason for t in trials if t.reason and not t.is_baseline})
    because = "; ".join(reasons[:3]) or why
    return "No candidate completed" + (f": {because}." if because else ".")


def baseline_of(trials: Sequence[Trial]) -> Trial | None:
    """The baseline of `trial_view.baseline_of`; else the last one that was tried to an end."""
    done = trial_view.baseline_of(trials)
    return done or next((t for t in reversed(trial_view.latest(trials)) if t.is_baseline), None)


def noise_before(store: Store, asked: WinnerCriteria, *, without: str = "") -> Spreads:
    """The noise between launches by the repeats of one configuration within one confirmation, pooled over all
    of this node with the same model, engine version and traffic. `without`: the label of a confirmation that
    is left out.
    """
    groups: dict[tuple[str, Where], list[list[float]]] = {}
    for study in store.studies(node=asked.study.node, model=asked.study.model):
        if _traffic(study) != _traffic(asked.study):
            continue
        folders = {each.id: each.directory or "" for each in store.launches(study.id)}
        for trial in store.trials(study.id):
            for where, rows in _confirmations(trial, folders, without):
                for name in asked.metrics:
                    values = [m.values[name] for m in rows if name in m.values]
                    groups.setdefault((name, where), []).append(values)
    return {key: spread_of(values) for key, values in groups.items()}


def _traffic(study: Study) -> tuple[JSON, ...]:
    """What two studies must share for the noise of one to be that of the other."""
    windows: list[JSON] = [[s.start_s, s.duration_s, s.held_out] for s in study.slices]
    return study.engine_version, study.trace_digest, windows, study.spec.get("speed")


def _confirmations(
    trial: Trial, folders: Mapping[str, str], without: str
) -> Iterator[tuple[Where, list[Measurement]]]:
    """The repeats of a trial, those of one confirmation together."""
    for where in PLACES:
        rows: list[Measurement] = []
        last = ""
        for each in (m for m in trial.measurements if m.purpose == where):
            began = label_in(folders.get(each.launch_id or "")) or ""
            if without and began == without:
                continue
            if rows and (began != last or each.repeat <= rows[-1].repeat):
                yield where, rows
                rows = []
            rows.append(each)
            last = began
        if rows:
            yield where, rows
