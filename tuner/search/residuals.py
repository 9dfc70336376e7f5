"""What is not known of an objective: a Gaussian process of what a prediction got wrong, averaged by evidence.

A hypothesis is a mean (the simulator's, or flat: nothing is predicted), how far the truth lies from it, and
how far along the knobs that error reaches. Each is weighted by how likely it makes what was measured (its
marginal likelihood), so a simulator that is wrong about an objective loses its say about it by degrees, and
no other.
"""

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SCALES = (0.06, 0.15, 0.4, 1.0)
"""How far the truth lies from a mean (one standard deviation, of a log latency): from the noise to anything.
"""
LENGTHS = (0.3, 1.0)
"""How far an error reaches, as a share of a knob's range."""
LESSER = (1.0, 0.3)
"""How much knobs other than the leading ones count in a distance: as much, or little."""
COMMON, SINGLE = 0.2, 0.5
"""Shares of an error's variance: what all candidates have alike, and what is the sum of each knob's own."""
FLAT = 0.1
"""How likely the flat mean is before anything but the baseline was measured, where there is another."""

Matrix = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mixture:
    """One objective at `n` places under `h` hypotheses: `weights` h, `mean` and `deviation` h × n.

    `say` is the weight of those that rest on a prediction, from 0 to 1.
    """

    weights: Matrix
    mean: Matrix
    deviation: Matrix
    say: float

    def draw(self, count: int, rng: np.random.Generator) -> Matrix:
        """Values of every place, count × n: hypotheses as often as they are likely."""
        at = (np.arange(count) + rng.random()) / count
        chosen = np.minimum(np.searchsorted(np.cumsum(self.weights), at), len(self.weights) - 1)
        shape = (count, self.mean.shape[1])
        drawn: Matrix = self.mean[chosen] + self.deviation[chosen] * rng.standard_normal(shape)
        return drawn


def mixture(
    there: Matrix,
    here: Matrix,
    values: Matrix,
    variances: Matrix,
    means: list[tuple[Matrix, Matrix]],
    leading: NDArray[np.bool_],
) -> Mixture:
    """An objective `here` (p × knobs), by its `values` (n) `there` (n × knobs), measured with `variances`.

    `means` are predictions as (there, here); flat is the baseline's value, which is 0. `leading` marks the
    knobs that matter most.
    """
    whole = [*means, (np.zeros(len(values)), np.zeros(len(here)))]
    prior = [(1 - FLAT) / len(means)] * len(means) + [FLAT] if means else [1.0]
    logs, centres, widths = [], [], []
    for length, lesser in itertools.product(LENGTHS, LESSER):
        stretch = np.where(leading, 1.0, lesser) / length
        near, across = _alike(there * stretch, there * stretch), _alike(there * stretch, here * stretch)
        for scale in SCALES:
            factor = np.linalg.cholesky(scale**2 * near + np.diag(variances))
            solved = np.linalg.solve(factor, scale**2 * across)
            width = np.sqrt(np.maximum(scale**2 - (solved**2).sum(axis=0), 0.0))
            for chance, (past, future) in zip(prior, whole, strict=True):
                errors = np.linalg.solve(factor, values - past)
                logs.append(np.log(chance) - 0.5 * errors @ errors - np.log(np.diag(factor)).sum())
                centres.append(future + errors @ solved)
                widths.append(width)
    weights = np.exp(np.array(logs) - max(logs))
    weights /= weights.sum()
    say = 1.0 - float(weights[len(means) :: len(whole)].sum()) if means else 0.0
    return Mixture(weights=weights, mean=np.array(centres), deviation=np.array(widths), say=say)


def _alike(a: Matrix, b: Matrix) -> Matrix:
    """How alike errors at places are, 1 = the same: what all share, each knob's own, the rest."""
    apart = (a[:, None, :] - b[None, :, :]) ** 2
    single = np.exp(-apart / 2).mean(axis=2)
    found: Matrix = COMMON + SINGLE * single + (1 - COMMON - SINGLE) * np.exp(-apart.sum(axis=2) / 2)
    return found
