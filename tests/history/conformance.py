"""What every Store does, whatever the database: one class, inherited once per database."""

import math
from dataclasses import replace
from datetime import timedelta

import pytest

from tests.history.records import (
    NOW,
    a_conclusion,
    a_launch,
    a_measurement,
    a_run,
    a_study,
    finished,
    newest_conclusion,
    start,
)
from tuner.errors import BadInput, Conflict, NotFound
from tuner.history.store import Store
from tuner.records import (
    Candidate,
    Node,
    ProfileKey,
    RunState,
    TrialState,
    Violation,
)

KEY = ProfileKey(model="Qwen/Qwen2.5-7B-Instruct", target="n1", workload="chat")


class StoreConformance:
    """Subclasses give the fixture `store`: a Store over an empty database."""

    @pytest.fixture
    def store(self) -> Store:
        raise NotImplementedError

    # Studies and runs

    def test_a_study_comes_back_as_it_went_in(self, store: Store) -> None:
        study = store.add_study(a_study())
        assert store.study(study.id) == a_study()
        assert store.add_study(replace(study, created_at=NOW + timedelta(1))) == study

    def test_a_study_is_found_by_name_and_by_the_beginning_of_its_id(self, store: Store) -> None:
        old = store.add_study(a_study(engine="0.31.0"))
        new = store.add_study(a_study(now=NOW + timedelta(days=1)))
        assert store.study("chat") == new
        assert store.study(old.id[:12]) == old
        assert store.studies() == (new, old)

    def test_an_unknown_study_names_the_nearest(self, store: Store) -> None:
        store.add_study(a_study("chat-h100"))
        with pytest.raises(NotFound, match="did you mean 'chat-h100'"):
            store.study("chat-h10")

    def test_an_ambiguous_id_is_refused(self, store: Store) -> None:
        store.add_study(replace(a_study("one"), id="ab1"))
        store.add_study(replace(a_study("two"), id="ab2"))
        with pytest.raises(BadInput, match="more than one"):
            store.study("ab")

    def test_an_unfinished_run_is_resumed(self, store: Store) -> None:
        run = a_run(store, a_study())
        again = store.open_run(run.study_id, trials_limit=5, deadline=NOW, now=NOW, pid=18, host="there")
        assert again == replace(run, trials_limit=5, deadline=NOW, pid=18, host="there")
        assert store.runs() == (again,)

    def test_a_finished_run_is_not_resumed(self, store: Store) -> None:
        run = a_run(store, a_study())
        store.save_run(replace(run, state=RunState.FINISHED, ended_at=NOW, summary={"winner": 3}))
        later = a_run(store, a_study(), now=NOW + timedelta(days=1))
        assert later.id != run.id
        assert [each.id for each in store.runs(run.study_id)] == [later.id, run.id]
        assert store.run(run.id).summary == {"winner": 3}

    def test_a_request_to_cancel_outlives_a_save_of_the_controller(self, store: Store) -> None:
        run = a_run(store, a_study())
        store.cancel_run(run.id)
        assert store.save_run(replace(run, reason="still going")).cancel_requested
        assert store.run(run.id).cancel_requested

    def test_a_cancelled_run_whose_controller_died_is_closed_not_resumed(self, store: Store) -> None:
        run = a_run(store, a_study())
        store.cancel_run(run.id)
        assert a_run(store, a_study()).id != run.id
        assert store.run(run.id).state == RunState.CANCELLED
        with pytest.raises(Conflict, match="already ended"):
            store.cancel_run(run.id)

    def test_how_a_run_ended_is_written_once(self, store: Store) -> None:
        run = a_run(store, a_study())
        store.save_run(replace(run, state=RunState.FINISHED, ended_at=NOW))
        with pytest.raises(Conflict, match="has ended as FINISHED"):
            store.save_run(replace(run, state=RunState.FAILED, ended_at=NOW))

    # Trials and measurements

    def test_a_conclusion_comes_back_as_it_went_in(self, store: Store) -> None:
        study = a_study()
        run = a_run(store, study)
        assert store.conclusion(run.id) is None
        assert newest_conclusion(store, study.id) is None
        said = a_conclusion(run)
        store.save_run(replace(run, state=RunState.FINISHED, ended_at=NOW), said)
        assert store.conclusion(run.id) == said
        assert newest_conclusion(store, study.id) == said
        assert store.conclusions(study.id) == (said,)
        assert store.conclusions("elsewhere") == ()

    def test_a_conclusion_is_never_changed(self, store: Store) -> None:
        run = a_run(store, a_study())
        said = a_conclusion(run)
        store.save_run(run, said)
        other = a_conclusion(run, sentence="On second thought.")
        with pytest.raises(Conflict, match="never changed"):
            store.save_run(run, other)
        with pytest.raises(Conflict, match="never changed"):
            store.save_run(replace(run, state=RunState.FINISHED, ended_at=NOW), other)
        assert store.conclusion(run.id) == said
        assert store.run(run.id).state is RunState.RUNNING

    def test_conclusions_come_the_oldest_first(self, store: Store) -> None:
        study, said = a_study(), []
        for day in range(3):
            run = a_run(store, study, now=NOW + timedelta(days=day))
            said.append(a_conclusion(run, sentence=f"night {day}"))
            store.save_run(replace(run, state=RunState.FINISHED, ended_at=said[-1].at), said[-1])
        assert store.conclusions(study.id) == tuple(said)
        assert newest_conclusion(store, study.id) == said[-1]

    def test_a_trial_comes_back_as_it_went_in(self, store: Store) -> None:
        run = a_run(store, a_study())
        store.add_launch(a_launch(a_study()))
        trial = store.start_trial(
            study_id=run.study_id,
            run_id=run.id,
            candidate=Candidate({"b": True, "a": 1, "c": 0.5, "d": None, "e": "recompute"}),
            number=3,
            attempt=1,
            seed=2**64 - 1,
            origin="baseline",
            now=NOW,
            directory="trials/3",
        )
        assert store.trial(trial.id) == trial
        done = replace(
            trial,
            state=TrialState.INFEASIBLE,
            violation=Violation(kv=math.inf, oom=None, err=-0.01),
            measurements=(a_measurement(launch_id="L1", kind="partial"),),
            reason="no room\x00 for the cache \ud800",
            cause="kv",
            effective={"a": 1, "b": True},
            ended_at=NOW + timedelta(minutes=3),
            gpu_seconds=181.25,
            screened=True,
        )
        expected = replace(done, reason="no room\ufffd for the cache ?")
        assert store.finish_trial(done) == expected
        assert store.trials(run.study_id) == (expected,)
        assert store.trial(trial.id).candidate.digest == trial.candidate.digest

    def test_infinite_and_missing_stay_apart(self, store: Store) -> None:
        trial = start(store, a_run(store, a_study()))
        measured = a_measurement(values={"ttft_p95_ms": math.inf, "goodput_rps": 0.0})
        back = finished(store, trial, measured).measurements[0].values
        assert back == {"ttft_p95_ms": math.inf, "goodput_rps": 0.0}
        assert "e2e_p95_ms" not in back

    @pytest.mark.parametrize("value", [math.nan, -math.inf])
    def test_what_is_not_a_measurement_is_refused(self, store: Store, value: float) -> None:
        trial = start(store, a_run(store, a_study()))
        with pytest.raises(BadInput, match="ttft_p95_ms"):
            finished(store, trial, a_measurement(values={"ttft_p95_ms": value}))
        assert store.trial(trial.id).state == TrialState.RUNNING

    def test_a_trial_is_finished_once(self, store: Store) -> None:
        trial = start(store, a_run(store, a_study()))
        finished(store, trial, a_measurement())
        with pytest.raises(Conflict, match="already ended as COMPLETE"):
            finished(store, trial, a_measurement(), state=TrialState.ABORTED)
        assert len(store.trial(trial.id).measurements) == 1

    def test_an_attempt_exists_once(self, store: Store) -> None:
        run = a_run(store, a_study())
        start(store, run, 4)
        with pytest.raises(Conflict, match="attempt 0 of trial 4"):
            start(store, run, 4)

    def test_no_trial_starts_in_a_run_that_ended(self, store: Store) -> None:
        run = a_run(store, a_study())
        store.save_run(replace(run, state=RunState.CANCELLED, ended_at=NOW))
        with pytest.raises(Conflict, match="no trial can start"):
            start(store, run)

    def test_measurements_keep_their_order_and_are_not_doubled(self, store: Store) -> None:
        trial = start(store, a_run(store, a_study()))
        first, second = a_measurement(1.0), a_measurement(2.0, repeat=1)
        store.add_measurement(trial.id, first)
        finished(store, store.trial(trial.id), first, second)
        store.add_measurement(trial.id, a_measurement(3.0, purpose="confirm"))
        back = store.trial(trial.id)
        assert [each.values["ttft_p95_ms"] for each in back.measurements] == [1.0, 2.0, 3.0]
        assert back.measurement == second

    def test_a_measurement_of_an_unknown_launch_is_refused(self, store: Store) -> None:
        trial = start(store, a_run(store, a_study()))
        with pytest.raises(NotFound, match="launch 'never'"):
            store.add_measurement(trial.id, a_measurement(launch_id="never"))

    def test_trials_are_ordered_filtered_and_paged(self, store: Store) -> None:
        run = a_run(store, a_study())
        for number in (2, 0, 1):
            start(store, run, number)
        finished(store, store.trials(run.study_id)[1], a_measurement())
        assert [trial.number for trial in store.trials(run.study_id)] == [0, 1, 2]
        complete = store.trials(run.study_id, (TrialState.COMPLETE,))
        assert [trial.number for trial in complete] == [1]
        assert [trial.number for trial in store.trials(run.study_id, after=(0, 0), limit=1)] == [1]
        assert [trial.number for trial in store.orphans()] == [2, 0]
        assert store.orphans(host="elsewhere") == ()

    def test_a_page_goes_on_with_the_later_attempts_of_its_last_number(self, store: Store) -> None:
        run = a_run(store, a_study())
        for number, attempt in ((0, 0), (0, 1), (0, 2), (1, 0)):
            start(store, run, number, attempt=attempt)
        found = store.trials(run.study_id, after=(0, 1))
        assert [(trial.number, trial.attempt) for trial in found] == [(0, 2), (1, 0)]

    def test_trials_of_two_studies_have_numbers_of_their_own(self, store: Store) -> None:
        one, other = a_run(store, a_study("one")), a_run(store, a_study("other"))
        assert start(store, one, 0).id != start(store, other, 0).id
        assert [trial.study_id for trial in store.trials(other.study_id)] == [other.study_id]

    def test_runs_are_counted_by_state(self, store: Store) -> None:
        assert store.run_counts() == {}
        run = a_run(store, a_study("one"))
        a_run(store, a_study("other"))
        store.save_run(replace(run, state=RunState.FINISHED, ended_at=NOW))
        assert store.run_counts() == {RunState.FINISHED: 1, RunState.RUNNING: 1}

    def test_what_cannot_be_an_id_is_nobody_s(self, store: Store) -> None:
        for wrong in ("", "\x00", "ü" * 200, "%", "'; drop table studies"):
            with pytest.raises(NotFound):
                store.study(wrong)
            with pytest.raises(NotFound):
                store.run(wrong)
        for number in (-1, 2**40):
            with pytest.raises(NotFound):
                store.trial(number)
        with pytest.raises((NotFound, BadInput)):
            store.trial(2**70)

    def test_launches(self, store: Store) -> None:
        study = store.add_study(a_study())
        launch = store.add_launch(a_launch(study))
        with pytest.raises(Conflict, match="'L1'"):
            store.add_launch(launch)
        ended = replace(launch, ended_at=NOW + timedelta(minutes=1), verdict="ok")
        store.finish_launch(ended)
        assert store.launches(study.id) == (ended,)
        assert store.known_launches({"L1", "another's"}) == {"L1"}
        assert store.known_launches(()) == set()

    # Traces and nodes

    def test_traces_by_digest_name_and_beginning(self, store: Store) -> None:
        old = store.add_trace("c0" * 32, "azure", "a.parquet", {"rows": 3}, NOW)
        new = store.add_trace("d0" * 32, "azure", "b.parquet", {}, NOW + timedelta(days=1))
        assert store.trace(old.digest) == old
        assert store.trace("latest:azure") == store.trace("azure") == new
        assert store.trace("c0c0") == old
        assert store.traces() == (new, old)
        with pytest.raises(NotFound, match="did you mean 'azure'"):
            store.trace("azur")

    def test_nodes(self, store: Store) -> None:
        node = Node(name="n1", gpu_class="h100-80x1", gpus=("GPU-1",), labels={"rack": "7"})
        store.add_node(node)
        store.add_node(replace(node, driver="560.1"))
        assert store.nodes() == (replace(node, driver="560.1"),)
        assert store.set_node_state("n1", "dirty").state == store.node("n1").state == "dirty"
        with pytest.raises(NotFound, match="did you mean 'n1'"):
            store.node("n2")

    def test_the_journal_of_a_hand_over(self, store: Store) -> None:
        store.add_node(Node(name="n1", gpu_class="h100-80x1"))
        store.set_handover("n1", {"restore": ["systemctl", "start", "vllm"]})
        store.add_node(Node(name="n1", gpu_class="h100-80x1", state="draining"))
        assert store.handover("n1") == {"restore": ["systemctl", "start", "vllm"]}
        store.set_handover("n1", None)
        assert store.handover("n1") is None
