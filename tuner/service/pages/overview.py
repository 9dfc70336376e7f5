"""What runs where: every node with its champions, and every schedule with its next window."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime

from tuner.conclusions import Conclusion, Difference
from tuner.errors import BadInput, NotFound
from tuner.fleet.window import Window, blacked_out, next_due, terms, window
from tuner.history.entities import Schedule
from tuner.history.store import Store
from tuner.profiles.registry import CHAMPION, stale_reasons
from tuner.records import AliasEvent, Node, Profile, ProfileKey, Run, RunState, Study


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedProfile:
    """One profile key on one node: the champion, if there is one, and what is known of it.

    `said` is what the run found that published the champion, `gains` how the champion differed from the
    baseline then. `waiting` is a challenger newer than the champion, `before` what its last move came from.
    """

    key: ProfileKey
    champion: Profile | None
    event: AliasEvent | None
    stale: tuple[str, ...]
    said: Conclusion | None
    gains: Sequence[Difference]
    waiting: Profile | None
    before: Profile | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A node (None: a GPU class, or a name nobody registered), what is served there, what runs now."""

    name: str
    node: Node | None
    places: tuple[ServedProfile, ...]
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


def _place(store: Store, key: ProfileKey, node: Node | None) -> ServedProfile:
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
    said = concluded(store, champion) if champion else None
    challenger = version_of(store, store.alias(key, "challenger"))
    newer = challenger if challenger and (not champion or challenger.version > champion.version) else None
    return ServedProfile(
        key=key,
        champion=champion,
        event=event,
        stale=stale,
        said=said,
        gains=gains(champion, said) if champion else (),
        waiting=newer,
        before=store.profile_version(key, event.from_version) if event and event.from_version else None,
    )


def version_of(store: Store, event: AliasEvent | None) -> Profile | None:
    """The version that an alias stands on."""
    if event is None or event.to_version is None:
        return None
    return store.profile_version(event.key, event.to_version)


def concluded(store: Store, profile: Profile) -> Conclusion | None:
    """What the run found that published a profile."""
    run_id = profile.evidence.get("run")
    return store.conclusion(run_id) if isinstance(run_id, str) else None


def gains(profile: Profile, said: Conclusion | None) -> Sequence[Difference]:
    """The differences from the baseline by which a profile won."""
    number = profile.evidence.get("trial_number")
    arm = said.arm(number) if said is not None and isinstance(number, int) else None
    return [c for c in arm.changes if c.where == "confirm"] if arm is not None else ()


def age_s(moment: datetime, now: datetime) -> float:
    """Seconds since a moment."""
    return max(0.0, (now - moment).total_seconds())


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleView:
    """A schedule as people read it. `problem` says why it can never run."""

    schedule: Schedule
    study: str
    next: Window | None
    blackout: date | None
    last: Run | None
    problem: str


def plans(store: Store, now: datetime) -> list[ScheduleView]:
    """Every schedule, by name."""
    return [_plan(store, schedule, now) for schedule in store.schedules()]


def _plan(store: Store, schedule: Schedule, now: datetime) -> ScheduleView:
    study = schedule.spec.get("study")
    said = study if isinstance(study, str) else "–"
    try:
        terms(schedule.spec)
        due = next_due(schedule, now) if schedule.enabled else None
        opens = window(schedule, due) if due is not None else None
        dark = blacked_out(schedule, opens) if opens is not None else None
    except BadInput as error:
        return ScheduleView(
            schedule=schedule, study=said, next=None, blackout=None, last=None, problem=str(error)
        )
    return ScheduleView(
        schedule=schedule, study=said, next=opens, blackout=dark, last=_last_run(store, schedule), problem=""
    )


def _last_run(store: Store, schedule: Schedule) -> Run | None:
    try:
        return store.run(schedule.last_run_id) if schedule.last_run_id else None
    except NotFound:
        return None
