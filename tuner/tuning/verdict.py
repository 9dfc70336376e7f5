"""A verdict in plain words: what the comparisons say of the chosen trial, and whether it wins."""

from collections.abc import Sequence
from dataclasses import dataclass

from tuner.records import Slo, Trial
from tuner.search.compare import Comparison
from tuner.search.pareto import meets

Compared = tuple[int, str, Comparison]
"""(trial number, `confirm` or `held_out`, the comparison with the baseline)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`word` is short, `sentence` whole. `wins`: a challenger is published. `confirmed`: its gain was proved
    against the baseline under a plan that is meant to be acted on.
    """

    word: str
    sentence: str
    wins: bool
    confirmed: bool = False


def judge(
    chosen: Trial, base: Trial | None, compared: Sequence[Compared], slo: Slo, *, demonstration: bool
) -> Verdict:
    """The verdict on the trial that the policy chose after the confirmation.

    It wins when an objective is clearly better than the baseline's and the held-out slice does not deny it.
    Without a baseline that served the traffic the best that did serve wins.
    """
    note = " Demonstration only: short windows, one repeat." if demonstration else ""
    if base is None:
        kept = "meets" if meets(chosen, slo) else "does not meet"
        sentence = (
            f"The baseline did not serve this traffic; trial {chosen.number} did, and {kept} the SLO.{note}"
        )
        return Verdict(word="winner without a baseline", sentence=sentence, wins=True)
    if chosen.is_baseline:
        sentence = f"Measured again, today's configuration stays the choice of the study's policy.{note}"
        return Verdict(word="no clear winner", sentence=sentence, wins=False)
    ours = [c for number, where, c in compared if number == chosen.number and where == "confirm"]
    held = {c.metric: c for number, where, c in compared if number == chosen.number and where == "held_out"}
    better = [c for c in ours if c.verdict == "better"]
    worse = [c for c in ours if c.verdict == "worse"]
    denied = [c for c in better if c.metric in held and held[c.metric].verdict == "worse"]
    against = f"Trial {chosen.number} against the baseline: {', '.join(words(c) for c in ours)}."
    if denied:
        names = ", ".join(c.metric for c in denied)
        sentence = f"{against} The held-out slice denies it ({names} is worse there).{note}"
        return Verdict(word="no clear winner", sentence=sentence, wins=False)
    if not better:
        sentence = f"{against} The difference is within the noise of the measurements.{note}"
        return Verdict(word="no clear winner", sentence=sentence, wins=False)
    word = "winner with a trade-off" if worse else "clear winner"
    kept = (
        "It meets the SLO."
        if meets(chosen, slo)
        else "It does not meet the SLO; nothing measured does better."
    )
    sentence = f"{against} {kept}{_held(held)}{note}"
    return Verdict(word=word, sentence=sentence, wins=True, confirmed=not demonstration)


def words(comparison: Comparison) -> str:
    """`ttft_p95_ms −48 % (−52 … −43, better)`."""
    low, high = (_percent(v) for v in (comparison.low, comparison.high))
    change = _percent(comparison.log_ratio)
    return f"{comparison.metric} {change} % ({low} … {high}, {comparison.verdict})"


def _percent(log_ratio: float) -> str:
    if log_ratio == float("inf"):
        return "+∞"
    if log_ratio != log_ratio:
        return "?"
    change = (2.718281828459045**log_ratio - 1) * 100 if log_ratio < 50 else float("inf")
    return f"{change:+.0f}".replace("-", "−")


def _held(held: dict[str, Comparison]) -> str:
    if not held:
        return " There is no held-out slice."
    agreed = sum(1 for c in held.values() if c.verdict == "better")
    return f" On the held-out slice {agreed} of {len(held)} objectives are clearly better."
