"""What was best on which night, drawn and told."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta

from markupsafe import Markup

from tuner.errors import BadInput
from tuner.history.best_per_night import Night, moment, newest_runs, night_of, rows, trend
from tuner.history.entities import RunBest
from tuner.history.store import Store
from tuner.measures import NAMES
from tuner.profiles.registry import CHAMPION
from tuner.records import ProfileKey, Run, Study
from tuner.report.card import AnswerCard, card
from tuner.report.explain import gave
from tuner.report.night_charts import NightMark, gains, over_nights
from tuner.service.pages.overview import LOOKED_THROUGH
from tuner.service.pages.query import Text, measurement
from tuner.service.pages.render import marked

NODES = 4
COMPARISONS = 5
LOOK_BACK = timedelta(days=31)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryQuery:
    """What the page is asked for; empty texts ask nothing. `after` is the last node of the page before."""

    model: Text = ""
    node: Text = ""
    workload: Text = ""
    metric: Text = "goodput_rps"
    since: Text = ""
    after: Text = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceHistory:
    """One node and workload: its nights drawn, the card of the newest (`night`), its newest comparisons, the
    change per night (None: too few).
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
    """The answer, and what else may be asked for. `runs` are the newest first.
    `following`: the `after` of the next page, if any.
    """

    asked: HistoryQuery
    models: Sequence[str]
    nodes: Sequence[str]
    workloads: Sequence[str]
    metrics: Sequence[str]
    runs: Sequence[Night]
    places: Sequence[PlaceHistory]
    following: str


def tell(store: Store, asked: HistoryQuery) -> HistoryView:
    """The nights of a model on some nodes: the newest run's model and its last month, unless told else."""
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
        metric=metric, compared=False, absent=True,
    )  # fmt: skip
    found = rows(bests)
    return HistoryView(
        asked=asked,
        models=sorted({place.model for place in places}),
        nodes=nodes,
        workloads=sorted({place.workload for place in ours}),
        metrics=sorted(NAMES),
        runs=found[::-1],
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
        card=card(said, key, gave=gave(store.attribution(said.run_id))) if said is not None else None,
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
