"""The command line: the names of the commands by group, with the examples that their help shows, and the exit
codes. Each command is in a module of `commands/`. A test runs or parses each example.
"""

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

EXAMPLES: dict[str, tuple[str, ...]] = {
    "demo": (
        "tuner demo",
        "tuner demo --trials 5 --home try",
        "tuner demo --python ~/vllm-cpu/bin/python --trace chat",
    ),
    "lint": (
        "tuner lint 'vllm serve Qwen/Qwen2.5-7B-Instruct' --card h100-80",
        "tuner lint compose.yaml --trace latest:chat --slo ttft=500,tpot=50",
        "tuner lint http://127.0.0.1:8000 --fail-on warning",
    ),
    "init": (
        "tuner init chat.yaml --from-url http://127.0.0.1:8000 --trace latest:chat",
        "tuner init --model Qwen/Qwen3-8B --space interactive --slo ttft=300,tpot=40",
        "tuner init try.yaml --from compose.yaml --python /opt/vllm/bin/python",
    ),
    "objectives": ("tuner objectives", "tuner objectives --json"),
    "plans": ("tuner plans",),
    "doctor": ("tuner doctor", "tuner doctor chat.yaml"),
    "tune": (
        "tuner tune chat.yaml --dry-run",
        "tuner tune chat.yaml --trials 20 --until 05:30",
        "tuner tune chat.yaml --confirm-only",
        "tuner tune chat.yaml --on auto --nodes gpu=a100",
    ),
    "predict": ("tuner predict chat.yaml", "tuner predict chat.yaml --candidates 200 --json"),
    "capture": (
        "tuner capture --upstream http://127.0.0.1:8000 --name chat",
        "tuner capture --upstream http://gpu-1:8000 --name chat --every day --keep 7",
    ),
    "trace import": (
        "tuner trace import requests.csv --name chat",
        "tuner trace import log.csv --column arrival_s=ts --unit ms",
    ),
    "trace list": ("tuner trace list",),
    "trace show": ("tuner trace show chat", "tuner trace show latest:chat --html chat.html"),
    "trace slice": (
        "tuner trace slice chat",
        "tuner trace slice chat --start 1200 --duration 60 -o peak.parquet",
    ),
    "trace reshape": ("tuner trace reshape chat --share 0.5 -o half.parquet",),
    "trace diff": ("tuner trace diff chat latest:chat",),
    "trace forget": ("tuner trace forget chat",),
    "knobs": ("tuner knobs", "tuner knobs --python /opt/vllm/bin/python --space bursty-mixed"),
    "knobs check": ("tuner knobs check bursty-mixed --python /opt/vllm/bin/python",),
    "baseline import": (
        "tuner baseline import compose.yaml",
        "tuner baseline import 'vllm serve Qwen/Qwen3-8B --max-num-seqs 64'",
    ),
    "compare": (
        "tuner compare today champion --study chat.yaml",
        "tuner compare champion champion@/opt/new/bin/python --study chat.yaml",
    ),
    "upgrade-check": (
        "tuner upgrade-check chat.yaml --to /opt/new/bin/python",
        "tuner upgrade-check chat.yaml --from img:v1 --to img:v2 --alias today",
    ),
    "explain": ("tuner explain 7", "tuner explain 7 --json"),
    "front": ("tuner front chat", "tuner front chat --timings --json"),
    "history": ("tuner history", "tuner history --node gpu-1 --since 2026-03-01 --metric ttft_p95_ms"),
    "report": ("tuner report chat", "tuner report chat -o chat.md"),
    "study list": ("tuner study list",),
    "study show": ("tuner study show chat",),
    "study export": (
        "tuner study export chat --csv chat.csv --parquet chat.parquet",
        "tuner study export chat --optuna sqlite:///chat-optuna.db",
    ),
    "run list": ("tuner run list", "tuner run list --study chat"),
    "run status": ("tuner run status", "tuner run status 3f2a"),
    "run cancel": ("tuner run cancel 3f2a",),
    "trial show": ("tuner trial show chat 7",),
    "trial log": ("tuner trial log chat 7", "tuner trial log chat 7 --lines 0"),
    "profile list": ("tuner profile list", "tuner profile list --model Qwen/Qwen2.5-7B-Instruct"),
    "profile show": ("tuner profile show 3",),
    "profile diff": ("tuner profile diff 2 3",),
    "profile resolve": (
        "tuner profile resolve --model Qwen/Qwen2.5-7B-Instruct",
        "tuner profile resolve --model Qwen/Qwen3-8B -o vllm.yaml --exit-code",
    ),
    "profile export": ("tuner profile export 3 --format args",),
    "profile promote": ("tuner profile promote --model Qwen/Qwen2.5-7B-Instruct",),
    "profile rollback": ("tuner profile rollback --model Qwen/Qwen3-8B --reason slow",),
    "serve": ("tuner serve", "tuner serve --host 0.0.0.0 --tls-cert cert.pem --tls-key key.pem"),
    "token create": (
        "tuner token create --name ci --scope read",
        "tuner token create --name ops --scope run --scope promote --expires 12h",
    ),
    "token list": ("tuner token list",),
    "token revoke": ("tuner token revoke 1",),
    "schedule add": ("tuner schedule add night --study chat.yaml --cron '0 1 * * *' --hours 4",),
    "schedule list": ("tuner schedule list",),
    "schedule next": ("tuner schedule next night --count 3",),
    "schedule run": ("tuner schedule run night", "tuner schedule run night --now"),
    "schedule remove": ("tuner schedule remove night",),
    "node list": ("tuner node list",),
    "node add": (
        "tuner node add gpu-1 --python /opt/vllm/bin/python --systemd vllm.service",
        "tuner node add try --card h100-80",
    ),
    "node restore": ("tuner node restore gpu-1", "tuner node restore --all"),
    "gc": ("tuner gc", "tuner gc --days 14 --apply"),
    "completion": ("tuner completion bash", "tuner completion fish"),
    "db upgrade": ("tuner db upgrade",),
    "db backup": ("tuner db backup backup.db", "tuner db backup backups --full"),
    "db restore": ("tuner db restore tuner-full.tar.gz",),
    "db copy": ("tuner db copy postgresql://tuner@db.example.org/tuner",),
}
"""Command → lines that can be typed, the simplest first."""

EXIT_CODES = """\
\b
tuner COMMAND -h shows the options and examples of a command.
Exit codes: 0 done · 1 failed · 2 wrong input · 3 unchanged · 4 not found
5 conflict · 6 try again · 7 no candidate can work · 8 stopped by a signal
9 schedule refused · 10 to 21 doctor found an error
22 and 23 compare --fail-if (docs/ has all)
"""


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
        "upgrade-check": "compare:upgrade_check", "explain": "report:explain",
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
    """The command of that name, with its examples in the help."""
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
