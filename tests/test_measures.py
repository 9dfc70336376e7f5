"""What one entry in tuner/measures.py gives: an objective. The entry is the example of docs/extending.md."""

import ast
import asyncio
import itertools
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.tuning import studies
from tuner import measures
from tuner.history.store import Store
from tuner.measures import Measure, measure_of
from tuner.records import Outcome, Slo, TrialState
from tuner.report import words
from tuner.search import trial_view
from tuner.tuning.run import RunLimits, tune
from tuner.tuning.significance import compare, spread_of
from tuner.tuning.study import load, read

DOCS = Path(__file__).parent.parent / "docs" / "extending.md"
NAME = "long_wait_share"
VIRTUAL = studies.STUDY.replace("kind: simulated", "kind: simulated\n  clock: virtual")


def _now() -> datetime:
    return datetime.now(UTC)


@pytest.fixture
def entry() -> Iterator[Measure]:
    """The example of the documentation, registered as it stands there."""
    section = DOCS.read_text().partition("## An objective")[2]
    block = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert block is not None
    exec(block[1], {})
    yield measures.MEASURES[NAME]
    del measures.MEASURES[NAME]


def test_22_4_an_objective_of_one_entry_is_tuned_for_from_study_file_to_words(
    entry: Measure, tmp_path: Path
) -> None:
    path = studies.write(tmp_path, VIRTUAL + f"objectives: [{NAME}, goodput_rps]\n")
    store = Store(f"sqlite:///{tmp_path / 'tuner.db'}")
    store.upgrade()
    prepared = load(path, store=store, now=_now())
    run = asyncio.run(tune(prepared, store, home=tmp_path, limits=RunLimits(trials=4), clock=_now))
    trials = store.trials(run.study_id)
    assert [t.state for t in trials if t.is_baseline] == [TrialState.COMPLETE]
    assert len(trials) == 4
    for trial in trials:
        assert trial.measurement is not None
        assert 0.0 <= trial.measurement.values[NAME] <= 1.0
        assert NAME in trial.measurement.slices[0].values
    assert trial_view.front(trials, prepared.study.objectives)
    (conclusion,) = store.conclusions(run.study_id)
    assert all(NAME in arm.confirmed for arm in conclusion.finalists if arm.dropped is None)
    assert words.heading(NAME) == f"{NAME} (of 1, ↓ better)"
    assert words.measured(NAME, 0.25) == "0.25 of 1"


def test_an_objective_of_one_entry_is_compared_request_by_request(entry: Measure) -> None:
    def outcomes(wait_s: float) -> list[Outcome]:
        return [
            Outcome(row=i, scheduled_s=i / 4, first_token_s=i / 4 + wait_s * (i % 4), last_token_s=i / 4 + 9)
            for i in range(400)
        ]

    base, other = ([{"s": outcomes(wait)}] * 3 for wait in (0.6, 0.3))
    found = compare(base, other, NAME, spread=spread_of([[0.5, 0.5, 0.5]]))
    assert found.base == pytest.approx(0.5)
    assert (found.other, found.rows) == (0.0, 1200)
    assert found.word == "better"
    with pytest.raises(ValueError, match=NAME):
        measures.register(entry)


def test_a_name_is_no_objective_before_it_has_an_entry(tmp_path: Path) -> None:
    path = studies.write(tmp_path, VIRTUAL + f"objectives: [{NAME}]\n")
    with pytest.raises(Exception, match=f"'{NAME}' is not a measurement"):
        read(path)


def test_the_limit_of_an_entry_is_the_corner_and_one_that_is_maximised_has_none() -> None:
    names = ("interactive.ttft_p95_ms", "interactive.goodput_rps")
    scale = trial_view.scale(names, (100.0, 4.0), Slo(ttft_ms=500))
    corner = trial_view.corner_of(names, (100.0, 4.0), Slo(ttft_ms=500))
    assert corner == (500.0, 2.0)
    assert scale.maximized == {"interactive.goodput_rps"}
    assert scale.costs([100.0, 4.0]).tolist() == [1.0, -1.0]
    own = Slo(ttft_ms=500, classes={"interactive": Slo(ttft_ms=300)})
    assert trial_view.corner_of(names, (100.0, 4.0), own) == (300.0, 2.0)


def test_every_entry_has_words_and_a_unit_that_its_users_print() -> None:
    for name in measures.NAMES:
        entry = measure_of(name)
        assert entry.name == name
        assert entry.words, name
        if name.endswith("_ms"):
            assert entry.unit == "ms"
    assert measure_of("lateness_p50_ms").unit == "ms"


def test_names_are_in_the_order_of_their_entries_and_each_is_once() -> None:
    some = list(measures.MEASURES)[:3]
    names = ["chat.ttft_p95_ms", *reversed(some), "a.ttft_p95_ms", *some]
    found = measures.in_order(names)
    assert found[:-2] == some
    assert found[-2:] == ["a.ttft_p95_ms", "chat.ttft_p95_ms"]
    assert measures.in_order(names, first=[some[2], "not_measured"])[:2] == [some[2], some[0]]


COUNTED = ("request", "launch", "trial", "repeat", "run", "row", "node", "file", "time", "study", "session",
           "finding", "engine", "slice", "profile", "conversation", "day", "knob", "candidate", "answer",
           "night", "card", "GPU", "core", "preemption", "arm", "configuration", "step",
           "round", "offload file")  # fmt: skip
PLURAL = re.compile(rf" (?:{'|'.join(re.escape(measures.many(2, what)[2:]) for what in COUNTED)})\b")
NEVER_ONE = {
    "more", "need", "len(all_of_it)", "tokens / length", "used", "gpus", "count", "said.repeats", "needed",
    "repeats", "one", "word", "number(nights)", "found.duration_s / 86400", "rows / seconds", "hasty",
    "facts.num_rows", "len(trace)", "len(left)", "there", "span", "most",
}  # fmt: skip
"""What stands before a plural and is a larger number wherever the sentence is said, or no number."""


def test_5_a_count_of_one_has_no_plural() -> None:
    """`1 requests`, `1 launches`: every number that may be one goes through `many`."""
    files = Path(measures.__file__).parent.rglob("*.py")
    trees = [(path, ast.walk(ast.parse(path.read_text()))) for path in files]
    places = [(path, node) for path, tree in trees for node in tree if isinstance(node, ast.JoinedStr)]
    assert len(places) > 1000
    found = set()
    for path, node in places:
        for value, after in itertools.pairwise(node.values):
            if not isinstance(value, ast.FormattedValue) or not isinstance(after, ast.Constant):
                continue
            told = ast.unparse(value.value)
            if PLURAL.match(str(after.value)) and not told.isupper() and told not in NEVER_ONE:
                found.add((path.name, told, after.value))
    assert found == set()


def test_5_counts_are_told_with_their_noun() -> None:
    said = [
        measures.many(*each)
        for each in ((1, "request"), (1, "study"), (2, "study"), (0, "launch"), (2, "day"))
    ]
    assert said == ["1 request", "1 study", "2 studies", "0 launches", "2 days"]
    assert measures.many(12000, "request", ",.0f") == "12,000 requests"
