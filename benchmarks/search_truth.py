"""The truth that `benchmarks/search.py` tunes against: engines in virtual time, one whole table per scenario.

It shares with the predictor that proposes candidates: the scheduler's rules (who is batched when), the
traces and the model's shape. It does not share: how long a step takes (a sum of parts with a saturating
efficiency and a graph cliff, where the predictor has a roofline), the coefficients, the memory that is left
for the cache, what runs out of memory, and the noise.
"""

import itertools
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tuner.knobs import model
from tuner.records import Candidate, Prediction, Slice, Slo, Value, Violation
from tuner.replay.plan import PLANS
from tuner.simulator import predict
from tuner.simulator.cost import CARDS, GIB, Coefficients, StepCost, preset
from tuner.simulator.memory import profile
from tuner.simulator.workload import Workload
from tuner.traffic.importers import read_any
from tuner.traffic.trace import Trace

OBJECTIVES = ("e2e_p95_ms", "tpot_p95_ms", "goodput_rps")
TRACES = {
    "conversation": "AzureLLMInferenceTrace_conv.csv",
    "code": "AzureLLMInferenceTrace_code.csv",
    "long context": "mooncake_conversation_trace.jsonl",
}
CARD_NAMES = ("h100-80", "a100-40", "l40s")
SLOS = {
    "h100-80": Slo(ttft_ms=5000, tpot_ms=45, attainment=0.9),
    "a100-40": Slo(ttft_ms=6000, tpot_ms=65, attainment=0.9),
    "l40s": Slo(ttft_ms=8000, tpot_ms=75, attainment=0.9),
}
LEVELS: Mapping[str, tuple[Value, ...]] = {
    "max_num_seqs": (32, 64, 128, 256, 512, 1024),
    "max_num_batched_tokens": (512, 1024, 2048, 4096, 8192, 16384),
    "gpu_memory_utilization": (0.84, 0.9, 0.96),
    "long_prefill_token_threshold": (0, 512),
}
WINDOW_S = 40.0
LEAD_S = 10.0
PLAN = replace(PLANS["standard"], load_warmup_s=LEAD_S, priming_turnovers=0.0, tail_limit_s=20.0)
LENGTH = 16384
VERSION = 3
"""Of the tables: raise it when anything here changes a number."""

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Space:
    """All combinations of the levels."""

    levels: Mapping[str, tuple[Value, ...]]

    def contains(self, candidate: Candidate) -> bool:
        return all(k in self.levels and v in self.levels[k] for k, v in candidate.items())

    def canonical(self, candidate: Candidate) -> Candidate:
        return candidate

    def everything(self) -> list[Candidate]:
        points = itertools.product(*self.levels.values())
        return [Candidate(dict(zip(self.levels, point, strict=True))) for point in points]


class TrueCost(StepCost):
    """Seconds of a step as a sum: overhead, launches without a graph, weights, products, cache, prompts."""

    def _dense(self, tokens: int, sampled: int) -> float:
        eager = 0.0 if self.sizes and tokens <= self.sizes[-1] else 0.0016
        efficiency = tokens / (tokens + 190.0)
        work = (tokens * self.token_s + sampled * self.head_s * 1.7) / efficiency if tokens else 0.0
        return eager + 0.82 * self.weights_s + work


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Result:
    """What one engine would measure without noise; per request milliseconds and due times (seconds)."""

    values: Mapping[str, float]
    due: Array
    ttft: Array
    tpot: Array
    e2e: Array
    blocks: int
    used: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    violation: Violation
    cause: str


class World:
    """One trace on one card: the space, the truth of every candidate, and the predictor."""

    def __init__(self, trace_name: str, card: str, folder: Path) -> None:
        self.name = f"{trace_name} on {card}"
        self.card = CARDS[card]
        self.facts = model.read("Qwen/Qwen2.5-7B-Instruct", env={})
        self.trace: Trace = read_any(folder / TRACES[trace_name])
        fits = self.trace.input_len + self.trace.output_len < LENGTH - 64
        self.trace = self.trace.take(np.flatnonzero(fits))
        self.slo = SLOS[card]
        self.space = Space(LEVELS)
        self.coefficients = Coefficients(
            compute=0.71, memory=0.74, attention=0.3, step_s=0.0041, seq_s=1.9e-5, request_s=0.007
        )
        self.table: dict[str, Result | Failure] = {}
        self.predictions: dict[str, Prediction] = {}
        self.twins: dict[str, list[tuple[int, Prediction]]] = {}
        self.simulated: dict[str, list[Result]] = {}
        self.defaults = Candidate(
            {
                "max_num_seqs": self.card.max_num_seqs,
                "max_num_batched_tokens": self.card.max_num_batched_tokens,
                "gpu_memory_utilization": 0.9,
                "block_size": 16,
                "long_prefill_token_threshold": 0,
            }
        )
        self.speed = 1.0
        self._scene()
        self._choose_speed()
        self.predictor = predict.Predictor(self.scene, preset(self.card), spreads=False)

    def _scene(self) -> None:
        span = WINDOW_S * self.speed
        starts = np.arange(LEAD_S * self.speed, float(self.trace.arrival_s[-1]) - span, span / 2)
        counts = [np.sum((self.trace.arrival_s >= s) & (self.trace.arrival_s < s + span)) for s in starts]
        peak = Slice(name="peak", start_s=float(starts[int(np.argmax(counts))]), duration_s=span)
        args: dict[str, Value] = {"max-model-len": LENGTH}
        self.scene = predict.Scene(
            trace=self.trace, slices=(peak,), facts=self.facts, card=self.card, plan=PLAN, speed=self.speed,
            slo=self.slo, args=args, cut=False,
        )  # fmt: skip
        self.work = Workload(self.trace, self.scene.slices, PLAN, self.speed)

    def _choose_speed(self) -> None:
        """The speed at which today's defaults serve about two thirds of the requests well."""
        found = []
        for speed in 0.15 * 1.5 ** np.arange(9):
            self.speed = float(speed)
            self._scene()
            result = self._simulate(self.defaults, self._memory(self.defaults)[0])
            off = abs(result.values["slo_attainment"] - 0.55)
            found.append((off if finite(result.values) else 9.0, float(speed)))
        self.speed = min(found)[1]
        self._scene()

    def _memory(self, ran: Mapping[str, Value]) -> tuple[int, Violation]:
        """(KV blocks, graded violations): the truth's own account of memory."""
        number = {name: float(value or 0) for name, value in ran.items()}
        weights = self.facts.parameters * self.facts.dtype_bytes / GIB
        layer = (
            number["max_num_batched_tokens"]
            * (2.2 * self.facts.intermediate + 7 * self.facts.hidden)
            * 2
            / GIB
        )
        logits = number["max_num_seqs"] * self.facts.vocab_size * 10 / GIB
        kv = self.card.memory_gib * number["gpu_memory_utilization"] - 0.9 - weights - layer - logits
        per_block = self.facts.kv_bytes_per_token * number["block_size"] / GIB
        blocks = max(int(kv / per_block), 0)
        tokens = blocks * number["block_size"]
        oom = self.card.memory_gib * (number["gpu_memory_utilization"] - 0.985) + 0.7 * (layer + logits)
        return blocks, Violation(kv=(LENGTH - tokens) / LENGTH, oom=oom / self.card.memory_gib)

    def _simulate(self, ran: Mapping[str, Value], blocks: int) -> Result:
        options = predict.options_of(self.scene, ran)[0]
        limits = replace(options.limits, num_blocks=blocks)
        cost = TrueCost(
            self.facts, self.card, self.coefficients, block_size=limits.block_size,
            capture_most=options.budget.capture_most,
        )  # fmt: skip
        cost.kv_s *= 1.25 if limits.block_size == 16 else 1.18
        runs = predict.simulate(self.scene, self.work, limits, cost)
        part = self.work.parts[0]
        due = np.array([at for at, inside in zip(part.at_s, part.measured, strict=True) if inside])
        values = predict.fold(runs, self.slo)
        kept = {n: values[n] for n in (*OBJECTIVES, "slo_attainment", "ttft_p95_ms")}
        run = runs[0]
        return Result(
            values=kept, due=due, ttft=run.ttft, tpot=run.tpot, e2e=run.e2e, blocks=blocks,
            used=values.get("kv_usage_max", 1.0) * blocks,
        )  # fmt: skip

    def truth(self, candidate: Candidate, launched: Candidate | None = None) -> Result | Failure:
        """What a relaunched engine measures; with `launched`, one whose limits were changed to it."""
        ran = Candidate({**self.defaults, **candidate})
        key = ran.digest
        if key not in self.table:
            blocks, violation = self._memory(ran)
            bad = (violation.oom or 0) > 0 or (violation.kv or 0) > 0
            cause = "out_of_memory" if (violation.oom or 0) > 0 else "kv_too_small"
            if float(ran["max_num_seqs"] or 0) > float(ran["max_num_batched_tokens"] or 0):
                self.table[key] = Failure(violation=Violation(err=1.0), cause="invalid_config")
            else:
                self.table[key] = (
                    Failure(violation=violation, cause=cause) if bad else self._with(ran, blocks)
                )
        result = self.table[key]
        if launched is None or isinstance(result, Failure):
            return result
        return self._with(ran, self._memory({**self.defaults, **launched})[0])

    def _with(self, ran: Candidate, blocks: int) -> Result:
        """Simulated once per set of limits, as long as the cache never fills up."""
        limits = Candidate({k: v for k, v in ran.items() if k != "gpu_memory_utilization"}).digest
        known_results = self.simulated.setdefault(limits, [])
        for result in known_results:
            if blocks == result.blocks or result.used < min(0.98 * blocks, 0.98 * result.blocks):
                return result
        known_results.append(self._simulate(ran, blocks))
        return known_results[-1]

    def predict(self, candidates: Sequence[Candidate]) -> list[Prediction]:
        found = []
        for candidate in candidates:
            ran = Candidate({**self.defaults, **candidate})
            if ran.digest not in self.predictions:
                self.predictions[ran.digest] = self._predicted(ran)
            found.append(self.predictions[ran.digest])
        return found

    def _predicted(self, ran: Candidate) -> Prediction:
        """The predictor's own word; the same numbers where only unused cache differs."""
        options = predict.options_of(self.scene, ran)[0]
        memory = profile(self.facts, self.card, options.budget)
        violation, feasible = predict.violation_of(options, memory, self.card)
        limits = Candidate({k: v for k, v in ran.items() if k != "gpu_memory_utilization"}).digest
        for blocks, prediction in self.twins.get(limits, []) if feasible else ():
            if prediction.values["kv_usage_max"] * blocks < 0.98 * min(memory.blocks, blocks):
                return replace(prediction, violation=violation)
        found = self.predictor([ran])[0]
        if found.feasible and "kv_usage_max" in found.values:
            self.twins.setdefault(limits, []).append((memory.blocks, found))
        return found


def known(candidate: Candidate) -> str | None:
    """What argument checking would refuse without a launch."""
    seqs, tokens = candidate.get("max_num_seqs"), candidate.get("max_num_batched_tokens")
    if isinstance(seqs, int) and isinstance(tokens, int) and seqs > tokens:
        return "max_num_seqs is above max_num_batched_tokens"
    return None


def load(trace_name: str, card: str, folder: Path, cache: Path) -> World:
    """The world with its whole table worked out, from the cache where it is there."""
    path = cache / f"search-{trace_name}-{card}-{VERSION}.pickle"
    if path.exists():
        found: World = pickle.loads(path.read_bytes())
        return found
    world = World(trace_name, card, folder)
    for candidate in world.space.everything():
        if isinstance(world.truth(candidate), Result) or known(candidate) is None:
            world.predict([candidate])
    world.predict([world.defaults])
    world.truth(world.defaults)
    cache.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(world))
    return world


def finite(values: Mapping[str, float]) -> bool:
    return all(math.isfinite(values[n]) for n in OBJECTIVES)
