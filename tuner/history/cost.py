"""What serving costs, what tuning cost, and when it is repaid. Prices are per GPU hour, in any currency."""

from collections.abc import Iterable
from dataclasses import dataclass

from tuner.errors import BadInput
from tuner.records import Trial

HOURS_PER_MONTH = 730.0
"""365 days × 24 hours / 12."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """What a profile saves against the baseline, for the same traffic.

    `fraction` of the GPU hours is no longer needed, `monthly` is its price for the given GPUs, and
    `nights_to_repay` how many nights like the last one the saving of the days between pays for one run;
    None when nothing is saved.
    """

    fraction: float
    monthly: float
    tuning_cost: float
    nights_to_repay: float | None


def cost_per_million_tokens(price_per_gpu_hour: float, gpus: int, tokens_per_s: float) -> float:
    """Price of a million tokens at a rate of tokens per second; +inf for none."""
    if price_per_gpu_hour < 0 or gpus < 1:
        raise BadInput(f"a price of {price_per_gpu_hour} for {gpus} GPUs makes no sense")
    return price_per_gpu_hour * gpus / 3600 / tokens_per_s * 1e6 if tokens_per_s > 0 else float("inf")


def gpu_hours(trials: Iterable[Trial]) -> float:
    """GPU hours that trials took, those that failed included."""
    return sum(trial.gpu_seconds for trial in trials) / 3600


def saving(
    *, baseline_rate: float, rate: float, price_per_gpu_hour: float, gpus: int, tuning_gpu_hours: float
) -> Saving:
    """The saving of serving the same traffic at a higher rate per GPU (goodput, or max_speed)."""
    if baseline_rate <= 0 or rate <= 0:
        raise BadInput("a saving needs two rates above zero")
    fraction = max(0.0, 1 - baseline_rate / rate)
    hourly = fraction * price_per_gpu_hour * gpus
    spent = tuning_gpu_hours * price_per_gpu_hour
    return Saving(
        fraction=fraction,
        monthly=hourly * HOURS_PER_MONTH,
        tuning_cost=spent,
        nights_to_repay=spent / (hourly * 24) if hourly > 0 else None,
    )
