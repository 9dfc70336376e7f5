"""What runs of earlier releases said of themselves is taken over as their conclusions."""

import json
from pathlib import Path

import pytest
from sqlalchemy import text

from tests.history.released import load
from tuner.conclusions import Conclusion, Judgement
from tuner.history.database import Database
from tuner.history.store import Store

SUMMARY = {
    "verdict": "winner with a trade-off",
    "sentence": "Trial 2 against the baseline: ttft_p95_ms −48 % (−52 … −43, better).",
    "winner": 2,
    "baseline": 0,
    "finalists": [2],
    "dropped": {"1": "16 of 500 requests failed"},
    "comparisons": [
        {"number": 2, "where": "confirm", "metric": "ttft_p95_ms", "ratio": 0.52, "low": 0.48, "high": 0.57,
         "repeats": 3, "rows": 900, "verdict": "better"},
        {"number": 2, "where": "held_out", "metric": "goodput_rps", "ratio": 0.9, "low": None, "high": None,
         "repeats": 3, "rows": 900, "verdict": "no clear winner"},
        {"number": 2, "where": "confirm", "metric": "tpot_p95_ms", "ratio": 1.0, "low": 0.99, "high": 1.01,
         "repeats": 3, "rows": 900, "verdict": "equivalent"},
    ],
    "demonstration": False,
    "profiles": {"challenger": {"id": 2, "version": 2, "model": "m", "target": "n1", "workload": "chat"}},
    "drift": ["the baseline's ttft_p95_ms went up by 7% during the study"],
    "gpu_seconds": 360.0,
}  # fmt: skip


def upgraded(folder: Path, summary: object, reason: str | None = None) -> Store:
    """A history of revision 0001 whose ended run kept this summary, brought to this release."""
    old = Database(f"sqlite:///{folder / 'a.db'}")
    load(old, "0001")
    change = text("UPDATE runs SET summary = :said, reason = :why WHERE state = 'FINISHED'")
    kept = json.dumps(summary, sort_keys=True, separators=(",", ":"))
    old.write(lambda connection: connection.execute(change, {"said": kept, "why": reason}))
    old.close()
    store = Store(f"sqlite:///{folder / 'a.db'}", check=False)
    store.upgrade()
    return store


def only(store: Store) -> Conclusion:
    (said,) = store.conclusions()
    store.close()
    return said


def test_a_run_of_an_earlier_release_keeps_what_it_said(tmp_path: Path) -> None:
    said = only(upgraded(tmp_path, SUMMARY))
    assert said.outcome is Judgement.TRADE_OFF
    assert said.sentence == SUMMARY["sentence"]
    assert (said.winner, said.repeats, said.confirmed) == (2, 3, True)
    assert said.baseline is not None
    assert said.baseline.trial == 0
    best, lost = said.finalists
    assert (best.trial, lost.trial, lost.dropped) == (2, 1, "16 of 500 requests failed")
    assert best.changed == {"max_num_seqs": (64, 66)}
    better = best.change("ttft_p95_ms")
    assert better is not None
    assert better.change == pytest.approx(-0.48)
    assert (better.before, better.after, better.word) == (None, None, "better")
    held = best.change("goodput_rps", "held_out")
    assert held is not None
    assert (held.low, held.high, held.word) == (-1.0, None, "open")
    same = best.change("tpot_p95_ms")
    assert same is not None
    assert same.word == "open"
    assert said.profiles["challenger"].version == 2
    assert said.drift == ("the baseline's ttft_p95_ms went up by 7% during the study",)


@pytest.mark.parametrize(
    ("verdict", "outcome"),
    [
        ("clear winner", "clear winner"),
        ("no clear winner", "no clear winner"),
        ("winner without a baseline", "baseline failed"),
        ("no verdict", "nothing served"),
        ("not confirmed", "not confirmed"),
    ],
)
def test_each_verdict_of_earlier_releases_has_its_outcome(tmp_path: Path, verdict: str, outcome: str) -> None:
    said = only(upgraded(tmp_path, {"verdict": verdict, "sentence": "So it was."}))
    assert (said.outcome, said.sentence) == (outcome, "So it was.")
    assert said.outcome in set(Judgement)


@pytest.mark.parametrize("summary", [{}, {"gpu_seconds": 3.0, "drift": []}])
def test_a_run_that_said_nothing_is_not_confirmed(tmp_path: Path, summary: object) -> None:
    said = only(upgraded(tmp_path, summary, "its window closed"))
    assert said.outcome is Judgement.NOT_CONFIRMED
    assert "its window closed" in said.sentence
    assert said.finalists == ()
