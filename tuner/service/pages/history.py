"""The page of the history: the best result of each night, and its change from the baseline."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta
from html import escape

from markupsafe import Markup

from tuner.conclusions import Difference
from tuner.errors import BadInput
from tuner.history.best_per_night import Night, moment, newest_runs, night_of, rows, trend, without_value
from tuner.history.entities import RunBest
from tuner.history.store import Store
from tuner.measures import NAMES
from tuner.profiles.registry import CHAMPION
from tuner.records import ProfileKey, Run, Study
from tuner.report.card import AnswerCard, card
from tuner.report.charts import LEFT, NONE, Axis, Frame, fitted, grid, legend, svg, upright, upright_mark
from tuner.report.words import change as words_of
from tuner.report.words import heading, measured, no_value, percent
from tuner.service.pages.overview import LOOKED_THROUGH
from tuner.service.pages.render import Text, marked, measurement


def over_nights(nights: Sequence[Night], metric: str) -> str:
    """Values of one node and workload with the range of their repeats, and the baselines as short bars."""
    shown = [n for n in nights if math.isfinite(n.best.value)]
    if not shown:
        return NONE.format("The chart shows one run of each night. None of these runs measured this.")
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
    """A picture of each night's change from the baseline on one node and workload, in per cent, with its
    interval; and a line for each mark.

    The points set the scale. An interval that is wider than all points is cut at the edge. If the points are
    far apart, the scale is logarithmic, so that one large gain does not hide the others.
    """
    shown = [(n, n.best.change) for n in found if n.best.change and n.best.change.change is not None]
    if not shown:
        return NONE.format(
            "The baseline of each night is 0 or infinite, so no change in per cent can be drawn."
        )
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


NODES = 4
COMPARISONS = 5
LOOK_BACK = timedelta(days=31)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryQuery:
    """The parameters of the page. An empty text is no filter. `after` is the last node of the page before."""

    model: Text = ""
    node: Text = ""
    workload: Text = ""
    metric: Text = "goodput_rps"
    since: Text = ""
    after: Text = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceHistory:
    """One node and workload: the picture of its nights, the card of the newest night (`night`), its newest
    comparisons, and the change per night (None: too few nights).
    """

    name: str
    comparisons: Sequence[tuple[Study, Run]]
    drawing: Markup
    card: AnswerCard | None
    night: date | None
    study_id: str
    trend: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryView:
    """The content of the page, and what else can be chosen. `runs` begin with the newest. `left_out` says how
    many runs have no row. `following` is the `after` of the next page, if there is one.
    """

    asked: HistoryQuery
    models: Sequence[str]
    nodes: Sequence[str]
    workloads: Sequence[str]
    metrics: Sequence[str]
    runs: Sequence[Night]
    left_out: str
    places: Sequence[PlaceHistory]
    following: str


def tell(store: Store, asked: HistoryQuery) -> HistoryView:
    """The nights of a model on some nodes. The default is the newest run's model and its last month."""
    metric = measurement(asked.metric)
    places, newest = store.places(), next(iter(store.runs(limit=1)), None)
    if newest is not None:
        model = asked.model or store.study(newest.study_id).model
        since = asked.since or (newest.started_at - LOOK_BACK).date().isoformat()
        asked = replace(asked, model=model, since=since)
    ours = [place for place in places if place.model == asked.model]
    wanted = [place for place in ours if asked.workload in ("", place.workload)]
    nodes = sorted({place.target for place in wanted})
    left = [asked.node] if asked.node else [node for node in nodes if node > asked.after]
    shown = left[:NODES]
    bests = store.bests(
        model=asked.model, node=shown, workload=asked.workload or None, since=_since(asked.since),
        metric=metric, absent=True,
    )  # fmt: skip
    found = rows(bests)
    return HistoryView(
        asked=asked,
        models=sorted({place.model for place in places}),
        nodes=nodes,
        workloads=sorted({place.workload for place in ours}),
        metrics=sorted(NAMES),
        runs=found[::-1],
        left_out=no_value(without_value(bests), metric),
        places=_places(store, bests, found, metric) if found else (),
        following=shown[-1] if len(left) > len(shown) else "",
    )


def _places(
    store: Store, bests: Sequence[RunBest], found: Sequence[Night], metric: str
) -> list[PlaceHistory]:
    """Each node and workload with its nights, by name."""
    places: dict[tuple[str, str], tuple[list[RunBest], list[Night]]] = {}
    for best in newest_runs(bests):
        places.setdefault((best.node, best.workload), ([], []))[0].append(best)
    for night in found:
        if night.newest:
            places[night.best.node, night.best.workload][1].append(night)
    return [_place(store, name, *some, metric) for name, some in sorted(places.items())]


def _place(
    store: Store, name: tuple[str, str], runs: Sequence[RunBest], found: Sequence[Night], metric: str
) -> PlaceHistory:
    newest = runs[-1]
    key = ProfileKey(model=newest.model, target=newest.node, workload=newest.workload)
    compared = any(night.best.change is not None for night in found)
    drawn = gains(found, metric, _marks(store, key, found)) if compared else over_nights(found, metric)
    told = (store.conclusion(best.run_id) for best in reversed(runs))
    said = next((each for each in told if each is not None), None)
    return PlaceHistory(
        name=" for ".join(name),
        comparisons=_comparisons(store, key),
        drawing=marked(drawn),
        card=card(said, attribution=store.attribution(said.run_id)) if said is not None else None,
        night=night_of(store.run(said.run_id)) if said is not None else None,
        study_id=said.study_id if said is not None else newest.study_id,
        trend=trend(found),
    )


def _comparisons(store: Store, key: ProfileKey) -> list[tuple[Study, Run]]:
    """The newest comparisons and upgrade checks of a node and workload, each with its newest run."""
    known = store.studies(model=key.model, node=key.target, workload=key.workload, limit=LOOKED_THROUGH)
    found = [study for study in known if study.compares][:COMPARISONS]
    return [(study, run) for study in found for run in store.runs(study.id, limit=1)]


def _marks(store: Store, key: ProfileKey, found: Sequence[Night]) -> list[NightMark]:
    """Promotions, engine versions and traffic that changed within the shown nights."""
    first, last = found[0].date, found[-1].date
    moved = [e for e in store.alias_events(key) if e.alias == CHAMPION and e.to_version is not None]
    marks = [
        NightMark(date=e.at.date(), kind="promotion", text=f"version {e.to_version} promoted")
        for e in moved
        if first <= e.at.date() <= last + timedelta(days=1)
    ]
    texts = {"engine": "engine {}", "traffic": "other traffic", "gpu": "other GPU"}
    for night in found:
        for change in night.changes:
            if change.kind in texts:
                text = texts[change.kind].format(change.after)
                marks.append(NightMark(date=night.date - timedelta(days=1), kind=change.kind, text=text))
    return sorted(marks, key=lambda mark: mark.date)


def _since(text: str) -> datetime | None:
    if not text:
        return None
    try:
        return moment(text)
    except ValueError:
        raise BadInput(f"since: give a date such as 2026-03-01, not '{text}'") from None
