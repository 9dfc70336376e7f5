"""`tuner tune STUDY --on CLUSTER`: one study on many nodes, in one view."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tuner.commands.common import (
    interruptible,
    now,
    open_store,
    print_json,
    print_table,
    say,
    settings,
    store_if_any,
)

if TYPE_CHECKING:
    from tuner.fleet.dispatch import ClusterJob, NodeResult
    from tuner.fleet.dispatch_ray import Member
    from tuner.history.store import Store
    from tuner.records import Node
    from tuner.tuning.context import RunEvent, Tell
    from tuner.tuning.run import RunLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """The options of `tuner tune --on`."""

    study: Path
    on: str
    nodes: Sequence[str]
    limits: "RunLimits"
    dry_run: bool
    rules: bool
    isolated: bool
    as_json: bool


def tune_on(asked: ClusterOptions) -> None:
    """Tune on every selected node. The first error of a node is raised after all nodes have ended."""
    from tuner.fleet import dispatch, dispatch_ray
    from tuner.fleet.nodes import selector
    from tuner.tuning.study import read

    file, wanted = read(asked.study), selector(asked.nodes)
    dispatch_ray.connect(asked.on)
    dumps = ExitStack()
    try:
        dumps.enter_context(dispatch_ray.dumps_in(settings().home / "logs" / "ray.log"))
        picked = dispatch.choose(dispatch_ray.members(), wanted, _known(), file)
        job = dispatch.ClusterJob(
            file=file, name=str(asked.study), base=asked.study.parent.resolve(), limits=asked.limits,
            rules=asked.rules, isolated=asked.isolated,
        )  # fmt: skip
        if asked.dry_run:
            placement(job, picked, as_json=asked.as_json)
            return
        store = open_store(create=True)
        _warn()
        ended = _run(job, store, picked, quiet=asked.as_json)
    finally:
        dispatch_ray.disconnect()
        dumps.close()
    conclude(store, ended, as_json=asked.as_json)
    if (error := dispatch.worst(ended)) is not None:
        raise error


def _known() -> "Sequence[Node]":
    """The registered nodes; none if there is no history yet."""
    store = store_if_any()
    return store.nodes() if store else ()


def placement(job: "ClusterJob", picked: "Sequence[Member]", *, as_json: bool) -> None:
    """Print on which nodes the study would run, with the plan of each. Each node is asked; a problem that
    would prevent the run is raised.
    """
    from tuner.commands import plan
    from tuner.fleet import dispatch

    plans = interruptible(dispatch.asked_of(job, picked, store_if_any(), now), lambda event: None)
    trials = job.limits.trials
    if as_json:
        print_json(
            [{"node": m.name, "host": m.host, "gpus": m.gpus, "labels": dict(m.labels),
              **plan.plan_of(prepared, trials)} for m, prepared in plans]
        )  # fmt: skip
        return
    cells = ((m.name, m.host, m.gpus, _labels(m.labels)) for m in picked)
    print_table(["<node", "<host", "GPUs", "<labels"], cells)
    for member, prepared in plans:
        typer.echo(f"\nnode {member.name} ({prepared.node.gpu_class})")
        plan.print_plan(prepared, trials)


def _labels(labels: object) -> str:
    found = labels if isinstance(labels, dict) else {}
    return " ".join(f"{k}={v}" for k, v in found.items() if not k.startswith("ray.io/"))


def _warn() -> None:
    """Warn when the database allows only one controller machine."""
    if settings().url.startswith("sqlite"):
        say(
            "the history is an SQLite file, and only this machine can write to it. For controllers on "
            "several machines, set TUNER_DATABASE_URL to a PostgreSQL database"
        )


def _run(
    job: "ClusterJob", store: "Store", picked: "Sequence[Member]", *, quiet: bool
) -> "tuple[NodeResult, ...]":
    from tuner.fleet import dispatch

    home = settings().home
    names = [member.name for member in picked]
    with listeners(home, tuple(job.file.objectives), names, quiet=quiet) as tell:
        fleet = dispatch.Fleet(store=store, home=home, clock=now, tell=tell)
        return interruptible(dispatch.tune_all(job, fleet, picked), tell("all nodes"))


@contextmanager
def listeners(
    home: Path, objectives: tuple[str, ...], names: Sequence[str], *, quiet: bool = False
) -> "Iterator[Callable[[str], Tell]]":
    """Listeners for all nodes in one view: what each node does now, and its events by the node's name."""
    from tuner.commands.progress import describe, listener

    width = max((len(name) for name in names), default=0)
    doing: dict[str, str] = {}
    done: dict[str, int] = {}
    total: dict[str, int] = {}
    with listener(home, objectives, quiet=quiet) as one:

        def tell_of(name: str) -> "Tell":
            def tell(event: "RunEvent") -> None:
                if event.kind in ("run", "started", "finished"):
                    done[name] = event.done - (event.kind == "started")
                    total[name] = event.total or 0
                event = replace(event, done=sum(done.values()), total=sum(total.values()) or None)
                if event.kind == "phase":
                    number = "" if event.trial is None else f"trial {event.trial.label} "
                    doing[name] = f"{name}: {number}{event.text}"
                    one(replace(event, text=" · ".join(doing.values()), trial=None))
                elif (line := describe(event, objectives)) is not None:
                    counts = event.kind == "finished"
                    said = f"{name:<{width}} {line}"
                    one(replace(event, kind="finished" if counts else "note", text=said, trial=None))

            return tell

        yield tell_of


def conclude(store: "Store", ended: "Sequence[NodeResult]", *, as_json: bool) -> None:
    """Show the result of each node."""
    from tuner.commands.run import show_end

    if as_json:
        print_json([_as_data(store, each) for each in ended])
        return
    for each in ended:
        if each.run is None:
            continue
        typer.echo(f"\nnode {each.node} ({each.study.gpu_class})")
        show_end(store, each.study, each.run)


def _as_data(store: "Store", each: "NodeResult") -> dict[str, object]:
    from tuner.commands import front

    found: dict[str, object] = {"node": each.node, "gpu_class": each.study.gpu_class, "run": each.run}
    found["error"] = str(each.error or each.gone or "") or None
    return found if each.run is None else {**found, **front.as_data(store, each.study)}
