"""`tuner history`: best configurations over time."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.commands.common import Json, knobs, model_name, open_store, print_json, print_table

if TYPE_CHECKING:
    from tuner.history.entities import RunBest
    from tuner.history.store import Store


def history(
    model: Annotated[str | None, typer.Option(callback=model_name, help="Only this model.")] = None,
    node: Annotated[str | None, typer.Option(help="Only this node.")] = None,
    workload: Annotated[str | None, typer.Option(help="Only this workload.")] = None,
    since: Annotated[
        str | None, typer.Option(metavar="DATE", help="Only runs since, such as 2026-03-01.")
    ] = None,
    metric: Annotated[str, typer.Option(help="Which measurement to show.")] = "goodput_rps",
    as_json: Json = False,
) -> None:
    """Show what every run found over time, the oldest first: its winner, or today's configuration where it
    stays, measured again; the best first measurement where nothing was confirmed.
    """
    from tuner.errors import BadInput, nearest
    from tuner.measures import NAMES

    if metric not in NAMES:
        raise BadInput(f"--metric {metric}: no such measurement{nearest(metric, sorted(NAMES))}")
    store = open_store()
    begin = _date(since)
    models = _models(store, {"model": model, "target": node, "workload": workload})
    rows = [
        b
        for m in models
        for b in store.bests(model=m, node=node, workload=workload, since=begin, metric=metric)
    ]
    if as_json:
        print_json(rows)
        return
    heads = ["<ended", "<model", "<node", "<workload", "<engine", metric, "baseline", "change", "<outcome"]
    asked = f" since {since}" if since else ""
    print_table(
        [*heads, "trial", "<configuration"], map(_row, rows), empty=f"no run has measured {metric}{asked} yet"
    )


def _models(store: "Store", asked: dict[str, str | None]) -> list[str]:
    """The models that have studies as asked. NotFound names what there is none of, and the nearest."""
    from tuner.errors import NotFound, nearest

    left = store.places()
    for part, wanted in asked.items():
        known = {str(getattr(key, part)) for key in left}
        if wanted is not None and wanted not in known and left:
            name = "node" if part == "target" else part
            raise NotFound(f"there is no study of {name} '{wanted}'{nearest(wanted, known)}")
        left = tuple(key for key in left if wanted in (None, getattr(key, part)))
    return sorted({key.model for key in left})


def _row(best: "RunBest") -> list[object]:
    from tuner.report.words import change, outcome_of

    return [
        best.ended_at, best.model, best.node, best.workload, best.engine_version, best.value, best.baseline,
        change(best.change) if best.change else "", outcome_of(best), best.number, knobs(best.candidate),
    ]  # fmt: skip


def _date(text: str | None) -> datetime | None:
    from tuner.errors import BadInput

    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise BadInput(f"--since {text}: give a date such as 2026-03-01") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)
