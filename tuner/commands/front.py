"""`tuner front` and `tuner history`: the best configurations of a study, and over time."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.commands.common import (
    Json,
    StudyRef,
    knobs,
    model_name,
    now,
    open_store,
    print_json,
    print_table,
    text,
)
from tuner.errors import BadInput, NotFound, nearest

if TYPE_CHECKING:
    from tuner.history.entities import RunBest
    from tuner.history.store import Store
    from tuner.records import Launch, Study, Trial
    from tuner.report.board import Beside


def front(
    study: StudyRef,
    timings: Annotated[
        bool, typer.Option("--timings", help="Also show where the time of each launch went.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show a study's best trials beside the baseline.

    They are the Pareto front: no other trial beats one of them in every objective.
    """
    store = open_store()
    found = find_study(store, study)
    if as_json:
        print_json(as_data(store, found, timings=timings))
        return
    show(store, found)
    if timings:
        show_timings(store, found)


def find_study(store: "Store", ref: str) -> "Study":
    """A study by name, id, beginning of the id, or file (then the newest study of that name)."""
    if ref.endswith((".yaml", ".yml")) and Path(ref).is_file():
        from tuner.tuning import studyfile

        ref = studyfile.read(Path(ref)).name
    return store.study(ref)


def show(store: "Store", study: "Study") -> None:
    """Print the answer card of the newest run, then the table of the front."""
    from tuner.commands import running
    from tuner.report.board import board_of
    from tuner.report.card import key_of, run_lines
    from tuner.report.explain import gave
    from tuner.report.words import headline

    found = board_of(store, study)
    if (said := found.conclusion) is not None:
        given = gave(found.attribution)
        typer.echo("\n".join(run_lines(said, key_of(study), given, running.program())))
    if found.confirmation is not None and found.confirmation is not found.conclusion:
        last = found.confirmation
        typer.echo(f"Last confirmed {text(last.at)}: {headline(last)}")
    names = study.objectives
    heads = ["trial", "<role", *(head for n in names for head in (f"{n} first", "confirmed", "change"))]
    table = [
        [row.trial.number, row.kind if row.kind in ("baseline", "winner") else "", *_cells(row, names),
         knobs(row.trial.candidate)]
        for row in found.beside()
    ]  # fmt: skip
    title = f"front of {study.name} ({study.id[:12]}), by first measurements"
    print_table([*heads, "<configuration"], table, title=title, empty="nothing was measured yet")
    for sentence in (found.screened, found.published):
        if sentence:
            typer.echo(sentence)


def _cells(row: "Beside", names: "Sequence[str]") -> "Iterator[object]":
    """Per objective: the first measurement, what the confirmation measured, and the difference it found."""
    from tuner.report.words import change

    for name in names:
        made = row.change(name)
        yield from (row.first(name), row.confirmed(name), "" if made is None else change(made))


def as_data(store: "Store", study: "Study", *, timings: bool = False) -> dict[str, object]:
    """The same as JSON."""
    from tuner.report.board import board_of

    found = board_of(store, study)
    said, confirmed = found.conclusion, found.confirmation
    data: dict[str, object] = {
        "study": {"id": study.id, "name": study.name, "objectives": study.objectives},
        "baseline": found.base,
        "front": tuple(t for t in found.front if not t.is_baseline),
        "winner": found.winner,
        "verdict": {} if said is None else {"verdict": said.outcome, "sentence": said.sentence},
        "conclusion": None if said is None else said.to_json(),
        "confirmation": None if confirmed is None else confirmed.to_json(),
    }
    if timings:
        data["timings"] = timing_rows(store, study)
    return data


def timing_rows(store: "Store", study: "Study") -> list[dict[str, object]]:
    """A row per launch: its first trial, all trials that were measured in it, their purpose, the seconds
    until ready, measuring and in total, and how the launch ended.
    """
    trials = store.trials(study.id)
    return [_timing(launch, trials) for launch in store.launches(study.id)]


def _timing(launch: "Launch", trials: "Sequence[Trial]") -> dict[str, object]:
    inside = [t for t in trials if any(m.launch_id == launch.id for m in t.measurements)]
    purposes = {m.purpose for t in inside for m in t.measurements if m.launch_id == launch.id}
    # The directory is named by the trial that the launch was made for, also where nothing was measured.
    first, *rest = Path(launch.directory or "").name.split("-")
    number = int(first) if first.isdecimal() and rest else inside[0].number if inside else None
    confirming = rest[:1] == ["confirm"] or bool(purposes - {"search"})
    return {
        "launch": launch.id,
        "trial": number,
        "attempt": int(rest[-1]) if rest and rest[-1].isdecimal() else None,
        "trials": sorted({t.number for t in inside} | ({number} if number is not None else set())),
        "for": "confirmation" if confirming else "search",
        "ready_s": launch.timeline.get("ready_s"),
        "measuring_s": launch.measuring_s,
        "whole_s": launch.whole_s,
        "verdict": launch.verdict or ("served" if launch.ended_at else "running"),
    }


def show_timings(store: "Store", study: "Study") -> None:
    """Where the time of each launch went."""
    names = ("trials", "attempt", "for", "ready_s", "measuring_s", "whole_s", "verdict")
    heads = ["<trials", "attempt", "<for", "ready_s", "measuring_s", "whole_s", "<how it ended"]
    table: Sequence[Sequence[object]] = [[row[n] for n in names] for row in timing_rows(store, study)]
    print_table(heads, table, title="launches, and the trials that were measured in each")


def history(
    model: Annotated[str | None, typer.Option(callback=model_name, help="Only this model.")] = None,
    node: Annotated[str | None, typer.Option(help="Only this node.")] = None,
    workload: Annotated[str | None, typer.Option(help="Only this workload.")] = None,
    since: Annotated[
        str | None, typer.Option(metavar="DATE", help="Only runs that ended since, such as 2026-03-01.")
    ] = None,
    metric: Annotated[str, typer.Option(help="Which measurement to show.")] = "goodput_rps",
    as_json: Json = False,
) -> None:
    """Show the result of every run, the oldest first.

    The result is the winner or, where it stays, today's configuration, as measured again. For a run without
    a confirmation it is the best first measurement.
    """
    from tuner.measures import NAMES

    if metric not in NAMES:
        raise BadInput(f"--metric {metric}: there is no such measurement{nearest(metric, sorted(NAMES))}")
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
    stopped = store.stopped_runs(now=now())
    heads = ["<ended", "<model", "<node", "<workload", "<engine", metric, "baseline", "change", "<outcome"]
    asked = f" since {since}" if since else ""
    print_table(
        [*heads, "trial", "<configuration"],
        [_row(b, stopped) for b in rows],
        empty=_unended(store, models, node, workload, stopped) or f"no run has measured {metric}{asked} yet",
    )


def _unended(
    store: "Store", models: Sequence[str], node: str | None, workload: str | None, stopped: frozenset[str]
) -> str:
    """A sentence where all runs of some studies have no end yet; empty elsewhere."""
    from tuner.records import RunState
    from tuner.report.words import unended

    ours = [s.id for m in models for s in store.studies(model=m, node=node, workload=workload)]
    runs = [run for study_id in ours for run in store.runs(study_id)]
    if not runs or any(run.state is not RunState.RUNNING for run in runs):
        return ""
    newest = max(runs, key=lambda run: run.started_at)
    return f"no run has ended yet. {unended(newest, stopped)}"


def _models(store: "Store", asked: dict[str, str | None]) -> list[str]:
    """The models with matching studies. NotFound names the part without a match, and the nearest one."""

    left = store.places()
    for part, wanted in asked.items():
        known = {str(getattr(key, part)) for key in left}
        if wanted is not None and wanted not in known and left:
            name = "node" if part == "target" else part
            raise NotFound(f"there is no study of {name} '{wanted}'{nearest(wanted, known)}")
        left = tuple(key for key in left if wanted in (None, getattr(key, part)))
    return sorted({key.model for key in left})


def _row(best: "RunBest", stopped: frozenset[str]) -> list[object]:
    from tuner.report.words import CONTINUES, STOPPED, change, outcome_of

    outcome = outcome_of(best, stopped)
    told = f"{outcome}; {CONTINUES}" if outcome == STOPPED else outcome
    return [
        best.ended_at, best.model, best.node, best.workload, best.engine_version, best.value, best.baseline,
        change(best.change) if best.change else "", told,
        best.number, knobs(best.candidate),
    ]  # fmt: skip


def _date(text: str | None) -> datetime | None:
    from tuner.history.best_per_night import moment

    if text is None:
        return None
    try:
        return moment(text)
    except ValueError:
        raise BadInput(f"--since {text}: give a date such as 2026-03-01") from None
