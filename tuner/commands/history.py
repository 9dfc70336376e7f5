"""`tuner history`: best configurations over time."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.commands.common import Json, knobs, open_store, print_json, print_table

if TYPE_CHECKING:
    from tuner.history.entities import RunBest


def history(
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    node: Annotated[str | None, typer.Option(help="Only this node.")] = None,
    since: Annotated[
        str | None, typer.Option(metavar="DATE", help="Only runs since, such as 2026-03-01.")
    ] = None,
    metric: Annotated[str, typer.Option(help="What best means.")] = "goodput_rps",
    as_json: Json = False,
) -> None:
    """Show the best configuration of every run over time, the oldest first."""
    from tuner.errors import BadInput, nearest
    from tuner.measures import NAMES

    if metric not in NAMES:
        raise BadInput(f"--metric {metric}: no such measurement{nearest(metric, sorted(NAMES))}")
    store = open_store()
    models = [model] if model else sorted({s.model for s in store.studies()})
    rows = [b for m in models for b in store.bests(model=m, node=node, since=_date(since), metric=metric)]
    if as_json:
        print_json(rows)
        return
    table = (
        [b.ended_at, b.model, b.node, b.engine_version, b.value, b.low, b.high, b.baseline, _sure(b),
         b.number, knobs(b.candidate)]
        for b in rows
    )  # fmt: skip
    heads = ["<ended", "<model", "<node", "<engine", metric, "low", "high", "baseline", "<confirmed", "trial"]
    print_table([*heads, "<configuration"], table)


def _sure(best: "RunBest") -> str:
    if best.demonstration:
        return "no: a demonstration"
    return "yes" if best.confirmed else "no"


def _date(text: str | None) -> datetime | None:
    from tuner.errors import BadInput

    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise BadInput(f"--since {text}: give a date such as 2026-03-01") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)
