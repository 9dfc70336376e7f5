"""`tuner front` and `tuner history`: the best configurations of a study, and over time."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.commands.common import (
    Json,
    StudyRef,
    model_name,
    now,
    open_store,
    print_json,
    print_table,
    say,
    text,
)
from tuner.errors import BadInput, NotFound, nearest

if TYPE_CHECKING:
    from tuner.history.entities import RunBest
    from tuner.history.store import Store
    from tuner.records import Launch, Study, Trial
    from tuner.report.board import Beside, Board


def front(
    study: StudyRef,
    timings: Annotated[
        bool, typer.Option("--timings", help="Also show where the time of each launch went.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show a study's best trials beside the baseline.

    They are the Pareto front: no other trial is at least as good in every objective and better in one.
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
    """A study by name, id, beginning of the id, or file. Of several studies with one name it is the newest,
    and that is said.
    """
    if ref.endswith((".yaml", ".yml")) and Path(ref).is_file():
        from tuner.tuning.study import read

        ref = read(Path(ref)).name
    found = store.study(ref)
    count = sum(each.name == found.name for each in store.studies()) if ref == found.name else 1
    if count > 1:
        say(f"{count} studies have the name {ref}. This is {found.id[:12]}, the newest")
    return found


def say_last_confirmed(found: "Board") -> None:
    """Say what the study's last confirmation found, if its newest run confirmed nothing."""
    from tuner.report.words import headline

    if (last := found.confirmation) is not None and last is not found.conclusion:
        typer.echo(f"Last confirmed {text(last.at)}: {headline(last)}")


def show(store: "Store", study: "Study") -> None:
    """Print the answer card of the newest run, then the table of the front."""
    from tuner.commands import common
    from tuner.report.board import board_of
    from tuner.report.card import run_lines
    from tuner.report.words import knobs, unended

    found = board_of(store, study)
    if going := unended(next(iter(store.runs(study.id, limit=1)), None), store.stopped_runs(now=now())):
        typer.echo(going)
    if (said := found.conclusion) is not None:
        typer.echo("\n".join(run_lines(said, found.attribution, common.program())))
    say_last_confirmed(found)
    names = study.objectives
    heads = ["trial", "<role", *(head for n in names for head in (f"{n} first", "confirmed", "change"))]
    table = [
        [row.trial.label, "" if row.kind == "front" else row.kind, *_cells(row, names),
         knobs(found.configuration(row.trial))]
        for row in found.beside()
    ]  # fmt: skip
    title = f"front of {study.name} ({study.id[:12]}), by first measurements"
    print_table([*heads, "<configuration"], table, title=title, empty="nothing was measured yet")
    for sentence in (found.sources, found.screened, found.published):
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
    data: dict[str, object] = {
        "study": found.named,
        "objectives": study.objectives,
        "baseline": found.base,
        "front": found.front,
        "rows": found.rows(),
        **found.found(),
    }
    if timings:
        data["timings"] = timing_rows(store, study)
    return data


def timing_rows(store: "Store", study: "Study") -> list[dict[str, object]]:
    """A row per launch: its first trial, all trials that were measured in it, their purpose, the seconds
    until ready, measuring and in total, and how the launch ended.
    """
    from tuner.report.words import INTERRUPTED, again_word, run_state

    trials = store.trials(study.id)
    stopped = store.stopped_runs(now=now())
    states = {run_state(run, stopped) for run in store.runs(study.id, limit=1)}
    goes_on = "running" if "RUNNING" in states else INTERRUPTED
    return [_timing(launch, trials, goes_on, again_word(study)) for launch in store.launches(study.id)]


def _timing(launch: "Launch", trials: "Sequence[Trial]", goes_on: str, again: str) -> dict[str, object]:
    from tuner.records import attempt_name, of_attribution

    inside = [t for t in trials if any(m.launch_id == launch.id for m in t.measurements)]
    purposes = {m.purpose for t in inside for m in t.measurements if m.launch_id == launch.id}
    # The directory is named by the trial that the launch was made for, also where nothing was measured.
    first, *rest = Path(launch.directory or "").name.split("-")
    number = int(first) if first.isdecimal() and rest else inside[0].number if inside else None
    confirming = rest[:1] == ["confirm"] or bool(purposes - {"search"})
    attempt = int(rest[-1]) if rest and rest[-1].isdecimal() else None
    known = [t.label for t in trials if t.number == number][-1:] if confirming else []
    alone = known or ([] if number is None else [attempt_name(number, None if confirming else attempt)])
    what = again if confirming else "search"
    if of_attribution(launch.directory):
        what = "attribution" if purposes == {"search"} else "last comparison"
    repeated = rest[:1] == ["confirm"] and what != "attribution"
    return {
        "launch": launch.id,
        "trial": number,
        "attempt": attempt,
        "repeat": int(rest[-2]) if repeated and rest[-2].isdecimal() else None,
        "trials": sorted({t.number for t in inside} | ({number} if number is not None else set())),
        "names": [t.label for t in inside] or alone,
        "for": what,
        "ready_s": launch.timeline.get("ready_s"),
        "measuring_s": launch.measuring_s,
        "whole_s": launch.whole_s,
        "verdict": launch.verdict or ("measured" if launch.ended_at else goes_on),
    }


def _for(row: "Mapping[str, object]") -> str:
    """`search`, `confirmation 2` or `comparison 2`; of a repeat that failed and was done again, that too."""
    repeat = row["repeat"]
    again = ", again" if repeat is not None and row["attempt"] else ""
    return f"{row['for']}{'' if repeat is None else f' {repeat}'}{again}"


def show_timings(store: "Store", study: "Study") -> None:
    """Where the time of each launch went."""
    title = "launches, and the trials that were measured in each"
    heads = ["<trials", "<for", "ready_s", "measuring_s", "whole_s", "<how it ended"]
    rows = timing_rows(store, study)
    table = [
        [row["names"], _for(row), *(row[n] for n in ("ready_s", "measuring_s", "whole_s", "verdict"))]
        for row in rows
    ]
    print_table(heads, table, title=title)
    typer.echo(
        "measuring_s and whole_s end when the engine has stopped. If an engine is kept for further trials,"
        " the time of each trial ends with its replay."
    )
    if any(str(row["verdict"]).startswith("controller:") for row in rows):
        typer.echo(
            "If a launch's controller died, these times end when the next command stopped the engine. If the"
            " engine was gone by then, they end with the last file that it wrote."
        )


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
    """Show the result of every run, the oldest first. Comparisons and upgrade checks are left out.

    The result is the winner or today's configuration, as measured again in the confirmation. If a run has no
    confirmation, the result is a first measurement.
    """
    from tuner.history.best_per_night import measured, without_value
    from tuner.measures import NAMES
    from tuner.report.words import no_value

    if metric not in NAMES:
        raise BadInput(f"--metric {metric}: there is no such measurement{nearest(metric, sorted(NAMES))}")
    store = open_store()
    begin = _date(since)
    models = _models(store, {"model": model, "target": node, "workload": workload})
    found = [
        best
        for m in models
        for best in store.bests(
            model=m, node=node, workload=workload, since=begin, metric=metric, absent=True
        )
    ]
    rows = sorted(filter(measured, found), key=lambda best: best.order)
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
    if left := no_value(without_value(found), metric):
        typer.echo(left)
    with_result = {best.run_id for best in found}
    for left in _without_row(store, models, node, workload, begin, with_result):
        typer.echo(left)


def _without_row(
    store: "Store",
    models: Sequence[str],
    node: str | None,
    workload: str | None,
    since: datetime | None,
    with_result: Collection[str],
) -> "Iterator[str]":
    """Sentences on the ended runs that have no result: they measured nothing in full, or compare."""
    from tuner.measures import many
    from tuner.records import RunState

    ended, compared = set[str](), set[str]()
    for m in models:
        for study in store.studies(model=m, node=node, workload=workload):
            over = [r for r in store.runs(study.id) if r.state is not RunState.RUNNING]
            these = {r.id for r in over if since is None or r.at >= since}
            ended, compared = (ended, compared | these) if study.compares else (ended | these, compared)
    if left := ended.difference(with_result):
        told = many(len(left), "ended run")
        yield f"{told} without a complete trial in an engine of its own: see `tuner run list`"
    if compared:
        told = many(len(compared), "run")
        yield f"left out: {told} of comparisons and upgrade checks; see `tuner run list`"


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
    from tuner.report.words import CONTINUES, STOPPED, change, knobs, outcome_of

    outcome = outcome_of(best, stopped)
    told = f"{outcome}; {CONTINUES}" if outcome == STOPPED else outcome
    return [
        best.ended_at, best.model, best.node, best.workload, best.engine_version, best.value, best.baseline,
        change(best.change) if best.change else "", told,
        best.label, knobs(best.candidate),
    ]  # fmt: skip


def _date(text: str | None) -> datetime | None:
    from tuner.history.best_per_night import moment

    if text is None:
        return None
    try:
        return moment(text)
    except ValueError:
        raise BadInput(f"--since {text}: give a date such as 2026-03-01") from None
