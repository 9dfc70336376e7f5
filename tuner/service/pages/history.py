"""What was best on which night, drawn and told."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from markupsafe import Markup

from tuner.errors import BadInput, nearest
from tuner.history.queries import Night, nights, trend
from tuner.history.store import Store
from tuner.measures import NAMES
from tuner.report.nights import picture
from tuner.service.pages.render import marked


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the page is asked for; empty texts ask nothing."""

    model: str = ""
    node: str = ""
    metric: str = "goodput_rps"
    since: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The answer, and what else may be asked for."""

    asked: Asked
    models: Sequence[str]
    nodes: Sequence[str]
    metrics: Sequence[str]
    nights: Sequence[Night]
    drawing: Markup
    trend: float | None


def tell(store: Store, asked: Asked) -> Told:
    """The nights of one model (the first of the history, unless one is named)."""
    studies = store.studies()
    models = sorted({study.model for study in studies})
    if asked.metric not in NAMES:
        raise BadInput(f"'{asked.metric}' is not a measurement{nearest(asked.metric, NAMES)}")
    model = asked.model or (models[0] if models else "")
    bests = store.bests(model=model, node=asked.node or None, since=_since(asked.since), metric=asked.metric)
    found = nights(bests)
    places = {(n.best.node, n.best.workload) for n in found}
    return Told(
        asked=Asked(model=model, node=asked.node, metric=asked.metric, since=asked.since),
        models=models,
        nodes=sorted({study.node for study in studies}),
        metrics=sorted(NAMES),
        nights=found[::-1],
        drawing=marked(picture(found, asked.metric)),
        trend=trend(found) if len(places) == 1 else None,
    )


def _since(text: str) -> datetime | None:
    if not text:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise BadInput(f"since: give a date such as 2026-03-01, not '{text}'") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)
