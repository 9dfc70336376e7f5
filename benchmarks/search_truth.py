"""The truths that `benchmarks/search.py` tunes against: engines in virtual time, a whole table per scenario.

A truth shares with the predictor that proposes candidates: the scheduler's rules, the traces and the shape of
the model. It does not share: how long a step takes (other parts, blended otherwise, with effects that the
predictor does not know), any coefficient, the memory that is left for the cache, what runs out of memory, and
the noise. The search was built with `A` and `D` in sight; `B` and `C`, on other hours of the traces, were
kept aside until its settings stood.
"""

import itertools
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tuner.records import Candidate, Slice, Slo, Value, Violation
from tuner.search import trial_view
from tuner.simulator import predict
from tuner.simulator.clock import Workload
from tuner.simulator.cost import CARDS, GIB, Coefficients, StepCost
from tuner.simulator.state import Step
from tuner.traffic import trace as traces
from tuner.traffic.importers import read_any
from tuner.tuning import study
from tuner.tuning.attempt import ERROR_RATE, widest
from tuner.tuning.next_trial import scene_of

NOW = datetime(2026, 1, 1, tzinfo=UTC)
OBJECTIVES = ("e2e_p95_ms", "tpot_p95_ms", "goodput_rps")
TRACES = {
    "conversation": "AzureLLMInferenceTrace_conv.csv",
    "code": "AzureLLMInferenceTrace_code.csv",
    "long context": "mooncake_conversation_trace.jsonl",
}
WINDOWS_S = {"conversation": 40.0, "code": 40.0, "long context": 80.0}
CARD_NAMES = ("h100-80", "a100-40", "l40s")
SLOS = {"h100-80": (5000, 45), "a100-40": (6000, 65), "l40s": (8000, 75)}
SPACE = "bursty-mixed"
"""The space that ships for the general case: ten knobs."""
FEW = {
    "max_cudagraph_capture_size": 1,
    "block_size": 1,
    "preemption": 1,
    "watermark": 1,
    "scheduler_reserve_full_isl": 1,
    "enable_prefix_caching": 1,
    "async_scheduling": 2,
}
"""Levels of these knobs that the reference grid goes through; all of every other knob's."""
LEAD_S, TAIL_S = 10.0, 60.0
LAUNCH_S, COMPILE_S, REFUSED_S = 57.0, 18.0, 12.0
LENGTH = 16384
SERVED_WELL = 0.6
"""Share of the requests within the SLO under today's defaults: the load of every scenario is set by it."""
VERSION = 12
"""Of the tables: raise it when anything here changes a number."""

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """How an engine really behaves. Seconds, GiB and shares; `blend` is the power by which compute and memory
    overlap (1: not at all), `saturation` the tokens that a step costs beside its own, `mixed` slows steps
    that read prompts beside decodes, `crowd` those of more than 256 sequences, `kv` scales reading the cache.
    """

    coefficients: Coefficients
    blend: float
    saturation: float
    eager_s: float
    mixed: float = 0.0
    crowd: float = 0.0
    kv: float
    reserved_gib: float
    layer: float
    margin: float
    noise: float
    screened: float
    late: bool


TRUTHS: Mapping[str, Truth] = {
    "A": Truth(
        coefficients=Coefficients(
            compute=0.74, memory=0.95, attention=0.4, step_s=0.0022, seq_s=1.5e-5, request_s=0.008
        ),
        blend=2.5, saturation=25, eager_s=0.001, kv=1.15, reserved_gib=0.9, layer=2.2, margin=0.985,
        noise=0.03, screened=0.06, late=False,
    ),
    "B": Truth(
        coefficients=Coefficients(
            compute=0.58, memory=0.72, attention=0.25, step_s=0.0045, seq_s=2.5e-5, request_s=0.012
        ),
        blend=1.8, saturation=60, eager_s=0.0008, mixed=0.12, kv=1.3, reserved_gib=1.6, layer=2.8,
        margin=0.975, noise=0.04, screened=0.09, late=True,
    ),
    "C": Truth(
        coefficients=Coefficients(
            compute=0.8, memory=0.85, attention=0.55, step_s=0.0015, seq_s=8e-6, request_s=0.003
        ),
        blend=1.0, saturation=10, eager_s=0.003, crowd=0.25, kv=1.05, reserved_gib=0.5, layer=1.8,
        margin=0.99, noise=0.03, screened=0.06, late=True,
    ),
    "D": Truth(
        coefficients=Coefficients(
            compute=0.75, memory=0.9, attention=0.5, step_s=0.002, seq_s=1e-5, request_s=0.004
        ),
        blend=1.1, saturation=20, eager_s=0.002, mixed=0.1, crowd=0.3, kv=1.1, reserved_gib=0.7, layer=2.0,
        margin=0.985, noise=0.035, screened=0.07, late=False,
    ),
}  # fmt: skip


class TrueCost(StepCost):
    """Seconds of a step, in another structure than the predictor's: see `Truth`."""

    truth: Truth

    def _dense(self, tokens: int, sampled: int) -> float:
        eager = 0.0 if self.sizes and tokens <= self.sizes[-1] else self.truth.eager_s
        wasted = self.truth.saturation if tokens else 0.0
        work = (tokens + wasted) * self.token_s + sampled * self.head_s * 1.7
        crowded = 1 + self.truth.crowd if sampled > 256 else 1.0
        power = self.truth.blend
        return (eager + float((self.weights_s**power + work**power) ** (1 / power))) * crowded

    def __call__(self, step: Step) -> float:
        mixed = 1 + self.truth.mixed if step.prefills and step.decodes else 1.0
        return StepCost.__call__(self, step) * mixed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Result:
    """What one engine would measure without noise; per request milliseconds and due times (seconds)."""

    values: Mapping[str, float]
    due: Array
    ttft: Array
    tpot: Array
    e2e: Array
    outputs: Array
    blocks: int
    used: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    violation: Violation
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """What is kept of a scenario: the load, the slice and every result."""

    speed: float
    start_s: float
    results: dict[str, tuple[dict[str, Value], Result | Failure]] = field(default_factory=dict)
    simulated: dict[str, list[Result]] = field(default_factory=dict)


class World:
    """One trace on one card under one truth: the study as the product reads it, and what every candidate
    would measure.
    """

    objectives: tuple[str, ...] = OBJECTIVES
    tail_s = TAIL_S

    def __init__(self, place: tuple[str, str, str], folder: Path, cache: Path) -> None:
        self.trace_name, self.card_name, truth = place
        self.name = f"{self.trace_name} on {self.card_name}, truth {truth}"
        self.truth_of, self.card = TRUTHS[truth], CARDS[self.card_name]
        self.window_s, self._folder, self._cache = WINDOWS_S[self.trace_name], folder, cache
        path = cache / f"{'-'.join(place).replace(' ', '-')}-{VERSION}.pickle"
        if path.exists():
            self.table: Table = pickle.loads(path.read_bytes())
            self._read(self.table.speed, self.table.start_s)
        else:
            self._choose_load()
            self._reference()
            path.write_bytes(pickle.dumps(self.table))
        self.compared = tuple(self._results())

    @property
    def serves(self) -> bool:
        """Whether the defaults serve, which a study begins with."""
        found = self.truth(self.defaults)
        return isinstance(found, Result) and finite(found.values)

    @property
    def levels(self) -> Mapping[str, tuple[Value, ...]]:
        """The space's knobs and levels."""
        return self.prepared.space.levels

    def _reference(self) -> None:
        """Work out what every point on a grid of the space measures, and every neighbour of the best ones
        until none is better: what a search is compared with, as the space is too large to know it all.
        """
        grid = [levels[: FEW.get(name, len(levels))] for name, levels in self.levels.items()]
        points = [Candidate(dict(zip(self.levels, point, strict=True))) for point in itertools.product(*grid)]
        for candidate in [self.defaults, *(c for c in points if self.prepared.known_failure(c) is None)]:
            self.truth(candidate)
        looked: set[str] = set()
        while new := [c for c in self._front() if c.digest not in looked]:
            for candidate in new:
                looked.add(candidate.digest)
                for near in self._near(candidate):
                    self.truth(near)

    def _near(self, candidate: Candidate) -> Iterator[Candidate]:
        """Candidates that differ in one knob."""
        for name, levels in self.levels.items():
            moved = (Candidate({**candidate, name: level}) for level in levels if level != candidate[name])
            yield from (c for c in moved if self.prepared.known_failure(c) is None)

    def _front(self) -> list[Candidate]:
        """Of everything worked out so far, what nothing else beats in every objective."""
        found = [(c, r) for c, r in self._results() if passes(r.values)]
        if not found:
            return []
        scale = trial_view.scale(OBJECTIVES, [1.0] * len(OBJECTIVES), Slo())
        costs = np.array([scale.costs([r.values[n] for n in OBJECTIVES]) for _, r in found])
        keep = trial_view.non_dominated(costs)
        return [c for (c, _), kept in zip(found, keep, strict=True) if kept]

    def _results(self) -> list[tuple[Candidate, Result]]:
        """Everything worked out so far that runs."""
        return [(Candidate(c), r) for c, r in self.table.results.values() if isinstance(r, Result)]

    @property
    def defaults(self) -> Candidate:
        return Candidate(
            {
                "max_num_seqs": self.card.max_num_seqs,
                "max_num_batched_tokens": self.card.max_num_batched_tokens,
                "max_cudagraph_capture_size": None,
                "gpu_memory_utilization": 0.92,
                "block_size": 16,
                "preemption": "recompute",
                "watermark": 0.0,
                "scheduler_reserve_full_isl": True,
                "enable_chunked_prefill": True,
                "long_prefill_token_threshold": 0,
                "enable_prefix_caching": True,
                "async_scheduling": "default",
            }
        )

    @cached_property
    def _trace_path(self) -> Path:
        """The trace without what the engine would refuse, in our own format."""
        path = self._cache / f"{self.trace_name.replace(' ', '-')}.parquet"
        if not path.exists():
            trace = read_any(self._folder / TRACES[self.trace_name])
            fits = trace.input_len + trace.output_len < LENGTH - 64
            traces.write(trace.take(np.flatnonzero(fits)), path)
        return path

    def _read(self, speed: float, start_s: float) -> None:
        """Prepare the study as `tuner tune` does."""
        span, (ttft, tpot) = self.window_s * speed, SLOS[self.card_name]
        stem = self.name.replace(" ", "-").replace(",", "")
        file = self._cache / f"{stem}.yaml"
        file.write_text(
            f"name: {stem}\nmodel: Qwen/Qwen2.5-7B-Instruct\nworkload: benchmark\ntrace: {self._trace_path}\n"
            f"space: {SPACE}\nengine: {{kind: simulated, card: {self.card_name}, "
            f"args: {{max-model-len: {LENGTH}}}}}\nslices: [{{start_s: {start_s!r}, duration_s: {span!r}}}]\n"
            f"speed: {speed!r}\nplan: {{base: standard, slices: 1, slice_s: {self.window_s}, "
            f"load_warmup_s: {LEAD_S}, tail_limit_s: {TAIL_S}, priming_turnovers: 0}}\n"
            f"slo: {{ttft_ms: {ttft}, tpot_ms: {tpot}, attainment: 0.9}}\n"
            f"objectives: [{', '.join(OBJECTIVES)}]\n"
        )
        self.prepared = study.load(file, store=None, now=NOW)
        self._scene_from(scene_of(self.prepared, self.card))

    def _scene_from(self, scene: predict.Scene) -> None:
        self.scene = scene
        self.work = Workload(scene.trace, scene.slices, scene.plan, scene.speed)

    def _choose_load(self) -> None:
        """The speed at which today's defaults serve SERVED_WELL of the requests well, by bisection."""
        self._read(1.0, LEAD_S)
        low, high = math.log(0.02), math.log(40.0)
        for _ in range(12):
            speed = math.exp((low + high) / 2)
            start_s = self._busiest(speed)
            busiest = Slice(name="peak", start_s=start_s, duration_s=self.window_s * speed)
            self._scene_from(replace(self.scene, slices=(busiest,), speed=speed))
            served = self._simulate(self.defaults, self._memory(self.defaults)[0]).values["slo_attainment"]
            low, high = (math.log(speed), high) if served > SERVED_WELL else (low, math.log(speed))
        self.table = Table(speed=round(speed, 4), start_s=round(start_s, 3))
        self._read(self.table.speed, self.table.start_s)

    def _busiest(self, speed: float) -> float:
        """Where the busiest window of the first half of the trace begins; of the second where it is kept
        aside.
        """
        at, span = self.scene.trace.arrival_s, self.window_s * speed
        first, last = LEAD_S * speed, float(at[-1]) - span
        half = ((first + last) / 2, last) if self.truth_of.late else (first, (first + last) / 2)
        starts = np.arange(*half, span / 4)
        if not len(starts):
            return first
        counts = np.searchsorted(at, starts + span) - np.searchsorted(at, starts)
        return float(starts[int(np.argmax(counts))])

    def _memory(self, ran: Mapping[str, Value]) -> tuple[int, Violation]:
        """(KV blocks, graded violations): the truth's own account of memory."""
        facts, truth = self.prepared.model, self.truth_of
        number = {n: float(v) for n, v in ran.items() if isinstance(v, int | float)}
        weights = facts.parameters * facts.dtype_bytes / GIB
        width = truth.layer * facts.intermediate + 7 * facts.hidden
        layer = number["max_num_batched_tokens"] * width * 2 / GIB
        logits = number["max_num_seqs"] * facts.vocab_size * 10 / GIB
        share = number["gpu_memory_utilization"]
        kv = self.card.memory_gib * share - truth.reserved_gib - weights - layer - logits
        size = int(number["block_size"])
        blocks = max(int(kv / (facts.kv_bytes_per_token * size / GIB)), 0)
        oom = self.card.memory_gib * (share - truth.margin) + 0.7 * (layer + logits)
        return blocks, Violation(kv=(LENGTH - size * blocks) / LENGTH, oom=oom / self.card.memory_gib)

    def _simulate(self, ran: Mapping[str, Value], blocks: int) -> Result:
        options = predict.options_of(self.scene, ran)[0]
        cost = TrueCost(
            self.prepared.model, self.card, self.truth_of.coefficients,
            block_size=options.limits.block_size, capture_most=options.budget.capture_most,
            overlapped=options.limits.async_scheduling,
        )  # fmt: skip
        cost.truth = self.truth_of
        cost.kv_s *= self.truth_of.kv
        limits = replace(options.limits, num_blocks=blocks)
        runs = predict.simulate(self.scene, self.work, limits, cost)
        part, run = self.work.parts[0], runs[0]
        due = np.array([at for at, inside in zip(part.at_s, part.measured, strict=True) if inside])
        values = predict.fold(runs, self.scene.trace)
        return Result(
            values=values, due=due, ttft=run.requests.ttft, tpot=run.requests.tpot, e2e=run.requests.e2e,
            outputs=run.requests.output_tokens,
            blocks=blocks, used=values.get("kv_usage_max", 1.0) * blocks,
        )  # fmt: skip

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """The trace's rows of the requests that are measured, in order of a result's arrays."""
        part = self.work.parts[0]
        return part.rows[part.measured]

    def ran(self, candidate: Mapping[str, Value]) -> Candidate:
        """What the engine runs when asked for a candidate."""
        return Candidate({**self.defaults, **candidate})

    def launch_s(self, ran: Candidate, compiled: bool) -> float:
        """GPU-seconds until an engine is ready; `compiled`: its graphs are."""
        return LAUNCH_S + (0.0 if compiled else COMPILE_S)

    def failed_s(self, ran: Candidate, failure: Failure) -> float:
        """GPU-seconds of a launch that fails."""
        return REFUSED_S if failure.cause == "invalid_config" else LAUNCH_S

    def lead_s(self, ran: Candidate, launched: Candidate | None) -> float:
        """GPU-seconds of a replay before its window begins."""
        return LEAD_S

    def engines(self, candidate: Candidate) -> tuple[Candidate, ...]:
        """What may be launched to screen a candidate, the first that works."""
        return widest(self.prepared, candidate)

    def holds(self, launched: Candidate, candidate: Candidate) -> bool:
        """Whether it is known what the candidate measures in a running engine."""
        return True

    def drawn(self, rng: np.random.Generator) -> Iterator[Candidate]:
        """Candidates at random, as random search tries them."""
        levels = self.levels
        for _ in range(2000):
            yield Candidate({n: v[int(rng.integers(len(v)))] for n, v in levels.items()})

    def grid(self, names: Sequence[str]) -> list[Candidate]:
        """Every combination of these knobs."""
        pairs = itertools.product(*(self.levels[name] for name in names))
        return [Candidate(dict(zip(names, pair, strict=True))) for pair in pairs]

    def truth(self, candidate: Candidate, launched: Candidate | None = None) -> Result | Failure:
        """What a relaunched engine measures; with `launched`, one whose limits were changed to it."""
        ran = self.ran(candidate)
        if ran.digest not in self.table.results:
            self.table.results[ran.digest] = (dict(ran), self._worked_out(ran))
        found = self.table.results[ran.digest][1]
        if launched is None or isinstance(found, Failure):
            return found
        return self._with(ran, self._memory(self.ran(launched))[0])

    def _worked_out(self, ran: Candidate) -> Result | Failure:
        if float(ran["max_num_seqs"] or 0) > float(ran["max_num_batched_tokens"] or 0):
            return Failure(violation=Violation(err=1.0), cause="invalid_config")
        blocks, violation = self._memory(ran)
        if (violation.oom or 0) > 0:
            return Failure(violation=violation, cause="out_of_memory")
        if (violation.kv or 0) > 0:
            return Failure(violation=violation, cause="kv_too_small")
        return self._with(ran, blocks)

    def _with(self, ran: Candidate, blocks: int) -> Result:
        """Simulated once per set of limits, as long as the cache never fills up."""
        limits = Candidate({k: v for k, v in ran.items() if k != "gpu_memory_utilization"}).digest
        known_results = self.table.simulated.setdefault(limits, [])
        for result in known_results:
            if blocks == result.blocks or result.used < min(0.98 * blocks, 0.98 * result.blocks):
                return result
        known_results.append(self._simulate(ran, blocks))
        return known_results[-1]


def failed_share(values: Mapping[str, float]) -> float:
    return values["failed"] / max(values["requests"], 1.0)


def passes(values: Mapping[str, float]) -> bool:
    """Whether `tuner tune` would take it for a trial that works."""
    return failed_share(values) <= ERROR_RATE and finite(values)


def finite(values: Mapping[str, float]) -> bool:
    return all(math.isfinite(values[n]) for n in OBJECTIVES)
