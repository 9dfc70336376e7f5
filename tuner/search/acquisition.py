"""A predictor's proposals: the best expected gain over the measured front, while its ranking holds."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tuner.records import Candidate, Prediction, Slo, Trial, TrialState
from tuner.search import pareto, trial_view
from tuner.search.encoding import Encoding

INSTEAD = "gp-instead"
"""Origin of proposals in turns that a predictor lost; one such trial in history keeps it off."""

LIMIT = 0.3
"""Rank correlation (`trust`) of predicted with measured below which the predictor is not heard again."""

ENOUGH = 4
"""Measured trials before the ranking is judged."""

POOL = 256
"""Candidates that a predictor is asked about: all of a small space, a random part of a large one."""

LEVEL = 0.08
"""Log difference under which two measurements are level: 3 % noise on both sides, twice over."""

HEARD = 64
"""Trials, the newest, that proposals learn from beside the predictor's own calibration."""

DRAWS = 12
SAMPLES = 2048

SLOWER, OFF, REACH = (0.4, 0.6), (0.1, 0.05), 0.4
"""What may be wrong with a prediction: how much slower an engine's steps are, in units of the predictor's
error, and the log error of an objective that this leaves; each as the part that all candidates share and the
part of each, and how far the latter reaches, as a share of a knob's range."""

UNTOLD = (0.3, 0.5)
"""`OFF` where nobody predicts: of the logarithms of the objectives themselves."""

FAR = 1.5
"""Errors beyond this (a factor of 4.5) count as this: how much worse than far too bad says nothing."""

NOISES = {"full": 0.06, "estimate": 0.2}
"""Log error of a measurement beside its slowness: of a whole replay, and of one that was stopped."""

PRIOR = {True: (4.0, 0.5), False: (0.1, 0.9)}
"""Trials (that worked, that failed) which the simulator's word is taken for beforehand, by what it says: it
leaves a predicted failure a tenth of its gain, and one that works outweighs it."""

ENDED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.INFEASIBLE)

WORTHLESS = 0.005
"""Predicted gain, as a share of each objective, for which a knob is not turned."""

PACES = np.linspace(-1.0, 1.0, 21)
"""From fast to slow, in the same units."""

Matrix = NDArray[np.float64]
Predictor = Callable[[Sequence[Candidate]], Sequence[Prediction]]


def pool(encoding: Encoding, seed: int) -> list[Candidate]:
    """The study's pool, the same at every ask, so that a predictor may keep what it said."""
    if encoding.size <= POOL:
        sizes = [len(values) for values in encoding.levels]
        points = [tuple(int(i) for i in point) for point in np.ndindex(*sizes)]
    else:
        rng = np.random.default_rng(trial_view.derive(seed, 0, "pool"))
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
    scale = trial_view.scale(objectives, [1.0] * len(objectives), Slo())
    return np.array([scale.costs(trial_view.objective_values(t, objectives) or ()) for t in trials])


def _known(trials: Sequence[Trial], objectives: Sequence[str]) -> list[Trial]:
    """The trials with every objective, measured in full or estimated when they were stopped."""
    ended = (t for t in trial_view.latest(trials) if t.state in (TrialState.COMPLETE, TrialState.PRUNED))
    return [t for t in ended if _kind(t) in NOISES and trial_view.objective_values(t, objectives) is not None]


def trust(predictor: Predictor, trials: Sequence[Trial], objectives: Sequence[str]) -> float | None:
    """How well the predictor ranks what was measured, 1 = always right, 0 = by chance; None with too little.

    Kendall's rank correlation over the pairs of trials that differ by more than the noise, all objectives
    together: a pair that is level says nothing about anybody's ranking. Stopped trials count by estimate.
    """
    found = _known(trials, objectives)
    if len(found) < ENOUGH:
        return None
    predictions = list(predictor([t.candidate for t in found]))
    right, told_apart = 0.0, 0
    for index, name in enumerate(objectives):
        real = np.array([(trial_view.objective_values(t, objectives) or ())[index] for t in found])
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


def flat(values: Mapping[str, float]) -> Predictor:
    """Who knows nothing, and expects of every candidate what was measured of one. With `UNTOLD` as `off`,
    expected gains are those of a Gaussian process through what was measured.
    """
    return lambda candidates: [Prediction(values=values) for _ in candidates]


def ranked(
    predictor: Predictor,
    pool: Sequence[Candidate],
    trials: Sequence[Trial],
    *,
    encoding: Encoding,
    scale: trial_view.Scale,
    rng: np.random.Generator,
    off: tuple[float, float] = OFF,
) -> Iterator[Candidate]:
    """The pool by expected gain of hypervolume, without the hopeless."""
    gains = expected_gains(predictor, pool, trials, encoding=encoding, scale=scale, rng=rng, off=off)
    for index in np.argsort(-gains, kind="stable"):
        if gains[int(index)] <= 0:
            return
        yield pool[int(index)]


def expected_gains(
    predictor: Predictor,
    pool: Sequence[Candidate],
    trials: Sequence[Trial],
    *,
    encoding: Encoding,
    scale: trial_view.Scale,
    rng: np.random.Generator,
    off: tuple[float, float] = OFF,
) -> Matrix:
    """Expected hypervolume gain of each candidate over what is measured, on the scale of the costs."""
    if not pool:
        return np.zeros(0)
    names = scale.objectives
    seen = _known(trials, names)[-HEARD:]
    predictions = list(predictor([*(t.candidate for t in seen), *pool]))
    past, future = predictions[: len(seen)], predictions[len(seen) :]
    places = _places(encoding, [t.candidate for t in seen]), _places(encoding, pool)
    logs = _draws(list(zip(past, seen, strict=True)), future, places, names, rng, off)
    real = [trial_view.objective_values(t, names) for t in pareto.measured(trials, names)]
    costs = scale.costs(np.exp(logs)), scale.costs(np.array(real).reshape(-1, len(names)))
    gains = _gain(*costs, np.array(scale.corner), rng)
    chances = chances_to_work(predictor, trials)
    likely: Matrix = gains * np.array([chances[p.feasible] for p in future])
    return likely


def chances_to_work(predictor: Predictor, trials: Sequence[Trial]) -> dict[bool, float]:
    """How likely a candidate works that is predicted to (True) or to fail (False), by the trials so far and
    `PRIOR`: one that was predicted to fail and worked makes the next such prediction count for half.
    """
    ended = [t for t in trial_view.latest(trials) if t.state in ENDED]
    expected = predictor([t.candidate for t in ended])
    counts = {kind: list(prior) for kind, prior in PRIOR.items()}
    for trial, prediction in zip(ended, expected, strict=True):
        counts[prediction.feasible][trial.state is TrialState.INFEASIBLE] += 1
    return {kind: works / (works + fails) for kind, (works, fails) in counts.items()}


def _draws(
    past: Sequence[tuple[Prediction, Trial]],
    future: Sequence[Prediction],
    places: tuple[Matrix, Matrix],
    names: Sequence[str],
    rng: np.random.Generator,
    off: tuple[float, float],
) -> Matrix:
    """Logarithms of what candidates may measure, draw × candidate × objective.

    Unknown of a candidate is how much slower than predicted its steps are, and what is wrong beside; what was
    measured near it tells.
    """
    variances = np.array([NOISES[_kind(t)] ** 2 for _, t in past])
    paces = np.array([_slowness(p, t, names) for p, t in past]).reshape(-1, 2)
    middle, width = _field(*places, paces[:, 0], paces[:, 1] + variances, SLOWER)
    drawn = np.clip(middle + width * rng.standard_normal((DRAWS, len(future))), -1.0, 1.0)
    logs = _at_pace(np.array([_course(p, names) for p in future]), drawn)
    expected = [_at_pace(_course(p, names), np.array(z)) for (p, _), z in zip(past, paces[:, 0], strict=True)]
    with np.errstate(invalid="ignore"):
        left = [_logs(trial, names) - each for (_, trial), each in zip(past, expected, strict=True)]
    errors = np.clip(np.array(left).reshape(-1, len(names)), -FAR, FAR)
    for column in range(len(names)):
        shift, width = _field(*places, errors[:, column], variances, off)
        logs[..., column] += shift + width * rng.standard_normal((DRAWS, len(future)))
    return logs


def likely(prediction: Prediction) -> dict[str, float]:
    """The mean over an engine as predicted, one that is slower and one that is faster."""
    slow, fast = prediction.slow, prediction.fast
    return {n: (slow.get(n, v) + 2 * v + fast.get(n, v)) / 4 for n, v in prediction.values.items()}


def plain(
    predictor: Predictor, encoding: Encoding, candidate: Candidate, objectives: Sequence[str]
) -> Candidate:
    """The candidate with every knob back where the baseline has it that the predictor expects no gain of, in
    the objectives and in goodput.
    """
    names = tuple(dict.fromkeys((*objectives, "goodput_rps")))
    point, base = encoding.point(candidate), encoding.point(Candidate())
    if point is None or base is None:
        return candidate

    def expected(each: Candidate) -> list[float]:
        found = predictor([each])[0]
        return [likely(found).get(n, np.nan) if found.feasible else np.nan for n in names]

    values = expected(candidate)
    scale = trial_view.scale(names, values, Slo())
    allowed = scale.costs(values) + WORTHLESS
    for knob, level in enumerate(base):
        moved = (*point[:knob], level, *point[knob + 1 :])
        if moved != point and np.all(scale.costs(expected(encoding.candidate(moved))) <= allowed):
            point = moved
    return encoding.candidate(point)


def _course(prediction: Prediction, objectives: Sequence[str]) -> Matrix:
    """Logarithms of the objectives of a fast, the predicted and a slow engine: 3 × objective."""
    rows = (prediction.fast or prediction.values, prediction.values, prediction.slow or prediction.values)
    values = np.array([[max(row.get(name, np.inf), 1e-6) for name in objectives] for row in rows])
    logs: Matrix = np.log(values)
    return logs


def _at_pace(courses: Matrix, paces: Matrix) -> Matrix:
    """Logarithms of the objectives at a pace: courses … × 3 × objective, paces draw × … ."""
    share = np.abs(paces)[..., None]
    other = np.where(paces[..., None] < 0, courses[..., 0, :], courses[..., 2, :])
    with np.errstate(invalid="ignore"):
        found: Matrix = courses[..., 1, :] * (1 - share) + other * share
    exact: Matrix = np.where(share == 0, courses[..., 1, :], found)
    return exact


def _kind(trial: Trial) -> str:
    return trial.measurement.kind if trial.measurement else ""


def _logs(trial: Trial, objectives: Sequence[str]) -> Matrix:
    """Logarithms of what was measured (or estimated) of a trial, in order of the objectives."""
    logs: Matrix = np.log(np.maximum(trial_view.objective_values(trial, objectives) or (), 1e-6))
    return logs


def _slowness(prediction: Prediction, trial: Trial, objectives: Sequence[str]) -> tuple[float, float]:
    """(mean, variance) of how much slower than predicted a trial ran, by all its objectives together."""
    course = _course(prediction, objectives)[None]
    with np.errstate(invalid="ignore"):
        apart = _at_pace(course, PACES[:, None])[:, 0, :] - _logs(trial, objectives)
    known = np.isfinite(apart).all(axis=0)
    off = (apart[:, known] ** 2).sum(axis=1) / (2 * NOISES[_kind(trial)] ** 2)
    weight = np.exp(off.min() - off)
    mean = float(np.average(PACES, weights=weight))
    return mean, float(np.average((PACES - mean) ** 2, weights=weight))


def _places(encoding: Encoding, candidates: Sequence[Candidate]) -> Matrix:
    """Where candidates lie, every knob from 0 (its first level) to 1."""
    points = [encoding.point(c) or (0,) * len(encoding.names) for c in candidates]
    widths = np.maximum([len(values) - 1 for values in encoding.levels], 1)
    return np.array(points, np.float64).reshape(len(candidates), len(widths)) / widths


def _field(
    there: Matrix, here: Matrix, values: Matrix, variances: Matrix, parts: tuple[float, float]
) -> tuple[Matrix, Matrix]:
    """(mean, standard deviation) of a quantity `here`, by a Gaussian process through the values `there`: one
    part is common to all, one fades with the distance of the knobs.
    """
    common, own = parts

    def alike(a: Matrix, b: Matrix) -> Matrix:
        apart = ((a[:, None, :] - b[None, :, :]) ** 2).sum(axis=2)
        found: Matrix = common**2 + own**2 * np.exp(-apart / (2 * REACH**2))
        return found

    known = np.isfinite(values)
    there, values, variances = there[known], values[known], variances[known]
    across = np.linalg.solve(alike(there, there) + np.diag(variances), alike(there, here))
    left = common**2 + own**2 - (alike(there, here) * across).sum(axis=0)
    return across.T @ values, np.sqrt(np.maximum(left, 0.0))


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
    found = np.zeros(len(flat))
    may = np.all(flat <= points.max(axis=0), axis=1)
    hits = np.ones((int(may.sum()), len(points)), dtype=bool)
    for column in range(len(reference)):
        hits &= flat[may, None, column] <= points[None, :, column]
    found[may] = hits.sum(axis=1)
    shares = found.reshape(costs.shape[:2]).mean(axis=0)
    gains: Matrix = shares / SAMPLES * float(np.prod(reference - low))
    return gains
