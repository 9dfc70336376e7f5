"""A study of ten thousand trials, written at once."""

import numpy as np
from sqlalchemy import Connection, insert

from tests.browser import world
from tuner.history.base import row_of
from tuner.history.store import Store
from tuner.history.tables import measurements, trials
from tuner.records import Candidate, Run, Trial, TrialState

TRIALS = 10_000
FIRST = 1_000_000


def add_trials(store: Store, run: Run, count: int = TRIALS) -> None:
    """All trials in one transaction, as `start_trial` and `finish_trial` would have written them."""
    rng = np.random.default_rng(1)
    made, measured = [], []
    for number in range(count):
        sequences, tokens = int(rng.integers(4, 512)), int(rng.integers(256, 8192))
        values = world.numbers(sequences, tokens)
        noisy = {name: value * rng.lognormal(0, 0.03) for name, value in values.items()}
        trial = Trial(
            id=FIRST + number, study_id=run.study_id, run_id=run.id, number=number, seed=number,
            candidate=Candidate({"max_num_seqs": sequences, "max_num_batched_tokens": tokens}),
            origin="baseline" if number == 0 else "tpe", state=TrialState.COMPLETE, gpu_seconds=140.0,
            started_at=run.started_at, ended_at=run.started_at,
        )  # fmt: skip
        made.append(row_of(trial, "measurements"))
        measured.append({**row_of(world.measured(noisy)), "trial_id": trial.id})

    def work(connection: Connection) -> None:
        connection.execute(insert(trials), made)
        connection.execute(insert(measurements), measured)

    store.database.write(work)
