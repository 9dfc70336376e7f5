"""What a study starts with from earlier ones: winner, front and calibration of this node and of others."""

from collections.abc import Sequence
from datetime import datetime

from tuner.errors import NotFound
from tuner.history.store import Store
from tuner.records import Candidate, Study, Trial
from tuner.search import pareto, trial_view
from tuner.simulator.cost import Coefficients, coefficients_of
from tuner.traffic.statistics import describe, sequences_for
from tuner.tuning.study import Prepared

# Front members that are tried first: of the same node's last study, of another node's, of so many nodes.
OWN_FRONTS, OTHER_FRONTS, OTHER_NODES = 4, 2, 3

# Cache by digest of the trace: every proposal asks for it.
_ENOUGH: dict[str, int | None] = {}

# (origin, candidate)
Seed = tuple[str, Candidate]


def fronts_of(store: Store, prepared: Prepared, before: datetime | None = None) -> tuple[Seed, ...]:
    """Winner and front of this node's last study and of other nodes', for the same model, engine version and
    workload, as candidates of this study's space. They are measured again, never copied. `before`: only what
    had ended by then counts.
    """
    found: list[Seed] = []
    for each in _last_studies(store, prepared.study, before):
        own = each.node == prepared.study.node
        trials = [t for t in store.trials(each.id) if t.ended_at is not None and _by(t.ended_at, before)]
        for trial in _front(store, each, trials)[: OWN_FRONTS if own else OTHER_FRONTS]:
            origin = f"{'same node' if own else f'node {each.node}'}: {each.name}/{trial.number}"
            found.append((origin, _as_here(prepared, trial)))
    return tuple(found)


def _last_studies(store: Store, mine: Study, before: datetime | None) -> list[Study]:
    """The last study of this node, and of other nodes (the same GPU class first), that may seed this one:
    it has a front, and on another node a run of it has ended.
    """
    found: dict[str, Study] = {}
    for each in store.studies(model=mine.model):  # the newest comes first
        alike = (each.engine_version, each.workload) == (mine.engine_version, mine.workload)
        if each.id == mine.id or not alike or each.node in found or not _by(each.created_at, before):
            continue
        if "compare" in each.identity:  # its arms were chosen by hand, on whichever engine
            continue
        ended = [r.ended_at for r in store.runs(each.id) if r.ended_at is not None]
        over = each.node == mine.node or any(_by(moment, before) for moment in ended)
        if over and pareto.front(store.trials(each.id), each.objectives):
            found[each.node] = each
    others = sorted(found.values(), key=lambda s: (s.gpu_class != mine.gpu_class, s.node))
    own = [each for each in others if each.node == mine.node]
    return [*own, *[each for each in others if each.node != mine.node][:OTHER_NODES]]


def _by(moment: datetime, before: datetime | None) -> bool:
    return before is None or moment < before


def _front(store: Store, study: Study, trials: Sequence[Trial]) -> list[Trial]:
    """A study's winner first (of its last run, else by the SLO), then the rest of its front."""
    members = [t for t in pareto.front(trials, study.objectives) if not t.is_baseline]
    winners = [each.winner for each in store.conclusions(study.id) if each.winner is not None]
    try:
        best = winners[-1] if winners else pareto.choose(trials, "slo", study.slo, study.objectives).number
    except NotFound:
        return []
    ordered = [t for t in trial_view.latest(trials) if t.number == best and not t.is_baseline]
    return [*ordered, *(t for t in members if t.number != best)]


def _as_here(prepared: Prepared, trial: Trial) -> Candidate:
    """Another study's trial as a candidate of this one. Knobs that this space does not turn get this study's
    values; knobs that the trial left to its engine, and this space must set, get the values that the engine
    reported.
    """
    levels = prepared.space.levels
    stated = {n: v for n, v in trial.effective.items() if n in levels and None not in levels[n]}
    named = {n: v for n, v in trial.candidate.items() if n in levels}
    return prepared.space.canonical({**stated, **named})


def by_concurrency(prepared: Prepared) -> tuple[Seed, ...]:
    """Today's configuration with the max_num_seqs that the trace's concurrency asks for, at the next level of
    the space; nothing if the space does not turn it or the trace is too small.
    """
    trace, levels = prepared.trace, prepared.space.levels.get("max_num_seqs", ())
    if trace.digest not in _ENOUGH:
        _ENOUGH[trace.digest] = sequences_for(describe(trace))
    enough = _ENOUGH[trace.digest]
    fitting = [v for v in levels if isinstance(v, int) and enough is not None and v >= enough]
    if not fitting:
        return ()
    candidate = prepared.space.canonical(prepared.baseline.with_values(max_num_seqs=min(fitting)))
    return ((f"traffic: {enough} at once are enough", candidate),)


def last_calibration(store: Store, prepared: Prepared, before: datetime | None) -> Coefficients | None:
    """The coefficients that the last run of another study on this node, else on its GPU class, fitted for the
    same model and engine version. None without a readable one. `before` as above.
    """
    study = prepared.study
    alike = [
        each
        for each in store.studies(model=study.model)
        if (each.engine_version, each.gpu_class) == (study.engine_version, study.gpu_class)
        and each.id != study.id
        and _by(each.created_at, before)
    ]
    for each in sorted(alike, key=lambda s: s.node != study.node):
        for run in store.runs(each.id):
            kept = run.summary.get("calibration")
            if run.ended_at is None or not _by(run.ended_at, before) or not isinstance(kept, dict):
                continue
            if (found := coefficients_of(kept.get("coefficients"))) is not None:
                return found
    return None
