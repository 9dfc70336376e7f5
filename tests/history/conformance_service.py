"""What every Store does with the service's own rows."""

from dataclasses import replace
from datetime import timedelta

import pytest

from tests.history.records import NOW, a_launch, a_measurement, a_run, a_study, finished, start
from tuner.errors import BadInput, Conflict, NotFound
from tuner.history.entities import Schedule
from tuner.history.store import Store
from tuner.records import AliasEvent, Candidate, Profile, ProfileKey, RunState

KEY = ProfileKey(model="Qwen/Qwen2.5-7B-Instruct", target="n1", workload="chat")
MINUTE = timedelta(minutes=1)


def a_profile(store: Store, value: int = 64, key: ProfileKey = KEY) -> Profile:
    study = store.add_study(a_study())
    return store.add_profile(
        key=key,
        candidate=Candidate({"max_num_seqs": value, "enable_prefix_caching": False}),
        engine_version="0.32.0",
        gpu_class="h100-80x1",
        study_id=study.id,
        trial_id=None,
        argv=("--max-num-seqs", str(value)),
        env={"VLLM_X": "1"},
        evidence={"confirmed": True, "front": [1.5, None]},
        now=NOW,
    )


def moved(store: Store, version: int | None, *, expected: int | None) -> AliasEvent:
    return store.move_alias(KEY, "champion", version, expected=expected, actor="me", reason="why", now=NOW)


class ServiceConformance:
    """Subclasses give the fixture `store`: a Store over an empty database."""

    # Profiles and aliases

    def test_versions_count_up_and_come_back_as_they_went_in(self, store: Store) -> None:
        first, second = a_profile(store, 64), a_profile(store, 96)
        other = a_profile(store, 64, replace(KEY, target="n2"))
        assert [first.version, second.version, other.version] == [1, 2, 1]
        assert store.profile(first.id) == store.profile_version(KEY, 1) == first
        assert store.profiles() == (other, second, first)
        assert store.profiles(KEY, after=second.id) == (first,)
        assert store.profile_keys() == (KEY, replace(KEY, target="n2"))
        assert a_profile(store, 96) == second
        with pytest.raises(NotFound, match="the newest is 2"):
            store.profile_version(KEY, 3)

    def test_evidence_must_be_json(self, store: Store) -> None:
        first = a_profile(store)
        fields = {name: getattr(first, name) for name in ("key", "candidate", "engine_version", "gpu_class")}
        with pytest.raises(BadInput, match="NaN"):
            store.add_profile(
                **fields,
                study_id=first.study_id,
                trial_id=None,
                argv=(),
                env={},
                evidence={"gain": float("nan")},
                now=NOW,
            )

    def test_an_alias_moves_by_compare_and_set_and_each_move_is_an_event(self, store: Store) -> None:
        a_profile(store, 64), a_profile(store, 96)
        assert store.alias(KEY, "champion") is None
        one = moved(store, 1, expected=0)
        with pytest.raises(Conflict, match="generation 1, not 0"):
            moved(store, 2, expected=0)
        two = moved(store, 2, expected=1)
        gone = moved(store, None, expected=None)
        assert [(e.generation, e.from_version, e.to_version) for e in (one, two, gone)] == [
            (1, None, 1),
            (2, 1, 2),
            (3, 2, None),
        ]
        assert store.alias(KEY, "champion") == gone
        assert store.alias_events(KEY) == (one, two, gone)
        assert store.aliases() == ()

    def test_an_alias_is_frozen_until_it_is_free_again(self, store: Store) -> None:
        a_profile(store)
        moved(store, 1, expected=0)
        for frozen in (True, False):
            store.freeze_alias(KEY, "champion", frozen, actor="me", reason="", now=NOW)
            assert store.alias_frozen(KEY, "champion") is frozen
        assert store.alias_frozen(KEY, "challenger") is False

    def test_an_alias_points_at_a_version_that_exists(self, store: Store) -> None:
        a_profile(store)
        with pytest.raises(NotFound, match="no version 9"):
            store.move_alias(KEY, "champion", 9, expected=None, actor="me", reason="", now=NOW)
        assert store.alias_events() == ()

    # Leases

    def test_a_node_has_one_holder(self, store: Store) -> None:
        lease = store.acquire_lease("n1", "first", now=NOW, ttl_s=60)
        with pytest.raises(Conflict, match="leased to 'first'"):
            store.acquire_lease("n1", "second", now=NOW + timedelta(seconds=59), ttl_s=60)
        assert store.leases(now=NOW) == (lease,)
        assert store.release_lease(lease)
        assert not store.release_lease(lease)
        assert store.leases(now=NOW) == ()
        assert store.acquire_lease("n1", "second", now=NOW, ttl_s=60).fence == lease.fence + 1

    def test_a_heartbeat_keeps_a_lease_and_one_that_ran_out_is_lost(self, store: Store) -> None:
        lease = store.acquire_lease("n1", "first", now=NOW, ttl_s=60)
        longer = store.renew_lease(lease, now=NOW + timedelta(seconds=50), ttl_s=60)
        store.fenced(longer, lambda: NOW + timedelta(seconds=100)).prove()
        with pytest.raises(Conflict, match="ran out"):
            store.renew_lease(longer, now=NOW + timedelta(seconds=200), ttl_s=60)
        taken = store.acquire_lease("n1", "second", now=NOW + timedelta(seconds=200), ttl_s=60)
        with pytest.raises(Conflict, match="'second' now has it with fence 2"):
            store.renew_lease(longer, now=NOW + timedelta(seconds=201), ttl_s=60)
        assert not store.release_lease(longer)
        store.fenced(taken, lambda: NOW + timedelta(seconds=201)).prove()

    def test_who_lost_the_lease_cannot_write(self, store: Store) -> None:
        now = NOW
        lease = store.acquire_lease("n1", "first", now=now, ttl_s=60)
        fenced = store.fenced(lease, lambda: now)
        run = a_run(fenced, a_study())
        trial = start(fenced, run)
        now = NOW + 2 * MINUTE
        with pytest.raises(Conflict, match="ran out"):
            finished(fenced, trial)
        store.acquire_lease("n1", "second", now=now, ttl_s=60)
        with pytest.raises(Conflict, match="is lost: "):
            start(fenced, run, 1)
        assert store.trials(run.study_id) == (trial,)
        assert fenced.trials(run.study_id) == (trial,)

    # Schedules

    def test_schedules(self, store: Store) -> None:
        nightly = Schedule(
            name="nightly",
            node="n1",
            cron="0 22 * * *",
            timezone="Europe/Berlin",
            spec={"window_s": 27000, "blackout": ["2026-12-24"]},
            created_at=NOW,
        )
        store.put_schedule(nightly)
        store.put_schedule(replace(nightly, enabled=False))
        assert store.schedules() == (replace(nightly, enabled=False),)
        assert store.fire_schedule("nightly", NOW)
        assert not store.fire_schedule("nightly", NOW)
        assert not store.fire_schedule("nightly", NOW - MINUTE)
        assert store.fire_schedule("nightly", NOW + MINUTE)
        store.scheduled_run("nightly", "r1")
        assert store.schedule("nightly").last_run_id == "r1"
        store.remove_schedule("nightly")
        with pytest.raises(NotFound):
            store.schedule("nightly")

    # Tokens and audit

    def test_a_token_is_known_by_its_text_until_it_ends(self, store: Store) -> None:
        token, text = store.create_token("ci", ["read", "run"], now=NOW, expires_at=NOW + 60 * MINUTE)
        assert text not in repr(store.tokens())
        assert store.verify_token(text, now=NOW) == replace(token, last_used_at=NOW)
        assert store.tokens() == (replace(token, last_used_at=NOW),)
        assert store.verify_token(text, now=NOW + 60 * MINUTE) is None
        store.revoke_token(token.id, now=NOW + MINUTE)
        assert store.verify_token(text, now=NOW + MINUTE) is None
        with pytest.raises(NotFound):
            store.revoke_token(token.id, now=NOW + MINUTE)

    @pytest.mark.parametrize(
        "change",
        [lambda t: t[:-1], lambda t: "x" + t, lambda t: "", lambda t: t + "\x00é", lambda t: "tuner_\x00_x"],
    )
    def test_another_text_is_nobody_s(self, store: Store, change: object) -> None:
        _, text = store.create_token("ci", ["read"], now=NOW)
        assert callable(change)
        assert store.verify_token(change(text), now=NOW) is None

    def test_an_unknown_scope_names_the_nearest(self, store: Store) -> None:
        with pytest.raises(BadInput, match="did you mean 'promote'"):
            store.create_token("ci", ["promot"], now=NOW)

    def test_audit_rows_are_paged_newest_first(self, store: Store) -> None:
        for number in range(3):
            store.add_audit(
                actor="me", action="promote", target=f"v{number}", reason="", now=NOW, detail={"n": number}
            )
        newest = store.audit(limit=2)
        assert [entry.target for entry in newest] == ["v2", "v1"]
        assert [entry.detail for entry in store.audit(after=newest[-1].id)] == [{"n": 0}]

    def test_an_idempotency_key_gives_the_first_answer(self, store: Store) -> None:
        assert store.answer("k", "d1") is None
        assert store.keep_answer("k", "d1", {"run": "r1"}, now=NOW) == {"run": "r1"}
        assert store.keep_answer("k", "d1", {"run": "r2"}, now=NOW) == {"run": "r1"}
        assert store.answer("k", "d1") == {"run": "r1"}
        with pytest.raises(Conflict, match="another request"):
            store.answer("k", "d2")

    # Care

    def test_old_folders_are_found_but_not_those_of_the_best_or_of_a_profile(self, store: Store) -> None:
        study = store.add_study(a_study())
        run = a_run(store, study)
        launch = replace(a_launch(study), directory="launches/L1", ended_at=NOW + MINUTE)
        store.finish_launch(store.add_launch(launch))
        for number, value in enumerate((100.0, 50.0, 70.0, 80.0)):
            trial = replace(start(store, run, number), directory=f"trials/{number}")
            finished(store, trial, a_measurement(value, goodput=value))
        start(store, run, 9)
        store.save_run(replace(run, state=RunState.FINISHED, ended_at=NOW))
        later = NOW + timedelta(days=30)
        found = store.leftovers(later)
        assert [each.directory for each in found] == ["launches/L1", "trials/2", "trials/3"]
        assert store.leftovers(NOW) == ()
        store.forget(found)
        assert store.leftovers(later) == ()
        assert [trial.directory for trial in store.trials(study.id)] == [
            "trials/0",
            "trials/1",
            None,
            None,
            None,
        ]

    def test_old_answers_and_traces_are_forgotten(self, store: Store) -> None:
        store.keep_answer("old", "d", 1, now=NOW)
        store.keep_answer("new", "d", 2, now=NOW + MINUTE)
        assert store.forget_answers(NOW + MINUTE) == 1
        assert store.answer("new", "d") == 2
        store.add_trace("c0" * 32, "azure", "a.parquet", {}, NOW)
        store.forget_trace("c0" * 32)
        assert store.traces() == ()
