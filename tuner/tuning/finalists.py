"""Which trials the confirmation measures again, and the verdict on what it measured."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from tuner.adapters import adapter_of
from tuner.conclusions import Arm, Difference, Judgement
from tuner.engine.metrics import same_value
from tuner.errors import BadInput
from tuner.measures import is_maximized, many
from tuner.records import EngineFacts, Outcome, Trial, TrialState, Value
from tuner.replay import outcomes
from tuner.report.words import difference
from tuner.search import trial_view
from tuner.tuning import quality
from tuner.tuning.context import RELAUNCHED
from tuner.tuning.next_trial import view_of
from tuner.tuning.study import Prepared
from tuner.tuning.winner import winner


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`winner` is a trial number: its configuration is published. `nearest`: to an SLO that nothing meets."""

    outcome: Judgement
    sentence: str
    winner: int | None = None
    nearest: int | None = None


def judge(
    base: Arm,
    finalists: Sequence[Arm],
    chosen: Arm,
    *,
    attainment: float,
    drift: Sequence[str] = (),
    not_worse: Mapping[str, float] | None = None,
    demonstration: bool = False,
) -> Verdict:
    """The verdict on the arm that the study's policy chose after the confirmation.

    `finalists` are those that served. If the baseline did not serve, `base` has `dropped`. The arm wins if
    an objective is clearly better than the baseline's and the held-out slice does not contradict this. If
    the baseline did not serve, the best arm that served wins. `attainment` is the share of good requests
    that the SLO requires.
    """
    note = " Demonstration only: short slices." if demonstration else ""
    if drift:
        sentence = f"The machine changed between the search and the confirmation: {'; '.join(drift)}."
        return Verdict(
            outcome=Judgement.NOT_TRUSTED, sentence=f"{sentence} No new configuration is published.{note}"
        )
    arms = [a for a in (base, *finalists) if a.dropped is None]
    missed = _slo_missed(arms, attainment)
    found = _against(base, chosen, finalists, not_worse or {})
    if missed is None:
        kept = _slo_kept(chosen, attainment)
        return Verdict(
            outcome=found.outcome, sentence=f"{found.sentence}{kept}{_left(finalists, not_worse)}{note}",
            winner=found.winner,
        )  # fmt: skip
    nearest, first = missed
    return Verdict(
        outcome=Judgement.SLO_MISSED, sentence=f"{first} {found.sentence}{_left(finalists, not_worse)}{note}",
        winner=found.winner, nearest=nearest,
    )  # fmt: skip


def _against(base: Arm, chosen: Arm, finalists: Sequence[Arm], not_worse: Mapping[str, float]) -> Verdict:
    """What the differences say, whatever the SLO."""
    if base.dropped is not None:
        why = base.dropped.rstrip(".")
        sentence = f"Today's configuration did not serve this traffic ({why}); {chosen.title} did."
        return Verdict(outcome=Judgement.BASELINE_FAILED, sentence=sentence, winner=chosen.trial)
    if chosen.trial == base.trial:
        sentence = "After the confirmation, the study's policy still chooses today's configuration."
        return Verdict(outcome=Judgement.BASELINE_STAYS, sentence=sentence)
    ours = [c for c in chosen.changes if c.where == "confirm"]
    held = [c for c in chosen.changes if c.where == "held_out"]
    better, worse = ([c for c in ours if c.word == word] for word in ("better", "worse"))
    against = f"Trial {chosen.label} against the baseline: {', '.join(difference(c) for c in ours)}."
    denied = [c.metric for c in better if any(h.metric == c.metric and h.word == "worse" for h in held)]
    if denied:
        sentence = f"{against} The held-out slice contradicts this ({', '.join(denied)} is worse there)."
        return Verdict(outcome=Judgement.BASELINE_STAYS, sentence=sentence)
    if worse and not better:
        return Verdict(outcome=Judgement.BASELINE_STAYS, sentence=f"{against} Nothing is better.")
    if not better:
        why = "The difference is within the noise of the measurements."
        if any(c.high is None for c in ours):
            why = "How much launches differ on this node is not known yet, so one repeat decides nothing."
        return Verdict(
            outcome=Judgement.NO_CLEAR_WINNER, sentence=f"{against} {why}{_passed_over(finalists, chosen)}"
        )
    if not worse:
        sentence = f"{against}{_held(held)}"
        return Verdict(outcome=Judgement.CLEAR_WINNER, sentence=sentence, winner=chosen.trial)
    first = f"A trade-off: trial {chosen.label} is worse in {', '.join(c.metric for c in worse)}"
    within = [f"{c.metric} may be {not_worse[c.metric]:.0%} worse" for c in worse if c.metric in not_worse]
    first += f" (within not_worse: {', '.join(within)})" if within else ""
    return Verdict(
        outcome=Judgement.TRADE_OFF, sentence=f"{first}. {against}{_held(held)}", winner=chosen.trial
    )


def _passed_over(finalists: Sequence[Arm], chosen: Arm) -> str:
    """What is better of the finalists that the policy did not choose."""
    found = {
        arm.label: [c.metric for c in arm.changes if (c.where, c.word) == ("confirm", "better")]
        for arm in finalists
        if arm.trial != chosen.trial
    }
    return "".join(
        f" Trial {label} is better in {' and '.join(names)}, but the study's policy chooses trial"
        f" {chosen.label}."
        for label, names in found.items()
        if names
    )


def exceeding(arm: Arm, not_worse: Mapping[str, float]) -> list[Difference]:
    """The differences by which an arm is worse than the study's `not_worse` allows, by what was measured."""
    ours = [c for c in arm.changes if c.where == "confirm" and c.metric in not_worse and c.word != "better"]
    return [
        c
        for c in ours
        if c.change is None or (-c.change if is_maximized(c.metric) else c.change) > not_worse[c.metric]
    ]


def worse_by(metric: str, before: float, after: float) -> float:
    """By which share of the baseline's value a metric is worse; negative if it is better."""
    change = (after - before) / before
    return -change if is_maximized(metric) else change


def _slo_missed(arms: Sequence[Arm], attainment: float) -> tuple[int | None, str] | None:
    """(the nearest, the sentence) if no arm meets the SLO; None if one does or nothing is known. No arm is
    the nearest if none served a good request.
    """
    known = [a for a in arms if a.misses_slo_by is not None]
    if not known or any(a.slo_met for a in known):
        return None
    nearest = max(known, key=lambda a: a.attainment or 0.0)
    if not nearest.attainment:
        return None, f"No trial meets the SLO: none had a good request. {attainment:.1%} are required."
    missing = 100 * (nearest.misses_slo_by or 0)
    return nearest.trial, (
        f"No trial meets the SLO: trial {nearest.label} comes nearest with {nearest.attainment:.1%} good"
        f" requests. {attainment:.1%} are required, so {missing:.1f} percentage points are missing."
    )


def _slo_kept(chosen: Arm, attainment: float) -> str:
    if chosen.slo_met is None:
        return ""
    if chosen.slo_met:
        return f" {'It' if chosen.changed else 'The configuration'} meets the SLO."
    return (
        f" It misses the SLO: {(chosen.attainment or 0):.1%} of the requests are good, but"
        f" {attainment:.1%} are required. Another trial meets the SLO."
    )


def _left(finalists: Sequence[Arm], not_worse: Mapping[str, float] | None) -> str:
    """Who was left out because the study forbids it."""
    found = [(a, e) for a in finalists if (e := exceeding(a, not_worse or {}))]
    said = [f"trial {a.label} ({', '.join(difference(c) for c in e)})" for a, e in found]
    return f" Left out by not_worse: {'; '.join(said)}." if said else ""


def _held(held: Sequence[Difference]) -> str:
    if not held:
        return " There is no held-out slice."
    agreed = sum(1 for c in held if c.word == "better")
    worse = [c.metric for c in held if c.word == "worse"]
    but = f" Clearly worse: {', '.join(worse)}." if worse else ""
    return f" Clearly better on the held-out slice: {agreed} of {many(len(held), 'objective')}.{but}"


def cannot_act(base: Trial, trial: Trial, facts: EngineFacts) -> str | None:
    """Why no difference between the engines of a trial and of the baseline can act, in one clause. None if
    a difference can act, or if the replayed requests are no longer there.
    """
    today, then = {**base.effective, **base.candidate}, {**trial.effective, **trial.candidate}
    shared = set(base.effective) & set(trial.effective)
    names = {
        n for n in (*shared, *base.candidate, *trial.candidate) if not same_value(today.get(n), then.get(n))
    }
    if not names or not names <= _LIMITS.keys():
        return None
    seen = [_seen(base), _seen(trial)]
    if any(each is None for each in seen) or _shapes_graphs(names, today, then, facts):
        return None
    crowds = [s for s in seen if s is not None]
    said = [_idle_limit(n, today.get(n), then.get(n), crowds) for n in sorted(names)]
    return "; ".join(text for text in said if text) if all(said) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """What was in an engine at once, at most: requests, and tokens of prompts; the longest prompt."""

    requests: int
    tokens: int
    longest: int


def crowd_of(rows: Sequence[Sequence[Outcome]]) -> Crowd:
    """The crowd of the slices of a replay."""
    return Crowd(
        requests=max((_peak(part, lambda o: 1) for part in rows), default=0),
        tokens=max((_peak(part, _prompt) for part in rows), default=0),
        longest=max((_prompt(o) for part in rows for o in part), default=0),
    )


def _prompt(outcome: Outcome) -> int:
    return max(outcome.input_tokens, outcome.expected_input)


def _seen(trial: Trial) -> Crowd | None:
    """What was in a trial's engine at once; None if a slice's file is gone."""
    measured = trial.measurement
    if measured is None or not measured.slices:
        return None
    try:
        return crowd_of([outcomes.read(s.outcomes_file or "") for s in measured.slices])
    except BadInput:
        return None


def _peak(part: Sequence[Outcome], size: Callable[[Outcome], int]) -> int:
    """The largest sum of `size` over the requests that were on their way at one moment."""
    moves = list[tuple[float, int]]()
    for each in part:
        if each.sent_s is not None:
            ended = max((t for t in (each.end_s, each.last_token_s) if t is not None), default=math.inf)
            moves += [(each.sent_s, size(each)), (ended, -size(each))]
    peak = now = 0
    for _, change in sorted(moves, key=lambda m: (m[0], -m[1])):
        now += change
        peak = max(peak, now)
    return peak


def _shapes_graphs(
    names: set[str], today: Mapping[str, Value], then: Mapping[str, Value], facts: EngineFacts
) -> bool:
    """Whether the number of sequences decides which CUDA graphs are captured: vLLM captures up to
    min(2 × max_num_seqs, 512) tokens unless an argument says otherwise.
    """
    graphs = adapter_of(facts.kind).graph_tokens
    if facts.platform != "cuda" or graphs is None or "max_num_seqs" not in names:
        return False
    sizes = "max_cudagraph_capture_size"
    if (sizes in today and sizes in then) or today.get("enforce_eager") is True:
        return False  # the engines say what they captured, and do not differ in it
    return any(
        not isinstance(v, int) or 2 * v < graphs
        for v in (today.get("max_num_seqs"), then.get("max_num_seqs"))
    )


# Limits → what shows that they cannot act: words, unit, and the most that was there at once.
_LIMITS: Mapping[str, tuple[str, str, Callable[[Crowd], int]]] = {
    "max_num_seqs": (": there were never more than {} in flight", "request", lambda c: c.requests),
    "max_num_batched_tokens": (
        ": there were never more than {} in flight", "token", lambda c: c.tokens + c.requests
    ),
    "long_prefill_token_threshold": (", the longest prompt has {}", "token", lambda c: c.longest),
}  # fmt: skip


def _idle_limit(name: str, before: Value, after: Value, seen: Sequence[Crowd]) -> str | None:
    """Why a limit cannot act, neither before nor after; None if it can."""
    words, unit, size = _LIMITS[name]
    most, off = max(map(size, seen)), (0, None) if name == "long_prefill_token_threshold" else ()
    for value in (before, after):
        is_limit = isinstance(value, int) and not isinstance(value, bool) and value >= most
        if value not in off and not is_limit:
            return None
    return f"{name} {after} has no effect{words.format(many(most, unit))}"


def finalists(prepared: Prepared, trials: Sequence[Trial], run_id: str) -> list[Trial]:
    """The policy's choice, then its choice without that trial. Left out are the baseline, trials that only
    changed knobs that could not act, trials that `not_worse` forbids, and trials that change the answers
    and were not judged. Screened trials are finalists, until they were relaunched or the run has made
    relaunches enough at its end.
    """
    base = trial_view.baseline_of(trials)
    left, found = [t for t in trials if not t.is_baseline], list[Trial]()
    key = view_of(prepared, trials).key
    count = prepared.plan.finalists
    ours = [t for t in trials if t.run_id == run_id and t.state is not TrialState.ABORTED]
    made = list(takewhile(lambda t: t.origin == RELAUNCHED, reversed(ours)))
    if len(made) > count:
        left = [t for t in left if not t.screened]
    while len(found) < count:
        best = winner(prepared, left, key)
        if best is None:
            break
        if why_not(prepared, base, best) is None:
            found.append(best)
        left = [t for t in left if key(t.candidate) != key(best.candidate)]
    return found


def only_screened(found: Sequence[Trial]) -> list[Trial]:
    """The finalists without a launch of their own: none in the search, and none in a confirmation."""
    return [t for t in found if t.screened and all(m.purpose == "search" for m in t.measurements)]


def why_not(prepared: Prepared, base: Trial | None, trial: Trial) -> str | None:
    """Why a trial cannot win, whatever its numbers; None if it can. `base` None: it did not serve."""
    if (turned := quality.held_back(prepared, trial)) is not None:
        return f"Trial {trial.label} is not a finalist: {turned}."
    if base is None:
        return None
    if (said := cannot_act(base, trial, prepared.facts)) is not None:
        return f"Trial {trial.label} is not a finalist: {said}."
    mine, its = (t.measurement.values if t.measurement else {} for t in (base, trial))
    for name, limit in prepared.file.not_worse.items():
        if mine.get(name) and name in its and worse_by(name, mine[name], its[name]) > limit:
            change = (its[name] - mine[name]) / mine[name]
            return f"Trial {trial.label} is not a finalist: {name} {change:+.0%} (not_worse: {limit:.0%})."
    return None


def left_out(prepared: Prepared, trials: Sequence[Trial]) -> list[str]:
    """Why complete trials are no finalists: three of them, those with an engine of their own first, and how
    many more there are. Of a screened trial that was relaunched, only the second is told.
    """
    base, key = trial_view.baseline_of(trials), view_of(prepared, trials).key
    done = [t for t in trial_view.latest(trials) if t.state is TrialState.COMPLETE and not t.is_baseline]
    own = {key(t.candidate) for t in done if not t.screened}
    told = [t for t in done if not t.screened or key(t.candidate) not in own]
    told.sort(key=lambda t: t.screened)
    found = [said for t in told if (said := why_not(prepared, base, t)) is not None]
    more = [f"{many(len(found) - 3, 'other trial')} cannot win either."] if found[3:] else []
    return [*found[:3], *more]
