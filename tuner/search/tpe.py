"""Optuna's TPESampler, rebuilt from history for one ask. The one file that imports optuna: import late."""

import copy
from collections.abc import Iterator, Sequence
from datetime import datetime

import optuna
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from tuner.search.encoding import Encoding, Point
from tuner.search.trial_view import EncodedTrial

STARTUP = 6
"""EncodedTrial trials before TPE models anything; until then it draws at random."""

EPOCH = datetime(2000, 1, 1)

optuna.logging.set_verbosity(optuna.logging.WARNING)


class _Told(FrozenTrial):
    """Never changed once told: the storage's deep copies were most of the time of an ask."""

    def __deepcopy__(self, memo: dict[int, object]) -> "_Told":
        return copy.copy(self)


def draws(encoding: Encoding, history: Sequence[EncodedTrial], seed: int, limit: int) -> Iterator[Point]:
    """Up to `limit` points that TPE proposes one after the other, each aware of those before it."""
    width = len(next(h.values for h in history if h.values is not None))
    sampler = optuna.samplers.TPESampler(
        seed=seed, multivariate=True, constant_liar=True, n_startup_trials=STARTUP
    )
    study = optuna.create_study(directions=["minimize"] * width, sampler=sampler)
    space: dict[str, BaseDistribution] = {
        name: IntDistribution(0, len(values) - 1)
        for name, values in zip(encoding.names, encoding.levels, strict=True)
    }
    study.add_trials(_frozen(encoding, history, space))
    for _ in range(limit):
        asked = study.ask(space)
        yield tuple(int(asked.params[name]) for name in encoding.names)


def _frozen(
    encoding: Encoding, history: Sequence[EncodedTrial], space: dict[str, BaseDistribution]
) -> list[FrozenTrial]:
    found: list[FrozenTrial] = []
    for row in history:
        running = row.values is None
        trial = _Told(
            number=-1,
            trial_id=-1,
            state=TrialState.RUNNING if running else TrialState.COMPLETE,
            value=None,
            values=row.values,
            datetime_start=EPOCH,
            datetime_complete=None if running else EPOCH,
            params=dict(zip(encoding.names, row.point, strict=True)),
            distributions=space,
            user_attrs={},
            system_attrs={},
            intermediate_values={},
        )
        for key, value in row.constraints.items() if not running else ():
            trial.set_constraint(key, value)
        found.append(trial)
    return found
