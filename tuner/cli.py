"""The command line: the names of the commands by group. Each is in a module of `commands/`."""

import os
import sys
from collections.abc import MutableMapping
from functools import cache
from importlib import import_module
from typing import Any

import typer
from typer._click.exceptions import UsageError
from typer.core import TyperGroup

from tuner import SERVICE_VERSION, __version__, masking
from tuner.commands.examples import EXAMPLES, EXIT_CODES

# Group → command → `module:name` in `tuner.commands`: a function, or a Typer with more commands.
GROUPS: dict[str, dict[str, str]] = {
    "Start": {
        "demo": "tune:demo", "lint": "lint:lint", "init": "init:init", "doctor": "upkeep:doctor",
    },
    "Tune": {
        "tune": "tune:tune", "predict": "plan:predict", "capture": "trace:capture", "trace": "trace:app",
        "knobs": "knobs:app", "objectives": "init:objectives", "plans": "init:plans",
        "baseline": "knobs:baseline_app",
    },
    "Results": {
        "front": "front:front", "history": "front:history", "report": "report:report", "study": "study:app",
        "run": "run:app", "trial": "study:trial_app", "profile": "profile:app", "compare": "compare:compare",
        "upgrade-check": "compare:upgrade_check", "explain": "explain:explain",
    },
    "Serve and fleet": {
        "serve": "serve:serve", "token": "serve:token_app", "schedule": "schedule:app", "node": "node:app",
    },
    "Upkeep": {"gc": "upkeep:gc", "db": "upkeep:database_app", "completion": "upkeep:completion"},
}  # fmt: skip
PLACES = {name: place for names in GROUPS.values() for name, place in names.items()}


class Commands(TyperGroup):
    """The commands by group. A command's module is imported when the command, or the whole help, is asked
    for: `tuner lint` does not wait for what `tuner tune` needs.
    """

    @property
    def commands(self) -> MutableMapping[str, Any]:
        """All commands by name."""
        return {name: command(name) for name in PLACES}

    @commands.setter
    def commands(self, given: object) -> None:
        """The base class sets what it was given, which is nothing."""

    def list_commands(self, ctx: object) -> list[str]:
        return list(PLACES)

    def get_command(self, ctx: object, cmd_name: str) -> Any:
        return command(cmd_name) if cmd_name in PLACES else None

    def format_commands(self, ctx: object, formatter: Any) -> None:
        width = max(map(len, PLACES))
        for title, names in GROUPS.items():
            with formatter.section(title):
                rows = ((f"{n:<{width}}", command(n).get_short_help_str(formatter.width)) for n in names)
                formatter.write_dl(list(rows))


class Group(TyperGroup):
    """A group that answers an unknown command with the near ones, or with all that it has."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except UsageError as error:
            if "Did you mean" not in error.message:
                error.message += f" There are: {', '.join(self.commands)}."
            raise


@cache
def command(name: str) -> Any:
    """The command of that name, with the examples of `commands/examples.py` in its help."""
    module, _, attribute = PLACES[name].partition(":")
    home = import_module(f"tuner.commands.{module}")
    found = getattr(home, attribute)
    around = typer.Typer(rich_markup_mode=None, add_completion=False)
    if not isinstance(found, typer.Typer):
        around.command(name, cls=getattr(home, "COMMAND", None), epilog=_examples(name))(found)
        return typer.main.get_command(around)
    for each in found.registered_commands:
        each.epilog = _examples(f"{name} {each.name}")
    around.add_typer(found, name=name, cls=Group, epilog=_examples(name))
    around.callback()(lambda: None)
    return typer.main.get_command(around).commands[name]  # type: ignore[attr-defined]


def _examples(path: str) -> str | None:
    """The examples of a command as the end of its help; of a group, the first one of each command."""
    lines = EXAMPLES.get(path) or [
        found[0] for name, found in EXAMPLES.items() if name.startswith(f"{path} ")
    ]
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)]) if lines else None


app = typer.Typer(
    name="tuner",
    cls=Commands,
    help="Find the vLLM configuration that serves your traffic best.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


def _no_color(asked: bool) -> None:
    if asked:
        os.environ["NO_COLOR"] = "1"


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
    no_color: bool = typer.Option(
        False, "--no-color", callback=_no_color, is_eager=True, help="No colours; NO_COLOR=1 does the same."
    ),
) -> None:
    """Find the vLLM configuration that serves your traffic best."""


def _refuse_other_service() -> None:
    """Conflict when the service that started this is of another version: it may store other rows."""
    if os.environ.get(SERVICE_VERSION, __version__) != __version__:
        from tuner.errors import Conflict

        raise Conflict(
            f"the service is vllm-config-tuner {os.environ[SERVICE_VERSION]}, this command is {__version__}:"
            " restart the service"
        )


def main() -> None:
    """Run a command. An error of the tuner is one sentence on standard error and an exit code."""
    masking.mask_files()
    try:
        _refuse_other_service()
        app(prog_name="tuner")
    except Exception as error:
        from tuner.errors import TunerError, Unavailable, page_of

        if isinstance(error, OSError):  # of the disk, the home or a pipe, which the tuner does not control
            error = Unavailable(f"{error.filename or 'the system'}: {error.strerror or error}")
        if not isinstance(error, TunerError):
            raise
        typer.echo(f"tuner: {error}{page_of(getattr(error, 'cause', None))}", err=True)
        sys.exit(error.exit_code)
