"""`tuner demo`: the whole path on the simulated engine and a bundled slice of a real trace."""

import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

from tuner.commands.common import open_store, say, settings
from tuner.commands.running import ends_by_signal, pull_words

STUDY = """\
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


@ends_by_signal()
def demo(
    trials: Annotated[int, typer.Option(min=2, help="How many trials.")] = 10,
    home: Annotated[Path | None, typer.Option(help="Where to keep it; TUNER_HOME/demo else.")] = None,
) -> None:
    """Tune a simulated engine on a bundled slice of a real trace; about a minute."""
    from tuner.commands import common, front, report, tune
    from tuner.settings import shipped
    from tuner.tuning.run import Limits
    from tuner.tuning.study import load

    place = (home or settings().home / "demo").resolve()
    place.mkdir(parents=True, exist_ok=True)
    os.environ["TUNER_HOME"] = str(place)
    os.environ.pop("TUNER_DATABASE_URL", None)
    shutil.copy(shipped("data", "traces", "azure-conversation-slice.parquet"), place)
    study_file = place / "demo.yaml"
    study_file.write_text(STUDY)
    store = open_store(create=True)
    prepared = load(study_file, store=store, now=common.now())
    run = tune.execute(prepared, store, Limits(trials=trials, early=False))
    typer.echo("DEMONSTRATION on a simulated engine.\n")
    front.show(store, prepared.study)
    written = report.write(store, prepared.study, place / "report.html")
    typer.echo(f"report: {written}")
    said = store.conclusion(run.id)
    if said is not None and said.winner is not None:
        typer.echo(f"pull the winner:\n  TUNER_HOME={place} {pull_words(prepared.study)}")
    say(f"the study file is {study_file}")
