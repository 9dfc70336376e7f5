"""What was best on which night, drawn and told."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from markupsafe import Markup

from tuner.errors import BadInput, nearest
from tuner.history.best_per_night import Night, moment, nights, trend
from tuner.history.store import Store
from tuner.measures import NAMES
from tuner.report.charts import over_nights
from tuner.service.pages.render import marked

NODES = 4
LOOK_BACK = timedelta(days=31)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryQuery:
    """What the page is asked for; empty texts ask nothing. `after` is the last node of the page before."""

    model: str = ""
    node: str = ""
    workload: str = ""
    metric: str = "goodput_rps"
    since: str = ""
    after: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryView:
    """The answer, and what else may be asked for. `following`: the `after` of the next page, if any."""

    asked: HistoryQuery
    models: Sequence[str]
    nodes: Sequence[str]
    workloads: Sequence[str]
    metrics: Sequence[str]
    nights: Sequence[Night]
    drawing: Markup
    trends: Sequence[tuple[str, float]]
    following: str


def tell(store: Store, asked: HistoryQuery) -> HistoryView:
    """The nights of a model on some nodes: the newest run's model and its last month, unless told else."""
    if asked.metric not in NAMES:
        raise BadInput(f"'{asked.metric}' is not a measurement{nearest(asked.metric, NAMES)}")
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
    found = nights(
        store.bests(
            model=asked.model, node=shown, workload=asked.workload or None, since=_since(asked.since),
            metric=asked.metric,
        )
    )  # fmt: skip
    return HistoryView(
        asked=asked,
        models=sorted({place.model for place in places}),
        nodes=nodes,
        workloads=sorted({place.workload for place in ours}),
        metrics=sorted(NAMES),
        nights=found[::-1],
        drawing=marked(over_nights(found, asked.metric)),
        trends=_trends(found),
        following=shown[-1] if len(left) > len(shown) else "",
    )


def _trends(found: Sequence[Night]) -> list[tuple[str, float]]:
    """Node and workload in words, and the trend there, where there are nights enough for one."""
    places: dict[str, list[Night]] = {}
    for night in found:
        places.setdefault(f"{night.best.node} for {night.best.workload}", []).append(night)
    told = [(place, trend(some)) for place, some in sorted(places.items())]
    return [(place, value) for place, value in told if value is not None]


def _since(text: str) -> datetime | None:
    if not text:
        return None
    try:
        return moment(text)
    except ValueError:
        raise BadInput(f"since: give a date such as 2026-03-01, not '{text}'") from None
