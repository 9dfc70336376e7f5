"""A predictor's proposals: the best expected gain over the measured front, while its ranking holds."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from tuner.records import Candidate, Prediction, Trial
from tuner.search import pareto, told

INSTEAD = "tpe-instead"
"""Origin of TPE's proposals in turns that a predictor lost; one such trial in history keeps it off."""

LIMIT = 0.3
"""Rank correlation of predicted with measured below which the predictor is not heard again."""

ENOUGH = 6
"""Measured trials before the ranking is judged."""

POOL = 96
"""Random members of the study's pool of candidates."""

DRAWS = 12
SAMPLES = 2048
SPREAD = 0.10

Matrix = NDArray[np.float64]


def leaders(trials: Sequence[Trial], objectives: Sequence[str]) -> tuple[Trial, ...]:
    """The front of everything measured in full, screened trials included; at most eight, newest first."""
    found = pareto.measured(trials, objectives)
    if not found:
        return ()
    keep = pareto.non_dominated(_costs_of(found, objectives))
    return tuple(t for t, kept in zip(found, keep, strict=True) if kept)[::-1][:8]


def _costs_of(trials: Sequence[Trial], objectives: Sequence[str]) -> Matrix:
    scale = told.scale(objectives, [1.0] * len(objectives))
    return np.array([scale.costs(told.objective_values(t, objectives) or ()) for t in trials])


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation with mean ranks for ties; 0 where either side is constant."""
    x, y = _ranks(np.asarray(a, float)), _ranks(np.asarray(b, float))
    if x.std() == 0 or y.std() == 0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])


def _ranks(values: Matrix) -> Matrix:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    means: Matrix = (ends - (counts - 1) / 2.0)[inverse]
    return means


def trust(
    predictor: Callable[[Sequence[Candidate]], Sequence[Prediction]],
    trials: Sequence[Trial],
    objectives: Sequence[str],
) -> float | None:
    """Mean rank correlation, over the objectives, of predicted with measured; None with too few trials."""
    found = pareto.measured(trials, objectives)
    if len(found) < ENOUGH:
        return None
    predictions = list(predictor([t.candidate for t in found]))
    scores = []
    for index, name in enumerate(objectives):
        real = [(told.objective_values(t, objectives) or ())[index] for t in found]
        if len(set(real)) > 1:
            scores.append(spearman([p.values.get(name, np.inf) for p in predictions], real))
    return float(np.mean(scores)) if scores else None


def ranked(
    predictor: Callable[[Sequence[Candidate]], Sequence[Prediction]],
    pool: Sequence[Candidate],
    trials: Sequence[Trial],
    *,
    scale: told.Scale,
    rng: np.random.Generator,
    cost: Callable[[Candidate], float] | None = None,
) -> Iterator[Candidate]:
    """The pool by expected gain of hypervolume (per second where a cost is given), without the hopeless."""
    gains = expected_gains(predictor, pool, trials, scale=scale, rng=rng)
    worth = [g / max(cost(c), 1e-3) if cost else g for g, c in zip(gains, pool, strict=True)]
    for index in np.argsort(-np.array(worth), kind="stable"):
        if gains[int(index)] <= 0:
            return
        yield pool[int(index)]


def expected_gains(
    predictor: Callable[[Sequence[Candidate]], Sequence[Prediction]],
    pool: Sequence[Candidate],
    trials: Sequence[Trial],
    *,
    scale: told.Scale,
    rng: np.random.Generator,
) -> Matrix:
    """Expected hypervolume gain of each candidate over what is measured, on the scale of the costs.

    Predictions are first corrected by the median ratio of measured to predicted per objective.
    """
    found = pareto.measured(trials, scale.objectives)
    predictions = list(predictor([*(t.candidate for t in found), *pool]))
    past, future = predictions[: len(found)], predictions[len(found) :]
    if not future:
        return np.zeros(0)
    ratios = [_bias(name, past, found) for name in scale.objectives]
    real = np.array([scale.costs(told.objective_values(t, scale.objectives) or ()) for t in found])
    means = np.array(
        [[p.values.get(n, np.inf) * r for n, r in zip(scale.objectives, ratios, strict=True)] for p in future]
    )
    spreads = np.array([[p.spread.get(n, SPREAD) for n in scale.objectives] for p in future])
    noise = np.exp(rng.standard_normal((DRAWS, len(scale.objectives)))[:, None, :] * spreads[None])
    costs = scale.costs(means[None] * noise)
    gains = _gain(costs, real.reshape(-1, len(scale.objectives)), np.array(scale.reference), rng)
    works = np.array([p.feasible for p in future])
    return np.where(works, gains, 0.0)


def _bias(name: str, past: Sequence[Prediction], found: Sequence[Trial]) -> float:
    ratios = []
    for prediction, trial in zip(past, found, strict=True):
        expected = prediction.values.get(name, 0.0)
        real = trial.measurement.values.get(name, 0.0) if trial.measurement else 0.0
        if 0 < expected < np.inf and 0 < real < np.inf:
            ratios.append(real / expected)
    return float(np.median(ratios)) if ratios else 1.0


def _gain(costs: Matrix, real: Matrix, reference: Matrix, rng: np.random.Generator) -> Matrix:
    """Mean over draws of the volume that only the candidate dominates; `costs` is draw × candidate × cost."""
    flat = costs.reshape(-1, costs.shape[2])
    finite = np.vstack([rows[np.all(np.isfinite(rows), axis=1)] for rows in (flat, real)])
    if not len(finite):
        return np.zeros(costs.shape[1])
    low = np.minimum(finite.min(axis=0), reference)
    points = low + rng.random((SAMPLES, len(reference))) * (reference - low)
    for row in real:
        points = points[~np.all(row <= points, axis=1)]
    if not len(points):
        return np.zeros(costs.shape[1])
    hits = np.ones((len(flat), len(points)), dtype=bool)
    for column in range(len(reference)):
        hits &= flat[:, None, column] <= points[None, :, column]
    shares = hits.sum(axis=1).reshape(costs.shape[:2]).mean(axis=0)
    gains: Matrix = shares / SAMPLES * float(np.prod(reference - low))
    return gains
