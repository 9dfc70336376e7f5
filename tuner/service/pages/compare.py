"""Two to five trials, profiles, nights or nodes side by side: knobs, numbers, latencies and timelines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from fastapi import Query
from markupsafe import Markup

from tuner.conclusions import Arm, Conclusion, Judgement
from tuner.errors import BadInput, NotFound
from tuner.history.best_per_night import night_of
from tuner.history.store import Store
from tuner.measures import NAMES, in_order
from tuner.records import Candidate, Profile, Study, Trial
from tuner.report import evidence
from tuner.report.words import outcome, reduced_of
from tuner.service.pages.render import Text, marked
from tuner.service.pages.studies import board_of, find, link

FEWEST, MOST = 2, 5
COLOURS = ("front", "winner", "three", "four", "baseline")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareQuery:
    """What to compare: trials of a study by number, profiles, runs (nights), or nodes."""

    study: Text = ""
    trials: Annotated[tuple[int, ...], Query(alias="trial", max_length=60)] = ()
    profiles: Annotated[tuple[int, ...], Query(alias="profile", max_length=60)] = ()
    runs: Annotated[tuple[str, ...], Query(alias="run", max_length=60)] = ()
    nodes: Annotated[tuple[str, ...], Query(alias="node", max_length=60)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a comparison.

    `trial` is the trial that measured it; None if the history does not have it. `values` are its first
    measurement. `confirmed` are from the repeats of one confirmation, and `outcome` is that run's.
    """

    name: str
    href: str
    study: Study
    engine: str
    trial: Trial | None
    candidate: Candidate
    values: Mapping[str, float | None] = field(default_factory=dict)
    confirmed: Mapping[str, float | None] = field(default_factory=dict)
    outcome: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """Rows of (name, a value for each side, whether the sides differ or it is an objective), and pictures
    with captions.
    """

    sides: Sequence[Side]
    facts: Sequence[tuple[str, Sequence[object], bool]]
    knobs: Sequence[tuple[str, Sequence[object], bool]]
    confirmed: Sequence[tuple[str, Sequence[float | None], bool]]
    numbers: Sequence[tuple[str, Sequence[float | None], bool]]
    latencies: Sequence[tuple[str, Markup]]
    timelines: Sequence[tuple[str, Markup]]


def compare(store: Store, asked: CompareQuery) -> SideBySide:
    """The comparison. BadInput for fewer than two or more than five sides, NotFound for a side that does not
    exist.
    """
    count = len(asked.trials) + len(asked.profiles) + len(asked.runs) + len(asked.nodes)
    if not FEWEST <= count <= MOST:
        raise BadInput(f"{FEWEST} to {MOST} trials, profiles, nights or nodes can be compared, not {count}")
    sides = [
        *(_of_trial(store, find(store, asked.study), number) for number in asked.trials),
        *(_of_profile(store, store.profile(number)) for number in asked.profiles),
        *(_of_run(store, ref) for ref in asked.runs),
        *(_of_node(store, name) for name in asked.nodes),
    ]
    shown, ours = _named(sides), [name for side in sides for name in side.study.objectives]
    return SideBySide(
        sides=sides,
        facts=_facts(sides),
        knobs=_rows([dict(side.candidate) for side in sides]),
        confirmed=_numbers([side.confirmed for side in sides], ours),
        numbers=_numbers([side.values for side in sides], ours),
        latencies=[(name, marked(text)) for name, text in evidence.latencies(shown)],
        timelines=[(name, marked(text)) for name, text in evidence.timelines(shown)],
    )


def _named(sides: Sequence[Side]) -> list[evidence.Named]:
    """Gives each side's trial its own colour. Today's configuration has the same colour on every page."""
    free = iter(COLOURS)
    return [
        evidence.Named(name=s.name, kind="baseline" if s.trial.is_baseline else next(free), trial=s.trial)
        for s in sides
        if s.trial is not None
    ]


def _of_trial(
    store: Store,
    study: Study,
    number: int,
    name: str = "",
    *,
    profile: Profile | None = None,
    run: object = None,
) -> Side:
    """A trial by its last attempt, with the repeats of its newest confirmation, or of the confirmation of
    `run`. A confirmation that is not to be trusted is used only if there is no other.
    """
    board, _ = board_of(store, study)
    trial = next((t for t in reversed(board.trials) if t.number == number), None)
    if trial is None:
        raise NotFound(f"study {study.name} has no trial {number}")
    concluded = [c for c in store.conclusions(study.id) if run in (None, c.run_id)]
    again = [(c, arm) for c in concluded if (arm := _measured(store, c, number)) and arm.measured_again]
    trusted = [pair for pair in again if pair[0].measured_again]
    doubted = [pair for pair in again if pair[0].outcome is Judgement.NOT_TRUSTED]
    measured = trusted or doubted
    said, arm = measured[-1] if measured else (None, None)
    if run is not None and said is not None:
        trial = _then(store, trial, said)
    share = {} if arm is None or arm.attainment is None else {"slo_attainment": arm.attainment}
    role = {"baseline": " (today)", "winner": " (winner)"}.get(board.kind(trial), "")
    return Side(
        name=name or (arm.name if arm else None) or f"trial {trial.label}{role}",
        href=f"/profiles/{profile.id}" if profile else link(study, trial),
        study=study,
        engine=(arm.engine if arm else None) or study.engine_version,
        trial=trial,
        candidate=profile.candidate if profile else board.configuration(trial),
        values=trial.measurement.values if trial.measurement else {},
        confirmed={**share, **arm.confirmed} if arm else {},
        outcome=_outcome(said, arm, number) if said and arm else "",
    )


def _then(store: Store, trial: Trial, said: Conclusion) -> Trial:
    """A trial without what later runs measured: curves and bands are of the run that is compared."""
    later = {each.id for each in store.launches(trial.study_id) if each.started_at > said.at}
    return replace(trial, measurements=tuple(m for m in trial.measurements if m.launch_id not in later))


def _measured(store: Store, said: Conclusion, number: int) -> Arm | None:
    """The arm of a trial. If a reduced configuration of the winner was published, it has the winner's arm."""
    reduced = reduced_of(said, store.attribution(said.run_id))
    return said.arm(number) or (said.arm(said.winner) if number == reduced else None)


def _outcome(said: Conclusion, arm: Arm, number: int) -> str:
    """How the run ended. Beside a trial that did not win it says which one did."""
    if arm.trial == number:
        won = said.arm(said.winner) if said.winner != number else None
        return outcome(said) + (f": {won.title}" if won else "")
    return f"{outcome(said)}: {arm.title}, here without the knobs that give nothing"


def _of_profile(store: Store, profile: Profile) -> Side:
    name = f"version {profile.version}, {profile.key.target}"
    number = profile.evidence.get("trial_number")
    study = store.study(profile.study_id)
    if isinstance(number, int):
        return _of_trial(store, study, number, name, profile=profile, run=profile.evidence.get("run"))
    return Side(
        name=name,
        href=f"/profiles/{profile.id}",
        study=study,
        engine=profile.engine_version,
        trial=None,
        candidate=profile.candidate,
    )


def _of_run(store: Store, ref: str, name: str = "") -> Side:
    """The configuration that a night ended with: its winner, otherwise today's configuration."""
    run = store.run(ref)
    said, study = store.conclusion(run.id), store.study(run.study_id)
    arm = (said.arm(said.winner) or said.baseline) if said is not None else None
    if said is None or arm is None:
        raise NotFound(f"the run of the night of {night_of(run)} has no result that could be compared")
    shown = name or f"{night_of(run)}, ended {run.at:%H:%M}, {arm.title}"
    return _of_trial(store, study, arm.trial, shown, run=run.id)


def _of_node(store: Store, node: str) -> Side:
    """What the last night of a node ended with."""
    found = store.last_conclusions(node)
    if not found:
        raise NotFound(f"no run on node '{node}' has a result yet")
    return _of_run(store, max(found.values(), key=lambda said: said.at).run_id, node)


def _facts(sides: Sequence[Side]) -> list[tuple[str, Sequence[object], bool]]:
    told = {
        "node": [s.study.node for s in sides], "model": [s.study.model for s in sides],
        "workload": [s.study.workload for s in sides], "engine": [s.engine for s in sides],
        "traffic": [s.study.trace_digest[:12] for s in sides], "GPU": [s.study.gpu_class for s in sides],
    }  # fmt: skip
    return [(name, row, len(set(row)) > 1) for name, row in told.items()]


def _rows(found: Sequence[Mapping[str, object]]) -> list[tuple[str, Sequence[object], bool]]:
    names = sorted({name for each in found for name in each})
    rows = [(name, [each.get(name) for each in found]) for name in names]
    return [(name, row, len(set(map(str, row))) > 1) for name, row in rows]


def _numbers(
    found: Sequence[Mapping[str, float | None]], ours: Sequence[str]
) -> list[tuple[str, Sequence[float | None], bool]]:
    """First the objectives, then all other measurements that some side has, in the order of the catalogue."""
    known = {name for each in found for name in each if name in NAMES}
    shown = in_order(known, first=ours)
    return [(name, [each.get(name) for each in found], name in ours) for name in shown]
