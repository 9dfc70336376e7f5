"""`tuner report`: a study as one HTML file, or as Markdown for a pull request."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.commands.common import StudyRef, now, open_store, say, write_file

if TYPE_CHECKING:
    from tuner.history.store import Store
    from tuner.records import Study


class Format(StrEnum):
    """The format of a report."""

    HTML = "html"
    MD = "md"


def report(
    study: StudyRef,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="The file to write. Default: report.html or report.md."),
    ] = None,
    format: Annotated[
        Format | None,
        typer.Option(
            help="html (one file with pictures, needs no network) or md. Default: by the name of the file."
        ),
    ] = None,
) -> None:
    """Write a study's report as HTML or Markdown.

    The HTML file needs no network. `-o -` prints the report.
    """
    from tuner.commands.front import find_study

    store = open_store()
    chosen = format or (Format.MD if output is not None and output.suffix == ".md" else Format.HTML)
    place = output or Path(f"report.{chosen.value}")
    found = find_study(store, study)
    if str(place) == "-":
        typer.echo(text(store, found, chosen), nl=False)
        return
    say(f"wrote {write(store, found, place, chosen)}")


def text(store: "Store", study: "Study", format: Format = Format.HTML) -> str:
    """The report of a study."""
    from tuner.report.document import ReportData, markdown, render

    conclusions = store.conclusions(study.id)
    confirmation = next((c for c in reversed(conclusions) if c.measured_again), None)
    published = confirmation.profiles if confirmation else {}
    made = published.get("challenger")
    data = ReportData(
        run=next(iter(store.runs(study.id, limit=1)), None),
        stopped=store.stopped_runs(now=now()),
        study=study,
        trials=store.trials(study.id),
        conclusions=conclusions,
        launches=store.launches(study.id),
        commands=commands(study, [name for name in ("challenger", "baseline") if name in published][:1]),
        generated_at=now(),
        winner=store.profile(made.id) if made else None,
        attribution=store.attribution(conclusions[-1].run_id) if conclusions else None,
    )
    return markdown(data) if format is Format.MD else render(data)


def write(store: "Store", study: "Study", output: Path, format: Format = Format.HTML) -> Path:
    """Write the report of a study. Unavailable when the file cannot be written."""
    write_file(output, text(store, study, format))
    return output


def commands(study: "Study", aliases: list[str]) -> list[str]:
    """The commands that show the study again, and pull what it published under `aliases`."""
    from tuner.report.card import key_of, pull_command

    return [
        f"tuner front {study.id[:12]}",
        f"tuner study show {study.id[:12]}",
        f"tuner report {study.id[:12]} -o report.html",
        *(pull_command(key_of(study), alias) for alias in aliases),
    ]
