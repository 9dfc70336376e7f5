"""Fit the step cost to measured trials: damped Gauss–Newton on log residuals, with the presets as priors.

One trial is enough: a coefficient on which it has no effect (such as attention's share) stays near the
preset. Percentiles of client timings and the engine's own means are both used, each weighted by the
precision that a repeated measurement of it has.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tuner.errors import BadInput
from tuner.records import JSON, Candidate
from tuner.simulator.cost import Coefficients, preset
from tuner.simulator.options import StartRefused
from tuner.simulator.predict import Predictor, Scene, options_of

# Wide limits of every coefficient, so that a fit cannot leave what a device or a host could do.
BOUNDS: Mapping[str, tuple[float, float]] = {
    "compute": (0.02, 1.0),
    "memory": (0.05, 1.0),
    "attention": (0.01, 1.0),
    "step_s": (1e-5, 0.5),
    "seq_s": (1e-7, 0.02),
    "request_s": (1e-4, 0.5),
    "layer_s": (1e-6, 0.01),
    "sync_s": (1e-8, 0.02),
}

# How far a preset may be off: one standard deviation of the logarithm. With wider ones a fit to one trial is
# worse on other trials than the presets are (docs/simulator.md). One trial cannot tell `step_s` from the time
# of reading weights, and few of its steps show `layer_s`.
PRIORS: Mapping[str, float] = {
    "compute": 0.10,
    "memory": 0.10,
    "attention": 0.15,
    "step_s": 0.15,
    "seq_s": 1.0,
    "request_s": 1.0,
    "layer_s": 0.01,
    "sync_s": 0.3,
}

# Repeated measurements of a replay on a shared CPU differ by 10 to 40 % (docs/results/simulator-cpu.md):
# their precision is lower by this factor.
CPU_UNSURE = 4.0

# No datasheet gives a CPU's efficiencies; the times belong to the engine's own code, the same everywhere.
CPU_PRIORS: Mapping[str, float] = {**PRIORS, "compute": 1.0, "memory": 0.6, "attention": 1.2, "step_s": 0.5}

_STEPS = (0.1, 0.04)  # of the logarithm, for differences: wide, to see past the jumps of discrete steps
Floats = NDArray[np.float64]

_KINDS = ("ttft", "tpot", "itl", "e2e")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What was measured of one candidate: measurement names, milliseconds."""

    candidate: Candidate
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Fitted coefficients and how well they fit. `residuals` maps kind of latency to relative RMS error."""

    coefficients: Coefficients
    residuals: Mapping[str, float]
    error: float
    trials: int
    rounds: int

    def to_json(self) -> dict[str, JSON]:
        return {
            "coefficients": dict(self.coefficients.to_json()),
            "residuals": dict(self.residuals),
            "error": self.error,
            "trials": self.trials,
            "rounds": self.rounds,
        }


class _Problem:
    """Residuals of all observations and priors as a function of the logarithms of the coefficients."""

    def __init__(self, scene: Scene, observations: Sequence[Observation], start: Coefficients) -> None:
        self.names = tuple(PRIORS)
        self.start = start
        cpu = scene.card.platform == "cpu"
        priors, self.unsure = (CPU_PRIORS, CPU_UNSURE) if cpu else (PRIORS, 1.0)
        self.widths = np.array([priors[name] for name in self.names])
        self._predictor = Predictor(scene, start, spreads=False)
        self._cases = []
        for seen in observations:
            try:
                options, _ = options_of(scene, seen.candidate)
            except StartRefused as refused:
                what = "a candidate that was measured on the real engine"
                raise BadInput(f"the simulator refuses {what}: {refused}") from None
            used = {n: v for n, v in seen.values.items() if _usable(n, v)}
            self._cases.append((options, used))

    @property
    def measured(self) -> bool:
        return any(used for _, used in self._cases)

    def coefficients(self, x: Floats) -> Coefficients:
        values = {}
        for name, log in zip(self.names, x, strict=True):
            low, high = BOUNDS[name]
            values[name] = min(high, max(low, getattr(self.start, name) * math.exp(log)))
        return Coefficients(**values)

    def errors(self, x: Floats) -> list[tuple[str, float, float]]:
        """(name, log of predicted over measured, its precision) of every value that was measured."""
        self._predictor.coefficients = self.coefficients(x)
        found = []
        for options, used in self._cases:
            predicted = self._predictor.values(options)
            for name, value in used.items():
                if 0 < (other := predicted.get(name, math.inf)) < math.inf:
                    found.append((name, math.log(other / value), _sigma(name, value)))
                else:
                    found.append((name, 2.0, _sigma(name, value)))
        return found

    def residuals(self, x: Floats) -> Floats:
        raw = [error / (sigma * self.unsure) for _, error, sigma in self.errors(x)]
        robust = [math.copysign(math.sqrt(2 * (math.hypot(1, r / 3) - 1)) * 3, r) for r in raw]
        return np.concatenate([robust, x / self.widths])


def _usable(name: str, value: float) -> bool:
    kind, _, rest = name.partition("_")
    return kind in _KINDS and rest in ("mean_ms", "p50_ms", "p90_ms", "p95_ms", "p99_ms") and 0 < value < 1e9


def _sigma(name: str, value: float) -> float:
    """Relative precision of a repeated measurement: 3 % of a time per token, 6 % and 8 ms of a
    first token."""
    kind = name.partition("_")[0]
    if kind == "ttft":
        return math.hypot(0.06, 8.0 / value)
    return {"tpot": 0.03, "itl": 0.06, "e2e": 0.04}[kind]


def fit(
    scene: Scene,
    observations: Sequence[Observation],
    *,
    start: Coefficients | None = None,
    rounds: int = 8,
) -> Calibration:
    """Coefficients that explain the observations best, within BOUNDS. BadInput when none has a latency."""
    problem = _Problem(scene, observations, start or preset(scene.card))
    if not problem.measured:
        raise BadInput("no observation with latencies to calibrate on")
    x = np.zeros(len(problem.names))
    done = 0
    for step in _STEPS:
        x, used = _descend(problem, x, step, rounds)
        done += used
    return _report(problem, x, len(observations), done)


def _descend(problem: _Problem, x: Floats, step: float, rounds: int) -> tuple[Floats, int]:
    """Damped Gauss–Newton from x with differences of `step`; where it ended, and in how many rounds."""
    current = problem.residuals(x)
    damping = 1e-2
    for number in range(rounds):
        slopes = np.empty((len(current), len(x)))
        for index in range(len(x)):
            moved = x.copy()
            moved[index] += step
            slopes[:, index] = (problem.residuals(moved) - current) / step
        before = float(current @ current)
        while damping < 1e3:
            normal = slopes.T @ slopes
            shift = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -slopes.T @ current)
            tried = x + np.clip(shift, -0.7, 0.7)
            outcome = problem.residuals(tried)
            if outcome @ outcome < before:
                x, current = tried, outcome
                damping = max(damping / 5, 1e-4)
                break
            damping *= 5
        if float(current @ current) > before * (1 - 2e-3):
            return x, number + 1
    return x, rounds


def _report(problem: _Problem, x: Floats, trials: int, rounds: int) -> Calibration:
    by_kind: dict[str, list[float]] = {}
    for name, error, _ in problem.errors(x):
        by_kind.setdefault(name.partition("_")[0], []).append(error)
    residuals = {kind: float(np.sqrt(np.mean(np.square(found)))) for kind, found in by_kind.items()}
    steps = residuals.get("tpot", residuals.get("e2e", 0.05))
    # One trial fixes few coefficients: elsewhere the steps are known less well than the fit suggests.
    error = math.hypot(steps, 0.025 / math.sqrt(trials))
    return Calibration(
        coefficients=problem.coefficients(x), residuals=residuals, error=error, trials=trials, rounds=rounds
    )
