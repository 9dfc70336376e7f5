"""`tuner init` writes a study file. `tuner objectives` and `tuner plans` list what it may name."""

import re
import shlex
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tuner.commands.common import Json, open_store, print_records, say, write_file
from tuner.errors import BadInput, TunerError
from tuner.settings import variables

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tuner.knobs.baseline import Imported

SAMPLE = "azure-conversation-slice.parquet"
STUDY = """\
# Written by `tuner init`. If a key is misspelt, the error names the nearest known key.
#   check:   tuner doctor {file}
#   preview: tuner tune {file} --dry-run
#   run:     tuner tune {file}
name: {name}
model: {model}    # a name, or a folder with config.json
workload: {workload}    # a name for this kind of traffic; each workload has its own profiles
node: {node}    # or a registered node (tuner node list)

# The traffic that every trial replays: a file, a known trace (tuner trace list), or latest:NAME.{sample}
trace: {trace}
slices: auto    # the parts of it: peak, median, most bursty; or [{{start_s: 1200, duration_s: 60}}]
plan: {plan}    # how long each trial measures (tuner plans)

# The engine: `args` are fixed, the space says which knobs are turned (tuner knobs -h).{simulated}
engine: {engine}
space: {space}
# What runs today, as knobs; {{}} = the engine's own defaults.
baseline: {baseline}

# The limits that a good request keeps, and what the search improves (tuner objectives).
slo: {slo}
objectives: [ttft_p95_ms, tpot_p95_ms, goodput_rps]
winner: slo    # of the best trials, take the one that keeps the limits best; or knee, or {{weights: {{…}}}}
budget: {{trials: {trials}}}    # of each run; hours: 6 also limits its time
seed: 0
"""
OF_SAMPLE = "\n# This one is a sample of public traffic: replace it with your own (tuner capture -h)."
OF_SIMULATED = "\n# It is simulated: {kind: vllm, python: /path/to/python} measures a real one."
NEW_SLO = "ttft=500,tpot=50"


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyAnswers:
    """What `tuner init` was told. `url` and `source` are the two ways to name what runs today."""

    file: Path
    url: str | None
    source: str | None
    model: str | None
    trace: str | None
    space: str
    python: str | None
    card: str
    slo: str
    node: str
    workload: str
    plan: str | None
    trials: int


def init(
    file: Annotated[Path, typer.Argument(metavar="[STUDY.yaml]", help="The file to write.")] = Path(
        "study.yaml"
    ),
    from_url: Annotated[
        str | None, typer.Option(metavar="URL", help="The URL of the vLLM server that runs today.")
    ] = None,
    from_file: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FILE|COMMAND",
            help="What starts vLLM today: a command in quotes, unit, compose file, manifest or Helm values.",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model. Default: what runs today.")] = None,
    trace: Annotated[
        str | None,
        typer.Option(metavar="TRACE", help="The traffic. Default: the newest known trace, else a sample."),
    ] = None,
    space: Annotated[
        str, typer.Option(help="The knobs to turn: a shipped space, or a file.")
    ] = "bursty-mixed",
    python: Annotated[
        str | None,
        typer.Option(metavar="PY", help="The interpreter that has vllm. Default: that of `vllm`, if found."),
    ] = None,
    card: Annotated[str, typer.Option(help="The GPU of the simulated engine, without --python.")] = "h100-80",
    slo: Annotated[
        str,
        typer.Option(
            metavar="LIMITS", help="Limits in ms, such as ttft=500,tpot=50; also e2e=… and attainment=0.95."
        ),
    ] = NEW_SLO,
    node: Annotated[str, typer.Option(help="The node to tune.")] = "local",
    workload: Annotated[
        str, typer.Option(help="A name for this kind of traffic. Each workload has its own profiles.")
    ] = "default",
    plan: Annotated[
        str | None, typer.Option(help="How long to measure. Default: standard; brief for a short trace.")
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="Trials of each run.")] = 40,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
) -> None:
    """Write a study file, by asking or from a running server.

    On a terminal it asks for everything that no option gives. The file has a comment for each key.
    """
    if file.exists() and not force:
        raise BadInput(f"{file} exists: give another name, or --force to replace it")
    answers = StudyAnswers(
        file=file, url=from_url, source=from_file, model=model, trace=trace, space=space, python=python,
        card=card, slo=slo, node=node, workload=workload, plan=plan, trials=trials,
    )  # fmt: skip
    if sys.stdin.isatty() and (from_url, from_file, model) == (None, None, None):
        answers = _asked(answers)
    text, notes = study_text(answers)
    write_file(file, text)
    for note in notes:
        say(f"note: {note}")
    say(f"wrote {file}")
    _check(file)


def _check(file: Path) -> None:
    """Say what to do next, or why the study cannot run here yet."""
    from tuner.commands.plan import prepared_study

    try:
        prepared_study(file)
    except TunerError as error:
        say(f"the study cannot run here yet: {error}")
        return
    path, given = shlex.quote(str(file)), variables().strip()
    steps = f"tuner doctor {path}, then tuner tune {path} --dry-run, then tuner tune {path}"
    say(f"next: {steps}" + (f", each with {given}" if given else ""))


def _asked(given: StudyAnswers) -> StudyAnswers:
    """Ask for what runs today, the traffic, the space and the limits. Enter takes the default."""
    from tuner.knobs import space as spaces

    url = typer.prompt("URL of a vLLM server that runs today (Enter: none)", default="", show_default=False)
    model = None if url else typer.prompt("Model, a name or a folder")
    python = given.python or typer.prompt(
        "Interpreter that has vllm (Enter: the simulated engine)",
        default=_interpreter() or "",
        show_default=bool(_interpreter()),
    )
    trace = given.trace or typer.prompt(
        "Traffic: a file, or a known trace", default=_newest_trace() or SAMPLE
    )
    say("spaces: " + ", ".join(spaces.names()))
    return replace(
        given,
        url=url or None,
        model=model,
        python=python or None,
        trace=None if trace == SAMPLE else trace,
        space=typer.prompt("Space, the knobs to turn", default=given.space),
        slo=typer.prompt("Limits of a good request in ms", default=given.slo),
        workload=typer.prompt("Kind of traffic, a word", default=given.workload),
    )


def study_text(answers: StudyAnswers) -> tuple[str, list[str]]:
    """The text of the study file, and notes on what was left out. BadInput or NotFound for a wrong answer."""
    from tuner.knobs import space as spaces
    from tuner.tuning.study import parse

    space = spaces.load(answers.space)
    found = _today(answers)
    model = answers.model or (found.model if found else None)
    if model is None:
        raise BadInput("no model is known: give --model, or --from-url of a server that runs it")
    keys = found.study(space) if found else {}
    notes = list(found.notes) if found else []
    python = answers.python or _interpreter()
    kind = {"kind": "vllm", "python": python} if python else {"kind": "simulated", "card": answers.card}
    trace, plan = _traffic(answers)
    values = {
        "name": re.sub(r"[^\w.-]+", "-", answers.file.stem), "model": model, "node": answers.node,
        "workload": answers.workload, "trace": trace, "plan": plan, "space": answers.space,
        "engine": {**kind, **keys.get("engine", {})}, "slo": _limits(answers.slo), "trials": answers.trials,
        "baseline": _runnable(keys.get("baseline", {}), python is None, notes),
    }  # fmt: skip
    text = STUDY.format(
        file=answers.file,
        sample=OF_SAMPLE if trace.endswith(SAMPLE) else "",
        simulated="" if python else OF_SIMULATED,
        **{name: _yaml(value) for name, value in values.items()},
    )
    parse(text, name=str(answers.file))
    return text, notes


def _limits(text: str) -> dict[str, float]:
    """`ttft=500,tpot=50` as the key `slo` of a study."""
    from tuner.commands.lint import slo_of

    found = slo_of(text)
    names = ("ttft_ms", "tpot_ms", "e2e_ms", "attainment")
    limits = {name: value for name in names if (value := getattr(found, name)) is not None}
    return {name: int(value) if value == int(value) else value for name, value in limits.items()}


def _runnable(baseline: "Mapping[str, Any]", simulated: bool, notes: list[str]) -> dict[str, Any]:
    """The knobs of today's configuration that the chosen engine has; a note names the others."""
    from tuner.commands.knobs import facts_of
    from tuner.knobs.space import knob_rows

    if not (simulated and baseline):
        return dict(baseline)
    lacks = {row.name for row in knob_rows(facts_of(None)) if row.why_not}
    notes += [
        f"baseline: left out {name}: the simulated engine does not have it" for name in lacks & set(baseline)
    ]
    return {name: value for name, value in baseline.items() if name not in lacks}


def _today(answers: StudyAnswers) -> "Imported | None":
    """What runs today: by a running server's own words, or by what starts it; None if neither is given."""
    from tuner.knobs import manifests

    if answers.url is not None and answers.source is not None:
        raise BadInput("--from-url and --from both say what runs today: give only one of them")
    if answers.source is not None:
        return manifests.read(answers.source)
    return None if answers.url is None else served(answers.url)


def served(url: str) -> "Imported":
    """The configuration of a running server: what differs from the defaults of its release."""
    from tuner.knobs.baseline import Imported
    from tuner.lint import subject
    from tuner.records import Candidate

    if not url.startswith(("http://", "https://")):
        raise BadInput(f"--from-url {url}: give the address of the server, such as http://127.0.0.1:8000")
    (found,) = subject.engines(url)
    defaults = subject.facts_for(found.version, None, "cuda").defaults
    own = {name: value for name, value in found.effective.items() if value != defaults.get(name)}
    note = (
        ""
        if own
        else "the server does not report its configuration: start it with VLLM_SERVER_DEV_MODE=1, or give "
        "--from"
    )
    return Imported(
        source=url,
        model=found.source.model,
        candidate=Candidate(own),
        notes=(f"{url}: {note}",) if note else (),
    )


def _traffic(answers: StudyAnswers) -> tuple[str, str]:
    """The trace and the plan of the study. NotFound if the trace is not there."""
    from tuner.commands.trace import open_trace
    from tuner.replay.plan import PLANS
    from tuner.settings import shipped

    ref = answers.trace or _newest_trace() or str(shipped("data", "traces", SAMPLE))
    trace, _ = open_trace(ref)
    standard = PLANS["standard"]
    short = trace.duration_s < standard.slices * standard.slice_s
    place = Path(ref).expanduser()
    return str(place.resolve()) if place.is_file() else ref, answers.plan or (
        "brief" if short else "standard"
    )


def _newest_trace() -> str | None:
    """The name of the trace that became known last."""
    try:
        return next((trace.name for trace in open_store().traces()), None)
    except TunerError:
        return None


def _interpreter() -> str | None:
    """The interpreter of the `vllm` that the shell finds: the first line of that script names it."""
    found = shutil.which("vllm")
    if found is None:
        return None
    first = Path(found).read_bytes().split(b"\n", 1)[0].decode(errors="replace")
    named = first.removeprefix("#!").strip()
    return named if first.startswith("#!") and Path(named).name.startswith("python") else None


def _yaml(value: object) -> str:
    """A value on one line of YAML."""
    import yaml

    text: str = yaml.safe_dump(
        value, default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False
    )
    return text.removesuffix("...\n").strip()


def objectives(as_json: Json = False) -> None:
    """List the numbers that a study can improve.

    A number of one class of requests is written like interactive.ttft_p95_ms.
    """
    from tuner.measures import MEASURES

    rows = [
        {"name": m.name, "better": "higher" if m.direction == "maximize" else "lower", "unit": m.unit,
         "words": m.words}
        for m in MEASURES.values()
    ]  # fmt: skip
    heads = ["<objective", "<better", "<unit", "<what it is"]
    print_records(rows, heads, lambda row: list(row.values()), as_json=as_json)


def plans(as_json: Json = False) -> None:
    """List the plans: how long each trial measures.

    A study may change one number of a plan: `plan: {base: standard, repeats: 2}`.
    """
    from tuner.replay.plan import PLANS

    print_records(
        list(PLANS.values()),
        ["<plan", "slices", "seconds each", "warm-up s", "finalists", "<repeats", "<the numbers are"],
        lambda p: (
            p.name, p.slices, p.slice_s, p.load_warmup_s, p.finalists, f"{p.repeats} to {p.most}",
            "to look at" if p.demonstration else "to act on",
        ),
        as_json=as_json,
    )  # fmt: skip
