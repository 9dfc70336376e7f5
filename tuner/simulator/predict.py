"""What a candidate would measure: a study's slices in virtual time, under the names of measurements.

`Batch` predicts many at once, over processes: `python -m tuner.simulator.predict FILE` does a share of them.
"""

import json
import math
import os
import pickle
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuner import processes
from tuner.knobs.model import ModelFacts
from tuner.leftovers import scratch_prefix
from tuner.measures import OF_A_CLASS
from tuner.metrics import RequestColumns, pool_engine
from tuner.records import Candidate, Prediction, Slice, Slo, Value, Violation
from tuner.replay.plan import PLANS, Plan
from tuner.simulator.clock import Clock, Course, PreparedSlice, Workload
from tuner.simulator.cost import Card, Coefficients, Memory, StepCost, profile
from tuner.simulator.options import Options, StartRefused, host_blocks, plain_arguments, settle
from tuner.simulator.scheduler import Scheduler
from tuner.simulator.state import EngineRequest, SchedulerLimits
from tuner.traffic.trace import Trace

# Relative error that is assumed of the presets' step times (one standard deviation) before a calibration.
UNCALIBRATED = 0.20

# Relative error that remains with a good calibration: about what a repeated measurement differs by
# (`calibrate` weighs them with the same precision).
FLOORS: Mapping[str, float] = MappingProxyType({"ttft": 0.08, "tpot": 0.03, "itl": 0.06, "e2e": 0.04})

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What is fixed for all candidates of a study. `args` are the engine's fixed arguments, dashes or not.

    A replay cuts what still runs at the end of its tail, and so does a scene, unless `cut` is False. Of the
    classes of requests in `classes` there are numbers beside those of all requests.
    """

    trace: Trace
    slices: tuple[Slice, ...]
    facts: ModelFacts
    card: Card
    plan: Plan = PLANS["standard"]
    speed: float = 1.0
    slo: Slo = field(default_factory=Slo)
    args: Mapping[str, Value] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    deadline_s: float | None = None
    cut: bool = True
    gpus: int = 1
    classes: tuple[str, ...] = ()

    @property
    def patience(self) -> float:
        """Seconds after a window during which its requests may still end."""
        return min(self.deadline, self.plan.tail_limit_s) if self.cut else self.deadline

    @property
    def deadline(self) -> float:
        """Seconds after which a request counts as failed, as a replay has it."""
        return self.deadline_s or max(60.0, 4 * (self.slo.e2e_ms or 0.0) / 1000)


def options_of(scene: Scene, knobs: Mapping[str, Value]) -> tuple[Options, Memory]:
    """The effective options of a candidate on top of the fixed arguments, and its memory.

    Knobs that the simulator does not model are ignored. StartRefused if the engine would not start.
    """
    both = {**scene.args, **knobs}
    given: dict[str, Any] = {}
    for name, value in both.items():  # a knob's value has a list as canonical JSON
        is_list = isinstance(value, str) and value.startswith("[")
        given[name.lstrip("-").replace("-", "_")] = json.loads(str(value)) if is_list else value
    known = dict(plain_arguments())
    known.update({name: value for name, value in given.items() if name in known and value is not None})
    known |= {"model": scene.facts.name, "data_parallel_size": given.get("data_parallel_size")}
    options = settle(Namespace(**known), scene.card, scene.facts, scene.env, scene.gpus)
    memory = profile(scene.facts, scene.card.group(options.ranks), options.budget)
    _, _, size = str(given.get("preemption") or "recompute").partition(":")
    host_gib = float(size) if size else options.offload_gib
    return options.with_blocks(memory.blocks, host_blocks(scene.facts, options, host_gib)), memory


@dataclass(slots=True)
class SimulatedSlice:
    """One slice as simulated: its measured requests (`rows` of the trace), and the engine's numbers."""

    window_s: float
    rows: NDArray[np.int64]
    requests: RequestColumns
    engine: dict[str, float]
    course: Course


def simulate(
    scene: Scene, work: Workload, limits: SchedulerLimits, cost: StepCost, replicas: int = 1
) -> list[SimulatedSlice]:
    """All slices of a scene, each from primed, idle engines: one engine, or several data parallel ones that
    get the requests in turn. (vLLM sends each request to the engine with the fewest. Under load, this makes
    no difference.)
    """
    return [
        _joined([_slice(scene, work, part, limits, cost, slice(n, None, replicas)) for n in range(replicas)])
        for part in work.parts
    ]


def _slice(
    scene: Scene, work: Workload, part: PreparedSlice, limits: SchedulerLimits, cost: StepCost, ours: slice
) -> SimulatedSlice:
    """One engine under its share of a slice's requests."""
    scheduler = Scheduler(limits)
    work.prime(part, scheduler)
    delay = cost.coefficients.request_s
    requests = work.requests(part, limits, delay)[ours]
    fits = [request for request in requests if request.prompt < limits.max_model_len]
    last = part.start_s + part.window_s + scene.patience
    course = Clock(scheduler, cost, until=last).run(fits)
    measured = [request for request, inside in zip(requests, part.measured[ours], strict=True) if inside]
    return _fold(measured, part, course, scheduler, scene, delay)


def _joined(runs: Sequence[SimulatedSlice]) -> SimulatedSlice:
    """Engines that served one slice together: counts and queues add up, the rest is their mean."""
    if len(runs) == 1:
        return runs[0]
    names = {name for run in runs for name in run.engine}
    found = {name: [run.engine[name] for run in runs if name in run.engine] for name in names}
    added = ("preemptions", "prefix_hits", "prefix_queries", "queue_depth_mean", "queue_depth_max")
    return replace(
        runs[0],
        rows=np.concatenate([run.rows for run in runs]),
        requests=RequestColumns.pooled([run.requests for run in runs]),
        engine={n: sum(values) / (1 if n in added else len(values)) for n, values in found.items()},
    )


def _good(scene: Scene, rows: NDArray[np.int64], latencies: Mapping[str, Floats]) -> NDArray[np.bool_]:
    """Which requests ended within every limit that the SLO sets for them."""
    good = np.isfinite(latencies["e2e"])
    for kind, values in latencies.items():
        limits = np.full(len(good), getattr(scene.slo, f"{kind}_ms") or math.inf)
        for name in reversed([name for name in scene.trace.classes if name in scene.slo.classes]):
            inside = scene.trace.classes[name][rows]
            limits[inside] = getattr(scene.slo.classes[name], f"{kind}_ms") or math.inf
        good &= ~(values > limits)
    return good


def _fold(
    measured: Sequence[EngineRequest],
    part: PreparedSlice,
    course: Course,
    scheduler: Scheduler,
    scene: Scene,
    delay: float,
) -> SimulatedSlice:
    """Times count from when each request was due; the front end's delay is in the arrivals. A gap counts for
    every measured request that was decoding then.
    """
    due = np.array([part.at_s[r.number] for r in measured])
    arrival = np.array([r.arrival for r in measured])
    first = np.array([r.first for r in measured])
    last = np.array([r.last for r in measured])
    made = np.array([r.output for r in measured], np.float64)
    failed = (last < 0) | (last - arrival > scene.deadline - delay)
    ttft = np.where(failed, math.inf, (first - due) * 1e3)
    e2e = np.where(failed, math.inf, (last - due) * 1e3)
    later = np.maximum(made - 1, 1)
    tpot = np.where(made > 1, np.where(failed, math.inf, (last - first) / later * 1e3), math.nan)
    gaps = np.array(course.gaps).reshape(-1, 3)
    begun, ended = np.sort(first[~failed]), np.sort(last[~failed])
    decoding = np.searchsorted(begun, gaps[:, 0]) - np.searchsorted(ended, gaps[:, 0])
    inside = decoding > 0
    rows = part.rows[[r.number for r in measured]]
    latencies = {"ttft": ttft, "tpot": tpot, "e2e": e2e}
    requests = RequestColumns(
        answered=~failed,
        good=_good(scene, rows, latencies),
        **latencies,
        input_tokens=np.array([r.prompt for r in measured], np.float64),
        output_tokens=made,
        itl=gaps[inside, 1] * 1e3,
        itl_tokens=gaps[inside, 2] * decoding[inside],
    )
    return SimulatedSlice(
        window_s=part.window_s,
        rows=rows,
        requests=requests,
        engine=_engine(course, scheduler, part),
        course=course,
    )


def _engine(course: Course, scheduler: Scheduler, part: PreparedSlice) -> dict[str, float]:
    """The counters that change between a scrape at the window's start and one at its end."""
    levels = course.table()
    found = {"preemptions": float(scheduler.preemptions)}
    if scheduler.queries:
        found |= {"prefix_hits": float(scheduler.hits), "prefix_queries": float(scheduler.queries)}
    edges = part.start_s, part.start_s + part.window_s
    inside = levels[(levels[:, 0] >= edges[0]) & (levels[:, 0] <= edges[1])]
    if len(inside):
        steps, tokens = (np.interp(edges, levels[:, 0], levels[:, i], left=0) for i in (3, 4))
        if steps[1] > steps[0]:
            found["batch_tokens_mean"] = float((tokens[1] - tokens[0]) / (steps[1] - steps[0]))
        spans = np.diff(inside[:, 0], prepend=part.start_s)
        weights = np.maximum(spans, 1e-9)
        found["queue_depth_mean"] = float(np.average(inside[:, 1], weights=weights))
        found["queue_depth_max"] = float(inside[:, 1].max())
        found["kv_usage_mean"] = float(np.average(inside[:, 2], weights=weights))
        found["kv_usage_max"] = float(inside[:, 2].max())
    return found


def fold(runs: Sequence[SimulatedSlice], trace: Trace, classes: Sequence[str] = ()) -> dict[str, float]:
    """Measurement names of all slices together: outcomes pooled, rates over the sum of the windows."""
    window_s = sum(run.window_s for run in runs)
    values = RequestColumns.pooled([run.requests for run in runs]).values(window_s, p99_needs=0)
    for name in classes:
        ours = RequestColumns.pooled([run.requests.among(trace.classes[name][run.rows]) for run in runs])
        found = ours.values(window_s, p99_needs=0)
        values |= {f"{name}.{metric}": value for metric, value in found.items() if metric in OF_A_CLASS}
    return values | pool_engine([(run.engine, run.window_s) for run in runs])


class Predictor:
    """Predictions for candidates of one scene; asking twice for one candidate costs nothing.

    `error` is the relative error of step times to expect (a calibration's, else UNCALIBRATED). Each
    candidate is also simulated slower and faster by this error. So its `spread` is wide if a queue is about
    to form.
    """

    def __init__(
        self, scene: Scene, coefficients: Coefficients, *, error: float = UNCALIBRATED, spreads: bool = True
    ) -> None:
        self.scene = scene
        self.coefficients = coefficients
        self.error = error
        self.spreads = spreads
        self._work = Workload(scene.trace, scene.slices, scene.plan, scene.speed)
        self._known: dict[str, Prediction] = {}

    def __call__(self, candidates: Sequence[Candidate]) -> tuple[Prediction, ...]:
        found = []
        for candidate in candidates:
            if candidate.digest not in self._known:
                self._known[candidate.digest] = self._predict(candidate)
            found.append(self._known[candidate.digest])
        return tuple(found)

    def unknown(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Candidates that were not predicted yet, each once."""
        return [c for digest, c in {c.digest: c for c in candidates}.items() if digest not in self._known]

    def learn(self, found: Mapping[Candidate, Prediction]) -> None:
        """Take predictions that were made elsewhere."""
        self._known.update({candidate.digest: prediction for candidate, prediction in found.items()})

    def _predict(self, candidate: Candidate) -> Prediction:
        try:
            options, memory = options_of(self.scene, candidate)
        except StartRefused:
            return Prediction(values={}, feasible=False, violation=Violation(kv=0.0, oom=0.0, err=1.0))
        violation, feasible = violation_of(options, memory, self.scene.card)
        if not feasible:
            return Prediction(values={}, feasible=False, violation=violation)
        values = self.values(options)
        requests = max(values.get("requests", 0.0), 1.0)
        failed = values.get("failed", 0.0) / requests - 0.01
        found = Prediction(values=values, feasible=failed <= 0, violation=replace(violation, err=failed))
        if not self.spreads:
            return found
        slow, fast = self.values(options, 1 + self.error), self.values(options, 1 / (1 + self.error))
        return replace(found, spread=_spread(values, fast, slow), fast=fast, slow=slow)

    def values(self, options: Options, slower: float = 1.0) -> dict[str, float]:
        """The numbers under given options; `slower` multiplies every step's time."""
        scaled = self.coefficients.slowed(slower)
        cost = options.cost(self.scene.facts, self.scene.card, scaled)
        runs = simulate(self.scene, self._work, options.limits, cost, options.replicas)
        return fold(runs, self.scene.trace, self.scene.classes)


def _spread(
    values: Mapping[str, float], fast: Mapping[str, float], slow: Mapping[str, float]
) -> dict[str, float]:
    """Half the log distance from fast to slow, and never less than what remains when steps are known."""
    spread = {}
    for name, value in values.items():
        low, high = fast.get(name, value), slow.get(name, value)
        floor = FLOORS.get(name.partition("_")[0], 0.02)
        if 0 < low < math.inf and 0 < high < math.inf:
            spread[name] = math.hypot(floor, math.log(high / low) / 2)
    return spread


def violation_of(options: Options, memory: Memory, card: Card) -> tuple[Violation, bool]:
    """Graded constraints of the start-up, and whether the engine would come up."""
    length, tokens = options.limits.max_model_len, memory.tokens(options.limits.block_size)
    kv = (length - tokens) / length
    fits = options.limits.block_size % (32 if card.platform == "cpu" else 16) == 0
    oom = memory.missing_gib if card.platform == "cuda" else -0.3
    return Violation(kv=kv, oom=oom, err=None), kv <= 0 and oom <= 0 and fits and memory.kv_gib > 0


# The fewest candidates per process: a process takes about as long to start as so many predictions.
SHARE = 8

# Processes at most, so that a large host keeps cores for others; chosen, not measured.
MOST = 8

# A share that takes longer is predicted in this process; usually it takes seconds.
TIMEOUT_S = 300.0


class Batch:
    """A predictor that spreads new candidates over processes if that is faster. It predicts the same
    values."""

    def __init__(self, predictor: Predictor, *, workers: int | None = None) -> None:
        self._predictor = predictor
        free = len(os.sched_getaffinity(0)) - 2
        self._workers = min(MOST, free) if workers is None else workers

    @property
    def scene(self) -> Scene:
        """What is fixed for all candidates."""
        return self._predictor.scene

    def __call__(self, candidates: Sequence[Candidate]) -> tuple[Prediction, ...]:
        new = self._predictor.unknown(candidates)
        workers = min(self._workers, len(new) // SHARE)
        if workers > 1:
            shares = [new[i::workers] for i in range(workers)]
            with tempfile.TemporaryDirectory(prefix=scratch_prefix()) as folder:
                paths = [Path(folder) / f"{i}" for i in range(workers)]
                with ThreadPoolExecutor(workers) as pool:
                    for share, found in zip(shares, pool.map(self._share, shares, paths), strict=True):
                        self._predictor.learn(dict(zip(share, found, strict=False)))
        return self._predictor(candidates)

    def _share(self, share: Sequence[Candidate], path: Path) -> Sequence[Prediction]:
        """One process's share; empty if that process failed: then it is done here."""
        ask = partial(Predictor, self._predictor.scene, self._predictor.coefficients)
        fresh = ask(error=self._predictor.error, spreads=self._predictor.spreads)
        path.write_bytes(pickle.dumps((fresh, [dict(c) for c in share])))
        command = (sys.executable, "-m", "tuner.simulator.predict", str(path))
        done = processes.run(command, timeout_s=TIMEOUT_S)
        if done.code != 0:
            return ()
        found: list[Prediction] = pickle.loads(path.read_bytes())
        return found


def main(path: Path) -> None:
    """Read a predictor and candidates, write the predictions in their place."""
    predictor, asked = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(list(predictor([Candidate(values) for values in asked]))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
