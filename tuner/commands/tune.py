"""`tuner tune` and `tuner demo`: tune an engine on its node, or a simulated one to see how it works, with the
study, the trace and the tiny model that the demo writes.
"""

import json
import os
import shutil
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.commands.common import (
    Json,
    ends_by_signal,
    interruptible,
    now,
    open_store,
    print_json,
    say,
    settings,
    store_if_any,
)
from tuner.commands.plan import prepared_study, print_plan, say_unjudged, trials_so_far
from tuner.errors import BadInput, Conflict
from tuner.measures import many
from tuner.settings import shipped

if TYPE_CHECKING:
    from tuner.history.store import Store
    from tuner.records import Run
    from tuner.traffic.trace import Trace
    from tuner.tuning.context import RunEvent, Tell
    from tuner.tuning.run import RunLimits
    from tuner.tuning.study import Prepared


StudyFile = Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="The study file.")]
Trials = Annotated[
    int | None, typer.Option(min=1, help="Trials of this run. Default: the budget of the study file.")
]
Hours = Annotated[
    float | None, typer.Option(help="Hours of this run. Default: the budget of the study file.")
]
Until = Annotated[str | None, typer.Option(metavar="HH:MM", help="End before this local time.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print command lines, slices and times; launch nothing.")
]
CheckRules = Annotated[
    bool,
    typer.Option("--check-rules", help="Also launch candidates that are known to fail, to check the rules."),
]
AllTrials = Annotated[
    bool, typer.Option("--all-trials", help="Use the whole budget; the search does not end early.")
]
ConfirmOnly = Annotated[
    bool, typer.Option("--confirm-only", help="Only measure the finalists again; no new trials.")
]
MinTrials = Annotated[
    int, typer.Option(min=0, help="Start only if at least this many trials fit into the time left.")
]
Cluster = Annotated[
    str | None,
    typer.Option("--on", metavar="CLUSTER", help="A Ray cluster: auto, HOST:PORT or ray://HOST:PORT."),
]
Nodes = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="Only these nodes of the cluster: gpu=, name=, class=, host=, or a label. May be repeated.",
    ),
]
Isolated = Annotated[
    bool,
    typer.Option(
        "--isolated",
        help="Nodes of one host replay at the same time, not in turns. This gives the study another ID.",
    ),
]
RunId = Annotated[
    str | None, typer.Option("--run", hidden=True, help="The run that the service began for this process.")
]


@ends_by_signal()
def tune(
    study: StudyFile,
    trials: Trials = None,
    hours: Hours = None,
    until: Until = None,
    dry_run: DryRun = False,
    check_rules: CheckRules = False,
    all_trials: AllTrials = False,
    confirm_only: ConfirmOnly = False,
    min_trials: MinTrials = 0,
    on: Cluster = None,
    nodes: Nodes = None,
    isolated: Isolated = False,
    run: RunId = None,
    as_json: Json = False,
) -> None:
    """Find an engine's best configuration for a trace.

    An interrupted run continues where it stopped.
    """
    from dataclasses import replace

    from tuner.tuning import study as studies
    from tuner.tuning.context import hours_left
    from tuner.tuning.run import RunLimits

    refuse(
        hours=hours, alone=on is None and bool(nodes or isolated), idle=confirm_only and trials is not None
    )
    budget = studies.read(study).budget
    whole = hours or budget.hours
    limits = RunLimits(
        trials=None if confirm_only else trials or budget.trials,
        deadline=None if on is None and run is None else deadline(whole, until),
        early=not all_trials,
        run=run,
        confirm_only=confirm_only,
    )
    if on is not None:
        from tuner.commands.fleet import ClusterOptions, tune_on

        tune_on(
            ClusterOptions(study=study, on=on, nodes=nodes or (), limits=limits, dry_run=dry_run,
                  rules=not check_rules, isolated=isolated, as_json=as_json)
        )  # fmt: skip
        return
    prepared = prepared_study(study, check_rules=check_rules)
    if confirm_only:
        check_finalists(prepared)
    if dry_run:
        window = window_s(hours_left(store_if_any(), prepared.study.id, whole, now()), until)
        print_plan(prepared, limits.trials, as_json=as_json, confirm_only=confirm_only, window_s=window)
        return
    say_unjudged(prepared)
    store = open_store(create=True)
    if run is None:  # the service gives what is left of its own deadline
        left = hours_left(store, prepared.study.id, whole, now())
        limits = replace(limits, deadline=deadline(left, until))
    done = on_its_node(prepared, store, limits, min_trials=min_trials, quiet=as_json)
    conclude(store, prepared, done, as_json=as_json)


def refuse(*, hours: float | None, alone: bool, idle: bool) -> None:
    """BadInput for options that exclude each other. `alone`: --nodes or --isolated without --on; `idle`:
    --trials with --confirm-only.
    """
    from tuner.tuning.study import MOST_HOURS

    if hours is not None and not 0 < hours <= MOST_HOURS:
        raise BadInput(f"--hours {hours:g}: give more than 0, at most {MOST_HOURS} (a year)")
    if alone:
        raise BadInput("--nodes and --isolated need --on: they choose nodes of a cluster")
    if idle:
        raise BadInput("--confirm-only makes no new trials: leave --trials out")


def check_finalists(prepared: "Prepared") -> None:
    """Conflict if the study has no trial that can be measured again."""
    from tuner.tuning.finalists import finalists

    if not finalists(prepared, trials_so_far(prepared), ""):
        raise Conflict(
            f"study {prepared.study.name} has no finalist to measure again: run 'tuner tune' without"
            " --confirm-only first"
        )


def on_its_node(
    prepared: "Prepared",
    store: "Store",
    limits: "RunLimits",
    *,
    min_trials: int = 0,
    quiet: bool = False,
    listen: "Tell | None" = None,
) -> "Run":
    """Take the node from production, run, and give it back before the deadline. Notifications are sent.

    Conflict when fewer than `min_trials` trials fit into the time left, by the past trials of this node.
    """
    from dataclasses import replace

    from tuner.fleet import handover, notify, schedule
    from tuner.tuning.execution import traffic_notes

    home, study = settings().home, prepared.study
    for sentence in traffic_notes(prepared, store):
        say(sentence)
    if limits.deadline is not None:
        end = limits.deadline - timedelta(seconds=handover.budget_s(home, study.node))
        limits = replace(limits, deadline=end)
        known = schedule.trial_times(store, study.node, study.id)
        if (reason := schedule.too_short(known, (end - now()).total_seconds(), min_trials)) is not None:
            raise Conflict(f"the run does not start: {reason}")
    taken = handover.handed_over(store, prepared.node, home=home, clock=now, say=say)
    with notify.failures(home, study, clock=now, say=say), taken as held:
        run = execute(prepared, held, limits, quiet=quiet, listen=listen)
    notify.concluded(home, store, study, run, clock=now, say=say)
    return run


def window_s(hours: float | None, until: str | None) -> float | None:
    """Seconds until `hours` have passed or the local clock shows `until`, whichever comes first."""
    ends = [3600 * hours] if hours else []
    if until:
        try:
            clock = datetime.strptime(until, "%H:%M").time()
        except ValueError:
            raise BadInput(f"--until {until}: give a time of day such as 05:30") from None
        here = datetime.now().astimezone()
        end = here.replace(hour=clock.hour, minute=clock.minute, second=0, microsecond=0)
        ends.append(((end if end > here else end + timedelta(days=1)) - here).total_seconds())
    return min(ends, default=None)


def deadline(hours: float | None, until: str | None) -> datetime | None:
    """The end of a window that begins now."""
    left_s = window_s(hours, until)
    return None if left_s is None else now() + timedelta(seconds=left_s)


def execute(
    prepared: "Prepared",
    store: "Store",
    limits: "RunLimits",
    *,
    quiet: bool = False,
    listen: "Tell | None" = None,
) -> "Run":
    """Run to the end; SIGINT and SIGTERM stop the engine and leave a run that can be resumed (exit 8)."""
    from tuner.commands.progress import listener
    from tuner.tuning.context import steady
    from tuner.tuning.run import tune as loop

    home = settings().home
    with listener(home, prepared.study.objectives, quiet=quiet) as shown:
        tell = shown if listen is None else both(shown, listen)
        work = loop(prepared, store, home=home, limits=limits, clock=steady(now), tell=tell)
        return interruptible(work, tell)


def both(one: "Tell", other: "Tell") -> "Tell":
    """Two listeners as one."""

    def tell(event: "RunEvent") -> None:
        one(event)
        other(event)

    return tell


def conclude(store: "Store", prepared: "Prepared", run: "Run", *, as_json: bool) -> None:
    """Show the result: the conclusion, the front beside the baseline, and how to pull the winner."""
    from tuner.commands import front
    from tuner.commands.run import show_end

    study = prepared.study
    if as_json:
        print_json({"run": run, **front.as_data(store, study)})
        return
    show_end(store, study, run)


DemoTrials = Annotated[
    int | None,
    typer.Option(
        min=2, help="How many trials. Default: 10; 3 with `--python`; 4 with `--python` and `--trace`."
    ),
]
DemoHome = Annotated[
    Path | None,
    typer.Option(
        help="The folder to use. Default: TUNER_HOME/demo; TUNER_HOME/demo-cpu if `--python` is given."
    ),
]
DemoPython = Annotated[
    Path | None,
    typer.Option(
        metavar="PY",
        help="Tune the vLLM of this interpreter on a tiny model. This is a real engine, and needs no GPU.",
    ),
]
DemoTrace = Annotated[
    str | None,
    typer.Option(
        metavar="TRACE",
        help="With --python: use your own traffic (a file, the name of a known trace, or latest:CAPTURE).",
    ),
]


@ends_by_signal()
def demo(
    trials: DemoTrials = None, home: DemoHome = None, python: DemoPython = None, trace: DemoTrace = None
) -> None:
    """Tune a simulated engine on a slice of a real trace. It takes a minute or two."""
    from tuner.commands import front, report
    from tuner.commands.trace import open_trace
    from tuner.tuning.run import RunLimits
    from tuner.tuning.study import load

    if trace is not None and python is None:
        raise BadInput("--trace needs --python PY: the interpreter that has vLLM, for a GPU or a CPU")
    own = None if trace is None else open_trace(trace)[0]  # before the home changes
    if python is not None:  # not resolved: a virtual environment's Python is a link
        python = python.expanduser().absolute()
    place = (home or settings().home / ("demo" if python is None else "demo-cpu")).resolve()
    os.environ["TUNER_HOME"] = str(place)
    os.environ.pop("TUNER_DATABASE_URL", None)
    study_file = write_study(place, python, own)
    say(f"the study file is {study_file}")
    store = open_store(create=True)
    prepared = load(study_file, store=store, now=now())
    limit = trials or prepared.file.budget.trials
    if own is not None:
        print_plan(prepared, limit, then_runs=True)
    execute(prepared, store, RunLimits(trials=limit, early=False))
    typer.echo(said_of_demo(python, own is not None))
    front.show(store, prepared.study)
    written = report.write(store, prepared.study, place / "report.html")
    typer.echo(f"report: {written}")


def said_of_demo(python: Path | None, own: bool) -> str:
    """What the numbers of a demo are worth, in one sentence."""
    if own:
        return "YOUR TRAFFIC on a tiny model. A winner here can be a loser with your model and card.\n"
    return f"DEMONSTRATION on {'a simulated engine' if python is None else 'a tiny model'}.\n"


TRACE = "azure-conversation-slice.parquet"

TINY_MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
"""The config.json of a Qwen2 with four layers: 3.4 million weights, which vLLM draws at random."""

SIMULATED = """\
# Written by `tuner demo`: the simulated engine on a slice of the Azure conversation trace.
name: demo
model: Qwen/Qwen2.5-7B-Instruct
workload: chat
trace: azure-conversation-slice.parquet
space: demo
engine: {kind: simulated, card: h100-80, args: {max-model-len: 16384}}
baseline: {max_num_seqs: 16}
slices: [{start_s: 78, duration_s: 6, name: burst}]
speed: 2.0
plan: quick
slo: {ttft_ms: 500, tpot_ms: 50, attainment: 0.95}
budget: {trials: 10}
seed: 7
"""

LONGEST = 8192
"""Tokens of prompt and answer that the tiny model takes."""

REAL = f"""\
# Written by `tuner demo --python`: vLLM on a tiny model with random weights.
model: tiny-model
space: demo-space.yaml
engine:
  kind: vllm
  python: PYTHON
  # Uncompiled in float32, a launch on a CPU takes seconds instead of a minute.
  args:
    {{load-format: dummy, skip-tokenizer-init: true, max-model-len: {LONGEST}, dtype: float32,
     enforce-eager: true}}
  env: {{VLLM_CPU_KVCACHE_SPACE: 1, HF_HUB_OFFLINE: 1}}
baseline: {{max_num_seqs: 4}}
slo: {{ttft_ms: 5000, tpot_ms: 500, e2e_ms: 60000}}
live_limits: off
seed: 7
"""

BURST = f"""\
name: demo
workload: chat
trace: {TRACE}
slices: [{{start_s: 78, duration_s: 2, name: burst}}]
speed: 0.1
plan: {{base: quick, tail_limit_s: 240, lateness_ms: 1000, repeats: 1, most_repeats: 1}}
budget: {{trials: 3}}
"""
"""Two seconds of the bundled trace and one repeat: all steps of a run, but too little for a result."""

OWN = """\
name: own-traffic
workload: own-traffic
trace: own-traffic.parquet
slices: auto
# So fast that a CPU keeps up: few requests run at once.
speed: SPEED
# A slice lasts up to ten times slice_s.
plan:
  {base: brief, slice_s: SLICE, tail_limit_s: 240, lateness_ms: 1000, finalists: 1, repeats: 3,
   most_repeats: 3}
budget: {trials: 4}
"""

# The mean load that a CPU gets: about a third of what two cores served in docs/results/simulator-cpu.md with
# 8 sequences at once, so that bursts fit.
TOKENS_S, REQUESTS_S = 1500.0, 2.0

# A slice lasts at most so many seconds, or as long as so many requests take if that is longer.
SLICE_S, REQUESTS = 60.0, 40

SPACE = """\
about: Few levels, for a first look at a real engine on a CPU.
vllm: ">=0.11.2"
knobs:
  max_num_seqs: [4, 8, 32]
  max_num_batched_tokens: [1024, 2048, 4096]
"""


def write_study(folder: Path, python: Path | None, own: "Trace | None" = None) -> Path:
    """The demo's study file in a folder, with all that it names. With a Python it launches that vLLM, on the
    own trace if one is given, without the requests that the tiny model does not take.

    BadInput when no request is left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    study = folder / ("demo.yaml" if own is None else "own-traffic.yaml")
    if own is None:
        shutil.copy(shipped("data", "traces", TRACE), folder)
    if python is None:
        study.write_text(SIMULATED)
        return study
    part = BURST if own is None else _own(folder, own)
    write_tiny_model(folder / "tiny-model", max_position_embeddings=LONGEST)
    (folder / "demo-space.yaml").write_text(SPACE)
    study.write_text(REAL.replace("PYTHON", json.dumps(str(python))) + part)
    return study


def _own(folder: Path, own: "Trace") -> str:
    """Write the own trace; what the study says of it."""
    from tuner.traffic import trace as traces
    from tuner.traffic.structure import up_to

    kept = up_to(own, LONGEST)
    if not len(kept):
        raise BadInput(f"every request of the trace has more than the {LONGEST} tokens that the model takes")
    if left_out := len(own) - len(kept):
        say(f"left out: {left_out} of {many(len(own), 'request')}, longer than the model's {LONGEST} tokens")
    traces.write(kept, folder / "own-traffic.parquet")
    speed, slice_s = pace(kept)
    return OWN.replace("SPEED", f"{speed:g}").replace("SLICE", f"{slice_s:g}")


def pace(trace: "Trace") -> tuple[float, float]:
    """The speed at which a CPU keeps up with the mean load of a trace, and the plan's seconds of a slice (a
    tenth of the longest), so that one holds enough requests.
    """
    from tuner.tuning.study import MOST_SPEED

    tokens = float(trace.input_len.sum(dtype="int64") + trace.output_len.sum(dtype="int64"))
    lasts_s = max(tokens / TOKENS_S, len(trace) / REQUESTS_S)
    speed = min(max(float(f"{trace.duration_s / lasts_s:.2g}"), 1 / MOST_SPEED), MOST_SPEED)
    return speed, round(max(SLICE_S, REQUESTS * lasts_s / len(trace)) / 10, 1)


def write_tiny_model(folder: Path, **changes: object) -> None:
    """A folder with the tiny model's config.json, with other values if given."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY_MODEL | changes))
