"""`tuner report`: a study as one HTML file."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.commands.common import StudyRef, now, open_store, say

if TYPE_CHECKING:
    from tuner.history.store import Store
    from tuner.records import Study


def report(
    study: StudyRef,
    output: Annotated[Path, typer.Option("-o", "--output", help="The file to write.")] = Path("report.html"),
) -> None:
    """Write a study's report: one HTML file that needs no network."""
    from tuner.commands.front import find_study

    store = open_store()
    say(f"wrote {write(store, find_study(store, study), output)}")


def write(store: "Store", study: "Study", output: Path) -> Path:
    """Write the report of a study. Unavailable when the file cannot be written."""
    from tuner.commands.front import last_run
    from tuner.errors import Unavailable
    from tuner.report.document import ReportData, render
    from tuner.search import pareto

    trials = store.trials(study.id)
    run = last_run(store, study)
    data = ReportData(
        study=study,
        trials=trials,
        front=pareto.front(trials, study.objectives),
        summary=run.summary if run else {},
        commands=commands(study),
        generated_at=now(),
    )
    try:
        output.write_text(render(data), encoding="utf-8")
    except OSError as error:
        raise Unavailable(f"cannot write {output}: {error.strerror}") from error
    return output


def commands(study: "Study") -> list[str]:
    """What shows the same again."""
    pull = ["tuner", "profile", "resolve", "--model", study.model, "--node", study.node]
    pull += ["--workload", study.workload, "--alias", "challenger", "--format", "vllm-yaml"]
    return [
        f"tuner front {study.id[:12]}",
        f"tuner study show {study.id[:12]}",
        f"tuner report {study.id[:12]} -o report.html",
        shlex.join(pull),
    ]
