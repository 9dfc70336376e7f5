"""One study in virtual time: the product's own proposals, judge and live limits on a virtual engine, which
charges each step the GPU-seconds that an H100 took for it (docs/results/h100.md).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray
from search_truth import NOW, Failure, Result, World, failed_share, passes

from tuner.records import Candidate, Measurement, Trial, TrialState, Value, Violation
from tuner.search import trial_view
from tuner.tuning import early_stopping
from tuner.tuning.attempt import ERROR_RATE
from tuner.tuning.winner import pick

CHANGE_S = 1.0
SHARES = (0.8, 0.9, 0.95)
GOALS = (*(f"{kind}{round(100 * share)}" for kind in ("any", "hv") for share in SHARES), "pick")
"""`any`: everything measured in full counts; `hv`: only what was measured in an engine launched for it."""
TO_GOAL = "any90"
BASELINES = 2
"""Draws of the noise of a scenario's baseline: each takes a calibration of its own, so seeds share them."""

Array = NDArray[np.float64]


@dataclass(slots=True, kw_only=True, eq=False)
class Bench:
    """What a study spent and on what, what it knows, and what an onlooker knows to be true."""

    world: World
    seed: int
    budget: float
    goals: Sequence[str] = GOALS
    spent: float = 0.0
    on: dict[str, float] = field(default_factory=dict)
    failed: int = 0
    trials: list[Trial] = field(default_factory=list)
    columns: dict[int, early_stopping.Columns] = field(default_factory=dict)
    engine: Candidate | None = None
    ready_s: float = 0.0  # of the running engine: from its launch until it answered
    groups: set[Value] = field(default_factory=set)
    onlooker: "Onlooker" = field(init=False)

    def __post_init__(self) -> None:
        self.onlooker = Onlooker(self)

    @property
    def over(self) -> bool:
        """The budget is spent, or every goal reached, so that the rest would change no number."""
        reached = self.onlooker.reached
        return self.spent >= self.budget or all(reached[goal] is not None for goal in self.goals)

    def charge(self, what: str, seconds: float) -> None:
        self.spent += seconds
        if self.onlooker.reached[TO_GOAL] is None:
            self.on[what] = self.on.get(what, 0.0) + seconds

    def launch(self, candidate: Mapping[str, Value], what: str = "launches") -> Failure | None:
        """Start an engine; how it failed, or None."""
        self.engine = None
        ran, truth = self.world.ran(candidate), self.world.truth(self.world.ran(candidate))
        if isinstance(truth, Failure):
            self.charge("failed launches", self.world.failed_s(ran, truth))
            self.failed += 1
            return truth
        compiled = ran["max_num_batched_tokens"] in self.groups
        self.ready_s = self.world.launch_s(ran, compiled)
        self.charge(what, self.ready_s)
        self.groups.add(ran["max_num_batched_tokens"])
        self.engine = Candidate(candidate)
        return None

    def relaunch(
        self, candidate: Candidate, case: early_stopping.Case | None = None, origin: str = "tpe"
    ) -> None:
        """A trial as everybody does it: an engine of its own and a replay."""
        begun, first = self.spent, not self.trials
        failure = self.launch(candidate, "baseline" if first else "launches")
        if failure is None:
            self.replay(candidate, screened=False, case=case, origin=origin, begun=begun)
        else:
            self.add(
                candidate, TrialState.INFEASIBLE, origin=origin, begun=begun, violation=failure.violation,
                cause=failure.cause, reason=failure.cause,
            )  # fmt: skip

    def replay(
        self,
        candidate: Candidate,
        *,
        screened: bool,
        case: early_stopping.Case | None,
        origin: str,
        begun: float,
    ) -> None:
        """Measure a candidate in the running engine as the next trial, in full or until it is judged."""
        number, launched = len(self.trials), self.engine if screened else None
        ran = self.world.ran(candidate)
        result, lead = self.world.truth(ran, launched), self.world.lead_s(ran, launched)
        if not isinstance(result, Result):
            raise TypeError(f"{candidate} cannot run")
        columns, ends, due = self._noisy(result, candidate, screened)
        stop = None if case is None else self._judged(case, columns, ends, due)
        kind = "baseline" if not number else "screens" if screened else "replays"
        self.charge(kind, lead + (stop[0] if stop else self._replay_s(ends)))
        common: dict[str, Any] = {"screened": screened, "origin": origin, "begun": begun}
        if stop is None:
            self.columns[number] = columns
            values = self._values(columns, result)
            failed = failed_share(values) - ERROR_RATE
            state = TrialState.COMPLETE if failed <= 0 else TrialState.INFEASIBLE
            ended = {"measurements": (Measurement(values=values),), "violation": Violation(err=failed)}
            self.add(candidate, state, cause="errors" if failed > 0 else None, **ended, **common)
            if failed <= 0:
                self.onlooker.look(self.trials[-1])
        else:
            estimate = (Measurement(values=stop[1], kind="estimate"),) if stop[1] else ()
            self.add(candidate, TrialState.PRUNED, measurements=estimate, reason=stop[2], **common)

    def _noisy(
        self, result: Result, candidate: Candidate, screened: bool
    ) -> tuple[early_stopping.Columns, Array, Array]:
        """(requests as measured, when each ended, when it was due): seconds from the window's start."""
        truth = self.world.truth_of
        number = len(self.trials)
        draw = self.seed if number else self.seed % BASELINES
        rng = np.random.default_rng((draw, number, 77))
        factors = np.exp(truth.noise * rng.standard_normal(3))
        if screened:
            own = np.random.default_rng(int(self.world.ran(candidate).digest[:8], 16))
            factors = factors * np.exp(truth.screened * own.standard_normal(3))
        latency = {
            kind: values * factor
            for kind, values, factor in zip(
                ("ttft", "tpot", "e2e"), (result.ttft, result.tpot, result.e2e), factors, strict=True
            )
        }
        slo = self.world.scene.slo
        good = np.isfinite(latency["e2e"]) & ~(latency["ttft"] > (slo.ttft_ms or math.inf))
        good &= ~(latency["tpot"] > (slo.tpot_ms or math.inf))
        order = np.argsort(self.world.rows, kind="stable")
        columns = early_stopping.Columns(
            row=self.world.rows[order], good=good[order].astype(np.float64),
            latency={kind: values[order] for kind, values in latency.items()},
        )  # fmt: skip
        due = (result.due - self.world.work.parts[0].start_s)[order]
        return columns, due + columns.latency["e2e"] / 1e3, due

    def _replay_s(self, ends: Array) -> float:
        finished = ends[np.isfinite(ends)]
        late = len(finished) < len(ends) or not len(finished)
        tail = self.world.tail_s if late else float(finished.max()) - self.world.window_s
        return self.world.window_s + min(max(tail, 0.0), self.world.tail_s)

    def _values(self, columns: early_stopping.Columns, result: Result) -> dict[str, float]:
        """What a measurement holds: percentiles of the requests, and the engine's own numbers."""
        found = {
            f"{kind}_{share}_ms": columns.fold(f"{kind}_{share}_ms")
            for kind in ("ttft", "tpot", "e2e")
            for share in ("mean", "p50", "p90", "p95", "p99")
        }
        found["goodput_rps"] = float(columns.good.sum()) / self.world.window_s
        found["slo_attainment"] = float(columns.good.mean())
        failed = float(np.isinf(columns.latency["e2e"]).sum())
        own = {n: v for n, v in result.values.items() if n in ("preemptions", "kv_usage_max")}
        return {
            **found,
            **own,
            "ready_s": self.ready_s,
            "requests": float(len(columns.row)),
            "failed": failed,
        }

    def requests(self, case: early_stopping.Case, trial: Trial) -> early_stopping.Columns | None:
        """What a judge asks of an earlier trial."""
        return self.columns.get(trial.number)

    def _judged(
        self, case: early_stopping.Case, columns: early_stopping.Columns, ends: Array, due: Array
    ) -> tuple[float, dict[str, float], str] | None:
        """(seconds until the judge stops the window, the estimate, why), None when it runs to its end."""
        whole, court = self._replay_s(ends), early_stopping.Judge(case)
        for now in np.arange(1.0, whole, 1.0):
            ages = now - due[(due < now) & ~(ends <= now)]
            reason = court.look(columns.take(ends <= now), ages.tolist())
            if reason is not None:
                return float(now), court.estimate(), reason
        return None

    def add(self, candidate: Candidate, state: TrialState, *, begun: float, **more: object) -> None:
        number = len(self.trials)
        row = Trial(
            id=number + 1, study_id="bench", run_id="bench", number=number, candidate=candidate, state=state,
            effective=dict(self.world.ran(candidate)), gpu_seconds=self.spent - begun,
            started_at=NOW + timedelta(seconds=begun), ended_at=NOW + timedelta(seconds=self.spent),
        )  # fmt: skip
        self.trials.append(replace(row, **more))  # type: ignore[arg-type]


class Onlooker:
    """Who knows the whole table: at how many GPU-seconds each goal was reached; None = not yet."""

    def __init__(self, bench: Bench) -> None:
        self._bench, world = bench, bench.world
        base = world.truth(world.defaults)
        results = [r for _, r in world.compared if passes(r.values)]
        if not isinstance(base, Result):
            raise TypeError(f"{world.name}: the defaults do not run")
        reference = [base.values[n] for n in world.objectives]
        self._scale = trial_view.scale(world.objectives, reference, world.scene.slo)
        self._best = self._volume([[r.values[n] for n in world.objectives] for r in results])
        meeting = [r.values["goodput_rps"] for r in results if self._meets(r)]
        self._pick = max(meeting, default=0.0)
        mine = [[base.values[n] for n in world.objectives]] if passes(base.values) else []
        self.default_share = self._volume(mine) / self._best if self._best > 0 else None
        self._rows: dict[str, list[list[float]]] = {"any": [], "hv": []}
        self.reached: dict[str, float | None] = dict.fromkeys(GOALS)
        self.reached["pick"] = None if meeting else 0.0
        self.share = 0.0

    def _volume(self, rows: list[list[float]]) -> float:
        return trial_view.hypervolume(rows, self._scale)

    def _meets(self, result: Result) -> bool:
        return (
            passes(result.values)
            and result.values["slo_attainment"] >= self._bench.world.scene.slo.attainment * 0.985
        )

    def look(self, trial: Trial) -> None:
        """A trial was measured in full: what is it truly worth?"""
        true = self._bench.world.truth(self._bench.world.ran(trial.candidate))
        if not isinstance(true, Result) or not passes(true.values):
            return
        for kind in ("any",) if trial.screened else ("any", "hv"):
            self._rows[kind].append([true.values[n] for n in self._bench.world.objectives])
            share = self._volume(self._rows[kind]) / self._best
            self.share = share if kind == "any" else self.share
            for goal in SHARES:
                self._reach(f"{kind}{round(100 * goal)}", share >= goal)
        if not trial.screened and self.reached["pick"] is None:
            self._reach("pick", self._picked_well())

    def _reach(self, goal: str, reached: bool) -> None:
        if reached and self.reached[goal] is None:
            self.reached[goal] = self._bench.spent

    def _picked_well(self) -> bool:
        """Whether the pick among what was relaunched so far is truly within 5 % of the best pick."""
        true = self._bench.world.truth(self._bench.world.ran(self.pick().candidate))
        good = isinstance(true, Result) and self._meets(true)
        return good and isinstance(true, Result) and true.values["goodput_rps"] >= 0.95 * self._pick

    def pick(self) -> Trial:
        known = [t for t in self._bench.trials if not t.screened and t.state is TrialState.COMPLETE]
        world = self._bench.world
        return pick(known, "slo", world.scene.slo, world.objectives)

    def false_winner(self) -> bool:
        """Whether the pick by measured values, unconfirmed, truly serves less goodput than the baseline."""
        chosen, world = self.pick(), self._bench.world
        true, base = world.truth(world.ran(chosen.candidate)), world.truth(world.defaults)
        if not isinstance(true, Result) or not isinstance(base, Result):
            return True
        return not chosen.is_baseline and true.values["goodput_rps"] < base.values["goodput_rps"]
