"""An engine by formula, with knobs, cliffs and noise, and simulators of it that are right, wrong or
sabotaged.

What a study of it costs is charged as on a real card: a launch, and a replay. A thousand candidates take a
tenth of a second, so that a test can afford whole studies.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache

import numpy as np

from tuner.records import Candidate, Measurement, Prediction, Slo, Trial, TrialState, Value, Violation
from tuner.search import trial_view
from tuner.search.acquisition import StudyView
from tuner.tuning.next_trial import suggest

OBJECTIVES = ("ttft_p95_ms", "tpot_p95_ms", "goodput_rps")
LEVELS: Mapping[str, tuple[Value, ...]] = {
    "max_num_seqs": (16, 32, 64, 128, 256, 512, 1024),
    "max_num_batched_tokens": (512, 1024, 2048, 4096, 8192, 16384),
    "gpu_memory_utilization": (0.8, 0.85, 0.9, 0.95),
    "long_prefill_token_threshold": (0, 512, 2048),
    "async_scheduling": (False, True),
    "enable_prefix_caching": (True, False),
    "watermark": (0.0, 0.01, 0.05),
    "block_size": (16, 32),
}
DEFAULTS: Mapping[str, Value] = {
    "max_num_seqs": 1024,
    "max_num_batched_tokens": 8192,
    "gpu_memory_utilization": 0.9,
    "long_prefill_token_threshold": 0,
    "async_scheduling": False,
    "enable_prefix_caching": True,
    "watermark": 0.0,
    "block_size": 16,
}
PROMPT, OUTPUT = 1500.0, 200.0
SLO = Slo(ttft_ms=2000, tpot_ms=60)
LAUNCH_S, REPLAY_S = 75.0, 60.0
NOISE = 0.03

Predict = Callable[[Sequence[Candidate]], list[Prediction]]


class Space:
    levels = LEVELS

    def contains(self, candidate: Candidate) -> bool:
        return all(candidate[name] in LEVELS.get(name, ()) for name in candidate)

    def canonical(self, candidate: Candidate) -> Candidate:
        return candidate


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Seconds of a step: `step_s`, and for each token and each sequence of it. `crowd` slows steps of more
    than 256 sequences; `memory` is how many sequences fit the cache at full memory; `rate` is requests a
    second.
    """

    step_s: float = 0.010
    token_s: float = 2.4e-5
    seq_s: float = 4e-5
    crowd: float = 0.25
    mixed: float = 0.1
    memory: float = 900.0
    rate: float = 11.0
    slower: float = 1.0

    def values(self, candidate: Mapping[str, Value]) -> dict[str, float] | None:
        """What a replay measures without noise; None where the engine does not start."""
        ran = {name: float(value or 0) for name, value in {**DEFAULTS, **candidate}.items()}
        seqs, tokens, share = (
            ran["max_num_seqs"],
            ran["max_num_batched_tokens"],
            ran["gpu_memory_utilization"],
        )
        if share >= 0.95 and tokens * seqs >= 8192 * 512:
            return None
        prompt = PROMPT * (0.75 if ran["enable_prefix_caching"] else 1.0)
        chunk = min(tokens, ran["long_prefill_token_threshold"] or tokens)
        host = self.step_s * (0.8 if ran["async_scheduling"] else 1.0)
        fits = self.memory * (share - 0.55) * (1 - 2 * ran["watermark"]) / (PROMPT + OUTPUT) * 1500
        running, step = 32.0, host
        for _ in range(30):
            step = self._step(host, running, min(tokens, running + self.rate * prompt * step))
            needed = self.rate * (OUTPUT * step + prompt / chunk * step)
            running = 0.5 * running + 0.5 * min(needed, seqs, fits)
        worst = self._step(host, running, min(tokens, running + 1.5 * chunk))
        load = max(
            self.rate * prompt / max(tokens - running, 1.0) * self._step(host, running, tokens),
            self.rate * OUTPUT * step / min(seqs, fits),
        )
        wait = 0.3 * load**3 / (1 - load) if load < 0.98 else 15.0 + 60.0 * (load - 0.98)
        first, tpot = wait + math.ceil(prompt / chunk) * worst, 0.5 * (step + worst)
        good = self.rate / (1 + math.exp(3 * math.log(max(first / 2.0, tpot / 0.06, 1e-6))))
        times = {"ttft_p95_ms": first, "tpot_p95_ms": tpot, "e2e_p95_ms": first + OUTPUT * tpot}
        values = {name: 1e3 * seconds for name, seconds in times.items()}
        return {**values, "goodput_rps": good, "slo_attainment": good / self.rate}

    def _step(self, host: float, running: float, tokens: float) -> float:
        mixed = 1 + (self.mixed if tokens > 1.2 * running else 0.0)
        crowded = 1 + (self.crowd if running > 256 else 0.0)
        return self.slower * (host + self.token_s * tokens + self.seq_s * running) * mixed * crowded

    def predict(self, candidates: Sequence[Candidate]) -> list[Prediction]:
        """As a simulator says it: with engines that are faster and slower by 12 %."""
        fast, slow = (replace(self, slower=self.slower * factor) for factor in (1 / 1.12, 1.12))
        found = []
        for candidate in candidates:
            rows = [each.values(candidate) for each in (self, fast, slow)]
            if rows[0] is None or rows[1] is None or rows[2] is None:
                found.append(Prediction(values={}, feasible=False, violation=Violation(oom=0.5)))
            else:
                found.append(Prediction(values=rows[0], fast=rows[1], slow=rows[2]))
        return found


TRUTHS = {
    "loaded": Engine(),
    "crowded": Engine(crowd=0.6, seq_s=9e-5, rate=9.0),
    "tight": Engine(memory=420.0, rate=10.0, mixed=0.3),
}
NEAR = {"crowd": 0.0, "mixed": 0.0}
"""What a simulator does not know of any of them."""


def calibrated(truth: Engine) -> Engine:
    """A simulator of another structure, its steps scaled so that it is right about the baseline's time per
    token.
    """
    made = replace(truth, **NEAR, token_s=truth.token_s * 0.8, seq_s=truth.seq_s * 1.6)
    real = (truth.values({}) or {})["tpot_p95_ms"]
    for _ in range(20):
        made = replace(made, slower=made.slower * real / (made.values({}) or {})["tpot_p95_ms"])
    return made


def shuffled(predict: Predict) -> Predict:
    """Every candidate is told what another measures."""
    everything = points()

    def other(candidate: Candidate) -> Candidate:
        return everything[int(candidate.digest[:8], 16) % len(everything)]

    return lambda candidates: predict([other(c) for c in candidates])


def inverted(predict: Predict) -> Predict:
    """The better the worse, around the baseline: a half is told as double."""
    base = predict([Candidate()])[0].values

    def turned(values: Mapping[str, float]) -> dict[str, float]:
        return {name: base[name] ** 2 / max(value, 1e-9) for name, value in values.items()}

    return lambda candidates: [
        replace(p, values=turned(p.values), fast=turned(p.slow), slow=turned(p.fast))
        for p in predict(candidates)
    ]


def hopeless(predict: Predict) -> Predict:
    """Everything fails."""
    return lambda candidates: [Prediction(values={}, feasible=False) for _ in candidates]


def constant(predict: Predict) -> Predict:
    """Everything is as the baseline."""
    base = predict([Candidate()])[0]
    return lambda candidates: [base for _ in candidates]


SABOTAGE: Mapping[str, Callable[[Predict], Predict]] = {
    "shuffled": shuffled, "inverted": inverted, "infeasible": hopeless, "constant": constant,
}  # fmt: skip


@cache
def points() -> list[Candidate]:
    return [Candidate(dict(zip(LEVELS, point, strict=True))) for point in itertools.product(*LEVELS.values())]


@cache
def best_volume(truth: Engine) -> float:
    """Of everything in the space."""
    rows = [[v[n] for n in OBJECTIVES] for c in points() if (v := truth.values(c)) is not None]
    return trial_view.hypervolume(rows, scale_of(truth))


def scale_of(truth: Engine) -> trial_view.Scale:
    values = truth.values({}) or {}
    return trial_view.scale(OBJECTIVES, [values[n] for n in OBJECTIVES], SLO)


@dataclass(kw_only=True)
class Study:
    """A study in this world until `goal` of the best volume is found, or the GPU-seconds are spent."""

    truth: Engine
    predict: Predict | None
    seed: int
    goal: float = 0.9
    budget: float = 60 * (LAUNCH_S + REPLAY_S)
    sampler: str = "tuner"
    trials: list[Trial] = field(default_factory=list)
    spent: float = 0.0

    def run(self) -> float:
        """GPU-seconds until the goal, the budget where it is not reached."""
        rows: list[list[float]] = []
        while self.spent < self.budget:
            found = suggest(
                StudyView(space=Space(), trials=self.trials, objectives=OBJECTIVES, slo=SLO),
                seed=self.seed,
                number=len(self.trials),
                baseline=Candidate(),
                known=lambda candidate: None,
                sampler=self.sampler,
                seeds=self._picked(),
                predictor=self.predict,
            )
            if found is None:
                break
            self._measure(found.candidate, found.origin)
            real = self.truth.values(found.candidate)
            rows += [[real[n] for n in OBJECTIVES]] if real else []
            if trial_view.hypervolume(rows, scale_of(self.truth)) >= self.goal * best_volume(self.truth):
                return self.spent
        return self.budget

    def _picked(self) -> list[tuple[str, Candidate]]:
        """What the SLO policy would pick by the predictions, which a study tries first."""
        if self.predict is None or len(self.trials) != 1:
            return []
        pool = points()[self.seed :: 97]
        ranked = [
            (-p.values["goodput_rps"], p.values["ttft_p95_ms"], i)
            for i, p in enumerate(self.predict(pool)) if p.feasible
        ]  # fmt: skip
        if (
            not ranked or min(ranked)[:2] == max(ranked)[:2]
        ):  # as the product: what brings nothing is not turned
            return []
        return [("simulator: SLO", pool[min(ranked)[2]])]

    def _measure(self, candidate: Candidate, origin: str) -> None:
        number, real = len(self.trials), self.truth.values(candidate)
        self.spent += LAUNCH_S + (REPLAY_S if real else 0.0)
        rng = np.random.default_rng((self.seed, number))
        trial = Trial(
            id=number + 1, study_id="s", run_id="r", number=number, candidate=candidate, origin=origin,
            state=TrialState.INFEASIBLE, started_at=datetime(2026, 1, 1, tzinfo=UTC),
            effective={**DEFAULTS, **candidate}, violation=Violation(oom=0.5), cause="out_of_memory",
        )  # fmt: skip
        if real is not None:
            values = {n: v * math.exp(NOISE * rng.standard_normal()) for n, v in real.items()}
            trial = replace(
                trial, state=TrialState.COMPLETE, violation=Violation(), cause=None,
                measurements=(Measurement(values=values),),
            )  # fmt: skip
        self.trials.append(trial)
