"""What a run writes down before it begins: its study, its trace and its node; and the GPUs it may use."""

import socket
from dataclasses import replace
from datetime import datetime

from tuner.adapters import adapter_of
from tuner.engine.gpu import Gpus
from tuner.errors import NotFound
from tuner.history.store import Store
from tuner.records import Run, RunState, Study
from tuner.traffic import kept
from tuner.tuning.study import Clock, Prepared
from tuner.tuning.trial import Bench


def gpus_of(prepared: Prepared) -> Gpus:
    """The GPUs that this host's engines run on; none where the engine is simulated or runs on the CPU."""
    if not adapter_of(prepared.facts.kind).uses_gpus(prepared.facts.platform):
        return Gpus(nvml=None)
    return Gpus.open(prepared.file.engine.env, only=prepared.node.gpus)


def register(bench: Bench) -> Study:
    """Keep the study, its trace and its node, unless the history has them."""
    prepared, now = bench.prepared, bench.clock()
    study = bench.store.add_study(prepared.study)
    _register_trace(bench, now)
    try:
        bench.store.node(prepared.node.name)
    except NotFound:
        bench.store.add_node(replace(prepared.node, host=socket.gethostname()))
    return study


def _register_trace(bench: Bench, now: datetime) -> None:
    """A trace that is known keeps its name: a study may have asked for `latest:` of it. Its file is kept in
    the home, since captures are removed in time.
    """
    trace, name = bench.prepared.trace, bench.prepared.trace_path.stem
    path = kept.keep(trace, bench.home, name)
    try:
        bench.store.trace(trace.digest)
    except NotFound:
        meta = {**trace.meta, "requests": len(trace)}
        bench.store.add_trace(trace.digest, name, str(path.resolve()), meta, now)


def cancelled(store: Store, run_id: str | None, clock: Clock) -> Run | None:
    """The run that this process was started for, ended, where it was cancelled before; None: go on."""
    run = None if run_id is None else store.run(run_id)
    if run is None or (run.state is RunState.RUNNING and not run.cancel_requested):
        return None
    ended = replace(run, state=RunState.CANCELLED, reason="cancelled before it began", ended_at=clock())
    return run if run.state is not RunState.RUNNING else store.save_run(ended)


def fail(bench: Bench, run: Run, error: Exception) -> None:
    """End a run that a fault of our own broke: nobody could resume it to another end."""
    reason = f"unexpected: {type(error).__name__}: {error}"
    ended = replace(run, state=RunState.FAILED, reason=reason, ended_at=bench.clock(), pid=None)
    bench.store.save_run(ended)
