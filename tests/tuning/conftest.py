"""What the tests of this room share: the same study is simulated in many of them."""

import hashlib
import pickle
from collections.abc import Hashable, Iterator
from weakref import WeakKeyDictionary

import pytest

from tuner.simulator.options import Options
from tuner.simulator.predict import Predictor


@pytest.fixture(scope="session", autouse=True)
def simulated_once() -> Iterator[None]:
    """A predictor is a function of its scene, the coefficients and the options: each is simulated once."""
    simulated, scenes = Predictor.values, WeakKeyDictionary[Predictor, bytes]()
    known: dict[Hashable, dict[str, float]] = {}

    def values(self: Predictor, options: Options, slower: float = 1.0) -> dict[str, float]:
        if self not in scenes:
            scenes[self] = hashlib.sha256(pickle.dumps(self.scene)).digest()
        its = (options.limits, options.budget, options.ranks, options.replicas)
        key = (scenes[self], self.coefficients, *its, slower)
        if key not in known:
            known[key] = simulated(self, options, slower)
        return dict(known[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Predictor, "values", values)
        yield
