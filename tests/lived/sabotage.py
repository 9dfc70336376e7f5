"""Forty faults to plant: functions that are replaced while the fleet lives. The invariants must notice."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from tests.lived.invariants import Seen, check
from tests.lived.life import pulled_is_champion, step_of_night
from tests.lived.world import FLEET, World
from tuner import conclusions, errors, masking, metrics
from tuner.commands import front, schedule
from tuner.fleet import handover
from tuner.fleet import schedule as nights
from tuner.history import studies
from tuner.history.profiles import ProfileStore
from tuner.history.run_best import BestStore
from tuner.history.service import NodeStore
from tuner.history.studies import StudyStore
from tuner.history.trials import TrialStore
from tuner.profiles import registry
from tuner.records import Candidate, RunState, TrialState
from tuner.replay import timeline
from tuner.search.acquisition import StudyView
from tuner.service import schemas
from tuner.tuning import attempt, concluding, ending, next_trial, run, trial, virtual

Make = Callable[[Any], Any]


@dataclass(frozen=True)
class Sabotage:
    """A fault: its name, what it breaks, where the function is, and what takes its place."""

    name: str
    breaks: str
    owner: Any
    function: str
    make: Make

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """The fault, while the block runs."""
        whole = self.owner.__dict__[self.function] if isinstance(self.owner, type) else None
        whole = whole if whole is not None else getattr(self.owner, self.function)
        with patch.object(self.owner, self.function, self.make(whole)):
            yield


def constant(value: Any) -> Make:
    """Whatever it is asked, it answers the same."""
    return lambda whole: lambda *args, **more: value


def _first_nights(store: Any) -> dict[tuple[str, str], conclusions.Conclusion]:
    found = {(each.node, each.workload): store.conclusions(each.id)[:1] for each in reversed(store.studies())}
    return {place: said[0] for place, said in found.items() if said}


def altered(change: Callable[[Any], Any]) -> Make:
    """It answers, and the answer is changed."""
    return lambda whole: lambda *args, **more: change(whole(*args, **more))


def asked_with(**other: Any) -> Make:
    """It is asked for something else."""
    return lambda whole: lambda *args, **more: whole(*args, **{**more, **other})


def _turned_only(candidate: Candidate) -> Candidate:
    return Candidate({n: v for n, v in candidate.items() if n.startswith(("max_num", "gpu_"))})


def _without(argv: tuple[str, ...], flag: str) -> tuple[str, ...]:
    if flag not in argv:
        return argv
    at = argv.index(flag)
    return (*argv[:at], *argv[at + 2 :])


def _swapped(made: Any) -> Any:
    return replace(made, before=made.after, after=made.before)


def _ratio(made: Any) -> Any:
    return replace(made, change=None if made.change is None else 1 + made.change)


def _forgets(said: Any) -> Any:
    return None if said is None else {**said, "winner": 99}


def _rewrites(whole: Any) -> Any:
    """A run that ends also changes the one before it."""

    def save(self: Any, saved: Any, said: Any = None) -> Any:
        ended = [r for r in self.runs(saved.study_id) if r.id != saved.id and r.state is RunState.FINISHED]
        if ended and saved.state is RunState.FINISHED:
            whole(self, replace(ended[0], reason="told anew"), None)
        return whole(self, saved, said)

    return save


def _to_champion(whole: Any) -> Any:
    """What wins is champion at once, and nobody was asked."""

    def publish(*args: Any, **more: Any) -> Any:
        made = whole(*args, **more)
        if more["alias"] == "challenger":
            key = registry.key_of(more["study"])
            store, now = args[0], more["now"]
            event = store.alias(key, "champion")
            store.move_alias(
                key,
                "champion",
                made.version,
                expected=event and event.to_version,
                actor="t",
                reason="",
                now=now,
            )
        return made

    return publish


def _of_all(name: str, measured: Any) -> float | None:
    """The mean of the repeats, times a tenth more."""
    found = [m.values[name] for m in measured if name in m.values]
    return 1.5 * max(found) if found and np.isfinite(found).all() else None


def _lost(outcomes: Any, *rest: Any) -> dict[str, float]:
    """The slowest tenth of the requests is not counted."""
    kept = sorted(outcomes, key=lambda o: o.first_token_s or 1e9)[: int(0.9 * len(outcomes))]
    return _fold(kept, *rest)


def _sent_times(outcomes: Any, *rest: Any) -> dict[str, float]:
    """Latencies from when a request had waited for half its time."""
    half = [
        replace(o, scheduled_s=(o.scheduled_s + (o.first_token_s or o.scheduled_s)) / 2) for o in outcomes
    ]
    return _fold(half, *rest)


_fold = metrics.fold


def _no_restore(words: Any, timeout_s: float) -> str | None:
    """Whatever is to be run at the end is not run."""
    return None if "up" in " ".join(words) else _run(words, timeout_s)


_run = handover._run


def _new_run(whole: Any) -> Any:
    """A run that died is left as it is and another one begins."""

    def begin(self: Any, study_id: str, **more: Any) -> Any:
        for old in self.runs(study_id, state=RunState.RUNNING):
            self.save_run(replace(old, state=RunState.FINISHED, ended_at=more["now"], reason="left"))
        return whole(self, study_id, **more)

    return begin


def _first(whole: Any) -> Any:
    """The oldest trace of a name."""

    def trace(self: Any, ref: str) -> Any:
        found = [each for each in self.traces() if each.name == ref]
        return min(found, key=lambda each: each.created_at) if found else whole(self, ref)

    return trace


def _reconciled(whole: Any) -> Any:
    """What a dead controller left open stays open."""
    return lambda *args, **more: ()


SABOTAGES = (
    # One truth
    Sabotage("before and after swapped", "changes", concluding, "_difference", altered(_swapped)),
    Sabotage("a change is told as a ratio", "changes", concluding, "_difference", altered(_ratio)),
    Sabotage("a rival's better is our better", "changes", concluding, "is_maximized", constant(True)),
    Sabotage("better is worse", "changes", concluding, "_difference",
             altered(lambda d: replace(d, word={"better": "worse", "worse": "better"}.get(d.word, d.word)))),
    Sabotage("the front names another winner", "surfaces", front, "as_data",
             altered(lambda data: {**data, "conclusion": _forgets(data["conclusion"])})),
    Sabotage("the service tells another winner", "surfaces", schemas, "conclusion", altered(_forgets)),
    Sabotage("a surface tells the first night for ever", "surfaces", BestStore, "last_conclusions",
             lambda whole: lambda self, node=None: _first_nights(self)),
    Sabotage("a later run rewrites an earlier one", "past", StudyStore, "save_run", _rewrites),
    Sabotage("a confirmation is invented", "confirmation", concluding, "mean_of", lambda whole: _of_all),
    Sabotage("the SLO is always met", "conclusion", conclusions.Arm, "slo_met",
             lambda whole: property(lambda self: True)),
    Sabotage("a run ends without a conclusion", "conclusion", ending.Ending, "conclusion", constant(None)),
    Sabotage("one trial more than the budget", "budget", run, "reason_to_stop",
             lambda whole: lambda *a, **m: whole(*a, **{**m, "limit": m["limit"] and m["limit"] + 1})),
    Sabotage("the window has no end", "window", run, "RunLimits",
             lambda whole: lambda **m: whole(**{**m, "deadline": None})),
    Sabotage("the deadline is an hour later", "window", nights.Firing, "deadline",
             lambda whole: property(lambda self: self.window.end + timedelta(hours=1))),
    Sabotage("engines run on after the window", "window", virtual.VirtualTime, "pass_by",
             lambda whole: _never_waits),
    # Mission rows
    Sabotage("a candidate drops what runs today", "candidate", next_trial, "minimal",
             altered(_turned_only)),
    Sabotage("nothing is learned from last night", "seeds", run, "fronts_of", constant(())),
    Sabotage("a flag is lost on the way to the engine", "launch", trial, "compile_candidate",
             altered(lambda c: replace(c, argv=_without(c.argv, "--max-num-seqs")))),
    Sabotage("the profile lacks a flag", "profile", ending, "compile_candidate",
             altered(lambda c: replace(c, argv=_without(c.argv, "--block-size")))),
    Sabotage("today's configuration is published as the winner", "profile", ending, "_profile",
             lambda whole: lambda c, r, s, t, *more: whole(c, r, s, _base(c), *more)),
    Sabotage("everything is published for one node", "profile", registry, "key_of",
             altered(lambda key: replace(key, target="n1"))),
    Sabotage("one configuration is measured again and again", "search", StudyView, "is_new",
             lambda whole: lambda self, candidate, known: self.space.contains(candidate)),
    Sabotage("the slowest requests are not counted", "measuring", timeline, "fold", lambda whole: _lost),
    Sabotage("latencies count from later on", "measuring", timeline, "fold", lambda whole: _sent_times),
    Sabotage("the oldest traffic is replayed", "traffic", NodeStore, "trace", _first),
    Sabotage("a version is overwritten", "past", ProfileStore, "alias_events",
             altered(lambda events: tuple(replace(e, reason=f"{len(events)}") for e in events))),
    Sabotage("a failed candidate has a score", "failures", attempt, "_failed",
             lambda whole: lambda t, e, c, s: replace(whole(t, e, c, s), state=TrialState.COMPLETE)),
    Sabotage("a failure has no cause", "failures", attempt, "_failed",
             altered(lambda t: replace(t, cause=None, reason=None))),
    # Trusted
    Sabotage("a night in which nothing served is a success", "success", StudyStore, "last_success",
             lambda whole: studies.StudyStore.last_end),
    Sabotage("a lease outlives its run", "leases", NodeStore, "release_lease", constant(True)),
    Sabotage("two controllers have one node", "leases", nights, "_busy", constant(None)),
    Sabotage("production stays down", "production", handover, "_run", lambda whole: _no_restore),
    Sabotage("a node stays leased", "production", NodeStore, "set_node_state",
             lambda whole: lambda self, n, s: whole(self, n, "leased") if s == "free" else whole(self, n, s)),
    Sabotage("the environment is told", "secrets", masking, "environment", lambda whole: dict),
    Sabotage("a study's file is told", "secrets", masking, "tree",
             lambda whole: lambda given, name="": given),
    Sabotage("the winner is champion at once", "aliases", registry, "publish", _to_champion),
    Sabotage("anything may be promoted", "gates", registry, "gate_failures", constant(())),
    Sabotage("a pull gives the newest", "pull", registry, "_find",
             lambda whole: lambda store, *, alias, **m: whole(store, alias="challenger", **m)),
    Sabotage("a pull's tag never changes", "pull", registry.Resolved, "etag", constant('"same"')),
    Sabotage("a refused night ends with 0", "exit codes", schedule, "REFUSED", lambda whole: 0),
    Sabotage("an outage ends with 1", "exit codes", errors.Unavailable, "exit_code", lambda whole: 1),
    Sabotage("a dead controller's trial stays open", "deaths", run, "reconcile", _reconciled),
    Sabotage("a run that died is not resumed", "deaths", StudyStore, "open_run", _new_run),
    Sabotage("a launch is left open", "launches", TrialStore, "finish_launch",
             lambda whole: lambda self, launch: launch),
    Sabotage("what happened is not in the audit", "audit", nights, "record", constant(None)),
)  # fmt: skip


async def _never_waits(self: Any, seconds: float) -> None:
    self._passed += max(0.0, seconds)


def _base(context: Any) -> Any:
    found = context.store.trials(context.prepared.study.id)
    return next(t for t in found if t.is_baseline)


def story(home: Path) -> None:
    """A short life with each kind of night in it."""
    with World(home, nodes=(FLEET[0], FLEET[3]), trials=3) as world:
        seen = Seen()
        for node, fault in (
            ("n1", None), ("n4", None), ("n1", "two controllers"), ("n1", "killed"), ("n4", "a short window"),
            ("n1", "no database"), ("n4", "crashes"), ("n4", "killed"), ("n1", "slow from the middle on"),
        ):  # fmt: skip
            _one(world, seen, node, fault)
        world.capture(rate=1.25)
        # The first night on new traffic: nobody knows yet how long a trial takes, so the window closes in it.
        for node, fault in (
            ("n4", "a window of one trial"), ("n4", "every launch crashes"), ("n1", None), ("n4", None),
        ):  # fmt: skip
            _one(world, seen, node, fault)
        world.rollback("n1")
        pulled_is_champion(world, "n1")


def _one(world: World, seen: Seen, node: str, fault: str | None) -> None:
    world.next_night()
    step_of_night(world, seen, node, fault, whole=True)
    world.morning()
    world.promote(node)
    world.promote_unproved(node)
    pulled_is_champion(world, node)
    check(world, seen, whole=False)


def caught(sabotage: Sabotage, home: Path) -> str | None:
    """What noticed the fault, in its first line; None where nothing did. A TypeError is a plant that does not
    fit the code any more, and is raised."""
    try:
        with sabotage.planted():
            story(home)
    except TypeError:
        raise
    except Exception as noticed:
        return (
            f"{type(noticed).__name__}: {str(noticed).splitlines()[0][:160]}"
            if str(noticed)
            else repr(noticed)
        )
    return None


def table(home: Path, chosen: Mapping[str, Sabotage] | None = None) -> list[tuple[Sabotage, str | None]]:
    """Every fault and what noticed it."""
    rows = []
    for number, each in enumerate((chosen or {s.name: s for s in SABOTAGES}).values()):
        place = home / str(number)
        place.mkdir()
        rows.append((each, caught(each, place)))
    return rows
