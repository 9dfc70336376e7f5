"""Axes, ticks and grids of the charts: SVG text made on the server; the page brings the colours."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

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
