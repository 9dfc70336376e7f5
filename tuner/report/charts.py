"""Charts as SVG text made on the server: no script, no network; the page brings the colours."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 620, 380
LEFT, RIGHT, TOP, BOTTOM = 74, 16, 14, 52


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One trial in a plane of two measurements; `kind` is one of baseline, front, winner, other."""

    x: float
    y: float
    kind: str
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A measurement on an axis; `log` where all values are positive and spread over more than a factor 4."""

    name: str
    low: float
    high: float
    log: bool

    def at(self, value: float) -> float:
        """Position of a value in 0..1."""
        low, high, value = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return (value - low) / (high - low)


def scatter(points: Sequence[Point], x_name: str, y_name: str) -> str:
    """An SVG scatter of two measurements with the front as a stepped line; infinite values are left out."""
    shown = [p for p in points if math.isfinite(p.x) and math.isfinite(p.y)]
    if not shown:
        return '<p class="none">No trial has both measurements.</p>'
    x, y = _axis(x_name, [p.x for p in shown]), _axis(y_name, [p.y for p in shown])
    title = f"{escape(y_name)} over {escape(x_name)}"
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">',
        *_grid(x, y),
        _front_line([p for p in shown if p.kind in ("front", "winner")], x, y),
        *(_mark(p, x, y) for p in sorted(shown, key=lambda p: _ORDER.index(p.kind))),
        "</svg>",
    ]
    return "".join(parts)


_ORDER = ("other", "front", "baseline", "winner")


def _axis(name: str, values: Sequence[float]) -> Axis:
    low, high = min(values), max(values)
    log = low > 0 and high / low > 4
    if log:
        return Axis(name=name, low=low / 1.15, high=high * 1.15, log=True)
    pad = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    return Axis(name=name, low=low - pad, high=high + pad, log=False)


def ticks(axis: Axis) -> list[float]:
    """Round values inside an axis, about five of them."""
    if axis.log:
        decades = range(math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high)) + 1)
        steps = (1, 2, 5) if math.log10(axis.high / axis.low) < 2.5 else (1,)
        found = [m * 10.0**d for d in decades for m in steps]
    else:
        rough = (axis.high - axis.low) / 5
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= rough)
        first = math.ceil(axis.low / step)
        found = [(first + i) * step for i in range(7)]
    return [t for t in found if axis.low <= t <= axis.high]


def _place(p_x: float, p_y: float) -> tuple[float, float]:
    return LEFT + p_x * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - p_y * (HEIGHT - TOP - BOTTOM)


def _grid(x: Axis, y: Axis) -> list[str]:
    parts = []
    for tick in ticks(x):
        at, base = _place(x.at(tick), 0)
        parts.append(f'<line class="grid" x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{base:.1f}"/>')
        parts.append(f'<text x="{at:.1f}" y="{base + 16:.1f}" text-anchor="middle">{tick:g}</text>')
    for tick in ticks(y):
        left, at = _place(0, y.at(tick))
        parts.append(f'<line class="grid" x1="{left}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{tick:g}</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}">{escape(x.name)}</text>'
    )
    parts.append(f'<text class="axis" transform="translate(14 {middle}) rotate(-90)">{escape(y.name)}</text>')
    return parts


def _front_line(front: Sequence[Point], x: Axis, y: Axis) -> str:
    if len(front) < 2:
        return ""
    places = [_place(x.at(p.x), y.at(p.y)) for p in sorted(front, key=lambda p: (p.x, p.y))]
    return '<polyline class="front" points="' + " ".join(f"{a:.1f},{b:.1f}" for a, b in places) + '"/>'


def _mark(point: Point, x: Axis, y: Axis) -> str:
    a, b = _place(x.at(point.x), y.at(point.y))
    title = f"<title>{escape(point.label)}</title>"
    if point.kind == "baseline":
        place = f'x="{a - 6:.1f}" y="{b - 6:.1f}" width="12" height="12"'
        return f'<rect class="baseline" {place}>{title}</rect>'
    radius = {"winner": 8, "front": 6}.get(point.kind, 4)
    return f'<circle class="{point.kind}" cx="{a:.1f}" cy="{b:.1f}" r="{radius}">{title}</circle>'
