"""Tunes one study on many nodes, each node with a run of its own.

All runs are ordinary loops (`tuning.run.tune`) in this process, each under its node's lease; only launches
happen on the nodes. The front of a node that has finished seeds the searches that still run.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tuner.adapters import adapter_of
from tuner.errors import Aborted, BadInput, Conflict, TunerError, Unavailable
from tuner.fleet import dispatch_ray, nodes
from tuner.fleet.dispatch_ray import Hand, Member, Remote
from tuner.history.store import Store
from tuner.measures import many
from tuner.records import Node, Run, Study, digest_of
from tuner.tuning.context import RunEvent, Tell
from tuner.tuning.execution import stop_command_of
from tuner.tuning.next_trial import Seed, fronts_of
from tuner.tuning.run import RunLimits, tune
from tuner.tuning.study import Clock, Prepared, StudyFile, prepare


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterJob:
    """A study for many nodes: the file, its name in errors, the folder of its paths, the limits of a run.

    `isolated`: nodes that share a host replay at the same time, which makes it another study.
    """

    file: StudyFile
    name: str
    base: Path
    limits: RunLimits
    rules: bool = True
    isolated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What a job needs to run. `tell` gives the listener for a node's name."""

    store: Store
    home: Path
    clock: Clock
    tell: Callable[[str], Tell]
    ttl_s: float = nodes.LEASE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResult:
    """The result of one node: its run, or why there is none."""

    node: str
    study: Study
    run: Run | None = None
    error: TunerError | None = None
    gone: str | None = None


@dataclass(slots=True, kw_only=True)
class _Seat:
    """A node with its leased store, its lease, its worker and its study."""

    member: Member
    store: Store
    lease: ExitStack
    hand: Hand
    prepared: Prepared
    seeds: list[Seed] = field(default_factory=list)
    over: bool = False


def choose(
    found: Sequence[Member], wanted: nodes.Selector, known: Sequence[Node], file: StudyFile
) -> tuple[Member, ...]:
    """The selected nodes. BadInput if a node cannot run the study, NotFound if none matches."""
    if file.node != "local":
        raise BadInput(
            f"node: {file.node} names one node, but --on tunes many: remove `node` from the study file"
        )
    with_gpus = [member for member in found if member.gpus] or list(found)
    classes = {node.name: node.gpu_class for node in known}
    facts = {m.name: _facts(m, classes.get(m.name)) for m in (with_gpus if not wanted.pairs else found)}
    names = nodes.chosen(facts, wanted)
    picked = tuple(member for member in found if member.name in names)
    needed = needed_gpus(file)
    for member in picked:
        if needed > member.gpus and not (needed == 1 and adapter_of(file.engine.kind).simulated):
            raise BadInput(
                f"node {member.name} has {many(member.gpus, 'GPU')} in the cluster, the study needs {needed}"
            )
    return picked


def _facts(member: Member, gpu_class: str | None) -> Mapping[str, str]:
    facts = dict(member.facts)
    if gpu_class:
        facts["class"] = gpu_class
        facts["gpu"] = facts["gpu"] or gpu_class
    return facts


def needed_gpus(file: StudyFile) -> int:
    """The number of GPUs of one launch, by the fixed arguments of the study."""
    args = {key.replace("_", "-"): value for key, value in file.engine.args.items()}
    sizes = [args.get(f"{kind}-parallel-size", 1) for kind in ("tensor", "pipeline", "data")]
    whole = 1
    for size in sizes:
        whole *= size if isinstance(size, int) else 1
    return whole


async def tune_all(job: ClusterJob, fleet: Fleet, picked: Sequence[Member]) -> tuple[NodeResult, ...]:
    """Tune the study on all nodes at the same time. Returns the results in the order of the nodes.

    Before the first launch all nodes are leased, asked and prepared. A problem of one node is raised
    (Conflict: somebody else holds it), and no node starts. A lease is released when its node has finished.
    Cancelling stops all engines and returns when every run has been written; the same call resumes the runs.
    """
    with ExitStack() as stack:
        leased = {member.name: stack.enter_context(ExitStack()) for member in picked}
        stores = {
            name: lease.enter_context(nodes.held(fleet.store, name, clock=fleet.clock, ttl_s=fleet.ttl_s))
            for name, lease in leased.items()
        }
        hired = await asyncio.gather(*(_hire(job, member) for member in picked), return_exceptions=True)
        hands = [hand for hand in hired if isinstance(hand, Hand)]
        try:
            for problem in hired:
                if isinstance(problem, BaseException):
                    raise problem
            seats = [
                _seat(job, fleet, stores[hand.member.name], leased[hand.member.name], hand) for hand in hands
            ]
            whole = _Whole(job, fleet, seats)
            return await to_their_ends([whole.one(seat) for seat in seats])
        finally:
            for hand in hands:
                hand.end()


async def to_their_ends(parts: Sequence[Coroutine[Any, Any, NodeResult]]) -> tuple[NodeResult, ...]:
    """Run all parts at the same time. Also after an error or a cancel it returns when the last part has
    ended, so that none writes without its lease.
    """
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        return tuple(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            if not task.cancelling():
                task.cancel()
        await asyncio.wait(tasks)


async def _hire(job: ClusterJob, member: Member) -> Hand:
    return await dispatch_ray.hire(member, engine_of(job.file, member).engine, job.base)


def engine_of(file: StudyFile, member: Member) -> StudyFile:
    """The study as this node runs it: a simulated engine has the card that the node's label `gpu` names, as
    often as Ray has GPUs there.
    """
    card = member.labels.get("gpu")
    if not adapter_of(file.engine.kind).simulated or not card:
        return file
    here = {"card": card, "cards": max(1, member.gpus)}
    return file.model_copy(update={"engine": file.engine.model_copy(update=here)})


async def asked_of(
    job: ClusterJob, picked: Sequence[Member], store: Store | None, clock: Clock
) -> list[tuple[Member, Prepared]]:
    """The study as each node would run it. Nodes are asked, nothing is written or launched. A problem that
    would prevent a run is raised.
    """
    hired = await asyncio.gather(*(_hire(job, member) for member in picked), return_exceptions=True)
    hands = [hand for hand in hired if isinstance(hand, Hand)]
    try:
        for problem in hired:
            if isinstance(problem, BaseException):
                raise problem
        return [(hand.member, _prepared(job, hand, store, clock)) for hand in hands]
    finally:
        for hand in hands:
            hand.end()


def _prepared(job: ClusterJob, hand: Hand, store: Store | None, clock: Clock) -> Prepared:
    prepared = prepare(
        engine_of(job.file, hand.member),
        name=job.name,
        base=job.base,
        store=store,
        now=clock(),
        surveyed=hand.surveyed,
    )
    return replace(prepared, rules=job.rules, study=marked(prepared.study, job.isolated))


def _seat(job: ClusterJob, fleet: Fleet, store: Store, lease: ExitStack, hand: Hand) -> _Seat:
    nodes.register(store, hand.surveyed.node)
    prepared = _prepared(job, hand, store, fleet.clock)
    return _Seat(member=hand.member, store=store, lease=lease, hand=hand, prepared=prepared)


def marked(study: Study, isolated: bool) -> Study:
    """The study, marked when its replays do not take turns: it cannot be compared with one whose
    replays do.
    """
    if not isolated:
        return study
    identity = {**study.identity, "isolated": True}
    return replace(study, id=digest_of(identity), identity=identity)


class _Whole:
    """The nodes of one job while they run."""

    def __init__(self, job: ClusterJob, fleet: Fleet, seats: Sequence[_Seat]) -> None:
        self._job, self._fleet, self._seats = job, fleet, seats
        self._lent: set[str] = set()

    async def one(self, seat: _Seat) -> NodeResult:
        """Run one node to its end. Its errors do not stop other nodes."""
        name, study = seat.member.name, seat.prepared.study
        tell = self._fleet.tell(name)
        with ExitStack() as stack:
            remote = Remote(
                seat.hand, seat.prepared,
                lambda: self._spare(seat, stack), lambda text: tell(RunEvent(kind="note", text=str(text))),
                isolated=self._job.isolated,
            )  # fmt: skip
            seat.seeds[:] = fronts_of(seat.store, seat.prepared)
            try:
                with suppress(Aborted):  # a node that is lost already: the first launch waits for it
                    await remote.set_up(left_open(seat.store, study.node))
                run = await self._tuned(seat, remote, tell)
                return NodeResult(node=name, study=study, run=run)
            except TunerError as error:
                tell(RunEvent(kind="note", text=f"ended: {error}"))
                return NodeResult(node=name, study=study, error=error)
            except asyncio.CancelledError:
                if remote.gone is None:
                    raise
                tell(RunEvent(kind="note", text=remote.gone))
                return NodeResult(node=name, study=study, gone=remote.gone)
            finally:
                await remote.end()
                seat.over = True
                with suppress(Unavailable):  # a lease that cannot be released expires
                    seat.lease.close()
                self._share()

    async def _tuned(self, seat: _Seat, remote: Remote, tell: Tell) -> Run:
        return await tune(
            seat.prepared,
            seat.store,
            home=self._fleet.home,
            limits=self._job.limits,
            clock=self._fleet.clock,
            tell=tell,
            seeds=seat.seeds,
            work=remote,
        )

    def _share(self) -> None:
        """Give the fronts of finished nodes as seeds to the searches that still run."""
        for seat in self._seats:
            if not seat.over:
                seat.seeds[:] = fronts_of(seat.store, seat.prepared)

    async def _spare(self, seat: _Seat, stack: ExitStack) -> Hand | None:
        """A worker on the node itself when it is back, or on a free node of its class; None when there is
        none now. A node that was borrowed before and lost is released first.
        """
        stack.close()
        busy = {each.member.name for each in self._seats if not each.over} | self._lent
        for member in sorted(dispatch_ray.members(), key=lambda m: m.name != seat.member.name):
            is_itself = member.name == seat.member.name
            if not is_itself and (member.name in busy or member.gpus != seat.member.gpus):
                continue
            hand = await self._hired(seat, member, None if is_itself else stack)
            if hand is not None:
                return hand
        return None

    async def _hired(self, seat: _Seat, member: Member, stack: ExitStack | None) -> Hand | None:
        """A worker on a node if it is of the same class; a borrowed node is leased."""
        try:
            with ExitStack() as trial:
                if stack is not None:
                    fleet = self._fleet
                    trial.enter_context(
                        nodes.held(fleet.store, member.name, clock=fleet.clock, ttl_s=fleet.ttl_s)
                    )
                    trial.enter_context(self._borrowed(member.name))
                hand = await _hire(self._job, member)
                node, facts = hand.surveyed.node, hand.surveyed.facts
                same = (node.gpu_class, facts.version) == (
                    seat.prepared.node.gpu_class,
                    seat.prepared.facts.version,
                )
                if not same:
                    hand.end()
                    return None
                if stack is not None:
                    stack.push(trial.pop_all())
                return hand
        except TunerError:
            return None  # not available now: it is asked again while there is time

    @contextmanager
    def _borrowed(self, name: str) -> Iterator[None]:
        self._lent.add(name)
        try:
            yield
        finally:
            self._lent.discard(name)


def left_open(store: Store, node: str) -> Mapping[str, Sequence[str]]:
    """Launches that dead controllers left open on a node, with the stop command of each."""
    stops = {study.id: stop_command_of(study) for study in store.studies(node=node)}
    return {each.id: stops[each.study_id] for each in store.open_launches(node=node)}


def worst(ended: Sequence[NodeResult]) -> TunerError | None:
    """The first error of a node, or Conflict for a run that must be resumed; None if all went well."""
    for each in ended:
        if each.error is not None:
            return each.error
    gone = [each.gone for each in ended if each.gone]
    return Conflict("; ".join(gone)) if gone else None
