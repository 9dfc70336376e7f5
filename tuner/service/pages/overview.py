"""What runs where: every node with its champions, how old and stale they are, and what they gain."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from tuner.errors import NotFound
from tuner.history.store import Store
from tuner.profiles.registry import CHAMPION, stale_reasons
from tuner.records import JSON, AliasEvent, Node, Profile, ProfileKey, Run, RunState, Study
from tuner.report.budget import comparisons


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One profile key on one node: the champion, if there is one, and what is known of it.

    `waiting` is a challenger newer than the champion, `before` what the champion's last move came from.
    """

    key: ProfileKey
    champion: Profile | None
    event: AliasEvent | None
    stale: tuple[str, ...]
    gains: Sequence[Mapping[str, JSON]]
    waiting: Profile | None
    before: Profile | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A node (None: a GPU class, or a name nobody registered), what is served there, what runs now."""

    name: str
    node: Node | None
    places: tuple[Place, ...]
    running: tuple[tuple[Run, Study], ...]


def machines(store: Store) -> tuple[Machine, ...]:
    """Every node and every target of a profile, by name."""
    nodes = {node.name: node for node in store.nodes()}
    running = [(run, store.study(run.study_id)) for run in store.runs(state=RunState.RUNNING)]
    keys = store.profile_keys()
    names = sorted({*nodes, *(key.target for key in keys), *(study.node for _, study in running)})
    return tuple(
        Machine(
            name=name,
            node=nodes.get(name),
            places=tuple(_place(store, key, nodes.get(name)) for key in keys if key.target == name),
            running=tuple((run, study) for run, study in running if study.node == name),
        )
        for name in names
    )


def _place(store: Store, key: ProfileKey, node: Node | None) -> Place:
    event = store.alias(key, CHAMPION)
    champion = version_of(store, event)
    newest = next(iter(store.studies(model=key.model, node=key.target, workload=key.workload, limit=1)), None)
    stale: tuple[str, ...] = ()
    if champion is not None:
        stale = stale_reasons(
            champion,
            node=node,
            engine_version=newest.engine_version if newest else None,
            trace_digest=newest.trace_digest if newest else None,
        )
    challenger = version_of(store, store.alias(key, "challenger"))
    newer = challenger if challenger and (not champion or challenger.version > champion.version) else None
    return Place(
        key=key,
        champion=champion,
        event=event,
        stale=stale,
        gains=gains(store, champion) if champion else (),
        waiting=newer,
        before=store.profile_version(key, event.from_version) if event and event.from_version else None,
    )


def version_of(store: Store, event: AliasEvent | None) -> Profile | None:
    """The version that an alias stands on."""
    if event is None or event.to_version is None:
        return None
    return store.profile_version(event.key, event.to_version)


def gains(store: Store, profile: Profile) -> list[Mapping[str, JSON]]:
    """The comparisons with the baseline by which a profile won."""
    return [row for row in compared(store, profile) if row.get("where") == "confirm"]


def compared(store: Store, profile: Profile) -> list[Mapping[str, JSON]]:
    """Everything that a profile's trial was compared in with the baseline, as its run concluded it."""
    run_id = profile.evidence.get("run")
    try:
        summary = store.run(run_id).summary if isinstance(run_id, str) else {}
    except NotFound:
        return []
    number = profile.evidence.get("trial_number")
    return [row for row in comparisons(dict(summary)) if row.get("number") == number]


def age_s(moment: datetime, now: datetime) -> float:
    """Seconds since a moment."""
    return max(0.0, (now - moment).total_seconds())
