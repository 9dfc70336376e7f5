"""`tuner front`: the Pareto front of a study, beside the baseline."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.commands.common import Json, StudyRef, knobs, open_store, print_json, print_table

if TYPE_CHECKING:
    from tuner.history.store import Store
    from tuner.records import Launch, Run, Study, Trial


def front(
    study: StudyRef,
    timings: Annotated[bool, typer.Option("--timings", help="Add where each trial's time went.")] = False,
    as_json: Json = False,
) -> None:
    """Show the trials that no other trial beats in every objective, beside the baseline."""
    store = open_store()
    found = find_study(store, study)
    if as_json:
        print_json(as_data(store, found, timings=timings))
        return
    show(store, found)
    if timings:
        show_timings(store, found)


def find_study(store: "Store", ref: str) -> "Study":
    """A study by name, id, beginning of the id, or its file (then the newest of that name)."""
    if ref.endswith((".yaml", ".yml")) and Path(ref).is_file():
        from tuner.tuning import studyfile

        ref = studyfile.read(Path(ref)).name
    return store.study(ref)


def rows(store: "Store", study: "Study") -> "tuple[Trial | None, tuple[Trial, ...]]":
    """The baseline, and the front without it."""
    from tuner.search import pareto

    trials = store.trials(study.id)
    base = next((t for t in reversed(trials) if t.is_baseline and t.measurement), None)
    return base, tuple(t for t in pareto.front(trials, study.objectives) if not t.is_baseline)


def winner_of(store: "Store", study: "Study") -> int | None:
    """The number of the trial that won the newest finished run."""
    run = last_run(store, study)
    found = run.summary.get("winner") if run else None
    return found if isinstance(found, int) else None


def last_run(store: "Store", study: "Study") -> "Run | None":
    """The newest run of a study that came to a verdict."""
    return next((r for r in store.runs(study.id) if r.summary), None)


def show(store: "Store", study: "Study") -> None:
    """The table for people."""
    base, members = rows(store, study)
    winner = winner_of(store, study)
    names = [*study.objectives, *(n for n in ("slo_attainment", "failed") if n not in study.objectives)]
    table = []
    for trial in [*([base] if base else []), *members]:
        mark = "baseline" if trial is base else "winner" if trial.number == winner else ""
        values = trial.measurement.values if trial.measurement else {}
        cells = [_cell(values, base, trial, name) for name in names]
        table.append([trial.number, mark, *cells, knobs(trial.candidate)])
    print_table(
        ["trial", "<", *names, "<configuration"], table, title=f"front of {study.name} ({study.id[:12]})"
    )


def _cell(values: Mapping[str, float], base: "Trial | None", trial: "Trial", name: str) -> object:
    from tuner.report.words import number, ratio

    if trial is base or base is None or base.measurement is None or name == "failed":
        return values.get(name)
    change = ratio(values.get(name), base.measurement.values.get(name))
    return f"{number(values.get(name))} ({change.replace(' ', '')})" if change else values.get(name)


def as_data(store: "Store", study: "Study", *, timings: bool = False) -> dict[str, object]:
    """The same as JSON."""
    base, members = rows(store, study)
    run = last_run(store, study)
    data: dict[str, object] = {
        "study": {"id": study.id, "name": study.name, "objectives": study.objectives},
        "baseline": base,
        "front": members,
        "winner": winner_of(store, study),
        "verdict": run.summary if run else {},
    }
    if timings:
        data["timings"] = timing_rows(store, study)
    return data


def timing_rows(store: "Store", study: "Study") -> list[dict[str, object]]:
    """A row per launch: the trial that it was made for, all trials that were measured in it, what for, and
    seconds until ready, measuring and in all; the verdict says how it ended.
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
    whole = (launch.ended_at - launch.started_at).total_seconds() if launch.ended_at else None
    ready = launch.timeline.get("ready_s")
    return {
        "launch": launch.id,
        "trial": number,
        "attempt": int(rest[-1]) if rest and rest[-1].isdecimal() else None,
        "trials": sorted({t.number for t in inside} | ({number} if number is not None else set())),
        "for": "confirmation" if confirming else "search",
        "ready_s": ready,
        "measuring_s": whole - ready if whole is not None and ready is not None else None,
        "whole_s": whole,
        "verdict": launch.verdict or "served",
    }


def show_timings(store: "Store", study: "Study") -> None:
    """Where the time of each launch went."""
    names = ("trials", "attempt", "for", "ready_s", "measuring_s", "whole_s", "verdict")
    heads = ["<trials", "attempt", "<for", "ready_s", "measuring_s", "whole_s", "<how it ended"]
    table: Sequence[Sequence[object]] = [[row[n] for n in names] for row in timing_rows(store, study)]
    print_table(heads, table, title="launches, and the trials that were measured in each")
