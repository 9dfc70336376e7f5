"""Charts as SVG text: scatter of a front, cumulative curves, bars, one-knob slices, lines over time."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from tuner.report.axes import BOTTOM, TOP, Axis, Frame, fitted, from_zero, grid, svg
from tuner.report.words import heading, measured

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
