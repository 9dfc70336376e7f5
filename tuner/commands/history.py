"""`tuner history`: best configurations over time."""

from datetime import UTC, datetime
from typing import Annotated

import typer

from tuner.commands.common import Json, knobs, open_store, print_json, print_table


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
    rows = _rows(model, node, _date(since), metric)
    if as_json:
        print_json(rows)
        return
    names = ("ended_at", "study", "node", "engine_version", "value", "baseline", "trials")
    table = ([*(row[n] for n in names), row["verdict"], knobs(row["candidate"])] for row in rows)  # type: ignore[arg-type]
    heads = [
        "<ended",
        "<study",
        "<node",
        "<engine",
        metric,
        "baseline",
        "trials",
        "<verdict",
        "<configuration",
    ]
    print_table(heads, table)


def _date(text: str | None) -> datetime | None:
    from tuner.errors import BadInput

    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise BadInput(f"--since {text}: give a date such as 2026-03-01") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _rows(
    model: str | None, node: str | None, since: datetime | None, metric: str
) -> list[dict[str, object]]:
    from tuner.measures import MAXIMIZED
    from tuner.records import TrialState

    store, found = open_store(), list[dict[str, object]]()
    for study in store.studies(model=model, node=node):
        trials = store.trials(study.id, (TrialState.COMPLETE,))
        for run in store.runs(study.id):
            if since is not None and run.started_at < since:
                continue
            known = [
                (t.measurement.values[metric], t)
                for t in trials
                if t.run_id == run.id and t.measurement and metric in t.measurement.values
            ]
            if not known:
                continue
            value, best = (max if metric in MAXIMIZED else min)(known, key=lambda pair: pair[0])
            base = next((v for v, t in known if t.is_baseline), None)
            found.append(
                {
                    "run": run.id, "ended_at": run.ended_at, "study": study.name, "model": study.model,
                    "node": study.node, "engine_version": study.engine_version, "metric": metric,
                    "value": value, "baseline": base, "trials": len(known), "trial": best.number,
                    "candidate": best.candidate, "verdict": run.summary.get("verdict"),
                }
            )  # fmt: skip
    return sorted(found, key=lambda row: str(row["ended_at"]))
