"""A run's outcome in one word and one text: what the repeats of a confirmation say of the chosen trial."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tuner.conclusions import Arm, Difference, Judgement
from tuner.measures import is_maximized
from tuner.report.words import difference


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

    `finalists` are those that served, `base` has `dropped` where it did not. It wins when an objective is
    clearly better than the baseline's and the held-out slice does not deny it; without a baseline that
    served, the best that did serve wins. `attainment` is the SLO's share of good requests.
    """
    note = " Demonstration only: short windows." if demonstration else ""
    if drift:
        sentence = f"The machine changed between the search and the confirmation: {'; '.join(drift)}."
        return Verdict(outcome=Judgement.NOT_TRUSTED, sentence=f"{sentence} Nothing is published.{note}")
    arms = [a for a in (base, *finalists) if a.dropped is None]
    missed = _slo_missed(arms, attainment)
    found = _against(base, chosen, not_worse or {})
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


def _against(base: Arm, chosen: Arm, not_worse: Mapping[str, float]) -> Verdict:
    """What the differences say, whatever the SLO."""
    if base.dropped is not None:
        sentence = f"Today's configuration did not serve this traffic; {chosen.title} did."
        return Verdict(outcome=Judgement.BASELINE_FAILED, sentence=sentence, winner=chosen.trial)
    if chosen.trial == base.trial:
        sentence = "Measured again, today's configuration stays the choice of the study's policy."
        return Verdict(outcome=Judgement.BASELINE_STAYS, sentence=sentence)
    ours = [c for c in chosen.changes if c.where == "confirm"]
    held = [c for c in chosen.changes if c.where == "held_out"]
    better, worse = ([c for c in ours if c.word == word] for word in ("better", "worse"))
    against = f"Trial {chosen.trial} against the baseline: {', '.join(difference(c) for c in ours)}."
    denied = [c.metric for c in better if any(h.metric == c.metric and h.word == "worse" for h in held)]
    if denied:
        sentence = f"{against} The held-out slice denies it ({', '.join(denied)} is worse there)."
        return Verdict(outcome=Judgement.BASELINE_STAYS, sentence=sentence)
    if worse and not better:
        return Verdict(outcome=Judgement.BASELINE_STAYS, sentence=f"{against} Nothing is better.")
    if not better:
        sentence = f"{against} {_unclear(ours)}"
        return Verdict(outcome=Judgement.NO_CLEAR_WINNER, sentence=sentence)
    if not worse:
        sentence = f"{against}{_held(held)}"
        return Verdict(outcome=Judgement.CLEAR_WINNER, sentence=sentence, winner=chosen.trial)
    first = f"A trade-off: trial {chosen.trial} is worse in {', '.join(c.metric for c in worse)}"
    within = [f"{c.metric} may be {not_worse[c.metric]:.0%} worse" for c in worse if c.metric in not_worse]
    first += f" (within not_worse: {', '.join(within)})" if within else ""
    return Verdict(
        outcome=Judgement.TRADE_OFF, sentence=f"{first}. {against}{_held(held)}", winner=chosen.trial
    )


def exceeding(arm: Arm, not_worse: Mapping[str, float]) -> list[Difference]:
    """The differences by which an arm is worse than the study's `not_worse` allows, by what was measured."""
    ours = [c for c in arm.changes if c.where == "confirm" and c.metric in not_worse and c.word != "better"]
    return [c for c in ours if c.change is None or _worse(c) > not_worse[c.metric]]


def _worse(difference: Difference) -> float:
    change = difference.change or 0.0
    return -change if is_maximized(difference.metric) else change


def worse_by(metric: str, before: float, after: float) -> float:
    """By which share of the baseline's value a metric is worse; negative where it is better."""
    change = (after - before) / before
    return -change if is_maximized(metric) else change


def _slo_missed(arms: Sequence[Arm], attainment: float) -> tuple[int, str] | None:
    """(the nearest, the sentence) where no arm meets the SLO; None where one does or nothing is known."""
    known = [a for a in arms if a.misses_slo_by is not None]
    if not known or any(a.slo_met for a in known):
        return None
    nearest = max(known, key=lambda a: a.attainment or 0.0)
    who = f"trial {nearest.trial}"
    return nearest.trial, (
        f"No trial meets the SLO: {who} comes nearest with {(nearest.attainment or 0):.1%} good requests of"
        f" the {attainment:.1%} asked for ({100 * (nearest.misses_slo_by or 0):.1f} points short)."
    )


def _slo_kept(chosen: Arm, attainment: float) -> str:
    if chosen.slo_met is None:
        return ""
    if chosen.slo_met:
        return f" {'It' if chosen.changed else 'The configuration'} meets the SLO."
    return (
        f" It misses the SLO, which another trial meets ({(chosen.attainment or 0):.1%} good requests of"
        f" {attainment:.1%})."
    )


def _left(finalists: Sequence[Arm], not_worse: Mapping[str, float] | None) -> str:
    """Who was left out because the study forbids it."""
    found = [(a, e) for a in finalists if (e := exceeding(a, not_worse or {}))]
    said = [f"trial {a.trial} ({', '.join(difference(c) for c in e)})" for a, e in found]
    return f" Left out by not_worse: {'; '.join(said)}." if said else ""


def _unclear(ours: Sequence[Difference]) -> str:
    if any(c.high is None for c in ours):
        return "How much launches differ on this node is not known yet, so one repeat decides nothing."
    return "The difference is within the noise of the measurements."


def _held(held: Sequence[Difference]) -> str:
    if not held:
        return " There is no held-out slice."
    agreed = sum(1 for c in held if c.word == "better")
    return f" On the held-out slice {agreed} of {len(held)} objectives are clearly better."
