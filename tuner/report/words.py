"""How numbers, configurations and states are written for people: the same words as the command line's."""

import math
from collections.abc import Iterator, Mapping

from tuner.measures import MAXIMIZED

_UNITS = {
    "_ms": "ms",
    "_rps": "requests/s",
    "_tokens_per_s": "tokens/s",
    "_gib": "GiB",
    "_j_per_token": "J/token",
    "_seconds": "s",
}
_NAMED = {
    "ready_s": "s",
    "kv_usage_mean": "of 1",
    "kv_usage_max": "of 1",
    "slo_attainment": "of 1",
    "prefix_hit_rate": "of 1",
    "gpu_utilization": "of 1",
    "cost_per_million_tokens": "price/million tokens",
    "requests": "requests",
    "failed": "requests",
    "unfinished": "requests",
    "preemptions": "times",
    "queue_depth_mean": "requests",
    "queue_depth_max": "requests",
    "batch_tokens_mean": "tokens",
    "max_speed": "× the trace",
}


def unit(name: str) -> str:
    """The unit of a measurement name."""
    if name == "%":
        return "%"
    if name in _NAMED:
        return _NAMED[name]
    return next((said for ending, said in _UNITS.items() if name.endswith(ending)), "")


def heading(name: str) -> str:
    """A measurement's name with its unit and the way that is better: `ttft_p95_ms (ms, ↓ better)`."""
    arrow = "↑" if name in MAXIMIZED else "↓"
    said = unit(name)
    return f"{name} ({said}, {arrow} better)" if said else f"{name} ({arrow} better)"


def number(value: object) -> str:
    """A measured value for reading: four significant digits, ∞ for a failed one, an en dash for none."""
    if not isinstance(value, int | float):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def measured(name: str, value: object) -> str:
    """A value with its unit: `123.4 ms`."""
    return f"{number(value)} {unit(name)}".rstrip()


def knobs(candidate: Mapping[str, object]) -> str:
    """A candidate on one line, as the command line writes it."""
    return " ".join(f"{name}={value}" for name, value in candidate.items()) or "(engine defaults)"


def ratio(value: float | None, base: float | None) -> str:
    """Change against the baseline in per cent, signed; empty where it cannot be told."""
    if value is None or not base or math.isinf(base) or math.isinf(value):
        return ""
    return f"{(value / base - 1) * 100:+.0f} %"


def seconds(value: float | None) -> str:
    """A duration: `42 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`; an en dash for none."""
    if value is None or not math.isfinite(value):
        return "–"
    whole = round(abs(value))
    if whole < 10 and value != whole:
        return f"{value:.2g} s"
    parts = list(_parts(whole))[:2]
    return " ".join(parts) or "0 s"


def _parts(whole: int) -> Iterator[str]:
    started = False
    for size, name in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        count, whole = divmod(whole, size)
        if count or started:
            started = True
            yield f"{count} {name}"


def comparison(row: Mapping[str, object]) -> str:
    """A comparison of a run's summary, as the verdict says it: `ttft_p95_ms −48 % (−52 … −43, better)`."""
    ratio_, low, high = (_percent(row.get(name)) for name in ("ratio", "low", "high"))
    return f"{row.get('metric')} {ratio_} % ({low} … {high}, {row.get('verdict')})"


def _percent(value: object) -> str:
    if not isinstance(value, int | float):
        return "?"
    return f"{(value - 1) * 100:+.0f}".replace("-", "−")
