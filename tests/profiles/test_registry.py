"""What may be published, promoted, rolled back and resolved."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.history.records import NOW, a_measurement, a_run, a_study, finished, start
from tuner.errors import Conflict, NotFound
from tuner.history.store import Store
from tuner.profiles import registry
from tuner.profiles.registry import NO_GATES, Gates
from tuner.records import JSON, Node, Profile, Study

MODEL = "Qwen/Qwen2.5-7B-Instruct"
GOOD: dict[str, JSON] = {"confirmed": True, "slo_met": True}
WORSE: dict[str, JSON] = {
    "not_worse": {"ttft_p95_ms": 0.1},
    "changes": [
        {"metric": "ttft_p95_ms", "where": "confirm", "change": 0.3, "word": "worse"},
        {"metric": "tpot_p95_ms", "where": "confirm", "change": 0.9, "word": "worse"},
    ],
}
HELD_OUT: dict[str, JSON] = {
    "not_worse": {"goodput_rps": 0.1},
    "changes": [
        {"metric": "goodput_rps", "where": "confirm", "change": -0.05, "word": "open"},
        {"metric": "goodput_rps", "where": "held_out", "change": -0.2, "word": "worse"},
    ],
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path}/tuner.db")
    yield store
    store.close()


def published(
    store: Store, number: int, *, study: Study | None = None, confirmed: bool = True, now: datetime = NOW
) -> Profile:
    study = study or a_study()
    run = a_run(store, study)
    trial = finished(store, start(store, run, number), a_measurement())
    return registry.publish(
        store,
        study=study,
        trial=trial,
        argv=("--max-num-seqs", str(64 + number)),
        env={},
        evidence={"confirmed": confirmed, "slo_met": True},
        now=now,
    )


def champion(store: Store, profile: Profile) -> None:
    registry.promote(store, profile, actor="me", reason="night", now=NOW)


def test_the_winner_becomes_the_next_version_and_the_challenger(store: Store) -> None:
    first, second = published(store, 0), published(store, 1)
    assert (first.version, second.version) == (1, 2)
    assert second.evidence["trace_digest"] == "a" * 64
    assert second.evidence["values"] == {"goodput_rps": 3.5, "ttft_p95_ms": 120.0}
    found = registry.resolve(store, model=MODEL, workload="chat", node="n1", alias="challenger")
    assert found.profile == second
    assert store.alias(second.key, "champion") is None


def test_publishing_the_same_again_changes_nothing(store: Store) -> None:
    profile = published(store, 0)
    again = store.add_profile(
        **{name: getattr(profile, name) for name in ("key", "candidate", "engine_version", "gpu_class")},
        **{name: getattr(profile, name) for name in ("study_id", "trial_id", "argv", "env", "evidence")},
        now=NOW + timedelta(hours=1),
    )
    assert again == profile


@pytest.mark.parametrize(
    ("evidence", "gates", "told"),
    [
        ({"slo_met": True}, Gates(), "not confirmed$"),
        ({"slo_met": True, "demonstration": True}, Gates(), "not confirmed .*demonstration"),
        ({"confirmed": True}, Gates(), "did not meet the SLO"),
        ({**GOOD, **WORSE}, Gates(), r"its ttft_p95_ms is \+30%, worse than the 10% of not_worse"),
        ({**GOOD, **HELD_OUT}, Gates(), r"its goodput_rps is -20% on the held-out slice"),
        (GOOD, Gates(engine_version="0.33.0"), "engine 0.32.0, not 0.33.0"),
        (GOOD, Gates(max_age=timedelta(days=1)), "older than 1 day$"),
    ],
)
def test_gates(store: Store, evidence: dict[str, JSON], gates: Gates, told: str) -> None:
    profile = replace(published(store, 0), evidence=evidence)
    later = NOW + timedelta(days=2)
    assert registry.gate_failures(profile, NO_GATES, now=later) == ()
    with pytest.raises(Conflict, match=told):
        registry.promote(store, profile, gates=gates, actor="me", reason="", now=later)
    assert store.alias(profile.key, "champion") is None


def test_a_move_that_saw_an_older_state_is_refused(store: Store) -> None:
    first, second = published(store, 0), published(store, 1)
    registry.promote(store, first, expected=0, actor="a", reason="", now=NOW)
    with pytest.raises(Conflict, match="generation 1, not 0"):
        registry.promote(store, second, expected=0, actor="b", reason="", now=NOW)
    event = registry.promote(store, second, expected=1, actor="b", reason="", now=NOW)
    assert (event.generation, event.from_version, event.to_version) == (2, 1, 2)


def test_rollback_goes_one_further_back_each_time(store: Store) -> None:
    for number in range(3):
        champion(store, published(store, number))
    key = store.profiles()[0].key
    back = [registry.rollback(store, key, actor="me", reason="slow", now=NOW).to_version for _ in range(2)]
    assert back == [2, 1]
    with pytest.raises(Conflict, match="no version before 1"):
        registry.rollback(store, key, actor="me", reason="slow", now=NOW)
    moves = [(event.from_version, event.to_version) for event in store.alias_events(key, alias="champion")]
    assert moves == [(None, 1), (1, 2), (2, 3), (3, 2), (2, 1)]


def test_an_alias_moves_no_earlier_than_what_it_follows(store: Store) -> None:
    """A run on the virtual clock makes its profile later than the host's time."""
    first, second, before = published(store, 1), published(store, 2), NOW - timedelta(hours=1)
    for each in (first, second):
        event = registry.promote(store, each, actor="me", reason="night", now=before)
        assert event.at == each.created_at == NOW
    assert registry.rollback(store, first.key, actor="me", reason="worse", now=before).at == NOW


def test_the_moves_of_an_alias_are_told_in_their_order(store: Store) -> None:
    """An older version is promoted after one that a virtual clock made later than the host's time."""
    old, late = published(store, 1), published(store, 2, now=NOW + timedelta(hours=1))
    for each in (late, old):
        registry.promote(store, each, actor="me", reason="", now=NOW)
    registry.rollback(store, old.key, actor="me", reason="worse", now=NOW)
    store.freeze_alias(old.key, "champion", True, actor="me", reason="release", now=NOW)
    at = [event.at for event in store.alias_events(old.key, alias="champion")]
    assert at == [late.created_at] * 4


def test_a_frozen_alias_does_not_move(store: Store) -> None:
    first, second = published(store, 0), published(store, 1)
    champion(store, first)
    store.freeze_alias(first.key, "champion", True, actor="me", reason="release", now=NOW)
    with pytest.raises(Conflict, match="frozen"):
        champion(store, second)
    store.freeze_alias(first.key, "champion", False, actor="me", reason="over", now=NOW)
    champion(store, second)
    assert registry.resolve(store, model=MODEL, workload="chat", node="n1").profile == second


def test_nothing_there_is_told_apart_from_not_for_you(store: Store) -> None:
    champion(store, published(store, 0))
    with pytest.raises(NotFound, match="did you mean 'champion'"):
        registry.resolve(store, model=MODEL, workload="chat", node="n1", alias="champoin")
    with pytest.raises(NotFound):
        registry.resolve(store, model=MODEL, workload="batch", node="n1")
    with pytest.raises(Conflict, match=r"engine 0\.32\.0, not 0\.33\.0"):
        registry.resolve(store, model=MODEL, workload="chat", node="n1", engine_version="0.33.0")
    assert registry.resolve(store, model=MODEL, workload="chat", node="n1", engine_version="0.32.0+cpu")
    store.add_node(Node(name="n1", gpu_class="a100-80x1"))
    with pytest.raises(Conflict, match="GPU class h100-80x1, not a100-80x1"):
        registry.resolve(store, model=MODEL, workload="chat", node="n1")


def test_a_class_profile_is_served_only_when_asked_for(store: Store) -> None:
    profile = published(store, 0)
    by_class = store.add_profile(
        key=replace(profile.key, target="h100-80x1"),
        candidate=profile.candidate,
        engine_version=profile.engine_version,
        gpu_class=profile.gpu_class,
        study_id=profile.study_id,
        trial_id=profile.trial_id,
        argv=profile.argv,
        env=profile.env,
        evidence=GOOD,
        now=NOW,
    )
    champion(store, by_class)
    with pytest.raises(NotFound):
        registry.resolve(store, model=MODEL, workload="chat", node="n2")
    found = registry.resolve(store, model=MODEL, workload="chat", node="n2", gpu_class="h100-80x1")
    assert (found.profile, found.matched) == (by_class, "class")


def test_the_validator_changes_with_alias_content_and_format(store: Store) -> None:
    first, second = published(store, 0), published(store, 1)
    tags = set()
    for profile in (first, second, first):
        champion(store, profile)
        found = registry.resolve(store, model=MODEL, workload="chat", node="n1")
        tags |= {found.etag("args"), found.etag("json")}
    assert len(tags) == 6


def test_stale_names_what_changed(store: Store) -> None:
    store.add_node(Node(name="n1", gpu_class="h100-80x1", driver="550.1"))
    profile = published(store, 0)
    assert registry.stale_reasons(profile, node=store.node("n1"), engine_version="0.32.0") == ()
    other = Node(name="n1", gpu_class="h200-141x1", driver="560.1")
    reasons = registry.stale_reasons(profile, node=other, engine_version="0.33.0", trace_digest="c" * 64)
    assert reasons == (
        "engine 0.32.0 → 0.33.0",
        "GPU h100-80x1 → h200-141x1",
        "driver 550.1 → 560.1",
        "traffic: another trace",
    )


def test_diff_names_knobs_engine_and_traffic(store: Store) -> None:
    first = published(store, 0)
    second = published(store, 1, study=replace(a_study(engine="0.33.0"), trace_digest="c" * 64))
    told = [
        (change.kind, change.name, change.before, change.after) for change in registry.diff(first, second)
    ]
    assert told == [
        ("engine", "version", "0.32.0", "0.33.0"),
        ("traffic", "trace", "a" * 12, "c" * 12),
        ("knob", "max_num_seqs", "64", "65"),
    ]
    assert registry.diff(first, first) == ()


UNJUDGED: list[tuple[dict[str, JSON], bool, bool]] = [
    ({"unjudged": ["kv_cache_dtype"], "quality": "on"}, False, True),
    ({"unjudged": ["kv_cache_dtype"], "quality": "off"}, True, True),
    ({"unjudged": []}, True, False),
    ({}, False, True),  # published by an older release, which did not say
    ({"values": {"token_agreement": 1.0}}, True, False),
    ({"origin": "baseline"}, True, False),
]


@pytest.mark.parametrize(("said", "passes", "told"), UNJUDGED)
def test_M20_what_was_not_judged_is_promoted_only_where_the_study_said_so_and_says_it(
    store: Store, said: dict[str, JSON], passes: bool, told: bool
) -> None:
    study = a_study()
    run = a_run(store, study)
    trial = start(store, run, 0)
    trial = finished(store, trial, a_measurement())
    trial = replace(trial, candidate=trial.candidate.with_values(kv_cache_dtype="fp8"))
    profile = registry.publish(
        store, study=study, trial=trial, argv=(), env={}, evidence={**GOOD, **said}, now=NOW
    )  # fmt: skip
    if not passes:
        with pytest.raises(Conflict, match="its answers were not judged, although it changes kv_cache_dtype"):
            champion(store, profile)
    gates = registry.Gates() if passes else NO_GATES
    moved = registry.promote(store, profile, gates=gates, actor="me", reason="night", now=NOW)
    assert moved.reason == "night" + told * " (its answers were not judged: kv_cache_dtype)"
