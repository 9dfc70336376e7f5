"""Many predictions at once, over processes: `python -m tuner.simulator.batch FILE` does one share of them."""

import os
import pickle
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tuner import processes
from tuner.leftovers import scratch_prefix
from tuner.records import Candidate, Prediction
from tuner.simulator.predict import Predictor, Scene

# The fewest candidates per process: a process takes about as long to start as so many predictions.
SHARE = 8

# Processes at most, so that a large host keeps cores for others; chosen, not measured.
MOST = 8

# A share that takes longer is predicted in this process; usually it takes seconds.
TIMEOUT_S = 300.0


class Batch:
    """A predictor that spreads new candidates over processes where that is faster. It predicts the same
    values."""

    def __init__(self, predictor: Predictor, *, workers: int | None = None) -> None:
        self._predictor = predictor
        free = len(os.sched_getaffinity(0)) - 2
        self._workers = min(MOST, free) if workers is None else workers

    @property
    def scene(self) -> Scene:
        """What is fixed for all candidates."""
        return self._predictor.scene

    def __call__(self, candidates: Sequence[Candidate]) -> tuple[Prediction, ...]:
        new = self._predictor.unknown(candidates)
        workers = min(self._workers, len(new) // SHARE)
        if workers > 1:
            shares = [new[i::workers] for i in range(workers)]
            with tempfile.TemporaryDirectory(prefix=scratch_prefix()) as folder:
                paths = [Path(folder) / f"{i}" for i in range(workers)]
                with ThreadPoolExecutor(workers) as pool:
                    for share, found in zip(shares, pool.map(self._share, shares, paths), strict=True):
                        self._predictor.learn(dict(zip(share, found, strict=False)))
        return self._predictor(candidates)

    def _share(self, share: Sequence[Candidate], path: Path) -> Sequence[Prediction]:
        """One process's share; empty where that process failed: then it is done here."""
        ask = partial(Predictor, self._predictor.scene, self._predictor.coefficients)
        fresh = ask(error=self._predictor.error, spreads=self._predictor.spreads)
        path.write_bytes(pickle.dumps((fresh, [dict(c) for c in share])))
        command = (sys.executable, "-m", "tuner.simulator.batch", str(path))
        done = processes.run(command, timeout_s=TIMEOUT_S)
        if done.code != 0:
            return ()
        found: list[Prediction] = pickle.loads(path.read_bytes())
        return found


def main(path: Path) -> None:
    """Read a predictor and candidates, write the predictions in their place."""
    predictor, asked = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(list(predictor([Candidate(values) for values in asked]))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
