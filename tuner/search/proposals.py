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

COMMON, SPREAD, REACH = 0.1, 0.15, 0.4
"""Log error of the predictor that all candidates share, that each has of its own, and how far the latter
reaches, as a share of every knob's range."""

NOISE, FLOOR = 0.04, 0.02
"""Log error of one measurement, and the least that is left of a prediction's."""

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


def trusted(predictor: Predictor, trials: Sequence[Trial], objectives: Sequence[str]) -> bool:
    """Whether the predictor's ranking holds: it never failed in this study, and does not now."""
    if any(t.origin == INSTEAD for t in trials):
        return False
    found = trust(predictor, trials, objectives)
    return found is None or found >= LIMIT


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
    encoding: Encoding,
    scale: told.Scale,
    rng: np.random.Generator,
    cost: Callable[[Candidate], float] | None = None,
) -> Iterator[Candidate]:
    """The pool by expected gain of hypervolume (per second where a cost is given), without the hopeless."""
    gains = expected_gains(predictor, pool, trials, encoding=encoding, scale=scale, rng=rng)
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
    encoding: Encoding,
    scale: told.Scale,
    rng: np.random.Generator,
) -> Matrix:
    """Expected hypervolume gain of each candidate over what is measured, on the scale of the costs.

    Predictions are first corrected by what the trials near a candidate say of them (`_correction`).
    """
    found = pareto.measured(trials, scale.objectives)
    predictions = list(predictor([*(t.candidate for t in found), *pool]))
    past, future = predictions[: len(found)], predictions[len(found) :]
    if not future:
        return np.zeros(0)
    names = scale.objectives
    real = np.array([told.objective_values(t, names) or () for t in found]).reshape(-1, len(names))
    expected = np.array([[p.values.get(n, np.inf) for n in names] for p in past]).reshape(real.shape)
    means = np.array([[p.values.get(n, np.inf) for n in names] for p in future])
    spreads = np.empty_like(means)
    places = _places(encoding, [t.candidate for t in found]), _places(encoding, pool)
    for column in range(len(names)):
        with np.errstate(divide="ignore", invalid="ignore"):
            errors = np.log(real[:, column] / expected[:, column])
        shift, spreads[:, column] = _correction(errors, *places)
        means[:, column] *= np.exp(shift)
    noise = np.exp(rng.standard_normal((DRAWS, len(names)))[:, None, :] * spreads[None])
    gains = _gain(scale.costs(means[None] * noise), scale.costs(real), np.array(scale.reference), rng)
    works = np.array([p.feasible for p in future])
    return np.where(works, gains, 0.0)


def _places(encoding: Encoding, candidates: Sequence[Candidate]) -> Matrix:
    """Where candidates lie, every knob from 0 (its first level) to 1."""
    points = [encoding.point(c) or (0,) * len(encoding.names) for c in candidates]
    widths = np.maximum([len(values) - 1 for values in encoding.levels], 1)
    return np.array(points, np.float64).reshape(len(candidates), len(widths)) / widths


def _correction(errors: Matrix, there: Matrix, here: Matrix) -> tuple[Matrix, Matrix]:
    """(log correction, its standard deviation) of predictions `here`, by a Gaussian process through the log
    errors of the predictions `there`: one part is common to all, one fades with the distance of the knobs.
    """
    usable = np.isfinite(errors)
    there, errors = there[usable], errors[usable]

    def alike(a: Matrix, b: Matrix) -> Matrix:
        apart = ((a[:, None, :] - b[None, :, :]) ** 2).sum(axis=2)
        found: Matrix = COMMON**2 + SPREAD**2 * np.exp(-apart / (2 * REACH**2))
        return found

    prior = COMMON**2 + SPREAD**2
    if not len(errors):
        return np.zeros(len(here)), np.full(len(here), SPREAD)
    across = np.linalg.solve(alike(there, there) + NOISE**2 * np.eye(len(there)), alike(there, here))
    left = prior - (alike(there, here) * across).sum(axis=0)
    return across.T @ errors, np.sqrt(np.maximum(left, FLOOR**2))


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
