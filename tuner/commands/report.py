"""`tuner report`: a study as one HTML file, or as Markdown for a pull request; and `tuner explain`: why a
published configuration won, knob by knob.
"""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.commands.common import Json, StudyRef, now, open_store, print_json, say, write_file
from tuner.errors import BadInput, NotFound

if TYPE_CHECKING:
    from tuner.conclusions import Attribution, PublishedProfile
    from tuner.history.store import Store
    from tuner.records import Profile, Study


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
        runs=store.runs(study.id),
        stopped=store.stopped_runs(now=now()),
        study=study,
        trials=store.trials(study.id),
        conclusions=conclusions,
        launches=store.launches(study.id),
        commands=commands(study, made or published.get("baseline")),
        generated_at=now(),
        winner=store.profile(made.id) if made else None,
        attribution=store.attribution(conclusions[-1].run_id) if conclusions else None,
    )
    return markdown(data) if format is Format.MD else render(data)


def write(store: "Store", study: "Study", output: Path, format: Format = Format.HTML) -> Path:
    """Write the report of a study. Unavailable when the file cannot be written."""
    write_file(output, text(store, study, format))
    return output


def commands(study: "Study", made: "PublishedProfile | None") -> list[str]:
    """The commands that show the study again, and pull what it published."""
    from tuner.report.card import export_command

    return [
        f"tuner front {study.id[:12]}",
        f"tuner study show {study.id[:12]}",
        f"tuner report {study.id[:12]} -o report.html",
        *([export_command(made.id)] if made is not None else []),
    ]


def explain(
    profile: Annotated[int, typer.Argument(help="The profile's id (`tuner profile list`), not its version.")],
    as_json: Json = False,
) -> None:
    """Say which knobs of a profile give the gain, and why.

    After a winner is confirmed, the run leaves out one of its knobs at a time. The simulator decides if it is
    certain; otherwise a launch decides. Knobs that give nothing are left out of the profile.
    """
    from tuner.report.explain import lines
    from tuner.report.words import knobs

    store = open_store()
    found = store.profile(profile)
    if (stayed := _of_today(store, found)) is not None:
        if as_json:
            print_json({
                "profile": found.id, "candidate": dict(found.candidate), "attribution": None, "said": stayed
            })  # fmt: skip
        else:
            typer.echo(stayed)
        return
    told = attribution_of(store, found)
    if as_json:
        print_json({"profile": found.id, "candidate": dict(found.candidate), "attribution": told.to_json()})
        return
    typer.echo(f"profile {found.id}, version {found.version}: {knobs(found.candidate)}")
    for line in lines(told, gpus=store.study(found.study_id).has_gpus):
        typer.echo(line)


def attribution_of(store: "Store", profile: "Profile") -> "Attribution":
    """The attribution behind a profile. NotFound if its run made none, or not for this configuration, with
    the reason.
    """
    run = profile.evidence.get("run")
    if not isinstance(run, str):
        raise BadInput(
            f"profile {profile.id} was not published by a run, so it is not known which knobs give its gain"
        )
    found = store.attribution(run)
    if found is None:
        from tuner.report.explain import why_none
        from tuner.tuning.attribution import attribution_labels

        began = f"-confirm-{attribution_labels(run)[0]}-"
        begun = any(began in (each.directory or "") for each in store.launches(profile.study_id))
        why = why_none(store.conclusion(run), store.study(profile.study_id).spec.get("plan"), begun=begun)
        raise NotFound(f"run {run} did not find out which knobs give the gain: {why}")
    return found


def _of_today(store: "Store", profile: "Profile") -> str | None:
    """What is known of a profile that is today's configuration, as sentences; None for any other."""
    run = profile.evidence.get("run")
    if profile.evidence.get("origin") != "baseline" or not isinstance(run, str):
        return None
    today, said = f"Profile {profile.id} is today's configuration.", store.conclusion(run)
    if said is None:
        return f"{today} Run {run} measured it and has no conclusion."
    made = said.profiles.get("challenger")
    if made is None:
        return f"{today} Run {run} published no other configuration. Its conclusion: {said.sentence}"
    won = f"{today} The winner of run {run} is profile {made.id}."
    if store.attribution(run) is None:
        return (
            f"{won} The run did not find out which of its knobs give the gain;"
            f" `tuner explain {made.id}` says why."
        )
    return f"{won} `tuner explain {made.id}` says what the run found out about its knobs."
