"""The command line: the names of the commands, which are in `commands/`."""

import os
import sys
from collections.abc import Callable

import typer

from tuner import SERVICE_VERSION, __version__, masking
from tuner.commands import (
    front,
    knobs,
    lint,
    node,
    plan,
    profile,
    report,
    run,
    schedule,
    serve,
    study,
    trace,
    tune,
    upkeep,
)  # fmt: skip

app = typer.Typer(
    name="tuner",
    help="Find the vLLM configuration that serves your own traffic best.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
COMMANDS: dict[str, Callable[..., None]] = {
    "lint": lint.lint, "demo": tune.demo, "tune": tune.tune, "predict": plan.predict, "front": front.front,
    "capture": trace.capture, "report": report.report, "history": front.history, "doctor": upkeep.doctor,
    "gc": upkeep.gc, "serve": serve.serve,
}  # fmt: skip
GROUPS = {
    "trace": trace.app, "study": study.app, "run": run.app, "trial": study.trial_app, "profile": profile.app,
    "knobs": knobs.app, "baseline": knobs.baseline_app, "schedule": schedule.app, "node": node.app,
    "token": serve.token_app, "db": upkeep.database_app,
}  # fmt: skip
for name, command in COMMANDS.items():
    app.command(name)(command)
for name, group in GROUPS.items():
    app.add_typer(group, name=name)


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
    """Conflict when the service that started this is of another version: it may store other rows."""
    if os.environ.get(SERVICE_VERSION, __version__) != __version__:
        from tuner.errors import Conflict

        raise Conflict(
            f"the service that started this is vllm-config-tuner {os.environ[SERVICE_VERSION]}, this is"
            f" {__version__}: restart the service"
        )


def main() -> None:
    """Run a command. An error of the tuner is one sentence on standard error and an exit code."""
    masking.mask_files()
    try:
        _refuse_other_service()
        app()
    except Exception as error:
        from tuner.errors import TunerError, Unavailable

        if isinstance(error, OSError):  # of the disk, the home or a pipe, which the tuner does not control
            error = Unavailable(f"{error.filename or 'the system'}: {error.strerror or error}")
        if not isinstance(error, TunerError):
            raise
        typer.echo(f"tuner: {error}", err=True)
        sys.exit(error.exit_code)
