"""The command line: names and wires the commands; each lives in `commands/`, its imports inside."""

import os
import sys

import typer

from tuner import SERVICE_VERSION, __version__, private
from tuner.commands import (
    baseline,
    capture,
    database,
    demo,
    doctor,
    front,
    gc,
    history,
    knobs,
    node,
    predict,
    profile,
    report,
    run,
    schedule,
    serve,
    study,
    token,
    trace,
    trial,
    tune,
)

app = typer.Typer(
    name="tuner",
    help="Find the vLLM configuration that serves your own traffic best.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("demo")(demo.demo)
app.command("tune")(tune.tune)
app.command("predict")(predict.predict)
app.command("front")(front.front)
app.command("capture")(capture.capture)
app.command("report")(report.report)
app.command("history")(history.history)
app.command("doctor")(doctor.doctor)
app.command("gc")(gc.gc)
app.command("serve")(serve.serve)
app.add_typer(trace.app, name="trace")
app.add_typer(study.app, name="study")
app.add_typer(run.app, name="run")
app.add_typer(trial.app, name="trial")
app.add_typer(profile.app, name="profile")
app.add_typer(knobs.app, name="knobs")
app.add_typer(baseline.app, name="baseline")
app.add_typer(schedule.app, name="schedule")
app.add_typer(node.app, name="node")
app.add_typer(token.app, name="token")
app.add_typer(database.app, name="db")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Find the vLLM configuration that serves your own traffic best."""


def _refuse_other_service() -> None:
    """A controller of one version never works for a service of another: they may not keep the same rows."""
    if os.environ.get(SERVICE_VERSION, __version__) != __version__:
        from tuner.errors import Conflict

        raise Conflict(
            f"the service that started this is vllm-config-tuner {os.environ[SERVICE_VERSION]}, this is"
            f" {__version__}: restart the service"
        )


def main() -> None:
    """Run a command. What the tuner says on purpose is one sentence on standard error and its exit code."""
    private.mask_files()
    try:
        _refuse_other_service()
        app()
    except Exception as error:
        from tuner.errors import TunerError, Unavailable

        if isinstance(error, OSError):  # of the disk, the home, a pipe: nothing that the tuner decides
            error = Unavailable(f"{error.filename or 'the system'}: {error.strerror or error}")
        if not isinstance(error, TunerError):
            raise
        typer.echo(f"tuner: {error}", err=True)
        sys.exit(error.exit_code)
