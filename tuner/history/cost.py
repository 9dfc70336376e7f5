"""What a run's winner saves at the study's price, and when the tuning is repaid."""

from tuner.conclusions import Arm, RunCost, Saving

HOURS_PER_MONTH = 730.0
"""365 days × 24 hours / 12."""
RATES = ("max_speed", "goodput_rps")
"""By what traffic per GPU is counted: the highest speed at which the SLO is kept, where it was measured."""


def saving(winner: Arm | None, price_per_gpu_hour: object, cost: RunCost) -> Saving | None:
    """What serving the same traffic with the winner saves on the run's GPUs; None where no GPU or no price is
    known, or where the winner's rate is not clearly better.
    """
    price = price_per_gpu_hour if isinstance(price_per_gpu_hour, int | float) else 0.0
    made = next((c for name in RATES if winner is not None and (c := winner.change(name))), None)
    if (
        not cost.gpus
        or price <= 0
        or made is None
        or made.word != "better"
        or not (made.before and made.after)
    ):
        return None
    fraction = 1 - made.before / made.after
    hourly, hours = fraction * price * cost.gpus, (cost.search_s + cost.confirm_s) / 3600
    return Saving(
        metric=made.metric, price_per_gpu_hour=price, fraction=fraction, monthly=hourly * HOURS_PER_MONTH,
        tuning=hours * price, nights_to_repay=hours * price / (hourly * 24),
    )  # fmt: skip
