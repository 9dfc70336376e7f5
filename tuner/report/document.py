"""The report: one HTML file that needs no network, made from stored records alone."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import combinations
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from tuner.measures import direction_of
from tuner.records import JSON, Candidate, Study, Trial
from tuner.report.charts import Point, scatter

TEMPLATE = "report.html.j2"
SHOWN = ("slo_attainment", "request_rps", "failed", "preemptions", "prefix_hit_rate", "ready_s")
MAX_CHARTS = 3
NO_VERDICT: Mapping[str, JSON] = {"verdict": "", "sentence": "", "demonstration": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportData:
    """What a report tells. `summary` is a finished run's conclusion or {}; `commands` reproduce it."""

    study: Study
    trials: Sequence[Trial]
    front: Sequence[Trial]
    summary: Mapping[str, JSON]
    commands: Sequence[str]
    generated_at: datetime


def render(data: ReportData) -> str:
    """The HTML text. Failed requests count as infinite latency and are written as ∞."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    environment.filters["number"] = number
    environment.filters["knobs"] = knobs
    return environment.get_template(TEMPLATE).render(
        study=data.study,
        summary={**NO_VERDICT, **data.summary},
        comparisons=_list(data.summary.get("comparisons")),
        commands=data.commands,
        generated_at=data.generated_at.strftime("%Y-%m-%d %H:%M UTC"),
        objectives=data.study.objectives,
        directions={name: direction_of(name) for name in data.study.objectives},
        columns=[*data.study.objectives, *(n for n in SHOWN if n not in data.study.objectives)],
        beside=_beside(data),
        trials=[_row(trial, data) for trial in data.trials],
        charts=[Markup(chart) for chart in _charts(data)],
    )


def number(value: object) -> str:
    """A measured value for reading: four significant digits, ∞ for a failed one, an en dash for none."""
    if not isinstance(value, int | float):
        return "–"
    if math.isinf(value):
        return "∞"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def knobs(candidate: Candidate) -> str:
    """A candidate on one line."""
    return ", ".join(f"{name}={value}" for name, value in candidate.items()) or "engine defaults"


def _list(value: JSON) -> list[JSON]:
    return value if isinstance(value, list) else []


def _values(trial: Trial) -> Mapping[str, float]:
    return trial.measurement.values if trial.measurement else {}


def _kind(trial: Trial, data: ReportData) -> str:
    if trial.is_baseline:
        return "baseline"
    if trial.number == data.summary.get("winner"):
        return "winner"
    return "front" if any(trial.id == other.id for other in data.front) else "other"


def _row(trial: Trial, data: ReportData) -> Mapping[str, object]:
    return {
        "number": trial.number,
        "attempt": trial.attempt,
        "state": trial.state.value,
        "origin": trial.origin,
        "candidate": trial.candidate,
        "values": _values(trial),
        "kind": _kind(trial, data),
        "reason": trial.reason or "",
    }


def _beside(data: ReportData) -> list[Mapping[str, object]]:
    """The front's rows with the baseline's first, each with its ratio to the baseline per objective."""
    base = next((t for t in data.trials if t.is_baseline and t.measurement), None)
    rows = ([base] if base else []) + [t for t in data.front if not t.is_baseline]
    found: list[Mapping[str, object]] = []
    for trial in rows:
        ratios = {
            n: ratio(_values(trial).get(n), _values(base).get(n) if base else None)
            for n in data.study.objectives
        }
        found.append({**_row(trial, data), "ratios": ratios})
    return found


def ratio(value: float | None, base: float | None) -> str:
    """Change against the baseline in per cent, signed; empty where it cannot be told."""
    if value is None or not base or math.isinf(base) or math.isinf(value):
        return ""
    return f"{(value / base - 1) * 100:+.0f} %"


def _charts(data: ReportData) -> list[str]:
    complete = [t for t in data.trials if t.measurement and t.state == "COMPLETE"]
    pairs = list(combinations(data.study.objectives, 2))[:MAX_CHARTS]
    charts = []
    for x_name, y_name in pairs:
        points = [
            Point(
                x=_values(t)[x_name],
                y=_values(t)[y_name],
                kind=_kind(t, data),
                label=f"trial {t.number}: {knobs(t.candidate)}",
            )
            for t in complete
            if x_name in _values(t) and y_name in _values(t)
        ]
        charts.append(scatter(points, x_name, y_name))
    return charts
