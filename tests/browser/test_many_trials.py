"""A study of ten thousand trials: the page opens, draws its front, and says how long that took."""

import time

import numpy as np
import pytest
from sqlalchemy import Connection, insert

from tests.browser import world
from tests.browser.site import Site
from tuner.history.rows import row_of
from tuner.history.tables import measurements, trials
from tuner.records import Candidate, Run, Trial, TrialState

pytestmark = pytest.mark.browser
TRIALS = 10_000
FIRST = 1_000_000
PAINTED = """
const done = arguments[0];
requestAnimationFrame(() => requestAnimationFrame(() => {
  const page = performance.getEntriesByType('navigation')[0];
  done([page.responseEnd - page.requestStart, performance.now() - page.responseEnd, page.decodedBodySize]);
}));
"""


def test_ten_thousand_trials(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    store, made = site.world.store, world.study("many", node="gpu-02")
    store.add_study(made)
    run = store.open_run(made.id, trials_limit=None, deadline=None, now=world.NOW, pid=None, host="gpu-02")
    _add(site, run)
    ref = f"/studies/{made.id[:16]}"
    site.get("/")
    began = time.perf_counter()
    site.get(ref)
    whole = time.perf_counter() - began
    first = site.driver.execute_async_script(PAINTED)
    site.get(ref + "?page=2")
    again = site.driver.execute_async_script(PAINTED)
    with capsys.disabled():
        print(f"\n{TRIALS} trials: opened in {whole * 1000:.0f} ms, first from the database", end="")
        for name, (server, paint, size) in (("first", first), ("again", again)):
            print(
                f"; {name}: answer {server:.0f} ms, drawn {paint:.0f} ms after it, {size / 1e3:.0f} kB",
                end="",
            )
        print()
    assert "Page 2 of 100" in site.text()
    assert len(site.all("path.dots")) == 3
    assert site.errors() == []


def _add(site: Site, run: Run) -> None:
    """All trials in one transaction, as `start_trial` and `finish_trial` would have written them."""
    rng = np.random.default_rng(1)
    made, measured = [], []
    for number in range(TRIALS):
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

    site.world.store.database.write(work)
