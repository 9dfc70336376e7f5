"""Optuna's TPESampler, rebuilt from history for one ask. The only file that imports optuna, and lazily."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tuner.records import Trial, TrialState
from tuner.search import told
from tuner.search.encoding import Encoding, Point

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial
    from optuna.trial import Trial as OptunaTrial

STARTUP = 6
"""Told trials before TPE models anything; until then it draws at random."""


def derive(seed: int, number: int, purpose: str) -> int:
    """A 31-bit random state that depends on nothing else, the same in every process."""
    text = f"{seed}:{number}:{purpose}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 33


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One trial in the sampler's words; `values` is None for one that is still running."""

    point: Point
    values: tuple[float, ...] | None
    constraints: dict[str, float]


def tell(encoding: Encoding, trials: Sequence[Trial], scale: told.Scale) -> list[Told]:
    """History as the sampler is told it.

    COMPLETE and PRUNED with their costs (measured, or estimated); INFEASIBLE, and what has no number, at a
    filler beyond the worst that was seen; RUNNING without values; ABORTED never.
    """
    rows = []
    for trial in told.latest(trials):
        point = encoding.point(trial.candidate)
        if point is not None:
            rows.append((trial, point, _costs(trial, scale)))
    known = [tuple(c) for _, _, c in rows if c is not None and all(np.isfinite(c))]
    seen = np.array(known or [scale.reference])
    spread = np.ptp(seen, axis=0)
    filler = seen.max(axis=0) + 0.1 * np.where(spread > 0, spread, 1.0)
    found = []
    for trial, point, costs in rows:
        values = None
        if trial.state is not TrialState.RUNNING:
            values = tuple(filler if costs is None else np.where(np.isfinite(costs), costs, filler))
        found.append(Told(point=point, values=values, constraints=told.margins(trial)))
    return found


def _costs(trial: Trial, scale: told.Scale) -> np.ndarray | None:
    if trial.state not in (TrialState.COMPLETE, TrialState.PRUNED):
        return None
    values = told.objective_values(trial, scale.objectives)
    return None if values is None else scale.costs(values)


def draws(encoding: Encoding, history: Sequence[Told], seed: int, limit: int) -> Iterator[Point]:
    """Up to `limit` points that TPE proposes one after the other, each aware of those before it."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    width = len(next(h.values for h in history if h.values is not None))
    sampler = optuna.samplers.TPESampler(
        seed=seed, multivariate=True, constant_liar=True, n_startup_trials=STARTUP
    )
    study = optuna.create_study(directions=["minimize"] * width, sampler=sampler)
    space: dict[str, BaseDistribution] = {
        name: optuna.distributions.IntDistribution(0, len(values) - 1)
        for name, values in zip(encoding.names, encoding.levels, strict=True)
    }
    study.add_trials(_frozen(encoding, history, space))
    for _ in range(limit):
        asked: OptunaTrial = study.ask(space)
        yield tuple(int(asked.params[name]) for name in encoding.names)


def _frozen(
    encoding: Encoding, history: Sequence[Told], space: dict[str, "BaseDistribution"]
) -> list["FrozenTrial"]:
    import optuna

    found = []
    for row in history:
        running = row.values is None
        found.append(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState.RUNNING if running else optuna.trial.TrialState.COMPLETE,
                params=dict(zip(encoding.names, row.point, strict=True)),
                distributions=space,
                values=None if running else list(row.values or ()),
                constraints=None if running else row.constraints,
            )
        )
    return found
