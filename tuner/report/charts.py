"""Charts as SVG text, made on the server: axes, scatter of a front, curves, bars, levels of a knob, time
lines.

The page brings the colours.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

import numpy as np
from numpy.typing import NDArray

from tuner.measures import many
from tuner.report.words import heading, measured

WIDTH, HEIGHT = 620, 380
LEFT, RIGHT, TOP, BOTTOM = 74, 16, 14, 52


def tick_text(value: float) -> str:
    """A tick's label: plain digits, never an exponent below a million."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A measurement on an axis. `log` if all values are positive and differ by more than a factor of 4."""

    name: str
    low: float
    high: float
    log: bool = False
    text: Callable[[float], str] = tick_text
    """A tick's label."""

    def at(self, value: float) -> float:
        """Position of a value in 0..1."""
        low, high, value = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return (value - low) / (high - low)

    def spread(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """`at` of many values."""
        low, high = self.low, self.high
        if self.log:
            low, high, values = math.log10(low), math.log10(high), np.log10(values)
        return (values - low) / (high - low)


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


def grid(frame: Frame, *, x_labels: bool = True, about: int = 5) -> list[str]:
    """Grid lines, ticks and axis names."""
    parts = []
    for tick in ticks(frame.x):
        at = frame.px(tick)
        parts.append(
            f'<line class="grid" x1="{at:.1f}" y1="{frame.top}" x2="{at:.1f}" y2="{frame.bottom:.1f}"/>'
        )
        if x_labels:
            y, said = frame.bottom + 16, frame.x.text(tick)
            side = "start" if at < frame.left + 12 else "middle"  # else it meets the lowest label beside it
            parts.append(f'<text x="{at:.1f}" y="{y:.1f}" text-anchor="{side}">{said}</text>')
    for tick in ticks(frame.y, about):
        at = frame.py(tick)
        parts.append(f'<line class="grid" x1="{frame.left}" y1="{at:.1f}" x2="{frame.right}" y2="{at:.1f}"/>')
        parts.append(
            f'<text x="{frame.left - 6}" y="{at + 4:.1f}" text-anchor="end">{frame.y.text(tick)}</text>'
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


def svg(
    parts: Sequence[str], label: str, *, height: float = HEIGHT, interactive: bool = False, more: str = ""
) -> str:
    """A whole drawing. One with links in it is a group for screen readers and one stop of the keyboard, whose
    marks the arrow keys reach; else it is an image.
    """
    role = "group" if interactive else "img"
    stop = ' tabindex="0" data-marks' if interactive else ""
    opening = f'<svg viewBox="0 0 {WIDTH} {height:g}" role="{role}" aria-label="{escape(label)}"{stop}{more}>'
    return "".join([opening, *parts, "</svg>"])


MARKED = 300
"""Up to so many trials off the front are drawn as marks of their own, with words and links; more as dots."""

NONE = '<p class="none">{}</p>'


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One trial in a plane of two measurements; `kind` is one of baseline, front, winner, other. `front`: it
    is on the front, whatever its kind. `name` stands beside its mark.
    """

    x: float
    y: float
    kind: str
    label: str = ""
    href: str = ""
    front: bool = False
    name: str = ""


_ORDER = ("other", "front", "baseline", "winner")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cloud:
    """Many trials in a plane of two measurements, drawn as dots of one `kind` without words of their own."""

    kind: str
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    title: str

    def finite(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        known = np.isfinite(self.x) & np.isfinite(self.y)
        return self.x[known], self.y[known]


@dataclass(frozen=True, slots=True, kw_only=True)
class Guides:
    """What helps to read a scatter: the SLO's limits of both measurements, and how far launches of one
    configuration lie apart: (x, y, share of x, share of y) for each ellipse, two standard deviations.
    """

    x_limit: float | None = None
    y_limit: float | None = None
    noise: Sequence[tuple[float, float, float, float]] = ()


def scatter(
    points: Sequence[Point],
    x_name: str,
    y_name: str,
    *,
    clouds: Sequence[Cloud] = (),
    guides: Guides = Guides(),
    brush: bool = False,
) -> str:
    """An SVG scatter of two measurements with the front as a line; infinite values are left out. `brush`: a
    script may select a rectangle of it.
    """
    shown = [p for p in points if math.isfinite(p.x) and math.isfinite(p.y)]
    crowds = [(c, *c.finite()) for c in clouds]
    count = len(shown) + sum(len(x) for _, x, _ in crowds)
    if not count:
        return NONE.format("No trial has both measurements yet.")
    spans = ([e for _, x, _ in crowds if len(x) for e in (float(x.min()), float(x.max()))],
             [e for _, _, y in crowds if len(y) for e in (float(y.min()), float(y.max()))])  # fmt: skip
    x = fitted(heading(x_name), [*(p.x for p in shown), *spans[0]])
    y = fitted(heading(y_name), [*(p.y for p in shown), *spans[1]])
    frame = Frame(x=x, y=y)
    others = [p for p in shown if p.kind == "other"]
    marked = sorted((p for p in shown if p.kind != "other"), key=lambda p: _ORDER.index(p.kind))
    parts = [
        *grid(frame),
        *(_cloud(cloud, cx, cy, frame) for cloud, cx, cy in crowds),
        *_guides(guides, frame),
        _front_line([p for p in shown if p.front], frame),
        *(_mark(p, frame) for p in (*others, *marked)),
        *_labels(marked, frame),
    ]
    label = f"{y_name} over {x_name}: {many(count, 'trial')}, {len(marked)} of them named"
    ends = _ends(frame, x_name, y_name) if brush else ""
    return svg(parts, label, interactive=any(p.href for p in shown), more=ends)


def _cloud(cloud: Cloud, xs: NDArray[np.float64], ys: NDArray[np.float64], frame: Frame) -> str:
    """Dots, five wide, as one path; those within a square of two by two are one dot."""
    right, up = frame.x.spread(xs), frame.y.spread(ys)
    px = 2 * np.rint((frame.left + right * (frame.right - frame.left)) / 2).astype(np.int64)
    py = 2 * np.rint((frame.bottom - up * (frame.bottom - frame.top)) / 2).astype(np.int64)
    spots = np.unique(px * 10_000 + py)
    places = "".join(f"M{spot // 10_000} {spot % 10_000}h0" for spot in spots.tolist())
    return f'<path class="dots {cloud.kind}" d="{places}"><title>{escape(cloud.title)}</title></path>'


def _guides(guides: Guides, frame: Frame) -> list[str]:
    """The SLO's limits as lines with a word, and ellipses of noise."""
    parts = []
    for x, y, wide, high in guides.noise:
        a, b = frame.px(x), frame.py(y)
        rx, ry = abs(frame.px(x * (1 + 2 * wide)) - a), abs(frame.py(y * (1 + 2 * high)) - b)
        said = "<title>two standard deviations between launches of one configuration</title>"
        parts.append(
            f'<ellipse class="noise" cx="{a:.1f}" cy="{b:.1f}" rx="{rx:.1f}" ry="{ry:.1f}">{said}</ellipse>'
        )
    if (limit := guides.x_limit) is not None and frame.x.low < limit < frame.x.high:
        parts += upright_mark(frame, frame.px(limit), "slo", f"SLO {tick_text(limit)}", frame.top + 12)
    if (limit := guides.y_limit) is not None and frame.y.low < limit < frame.y.high:
        at, said = frame.py(limit), f"SLO {tick_text(limit)}"
        parts += [
            f'<line class="slo" x1="{frame.left}" x2="{frame.right}" y1="{at:.1f}" y2="{at:.1f}"/>',
            f'<text class="slo" x="{frame.right - 4}" y="{at - 4:.1f}" text-anchor="end">{said}</text>',
        ]
    return parts


def upright_mark(frame: Frame, at: float, kind: str, said: str, y: float) -> list[str]:
    """An upright line with words beside it, on the side where there is more room."""
    side = ' text-anchor="end"' if at > (frame.left + frame.right) / 2 else ""
    x, word = at - 4 if side else at + 4, kind.partition(" ")[0]
    return [
        f'<line class="{kind}" x1="{at:.1f}" x2="{at:.1f}" y1="{frame.top}" y2="{frame.bottom}"/>',
        f'<text class="{word}" x="{x:.1f}" y="{y}"{side}>{escape(said)}</text>',
    ]


LABELLED = 24
"""Up to so many marks have their trial's number beside them, as far as there is room."""


def _labels(points: Sequence[Point], frame: Frame) -> list[str]:
    parts, taken = [], list[tuple[float, float]]()
    for point in reversed(points[-LABELLED:]):
        a, b = frame.px(point.x), frame.py(point.y)
        if not point.name or any(abs(a - x) < 34 and abs(b - y) < 16 for x, y in taken):
            continue
        taken.append((a, b))
        side = ("end", -11) if a > frame.right - 60 else ("start", 11)
        parts.append(
            f'<text class="label" x="{a + side[1]:.1f}" y="{b - 6:.1f}" text-anchor="{side[0]}">'
            f"{escape(point.name)}</text>"
        )
    return parts


def _ends(frame: Frame, x_name: str, y_name: str) -> str:
    """What a script needs to know which values lie where in a drawing."""
    told = {
        "x": x_name, "y": y_name, "xlow": frame.x.low, "xhigh": frame.x.high, "ylow": frame.y.low,
        "yhigh": frame.y.high, "xlog": int(frame.x.log), "ylog": int(frame.y.log), "left": frame.left,
        "right": frame.right, "top": frame.top, "bottom": frame.bottom,
    }  # fmt: skip
    return " data-brush" + "".join(f' data-{name}="{escape(str(value))}"' for name, value in told.items())


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
    return f'<a href="{escape(point.href)}" aria-label="{label}" tabindex="-1">{shape}</a>'


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
    labels = ('text-anchor="middle"', 'text-anchor="start"')
    parts = [p for p in grid(plain) if not any(each in p for each in labels) and not upright(p)]
    for place, name in enumerate(names):
        short = name if len(name) <= 10 else name[:9] + "…"
        y = frame.bottom + (16 if len(names) < 8 or place % 2 == 0 else 28)
        parts.append(
            f'<text x="{frame.px(place):.1f}" y="{y:.1f}" text-anchor="middle">{escape(short)}</text>'
        )
    return parts


def upright(part: str) -> bool:
    """Whether a part of a grid is one of its upright lines."""
    return part.startswith("<line") and f'y1="{TOP}"' in part


def parallel(columns: Mapping[str, Sequence[object]], kinds: Sequence[str]) -> str:
    """Parallel coordinates: an axis for each column that has more than one value, a line for each row. A
    number keeps its scale, other values stand in order; a missing one is at the foot. `kinds` colours lines.
    """
    axes = {name: places for name, values in columns.items() if (places := _places(values)) is not None}
    if len(axes) < 2:
        return NONE.format("Fewer than two of the shown columns differ.")
    step = (WIDTH - 2 * SIDE) / (len(axes) - 1)
    parts, across = [], [SIDE + i * step for i in range(len(axes))]
    rows = zip(*(at for at, *_ in axes.values()), strict=True)
    for kind, row in sorted(zip(kinds, rows, strict=True), key=lambda pair: _ORDER.index(pair[0])):
        line = " ".join([f"{x:.0f},{_down(at):.0f}" for x, at in zip(across, row, strict=True)])
        parts.append(f'<polyline class="row {kind}" points="{line}"/>')
    for i, (name, (_, ticks_at, scale)) in enumerate(axes.items()):
        side = " first" if i == 0 else " last" if i == len(axes) - 1 else ""
        parts += _parallel_axis(SIDE + i * step, name, ticks_at, scale, i, side)
    return svg(parts, f"parallel coordinates of {', '.join(axes)}", height=HEIGHT + 20)


SIDE = 46.0
_Ticks = Sequence[tuple[float, str]]


def _down(at: float) -> float:
    return TOP + 20 + (1 - at) * (HEIGHT - TOP - 50)


def _places(values: Sequence[object]) -> tuple[list[float], _Ticks, str] | None:
    """(place of each value in 0 … 1, ticks, what a script needs to know of the scale); None without two."""
    known = [v for v in values if v is not None and not (isinstance(v, float) and not math.isfinite(v))]
    if len(set(map(str, known))) < 2:
        return None
    if all(isinstance(v, int | float) and not isinstance(v, bool) for v in known):
        numbers = np.array(values, np.float64)  # None becomes not a number
        there = np.isfinite(numbers)
        axis = fitted("", [float(numbers[there].min()), float(numbers[there].max())])
        at = np.where(there, axis.spread(np.where(there, numbers, axis.low)), 0.0).tolist()
        scale = f' data-low="{axis.low}" data-high="{axis.high}" data-log="{int(axis.log)}"'
        return at, [(axis.at(t), tick_text(t)) for t in ticks(axis, 4)], scale
    names = sorted(set(map(str, known)))
    spread = {name: 0.04 + 0.92 * i / (len(names) - 1) for i, name in enumerate(names)}
    return [spread.get(str(v), 0.0) for v in values], [(at, name) for name, at in spread.items()], ""


def _parallel_axis(x: float, name: str, ticks_at: _Ticks, scale: str, place: int, side: str) -> list[str]:
    """One axis: its line, with an area beside it that a script may brush, its ticks and its name. `side`: the
    names of the outermost axes begin or end at the edge of the drawing.
    """
    at = {" first": 2.0, " last": WIDTH - 2.0}.get(side, x)
    top, bottom = _down(1.0), _down(0.0)
    height = HEIGHT + 10 if place % 2 else HEIGHT - 6
    short = name.removeprefix("knob.")
    said = short if len(short) < 23 else short[:21] + "…"
    parts = [
        f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"/>',
        f'<rect class="axis" data-axis="{escape(short)}"{scale} x="{x - 12:.1f}" y="{top:.1f}" width="24"'
        f' height="{bottom - top:.1f}"/>',
        f'<text class="axis column{side}" x="{at:.1f}" y="{height:.1f}">{escape(said)}</text>',
    ]
    for tick, said in ticks_at[:8]:
        parts.append(f'<text x="{x + 4:.1f}" y="{_down(tick) + 4:.1f}">{escape(said[:12])}</text>')
    return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One strip of a timeline: steps, bars or marks over a common time axis. `fit`: values that the vertical
    axis must show too, so that strips of several drawings have one scale.
    """

    name: str
    style: str
    x: Sequence[float]
    y: Sequence[float]
    kind: str = "front"
    log: bool = False
    crosses: Sequence[float] = ()
    fit: Sequence[float] = ()


PANEL = 130.0


def shared(found: Sequence[Panel]) -> Callable[[Panel], Panel]:
    """What gives strips of the same name the same vertical axis."""
    ends: dict[str, list[float]] = {}
    for panel in found:
        finite = [v for v in panel.y if math.isfinite(v)]
        ends.setdefault(panel.name, []).extend([min(finite), max(finite)] if finite else [])
    return lambda panel: replace(panel, fit=ends.get(panel.name, ()))


def panels(found: Sequence[Panel], x_name: str, span: float, label: str) -> str:
    """Strips over one time axis in seconds, one under another."""
    shown = [p for p in found if len(p.x) or p.crosses]
    if not shown:
        return NONE.format("This host does not have the records of this trial's requests.")
    x = Axis(name=x_name, low=0.0, high=max(span, 1e-9))
    parts: list[str] = []
    for place, panel in enumerate(shown):
        top = TOP + place * PANEL
        last = place == len(shown) - 1
        parts += _panel(panel, x, top, last)
    return svg(parts, label, height=TOP + PANEL * len(shown) + BOTTOM - 16)


def _panel(panel: Panel, x: Axis, top: float, last: bool) -> list[str]:
    finite = [v for v in (*panel.y, *panel.fit) if math.isfinite(v)]
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
