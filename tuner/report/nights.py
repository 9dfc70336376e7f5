"""The best of every night as a line per node and workload."""

import math
from collections.abc import Sequence

from tuner.history.best_per_night import Night
from tuner.report.axes import Axis, Frame, fitted, grid, svg
from tuner.report.charts import NONE, legend
from tuner.report.words import heading, measured

KINDS = ("winner", "front", "three", "four")


def picture(nights: Sequence[Night], metric: str) -> str:
    """Values with the span of their repeats, and the baseline as a short bar."""
    shown = [n for n in nights if math.isfinite(n.best.value)]
    if not shown:
        return NONE.format("No night has measured this yet.")
    days = sorted({n.date for n in shown})
    places = sorted({(n.best.node, n.best.workload) for n in shown})
    values = [v for n in shown for v in (n.best.value, n.best.low, n.best.high) if math.isfinite(v)]
    values += [n.best.baseline for n in shown if n.best.baseline and math.isfinite(n.best.baseline)]
    first, last = days[0].toordinal(), days[-1].toordinal()
    frame = Frame(x=Axis(name="", low=first - 0.5, high=last + 0.5), y=fitted(heading(metric), values))
    parts = [p for p in grid(frame, x_labels=False) if f'y1="{frame.top}"' not in p]
    step = max(1, -(-len(days) // 5))
    for day in days[::step]:
        at = frame.px(day.toordinal())
        parts.append(f'<text x="{at:.1f}" y="{frame.bottom + 18}" text-anchor="middle">{day:%m-%d}</text>')
    for place, kind in zip(places, KINDS * len(places), strict=False):
        parts += _line([n for n in shown if (n.best.node, n.best.workload) == place], kind, metric, frame)
    names = [(kind, " for ".join(place)) for place, kind in zip(places, KINDS * len(places), strict=False)]
    label = f"best {metric} of every night"
    return svg(parts, label) + legend([*names, ("baseline", "the baseline")])


def _line(found: Sequence[Night], kind: str, metric: str, frame: Frame) -> list[str]:
    line = " ".join(f"{frame.px(n.date.toordinal()):.1f},{frame.py(n.best.value):.1f}" for n in found)
    parts = [f'<polyline class="line {kind}" points="{line}"/>']
    for night in found:
        at, best = frame.px(night.date.toordinal()), night.best
        if best.baseline and math.isfinite(best.baseline):
            base = frame.py(best.baseline)
            ends = f'x1="{at - 9:.1f}" y1="{base:.1f}" x2="{at + 9:.1f}" y2="{base:.1f}"'
            parts.append(f'<line class="median" {ends}/>')
        if math.isfinite(best.low) and math.isfinite(best.high):
            span = f'y1="{frame.py(best.low):.1f}" y2="{frame.py(best.high):.1f}"'
            parts.append(f'<line class="line {kind}" x1="{at:.1f}" x2="{at:.1f}" {span}/>')
        title = f"{night.date}: {measured(metric, best.value)}, {night.sure}"
        place = f'cx="{at:.1f}" cy="{frame.py(best.value):.1f}"'
        parts.append(f'<circle class="{kind} night" {place} r="5"><title>{title}</title></circle>')
    return parts
