"""Notes on a study's trace before a run: where `latest:` found it, what moved since the champion's trace, too
few requests, and which knobs it cannot judge.
"""

import re
from collections.abc import Iterator

import numpy as np

from tuner.errors import NotFound, TunerError
from tuner.history.entities import TraceInfo
from tuner.history.store import Store
from tuner.knobs.catalogue import CATALOGUE
from tuner.measures import many
from tuner.records import ProfileKey, Study
from tuner.replay.plan import PLANS
from tuner.traffic import slices, statistics, trace_files
from tuner.tuning.study import Prepared

# How the name of a capture ends, under which its trace is registered.
CAPTURE = re.compile(r"-\d{8}T\d{6}Z(\.\d+)?$")

# Fewer requests than this in all searched slices give no percentile: p95 of 20 is the slowest one.
FEW = 20

# How many runs back the one before is looked for.
RUNS = 100


def traffic_notes(prepared: Prepared, store: Store) -> Iterator[str]:
    """Sentences; none where the trace is the one that was tuned on before and `latest:` names one thing."""
    yield from _sources(prepared, store)
    champion = _champions(prepared, store)
    if champion is None or champion.trace_digest == prepared.trace.digest:
        return
    try:
        before, _ = trace_files.find(champion.trace_digest, store.trace(champion.trace_digest).path)
    except TunerError:  # the file may be on another host, or thrown away
        yield (
            "the champion was found on another trace, whose file is not on this host, so they cannot be "
            "compared"
        )
        return
    moved = [each.sentence for each in statistics.compare(before, prepared.trace) if each.moved]
    if not moved:
        yield "the champion was found on another trace, but the two do not differ in anything that matters"
    for sentence in moved:
        yield f"what has changed since the champion's trace: {sentence}"


def few_requests(prepared: Prepared) -> str | None:
    """A warning where the searched slices hold fewer than `FEW` requests in all."""
    searched = prepared.study.searched_slices
    count = sum(len(slices.rows(prepared.trace, s)) for s in searched)
    if count >= FEW:
        return None
    lasts = sum(s.duration_s for s in searched) / prepared.file.speed
    longer = tuple(PLANS)[tuple(PLANS).index(prepared.plan.name) + 1 :]
    auto = f" (with `slices: auto`: {' or '.join(f'`plan: {name}`' for name in longer)})" if longer else ""
    return (
        f"WARNING: the searched slices hold {many(count, 'request')} in all ({lasts:.3g} s of replay). That"
        f" is too few to compare configurations, so do not act on these numbers. Take longer slices{auto} or"
        " a higher `speed`"
    )


def _champions(prepared: Prepared, store: Store) -> Study | None:
    """The study that the champion of this model, node and workload comes from."""
    mine = prepared.study
    for target in (mine.node, mine.gpu_class):
        key = ProfileKey(model=mine.model, target=target, workload=mine.workload)
        event = store.alias(key, "champion")
        if event is not None and event.to_version is not None:
            found = store.profile_version(key, event.to_version).study_id
            if found is not None:
                return store.study(found)
    return None


def _sources(prepared: Prepared, store: Store) -> Iterator[str]:
    """Where `latest:NAME` was found, if both kinds have the name or the other kind was used before."""
    ref = prepared.file.trace
    if not ref.startswith("latest:"):
        return
    name, captured = ref.removeprefix("latest:"), prepared.trace_path.suffix != ".parquet"
    found = f"trace {ref} is the {_kind(captured)} {prepared.trace_path.name}"
    if captured and (imported := _known(store, name)) is not None:
        yield (
            f"{found}; an imported trace has the name too: write `trace: {name}` for it"
            f" ({imported.digest[:12]}, {imported.created_at:%Y-%m-%d})"
        )
    before = _before(prepared.study, ref, store)
    if before is not None and (CAPTURE.search(before.name) is not None) != captured:
        yield f"{found}; the run before this one took the {_kind(not captured)} {before.name}"


def _before(mine: Study, ref: str, store: Store) -> TraceInfo | None:
    """The trace of the last run for the same model, node and workload whose study names it alike."""
    for run in store.runs(limit=RUNS):
        study = store.study(run.study_id)
        same = (study.model, study.node, study.workload) == (mine.model, mine.node, mine.workload)
        if run.ended_at is not None and same and study.spec.get("trace") == ref:
            return _known(store, study.trace_digest)
    return None


def _kind(captured: bool) -> str:
    return "capture" if captured else "import"


def _known(store: Store, ref: str) -> TraceInfo | None:
    try:
        return store.trace(ref)
    except NotFound:
        return None


PREFIX = ("enable_prefix_caching", "prefix_caching_hash_algo")


def unjudged(prepared: Prepared) -> dict[str, str]:
    """Knob → why its effect does not show in this study. Of knobs that are turned only."""
    trace = prepared.trace
    found: dict[str, str] = {}
    for name, levels in prepared.space.levels.items():
        if CATALOGUE[name].needs_raw:
            found[name] = "its effect depends on what the texts say, and this study sends made-up tokens"
        elif name == "scheduling_policy" and "priority" in levels and len(np.unique(trace.priority)) < 2:
            found[name] = "every request of the trace has the same priority"
        elif name in PREFIX and not len(trace.blocks) and not (trace.parent >= 0).any():
            found[name] = "no prompts of the trace share a prefix"
    return found
