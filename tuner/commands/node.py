"""`tuner node`: machines with GPUs, and how production gives them up and takes them back."""

import getpass
import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tuner.commands.common import Json, now, open_store, print_records, say, settings
from tuner.errors import BadInput, NotFound, TunerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tuner.history.store import Store
    from tuner.records import JSON, Node
    from tuner.tuning.survey import EngineFile

app = typer.Typer(help="Register machines with GPUs and their hand-over.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(metavar="NODE", help="A node's name.")]
WATCH_S = 1.0
RETRY_S = 30.0
TRIES = 20


@app.command("list")
def list_nodes(as_json: Json = False) -> None:
    """List nodes with their holder and their hand-over hooks."""
    from tuner.fleet.hooks import hooks
    from tuner.report.words import node_state

    store, home = open_store(), settings().home
    leases = {lease.node: lease for lease in store.leases(now=now())}
    rows: list[dict[str, Any]] = []
    for node in store.nodes():
        lease = leases.get(node.name)
        holder = lease.holder if lease else None
        rows.append(
            {
                "node": node.name,
                "class": node.gpu_class,
                "host": node.host,
                "state": node_state(node, holder),
                "holder": holder,
                "hooks": [hook.name for hook in hooks(home, node.name)],
                "to_restore": store.handover(node.name) is not None,
                "labels": dict(node.labels),
            }
        )
    print_records(
        rows, ["<node", "<class", "<host", "<state", "<holder", "<hooks", "<to restore"],
        lambda r: (
            r["node"], r["class"], r["host"], r["state"], r["holder"], "; ".join(r["hooks"]), r["to_restore"],
        ),
        as_json=as_json,
    )  # fmt: skip


@app.command("add")
def add(
    node: Name,
    python: Annotated[
        str | None,
        typer.Option(metavar="PY", help="The interpreter that has vllm. The tuner lists the GPUs with it."),
    ] = None,
    card: Annotated[str | None, typer.Option(help="Make it a simulated node with this card.")] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="A model that HTTP requests may use on this node. May be repeated."),
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="A label. May be repeated.")
    ] = None,
    systemd: Annotated[
        list[str] | None, typer.Option(metavar="UNIT", help="A systemd unit of production. May be repeated.")
    ] = None,
    kubectl: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMESPACE/deployment/NAME",
            help="Production is this workload; it is scaled to 0 and back. May be repeated.",
        ),
    ] = None,
    drain: Annotated[str | None, typer.Option(help="The command that stops production.")] = None,
    restore: Annotated[str | None, typer.Option(help="The command that starts production again.")] = None,
    ready: Annotated[
        str | None, typer.Option(help="A command that exits with 0 when production serves.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds for each drain and restore.")] = 300.0,
) -> None:
    """Register this host, or update its entry. Given hooks replace the earlier ones."""
    from tuner.fleet import hooks, nodes

    home, engine = settings().home, _engine(python, card)
    hook: dict[str, JSON] = {"timeout_s": timeout}
    hook |= {"ready": _words(ready, "--ready")} if ready else {}
    entries = _entries(systemd or [], kubectl or [], drain, restore)
    sections: dict[str, JSON] = {}
    if entries:
        sections["handover"] = [{**entry, **hook} for entry in entries]
    if engine is not None and model:
        sections |= {"engine": engine.model_dump(mode="json", exclude_defaults=True), "models": list(model)}
    hooks.parse(sections, str(hooks.path_of(home, node)))
    store = open_store(create=True)
    found = _known(store, node) if engine is None else nodes.fingerprint(node, engine, base=Path.cwd()).node
    kept = nodes.register(store, replace(found, labels={**found.labels, **_labels(label or [])}))
    if sections:
        hooks.write(home, node, sections)
    names = "; ".join(each.name for each in hooks.hooks(home, node)) or "none"
    say(f"node {kept.name} is {kept.gpu_class}; hand-over hooks: {names}")


def _engine(python: str | None, card: str | None) -> "EngineFile | None":
    from tuner.tuning.survey import EngineFile

    if python is not None:
        return EngineFile(kind="vllm", python=str(Path(python).expanduser().absolute()))
    return None if card is None else EngineFile(kind="simulated", card=card)


def _known(store: "Store", name: str) -> "Node":

    try:
        return store.node(name)
    except NotFound:
        raise BadInput(f"node '{name}' is new: give --python (or --card for a simulated one)") from None


def _entries(
    units: "Sequence[str]", scaled: "Sequence[str]", drain: str | None, restore: str | None
) -> "list[dict[str, JSON]]":

    if (drain is None) != (restore is None):
        raise BadInput("give --drain and --restore together")
    entries: list[dict[str, JSON]] = [{"systemd": unit} for unit in units]
    entries += [{"kubectl": name} for name in scaled]
    if drain is not None and restore is not None:
        pair: dict[str, JSON] = {"drain": _words(drain, "--drain"), "restore": _words(restore, "--restore")}
        entries.append({"command": pair})
    return entries


def _words(line: str, option: str) -> "list[JSON]":

    try:
        return list(shlex.split(line))
    except ValueError as error:
        raise BadInput(f"{option}: cannot be split into words ({error})") from error


def _labels(pairs: "Sequence[str]") -> dict[str, str]:

    found = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not (sign and key and value):
            raise BadInput(f"--label {pair}: give KEY=VALUE, such as zone=eu-1")
        found[key] = value
    return found


@app.command("restore")
def restore_production(
    node: Annotated[str | None, typer.Argument(metavar="NODE", help="A node's name.")] = None,
    all_nodes: Annotated[bool, typer.Option("--all", help="Restore every node whose run has died.")] = False,
    mended: Annotated[
        bool,
        typer.Option(
            "--mended",
            help="Say that you repaired a node in state fault, so that runs use it again.",
        ),
    ] = False,
    host: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="HOST",
            help="Restore production that another host or pod drained. Use it if that HOST is gone.",
        ),
    ] = "",
    forget: Annotated[
        bool,
        typer.Option("--forget", help="Only clear the journal, because you brought production back by hand."),
    ] = False,
    after: Annotated[str | None, typer.Option(metavar="HOLDER", hidden=True)] = None,
) -> None:
    """Bring production back on a node whose run has died. If the run is alive, nothing is done."""
    from tuner.fleet import handover

    if (node is None) == (not all_nodes) or (node is None and (host or forget)):
        raise BadInput("give the name of one node, or --all (not with --from or --forget)")
    if host and forget:
        raise BadInput("--from runs the hooks here, and --forget runs no hooks: give only one of them")
    home = settings().home
    try:
        store = open_store()
    except NotFound as error:
        if node is not None:
            raise
        say(f"there is nothing to restore: {error}")
        return
    if node is None:
        if not handover.recover_all(store, home=home, clock=now, say=say):
            raise typer.Exit(6)
        return
    if after is not None:
        _outlive(store, node, after)
        return
    known = store.node(node)
    if known.state == "fault" and mended:
        store.set_node_state(node, "free")
    _restore(store, node, host, forget)


def _restore(store: "Store", node: str, host: str, forget: bool) -> None:
    """Say what the journal of a node has, undo or forget it, and say how that ended."""
    from tuner.fleet import handover

    found = handover.found(store, node)
    for line in found:
        say(line)
    if forget:
        done = handover.forget(store, node, clock=now)
    else:
        done = handover.recover(store, node, home=settings().home, clock=now, say=say, host=host)
    if done and (forget or host):
        action = "node.forget" if forget else "node.restore"
        store.add_audit(
            actor=getpass.getuser(), action=action, target=node, reason="; ".join(found), now=now()
        )
    held = not done and store.handover(node) is not None
    back = "the journal is cleared, and nothing was run" if forget else "production is back"
    state = "a run still uses it" if held else back if done else "there was nothing to restore"
    say(f"node {node}: {state}")


def _outlive(store: "Store", node: str, holder: str) -> None:
    """Wait until a controller has brought production back; if the controller dies first, do it instead."""
    from tuner.fleet import handover, nodes

    failures = 0
    while failures < TRIES:
        try:
            if handover.drained_by(store, node) != holder:
                return
            if nodes.is_dead(holder):
                handover.recover(store, node, home=settings().home, clock=now, say=say)
        except TunerError as error:
            failures += 1
            say(f"{now():%Y-%m-%d %H:%M:%S} {error}")
            time.sleep(RETRY_S)
        time.sleep(WATCH_S)
