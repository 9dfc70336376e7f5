"""What a replay measured, as a record; the formulas are in `tuner/metrics.py`."""

from collections.abc import Collection, Mapping

from tuner.metrics import fold, pool_engine
from tuner.records import Measurement, MeasurementKind, Purpose, SliceMeasurement, Slo
from tuner.replay.timeline import Replayed


def measure(
    replayed: Replayed,
    slo: Slo,
    *,
    price_per_gpu_hour: float | None = None,
    gpus: int = 1,
    extra: Mapping[str, float] | None = None,
    asked: Collection[str] = (),
    purpose: Purpose = "search",
    repeat: int = 0,
) -> Measurement:
    """Pooled over the slices, and per slice. p99 is absent under 1,000 requests unless `asked` by name.

    `extra` adds what others measured (ready_s, gpu_memory_gib ...). A replay stopped early is `partial`.
    """
    parts = [(part.outcomes, part.window_s, part.engine) for part in replayed.slices]
    pooled = fold([o for outcomes, _, _ in parts for o in outcomes], sum(w for _, w, _ in parts), slo, asked)
    pooled.update(pool_engine([(engine, window) for _, window, engine in parts]))
    pooled.update(_cost(pooled, price_per_gpu_hour, gpus))
    pooled.update(extra or {})
    slices = tuple(
        SliceMeasurement(
            name=part.slice.name,
            window_s=part.window_s,
            values={
                **fold(part.outcomes, part.window_s, slo, asked),
                **pool_engine([(part.engine, part.window_s)]),
            },
        )
        for part in replayed.slices
    )
    kind: MeasurementKind = "partial" if replayed.stopped else "full"
    return Measurement(
        values=pooled, slices=slices, kind=kind, purpose=purpose, repeat=repeat, fidelity=replayed.fidelity
    )


def _cost(values: Mapping[str, float], price: float | None, gpus: int) -> dict[str, float]:
    """Price of a million output tokens at this rate."""
    rate = values.get("output_tokens_per_s", 0.0)
    if price is None or rate <= 0:
        return {}
    return {"cost_per_million_tokens": price * gpus / 3600 / rate * 1e6}
