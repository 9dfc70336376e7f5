"""The page of `trace show --html`: a trace in pictures, one HTML file that needs no network."""

from collections.abc import Mapping, Sequence

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from tuner.report.charts import Curve, Panel, bars, curves, fitted, from_zero, panels
from tuner.report.document import HERE, environment
from tuner.traffic.statistics import CAPACITIES, Statistics, series
from tuner.traffic.structure import reuse_by_capacity
from tuner.traffic.trace import Trace

STEPS = 120
"""Points of a cumulative curve."""
STRIPS = (
    ("request_rps", "requests/s"),
    ("input_tokens_per_s", "prompt tokens/s"),
    ("output_tokens_per_s", "answer tokens/s"),
    ("concurrency", "requests in flight"),
)


def render(trace: Trace, numbers: Statistics, name: str) -> str:
    """The page; `numbers` are the trace's."""
    return (
        environment(html=True)
        .get_template("trace.html.j2")
        .render(
            name=name,
            digest=trace.digest,
            numbers=numbers,
            style=Markup((HERE / "style.css").read_text(encoding="utf-8")),
            over_time=Markup(_over_time(trace)),
            lengths=Markup(_cumulative({"prompt": trace.input_len, "answer": trace.output_len}, "tokens")),
            gaps=Markup(_cumulative({"between arrivals": np.diff(trace.arrival_s) * 1e3}, "milliseconds")),
            reuse=Markup(_reuse(trace)),
            table=_table(numbers),
        )
    )


def _over_time(trace: Trace) -> str:
    drawn = series(trace)
    strips = [
        Panel(
            name=said,
            style="steps" if key == "concurrency" else "bars",
            x=drawn["start_s"],
            y=drawn[key],
            kind="winner" if key == "concurrency" else "front",
        )
        for key, said in STRIPS
    ]
    return panels(strips, "seconds of trace time", trace.duration_s, "The trace over time")


def _cumulative(found: Mapping[str, NDArray[np.generic]], unit: str) -> str:
    """The share of values up to a size, one line per name. Values up to zero are left out: the axis is
    logarithmic.
    """
    shares = np.linspace(0.0, 1.0, STEPS + 1)
    kinds = ("winner", "baseline")
    lines = []
    for kind, (name, values) in zip(kinds, found.items(), strict=False):
        every = values.astype(np.float64)
        shown = every[every > 0]
        if len(shown):
            x = np.quantile(shown, shares).tolist()
            lines.append(Curve(name=name, kind=kind, x=x, y=shares.tolist()))
    sizes = [x for line in lines for x in line.x]
    return curves(lines, fitted(unit, sizes or [0.0]), from_zero("share", [1.0]), f"Share by {unit}")


def _reuse(trace: Trace) -> str:
    if not len(trace.blocks):
        return (
            '<p class="none">The trace has no block ids, so it is not known which prompts share a prefix.</p>'
        )
    shares = reuse_by_capacity(trace, CAPACITIES)
    said = {"any size" if size is None else f"{size:,} tokens": share for size, share in shares.items()}
    return bars({size: 100 * share for size, share in said.items()}, "%")


def _table(numbers: Statistics) -> Sequence[tuple[str, Mapping[str, float]]]:
    rows = (
        ("prompt tokens", numbers.input_len),
        ("answer tokens", numbers.output_len),
        ("declared max_tokens", numbers.max_tokens),
        (f"requests in flight ({numbers.concurrency_source})", numbers.concurrency),
        ("observed TTFT, ms", numbers.observed_ttft_ms),
        ("observed end to end, ms", numbers.observed_e2e_ms),
    )
    return [(name, values) for name, values in rows if values]
