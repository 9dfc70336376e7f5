"""A predictor's proposals: the best expected gain over the measured front, while its ranking holds."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from tuner.records import Candidate, Prediction, Trial
from tuner.search import pareto, told
from tuner.search.encoding import Encoding

INSTEAD = "tpe-instead"
"""Origin of TPE's proposals in turns that a predictor lost; one such trial in history keeps it off."""

LIMIT = 0.3
"""Rank correlation (`trust`) of predicted with measured below which the predictor is not heard again."""

ENOUGH = 6
"""Measured trials before the ranking is judged."""

POOL = 256
"""Candidates that a predictor is asked about: all of a small space, a random part of a large one."""

LEVEL = 0.08
"""Log difference under which two measurements are level: 3 % noise on both sides, twice over."""

DRAWS = 12
SAMPLES = 2048
SPREAD = 0.10

Matrix = NDArray[np.float64]
Predictor = Callable[[Sequence[Candidate]], Sequence[Prediction]]


def pool(encoding: Encoding, seed: int) -> list[Candidate]:
    """The study's pool, the same at every ask, so that a predictor may keep what it said."""
    if encoding.size <= POOL:
        sizes = [len(values) for values in encoding.levels]
        points = [tuple(int(i) for i in point) for point in np.ndindex(*sizes)]
    else:
        rng = np.random.default_rng(told.derive(seed, 0, "pool"))
        points = [encoding.random(rng) for _ in range(POOL)]
    return list({c.digest: c for c in map(encoding.candidate, points)}.values())


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


def trust(predictor: Predictor, trials: Sequence[Trial], objectives: Sequence[str]) -> float | None:
    """How well the predictor ranks what was measured, 1 = always right, 0 = by chance; None with too little.

    Kendall's rank correlation over the pairs of trials that differ by more than the noise, all objectives
    together: a pair that is level says nothing about anybody's ranking.
    """
    found = pareto.measured(trials, objectives)
    if len(found) < ENOUGH:
        return None
    predictions = list(predictor([t.candidate for t in found]))
    right, told_apart = 0.0, 0
    for index, name in enumerate(objectives):
        real = np.array([(told.objective_values(t, objectives) or ())[index] for t in found])
        expected = np.array([p.values.get(name, np.inf) for p in predictions])
        with np.errstate(divide="ignore", invalid="ignore"):
            apart = np.log(real)[:, None] - np.log(real)[None, :]
            order = np.sign(expected[:, None] - expected[None, :])
        pairs = np.triu(np.abs(apart) > LEVEL, 1)
        right += float(np.nansum((np.sign(apart) * order)[pairs]))
        told_apart += int(pairs.sum())
    return right / told_apart if told_apart >= ENOUGH else None


def twin_key(prediction: Prediction, objectives: Sequence[str]) -> tuple[str, ...] | None:
    """Equal for candidates between which the predictor sees no difference; None where it sees a failure."""
    if not prediction.feasible:
        return None
    return tuple(f"{prediction.values.get(name, np.inf):.4g}" for name in objectives)


def ranked(
    predictor: Predictor,
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
    predictor: Predictor,
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
