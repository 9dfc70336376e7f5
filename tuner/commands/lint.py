"""`tuner lint`: what a command line costs, without a GPU."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer._click.exceptions import NoSuchOption, UsageError
from typer.core import TyperCommand

from tuner.commands.common import Json, print_json

if TYPE_CHECKING:
    from tuner.history.store import Store
    from tuner.lint.run import LintedEngine
    from tuner.records import Slo
    from tuner.traffic.trace import Trace


What = Annotated[
    list[str],
    typer.Argument(
        metavar="COMMAND|FILE|URL...",
        help="A command line in quotes, a unit, compose file, manifest, Helm values or Markdown, or a URL.",
    ),
]
CardName = Annotated[str | None, typer.Option(help="The GPU, such as h100-80. It sets the memory and speed.")]
Gpus = Annotated[int | None, typer.Option(min=1, help="How many GPUs there are.")]
TraceRef = Annotated[
    str | None,
    typer.Option(metavar="TRACE", help="The traffic: a file, a stored trace or latest:CAPTURE."),
]
Rate = Annotated[
    float | None,
    typer.Option(min=0.001, help="Instead of a trace: requests a second (with --input, --output)."),
]
Input = Annotated[int | None, typer.Option("--input", min=1, help="Tokens of each prompt.")]
Output = Annotated[int | None, typer.Option(min=1, help="Tokens of each answer.")]
Limits = Annotated[
    str | None,
    typer.Option(
        metavar="ttft=500,tpot=50",
        help="Limits in ms, such as ttft=500,tpot=50; also e2e=… and attainment=0.95.",
    ),
]
EngineVersion = Annotated[
    str | None,
    typer.Option(
        metavar="V", help="The vLLM version to check against. Default: the image's, or the newest known."
    ),
]
HfConfig = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The config.json of a model that the tuner does not know."),
]
Pick = Annotated[
    str | None, typer.Option(metavar="NAME", help="The engine to check, if the input has several.")
]
FailOn = Annotated[
    str,
    typer.Option(
        help="Exit with 1 if a finding is at least this severe: error, warning or note. With never,"
        " findings do not change the exit code."
    ),
]
Sarif = Annotated[bool, typer.Option("--sarif", help="Print SARIF 2.1.0 for code scanning.")]


class LintCommand(TyperCommand):
    """`tuner lint`. A command line of vLLM without quotes is refused with the way to write it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = list(args)
        try:
            rest = super().parse_args(ctx, args)
        except NoSuchOption as error:
            if (flag := self._of_vllm(words)) is not None:
                error.message = f"{flag} is an argument of vLLM, not of tuner lint. {QUOTES}"
                error.possibilities = None
            raise
        what: list[str] = list(ctx.params.get("what") or ())
        if len(what) > 1 and what[0] == "vllm" and not Path("vllm").exists():
            raise UsageError(f"'vllm' is not a file. {QUOTES}", ctx)
        return rest

    def _of_vllm(self, words: list[str]) -> str | None:
        """The first word that is a flag of a vLLM release and none of this command."""
        from tuner.knobs.baseline import long_form
        from tuner.knobs.catalogue import table

        mine = {name for each in self.params for name in each.opts}
        for word in words:
            flag = long_form([word])[0].partition("=")[0].replace("_", "-").replace("--no-", "--")
            if flag in table().flags and flag not in mine:
                return word.partition("=")[0]
        return None


QUOTES = "Put vLLM's command line in quotes: tuner lint 'vllm serve MODEL --max-num-seqs 64'"
COMMAND = LintCommand


def lint(
    what: What,
    card: CardName = None,
    gpus: Gpus = None,
    trace: TraceRef = None,
    rate: Rate = None,
    input_: Input = None,
    output: Output = None,
    slo: Limits = None,
    engine_version: EngineVersion = None,
    hf_config: HfConfig = None,
    pick: Pick = None,
    fail_on: FailOn = "error",
    as_json: Json = False,
    as_sarif: Sarif = False,
) -> None:
    """Check a vLLM configuration without a GPU.

    It checks flags and memory, and predicts how the engine would serve your traffic. Nothing is launched.
    The exit code is 1 if a finding is as severe as --fail-on, or worse. docs/lint/ explains each finding.
    """
    from tuner.lint import findings, run, subject

    made, about = _traffic(trace, rate, input_, output) or (None, "")
    against = run.LintOptions(
        version=None if engine_version is None else engine_version.lstrip("v"),
        card=card,
        gpus=gpus,
        trace=made,
        about=about,
        slo=slo_of(slo),
        config=hf_config,
        store=None if made is None else _history(),
    )
    found = [each for one in what for each in subject.engines(one, pick)]
    linted = [run.lint(each, against, os.environ) for each in found]
    failed = findings.reaches([f for each in linted for f in each.findings], fail_on)
    _print(linted, as_json, as_sarif, limited=bool(slo))
    if failed:
        raise typer.Exit(1)


def _print(linted: "list[LintedEngine]", as_json: bool, as_sarif: bool, *, limited: bool) -> None:
    if as_sarif:
        from tuner.lint.run import sarif_document

        print_json(sarif_document(linted))
    elif as_json:
        print_json({"engines": linted})
    else:
        for each in linted:
            _show(each, limited=limited)


def _traffic(
    trace: str | None, rate: float | None, inputs: int | None, outputs: int | None
) -> "tuple[Trace, str] | None":
    """The requests to simulate and what they are. BadInput for half a rate, or a rate beside a trace."""
    from tuner.errors import BadInput

    parts = [rate, inputs, outputs]
    if trace is None and all(part is None for part in parts):
        return None
    if trace is not None and any(part is not None for part in parts):
        raise BadInput("give --trace, or --rate with --input and --output, not both")
    from tuner.commands.trace import open_part
    from tuner.lint.load import part, steady, window

    if trace is not None:
        made = part(*open_part(trace, window))
    elif rate is None or inputs is None or outputs is None:
        raise BadInput("give --rate, --input and --output together")
    else:
        made = steady(rate, inputs, outputs)
    return made.trace, made.about


def slo_of(text: str | None) -> "Slo":
    """`ttft=500,tpot=50` as limits in ms. BadInput names the part that is wrong."""
    from tuner.errors import BadInput, nearest
    from tuner.records import Slo

    names = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2e": "e2e_ms", "attainment": "attainment"}
    limits: dict[str, float] = {}
    for part in (text or "").split(",") if text else ():
        name, _, value = part.strip().partition("=")
        name = name.removesuffix("_ms")
        if name not in names:
            raise BadInput(f"--slo: '{name}' is not a limit{nearest(name, names)}; known: {', '.join(names)}")
        if not re.fullmatch(r"\d+(\.\d+)?", value) or float(value) <= 0:
            raise BadInput(f"--slo: {name}={value}: write a number above 0")
        limits[names[name]] = float(value)
    if not 0 < limits.get("attainment", 0.95) <= 1:
        raise BadInput("--slo: attainment is a share above 0 and at most 1")
    return Slo.read(limits)


def _history() -> "Store | None":
    """The history, for its calibrations; None if there is none."""
    from tuner.commands.common import open_store, settings
    from tuner.errors import TunerError

    file = settings().url.removeprefix("sqlite:///")
    if file != settings().url and not Path(file).exists():
        return None  # without the libraries that a look at it takes
    try:
        return open_store()
    except TunerError:
        return None


def _show(one: "LintedEngine", *, limited: bool) -> None:
    found = {s: sum(f.severity == s for f in one.findings) for s in ("error", "warning", "note")}
    counts = ", ".join(f"{n} {s}{'s' * (n != 1)}" for s, n in found.items())
    name = one.model or one.name
    typer.echo(f"{name} on vLLM {one.version} ({one.where}): {counts}")
    for each in one.findings:
        typer.echo(f"  {each.severity:<8}{each.id}: {each.sentence}")
        if each.fix:
            typer.echo(f"          fix: {each.fix}")
        typer.echo(f"          why: {each.evidence} ({each.page})")
    if one.predicted:
        from tuner.lint.load import p95s

        said = p95s(one.predicted)
        if limited and all(each.id != "slo-missed" for each in one.findings):
            said += f"; {one.predicted.get('slo_attainment', 0.0):.1%} of the requests keep the SLO"
        typer.echo(f"  predicted for {one.traffic}: {said}; {one.basis}")
    for note in one.unread:
        typer.echo(f"  not read: {note}")
    for why in dict.fromkeys(one.missing.values()):
        kinds = ", ".join(kind for kind, reason in one.missing.items() if reason == why)
        typer.echo(f"  not computed: {kinds} ({why})")
