"""The overview: for each node, whether there is a better configuration, how much better it is, whether it can
be trusted, and how to pull it; and every schedule with its next window.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime

from tuner.conclusions import PublishedProfile
from tuner.errors import BadInput, NotFound
from tuner.fleet.window import Window, blacked_out, next_due, terms, window
from tuner.history.entities import Schedule
from tuner.history.store import Store
from tuner.profiles.registry import CHAMPION, Gates, gate_failures, serve_the_same, stale_reasons
from tuner.records import AliasEvent, Node, Profile, ProfileKey, Run, RunState, Study
from tuner.report.card import AnswerCard, card, card_of_run, pull_command
from tuner.report.words import node_state


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedProfile:
    """One model and workload on one node: the answer, and what is served.

    `card` is the answer, of study `study_id`. It shows what the newest run found. If the newest run found
    nothing better than the champion, `card` shows the champion's own run, and `news` is the card of the
    newest run. `waiting` is a challenger that is newer than the champion. `refused` says why its gates do not
    allow a promotion. `same` says whether it is the champion's configuration. `before` is the version before
    the champion's last move.
    """

    key: ProfileKey
    card: AnswerCard | None
    study_id: str
    news: AnswerCard | None
    champion: Profile | None
    event: AliasEvent | None
    stale: tuple[str, ...]
    waiting: Profile | None
    refused: tuple[str, ...]
    same: bool
    before: Profile | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A node (None: a GPU class, or a name that is not registered), what is served there, and what runs now.
    `state` is one word.
    """

    name: str
    node: Node | None
    places: tuple[ServedProfile, ...]
    running: tuple[tuple[Run, Study], ...]
    state: str


NEWEST_STUDIES, LOOKED_THROUGH = 3, 20
"""Limits of the search for a place's newest run: how many studies (the newest first) are used, and how many
are read to find them. Comparisons are read, but not used.
"""


def machines(store: Store, now: datetime) -> tuple[Machine, ...]:
    """Every node, and every target of a study or profile, by name."""
    held = {lease.node: lease.holder for lease in store.leases(now=now)}
    nodes = {node.name: node for node in store.nodes()}
    running = [(run, store.study(run.study_id)) for run in store.runs(state=RunState.RUNNING)]
    keys = sorted(
        {*store.profile_keys(), *store.places()}, key=lambda key: (key.target, key.model, key.workload)
    )
    names = sorted({*nodes, *(key.target for key in keys), *(study.node for _, study in running)})
    return tuple(
        Machine(
            name=name,
            node=nodes.get(name),
            places=tuple(_place(store, key, nodes.get(name), now) for key in keys if key.target == name),
            running=tuple((run, study) for run, study in running if study.node == name),
            state=node_state(nodes[name], held.get(name)) if name in nodes else "",
        )
        for name in names
    )


def comparable(found: Sequence[Machine]) -> Sequence[str]:
    """The names of the nodes with a result that can be compared; empty if there are fewer than two."""
    names = [m.name for m in found if any(p.card and p.card.trial is not None for p in m.places)]
    return names if len(names) > 1 else ()


def _place(store: Store, key: ProfileKey, node: Node | None, now: datetime) -> ServedProfile:
    event = store.alias(key, CHAMPION)
    champion = version_of(store, event)
    known = store.studies(model=key.model, node=key.target, workload=key.workload, limit=LOOKED_THROUGH)
    studies = [study for study in known if not study.compares][:NEWEST_STUDIES]
    challenger = version_of(store, store.alias(key, "challenger"))
    newer = challenger if challenger and (not champion or challenger.version > champion.version) else None
    answer, news = _answers(store, studies, champion)
    return ServedProfile(
        key=key,
        card=answer[0] if answer else None,
        study_id=answer[1] if answer else "",
        news=news,
        champion=champion,
        event=event,
        stale=_stale(champion, node, studies),
        waiting=newer,
        refused=gate_failures(newer, Gates(), now=now) if newer else (),
        same=bool(newer and champion and serve_the_same(newer, champion)),
        before=store.profile_version(key, event.from_version) if event and event.from_version else None,
    )


def _stale(champion: Profile | None, node: Node | None, studies: Sequence[Study]) -> tuple[str, ...]:
    newest = next(iter(studies), None)
    if champion is None:
        return ()
    return stale_reasons(
        champion,
        node=node,
        engine_version=newest.engine_version if newest else None,
        trace_digest=newest.trace_digest if newest else None,
    )


def _answers(
    store: Store, studies: Sequence[Study], champion: Profile | None
) -> tuple[tuple[AnswerCard, str] | None, AnswerCard | None]:
    """((the card, its study), the card of a newer run that found nothing better)."""
    newest = newest_card(store, studies)
    if champion is None or (newest is not None and newest[0].profile is not None):
        return newest, None
    served = card_of_profile(store, champion, CHAMPION)
    if served is None:
        return newest, None
    return (served, champion.study_id), newest[0] if newest and newest[0].at > served.at else None


def newest_card(store: Store, studies: Sequence[Study]) -> tuple[AnswerCard, str] | None:
    """The card of the newest run that ended, of some studies, and its study's id."""
    found: list[tuple[AnswerCard, str]] = []
    for study in studies:
        ended = next(
            (run for run in store.runs(study.id, limit=2) if run.state is not RunState.RUNNING), None
        )
        if ended is None:
            continue
        said = store.conclusion(ended.id)
        made = card(said, attribution=store.attribution(ended.id)) if said else card_of_run(ended)
        found += [(made, study.id)] if made is not None else []
    return max(found, key=lambda each: each[0].at, default=None)


def card_of_profile(store: Store, profile: Profile, alias: str) -> AnswerCard | None:
    """The card of the run that published a profile, pulled by an alias that names it now (empty: by its id);
    None if this run is not known.
    """
    run_id, number = profile.evidence.get("run"), profile.evidence.get("trial_number")
    said = store.conclusion(run_id) if isinstance(run_id, str) else None
    if said is None:
        return None
    made = PublishedProfile(id=profile.id, version=profile.version)
    trial = number if isinstance(number, int) else None
    found = store.attribution(said.run_id)
    pull = pull_command(profile.key, alias) if alias else ""
    return card(said, trial=trial, pull=pull, profile=made, attribution=found)


def version_of(store: Store, event: AliasEvent | None) -> Profile | None:
    """The version that an alias points to."""
    if event is None or event.to_version is None:
        return None
    return store.profile_version(event.key, event.to_version)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleView:
    """A schedule for people. `problem` says why it can never start a run."""

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
