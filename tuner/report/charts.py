"""Charts as SVG text, made on the server: axes, scatter of a front, curves, bars, levels of a knob, time
lines.

The page brings the colours.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from tuner.history.best_per_night import Night
from tuner.report.words import heading, measured

WIDTH, HEIGHT = 620, 380
LEFT, RIGHT, TOP, BOTTOM = 74, 16, 14, 52


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A measurement on an axis; `log` where all values are positive and spread over more than a factor 4."""

    name: str
    low: float
    high: float
    log: bool = False

    def at(self, value: float) -> float:
        """Position of a value in 0..1."""
        low, high, value = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return (value - low) / (high - low)


def fitted(name: str, values: Sequence[float]) -> Axis:
    """The axis that shows all of some finite values with a little room."""
    low, high = min(values), max(values)
    if low > 0 and high / low > 4:
        return Axis(name=name, low=low / 1.15, high=high * 1.15, log=True)
    pad = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    return Axis(name=name, low=low - pad, high=high + pad)


def from_zero(name: str, values: Sequence[float]) -> Axis:
    """A linear axis from zero to a little above the highest value."""
    return Axis(name=name, low=0.0, high=(max(values, default=0.0) or 1.0) * 1.08)


def ticks(axis: Axis, about: int = 5) -> list[float]:
    """Round values inside an axis, about `about` of them."""
    if axis.log:
        decades = range(math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high)) + 1)
        steps = (1, 2, 5) if math.log10(axis.high / axis.low) < 1.7 else (1,)
        found = [m * 10.0**d for d in decades for m in steps]
    else:
        rough = (axis.high - axis.low) / about
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= rough)
        first = math.ceil(axis.low / step)
        found = [(first + i) * step for i in range(about + 2)]
    return [t for t in found if axis.low <= t <= axis.high]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The rectangle of a plot inside a drawing, and where values lie in it."""

    x: Axis
    y: Axis
    top: float = TOP
    bottom: float = HEIGHT - BOTTOM
    left: float = LEFT
    right: float = WIDTH - RIGHT

    def px(self, value: float) -> float:
        return self.left + self.x.at(value) * (self.right - self.left)

    def py(self, value: float) -> float:
        return self.bottom - self.y.at(value) * (self.bottom - self.top)


def tick_text(value: float) -> str:
    """A tick's label: plain digits, never an exponent below a million."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def grid(frame: Frame, *, x_labels: bool = True, about: int = 5) -> list[str]:
    """Grid lines, ticks and axis names."""
    parts = []
    for tick in ticks(frame.x):
        at = frame.px(tick)
        parts.append(
            f'<line class="grid" x1="{at:.1f}" y1="{frame.top}" x2="{at:.1f}" y2="{frame.bottom:.1f}"/>'
        )
        if x_labels:
            y, said = frame.bottom + 16, tick_text(tick)
            parts.append(f'<text x="{at:.1f}" y="{y:.1f}" text-anchor="middle">{said}</text>')
    for tick in ticks(frame.y, about):
        at = frame.py(tick)
        parts.append(f'<line class="grid" x1="{frame.left}" y1="{at:.1f}" x2="{frame.right}" y2="{at:.1f}"/>')
        parts.append(
            f'<text x="{frame.left - 6}" y="{at + 4:.1f}" text-anchor="end">{tick_text(tick)}</text>'
        )
    if x_labels:
        middle = (frame.left + frame.right) / 2
        parts.append(
            f'<text class="axis" x="{middle}" y="{frame.bottom + 40:.1f}">{escape(frame.x.name)}</text>'
        )
    if frame.y.name:
        centre, name = (frame.top + frame.bottom) / 2, escape(frame.y.name)
        parts.append(f'<text class="axis" transform="translate(14 {centre:.1f}) rotate(-90)">{name}</text>')
    return parts


def svg(parts: Sequence[str], label: str, *, height: float = HEIGHT, interactive: bool = False) -> str:
    """A whole drawing. One with links in it is a group for screen readers, else an image."""
    role = "group" if interactive else "img"
    opening = f'<svg viewBox="0 0 {WIDTH} {height:g}" role="{role}" aria-label="{escape(label)}">'
    return "".join([opening, *parts, "</svg>"])


MARKED = 300
"""Up to so many trials off the front are drawn as marks of their own, with words and links; more as dots."""

NONE = '<p class="none">{}</p>'


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One trial in a plane of two measurements; `kind` is one of baseline, front, winner, other. `front`: it
    is on the front, whatever its kind.
    """

    x: float
    y: float
    kind: str
    label: str = ""
    href: str = ""
    front: bool = False


_ORDER = ("other", "front", "baseline", "winner")


def scatter(points: Sequence[Point], x_name: str, y_name: str) -> str:
    """An SVG scatter of two measurements with the front as a line; infinite values are left out."""
    shown = [p for p in points if math.isfinite(p.x) and math.isfinite(p.y)]
    if not shown:
        return NONE.format("No trial has both measurements yet.")
    x, y = fitted(heading(x_name), [p.x for p in shown]), fitted(heading(y_name), [p.y for p in shown])
    frame = Frame(x=x, y=y)
    others = [p for p in shown if p.kind == "other"]
    marked = sorted((p for p in shown if p.kind != "other"), key=lambda p: _ORDER.index(p.kind))
    bare = len(others) > MARKED or any(not p.label for p in others)
    crowd = others if bare else []
    parts = [
        *grid(frame),
        _dots(crowd, frame),
        _front_line([p for p in shown if p.front], frame),
        *(_mark(p, frame) for p in ([] if crowd else others)),
        *(_mark(p, frame) for p in marked),
    ]
    label = f"{y_name} over {x_name}: {len(shown)} trials, {len(marked)} of them named"
    return svg(parts, label, interactive=any(p.href for p in shown))


def _dots(points: Sequence[Point], frame: Frame) -> str:
    """Thousands of trials as one path of round dots; those on the same spot of the drawing are one dot."""
    if not points:
        return ""
    spots = sorted({(round(frame.px(p.x)), round(frame.py(p.y))) for p in points})
    places = "".join(f"M{x} {y}h0" for x, y in spots)
    return f'<path class="dots" d="{places}"><title>{len(points)} other trials</title></path>'


def _front_line(front: Sequence[Point], frame: Frame) -> str:
    if len(front) < 2:
        return ""
    places = [(frame.px(p.x), frame.py(p.y)) for p in sorted(front, key=lambda p: (p.x, p.y))]
    return '<polyline class="frontline" points="' + " ".join(f"{a:.1f},{b:.1f}" for a, b in places) + '"/>'


def _mark(point: Point, frame: Frame) -> str:
    a, b = frame.px(point.x), frame.py(point.y)
    label = escape(point.label)
    title = f"<title>{label}</title>"
    if point.kind == "baseline":
        place = f'x="{a - 6:.1f}" y="{b - 6:.1f}" width="12" height="12"'
        shape = f'<rect class="baseline" {place}>{title}</rect>'
    elif point.kind == "winner":
        corners = f"{a:.1f},{b - 10:.1f} {a + 10:.1f},{b:.1f} {a:.1f},{b + 10:.1f} {a - 10:.1f},{b:.1f}"
        shape = f'<polygon class="winner" points="{corners}">{title}</polygon>'
    else:
        radius = 6 if point.kind == "front" else 4
        shape = f'<circle class="{point.kind}" cx="{a:.1f}" cy="{b:.1f}" r="{radius}">{title}</circle>'
    if not point.href:
        return shape
    keys = ' tabindex="-1"' if point.kind == "other" else ""
    return f'<a href="{escape(point.href)}" aria-label="{label}"{keys}>{shape}</a>'


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A line with an optional band. `kind` picks the colour: baseline, winner, front, or a number."""

    name: str
    kind: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


def curves(found: Sequence[Curve], x_axis: Axis, y_axis: Axis, label: str) -> str:
    """Lines with their bands, and a legend beneath the drawing."""
    if not found:
        return NONE.format("Nothing was measured for this picture.")
    frame = Frame(x=x_axis, y=y_axis)
    parts = grid(frame)
    for curve in found:
        if curve.low:
            there = [*zip(curve.x, curve.high, strict=True)]
            back = [*zip(curve.x, curve.low, strict=True)][::-1]
            parts.append(f'<polygon class="band {curve.kind}" points="{_points(there + back, frame)}"/>')
    for curve in found:
        line = _points([*zip(curve.x, curve.y, strict=True)], frame)
        name = escape(curve.name)
        parts.append(f'<polyline class="line {curve.kind}" points="{line}"><title>{name}</title></polyline>')
    return svg(parts, label) + legend([(c.kind, c.name) for c in found])


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Which line is which, in words."""
    swatch = (
        '<svg viewBox="0 0 24 8" class="swatch" aria-hidden="true"><path class="line {}" d="M0 4h24"/></svg>'
    )
    items = "".join(f"<li>{swatch.format(kind)}{escape(name)}</li>" for kind, name in entries)
    return f'<ul class="legend">{items}</ul>'


def _points(places: Sequence[tuple[float, float]], frame: Frame) -> str:
    return " ".join(f"{frame.px(x):.1f},{frame.py(y):.1f}" for x, y in places)


def bars(values: Mapping[str, float], name: str) -> str:
    """A table of horizontal bars with their values beside them; `name` is a measurement (for the unit)."""
    if not values:
        return NONE.format("Nothing to show.")
    most = max(values.values()) or 1.0
    rows = []
    for label, value in values.items():
        width = max(0.5, value / most * 100)
        said = escape(measured(name, value))
        rows.append(
            f'<tr><th scope="row">{escape(label)}</th><td>{said}</td><td class="bar">'
            '<svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
            f'<rect class="bar" width="{width:.1f}" height="10"/></svg></td></tr>'
        )
    return f'<table class="bars"><tbody>{"".join(rows)}</tbody></table>'


def levels(columns: Mapping[str, Sequence[float]], y_name: str, x_name: str) -> str:
    """One knob's slice: a column of dots per level, with the median as a bar."""
    values = [v for column in columns.values() for v in column if math.isfinite(v)]
    if not values:
        return NONE.format("No level of this knob was measured.")
    y = fitted(heading(y_name), values)
    x = Axis(name=x_name, low=-0.5, high=len(columns) - 0.5)
    frame = Frame(x=x, y=y)
    parts = _levels_grid(frame, list(columns))
    for place, column in enumerate(columns.values()):
        finite = sorted(v for v in column if math.isfinite(v))
        at = frame.px(place)
        parts += [f'<circle class="other" cx="{at:.1f}" cy="{frame.py(v):.1f}" r="4"/>' for v in finite]
        if finite:
            middle = frame.py(finite[len(finite) // 2])
            ends = f'x1="{at - 16:.1f}" y1="{middle:.1f}" x2="{at + 16:.1f}" y2="{middle:.1f}"'
            parts.append(f'<line class="median" {ends}/>')
    return svg(parts, f"{y_name} by {x_name}")


def _levels_grid(frame: Frame, names: Sequence[str]) -> list[str]:
    plain = Frame(x=Axis(name=frame.x.name, low=10.0, high=11.0), y=frame.y)
    parts = [p for p in grid(plain) if 'text-anchor="middle"' not in p and not _upright(p)]
    for place, name in enumerate(names):
        short = name if len(name) <= 10 else name[:9] + "…"
        y = frame.bottom + (16 if len(names) < 8 or place % 2 == 0 else 28)
        parts.append(
            f'<text x="{frame.px(place):.1f}" y="{y:.1f}" text-anchor="middle">{escape(short)}</text>'
        )
    return parts


def _upright(part: str) -> bool:
    return part.startswith("<line") and f'y1="{TOP}"' in part


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One strip of a timeline: steps, bars or marks over a common time axis."""

    name: str
    style: str
    x: Sequence[float]
    y: Sequence[float]
    kind: str = "front"
    log: bool = False
    crosses: Sequence[float] = ()


PANEL = 130.0


def panels(found: Sequence[Panel], x_name: str, span: float, label: str) -> str:
    """Strips over one time axis in seconds, one under another."""
    shown = [p for p in found if len(p.x) or p.crosses]
    if not shown:
        return NONE.format("No outcomes of this trial are on this host.")
    x = Axis(name=x_name, low=0.0, high=max(span, 1e-9))
    parts: list[str] = []
    for place, panel in enumerate(shown):
        top = TOP + place * PANEL
        last = place == len(shown) - 1
        parts += _panel(panel, x, top, last)
    return svg(parts, label, height=TOP + PANEL * len(shown) + BOTTOM - 16)


def _panel(panel: Panel, x: Axis, top: float, last: bool) -> list[str]:
    finite = [v for v in panel.y if math.isfinite(v)]
    positive = panel.log and bool(finite) and min(finite) > 0
    y = fitted("", finite) if positive else from_zero("", finite)
    frame = Frame(x=x, y=y, top=top + 22, bottom=top + PANEL - 12)
    parts = grid(frame, x_labels=last, about=3)
    parts.append(f'<text class="name" x="{frame.left}" y="{top + 16}">{escape(panel.name)}</text>')
    if panel.style == "bars":
        parts += _bars(panel, frame)
    elif panel.style == "dots":
        dots = "".join(
            f"M{frame.px(a):.1f} {frame.py(b):.1f}h0"
            for a, b in zip(panel.x, panel.y, strict=True)
            if math.isfinite(b)
        )
        parts.append(f'<path class="dots {panel.kind}" d="{dots}"/>')
    else:
        steps = [(a, b) for a, b in zip(panel.x, panel.y, strict=True) if math.isfinite(b)]
        parts.append(f'<polyline class="line {panel.kind}" points="{_points(steps, frame)}"/>')
    for at in panel.crosses:
        a, b = frame.px(at), frame.top + 6.0
        cross = f"M{a - 4:.1f} {b - 4:.1f}l8 8m0 -8l-8 8"
        parts.append(f'<path class="cross" d="{cross}"><title>failed</title></path>')
    return parts


def _bars(panel: Panel, frame: Frame) -> list[str]:
    width = (panel.x[1] - panel.x[0] if len(panel.x) > 1 else 1.0) / (frame.x.high - frame.x.low)
    wide = max(0.5, width * (frame.right - frame.left) - 0.5)
    base = frame.py(0.0)
    steps = "".join(
        f"M{frame.px(a):.1f} {base:.1f}V{frame.py(b):.1f}h{wide:.1f}V{base:.1f}z"
        for a, b in zip(panel.x, panel.y, strict=True)
        if b
    )
    return [f'<path class="fill {panel.kind}" d="{steps}"/>']


COLOURS = ("winner", "front", "three", "four")


def over_nights(nights: Sequence[Night], metric: str) -> str:
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
    for place, kind in zip(places, COLOURS * len(places), strict=False):
        parts += _night_line(
            [n for n in shown if (n.best.node, n.best.workload) == place], kind, metric, frame
        )
    names = [(kind, " for ".join(place)) for place, kind in zip(places, COLOURS * len(places), strict=False)]
    label = f"best {metric} of every night"
    return svg(parts, label) + legend([*names, ("baseline", "the baseline")])


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
