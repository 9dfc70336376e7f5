"""Charts of nights as SVG text: the best value of each night, and its change from the baseline."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from html import escape

from tuner.conclusions import Difference
from tuner.history.best_per_night import Night
from tuner.report.charts import LEFT, NONE, Axis, Frame, fitted, grid, legend, svg, upright, upright_mark
from tuner.report.words import change as words_of
from tuner.report.words import heading, measured, percent


def over_nights(nights: Sequence[Night], metric: str) -> str:
    """Values of one place with the span of their repeats, and the baseline as a short bar."""
    shown = [n for n in nights if math.isfinite(n.best.value)]
    if not shown:
        return NONE.format("No night has measured this yet.")
    days = sorted({n.date for n in shown})
    values = [v for n in shown for v in (n.best.value, n.best.low, n.best.high) if math.isfinite(v)]
    values += [n.best.baseline for n in shown if n.best.baseline and math.isfinite(n.best.baseline)]
    first, last = days[0].toordinal(), days[-1].toordinal()
    frame = Frame(x=Axis(name="", low=first - 0.5, high=last + 0.5), y=fitted(heading(metric), values))
    parts = [*_days(days, frame), *_night_line(shown, "winner", metric, frame)]
    names = [("winner", "the best"), ("baseline", "the baseline")]
    return svg(parts, f"best {metric} of every night") + legend(names)


def _night_line(found: Sequence[Night], kind: str, metric: str, frame: Frame) -> list[str]:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class NightMark:
    """Something that happened between nights: a promotion, another engine version, other traffic."""

    date: date
    kind: str
    text: str


def gains(found: Sequence[Night], metric: str, marks: Sequence[NightMark]) -> str:
    """The change from the baseline of each night of one place, in per cent, with its interval; a line for
    each mark. Points set the scale: an interval that is wider than all of them is cut at the edge. Where they
    are far apart, equal factors are equally far apart, so that one large gain does not flatten the others.
    """
    shown = [(n, n.best.change) for n in found if n.best.change and n.best.change.change is not None]
    if not shown:
        return NONE.format("No night has compared this with the baseline yet.")
    factors = [0.95, 1.05, *(1 + (c.change or 0.0) for _, c in shown)]
    y = replace(fitted("", factors), text=lambda factor: percent(factor - 1))
    days = sorted({n.date for n in found} | {m.date for m in marks})
    x = Axis(name="", low=days[0].toordinal() - 0.7, high=days[-1].toordinal() + 0.7)
    frame = Frame(x=x, y=y, left=LEFT + 24)
    parts = _days(days, frame)
    zero = frame.py(1.0)
    parts.append(f'<line class="zero" x1="{frame.left}" x2="{frame.right}" y1="{zero:.1f}" y2="{zero:.1f}"/>')
    for place, mark in enumerate(marks):
        parts += _night_mark(mark, frame, place)
    for night, change in shown:
        parts += _gain(night, change, frame)
    return svg(parts, f"change of {metric} from the baseline, night by night")


def _days(days: Sequence[date], frame: Frame) -> list[str]:
    """The grid, with days instead of numbers along it."""
    step = max(1, -(-len(days) // 6))
    lines = [part for part in grid(frame, x_labels=False) if not upright(part)]
    return lines + [
        f'<text x="{at:.1f}" y="{frame.bottom + 18}" text-anchor="middle">{day:%m-%d}</text>'
        for day in days[::step]
        for at in [frame.px(day.toordinal())]
    ]


def _night_mark(mark: NightMark, frame: Frame, place: int) -> list[str]:
    at, y = (
        frame.px(mark.date.toordinal() + 0.5 * (mark.kind != "promotion")),
        frame.top + 12 + 14 * (place % 4),
    )
    return upright_mark(frame, at, f"mark {mark.kind}", mark.text, y)


def _gain(night: Night, change: Difference, frame: Frame) -> list[str]:
    at, reach = frame.px(night.date.toordinal()), (frame.y.low, frame.y.high)
    low, high = (
        frame.py(min(reach[1], max(reach[0], 1 + v if v is not None else end)))
        for v, end in ((change.low, reach[0]), (change.high, reach[1]))
    )
    title = escape(f"{night.date}: {words_of(change)}")
    spot = f'cx="{at:.1f}" cy="{frame.py(1 + (change.change or 0.0)):.1f}"'
    return [
        f'<line class="span {change.word}" x1="{at:.1f}" x2="{at:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>',
        f'<circle class="gain {change.word}" {spot} r="5"><title>{title}</title></circle>',
    ]
