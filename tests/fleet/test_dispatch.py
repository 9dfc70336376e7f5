"""What a cluster's nodes are given to do, without a cluster: choice, the worker, and what siblings share."""

import asyncio
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.history.records import NOW, a_measurement, a_study
from tests.tuning.studies import tuner, write
from tuner import processes
from tuner.adapters import adapter_of
from tuner.errors import (
    Aborted,
    BadInput,
    Conflict,
    Infeasible,
    NotFound,
    StudyFailed,
    TunerError,
    Unavailable,
    UnsupportedKnob,
)
from tuner.fleet import dispatch
from tuner.fleet.dispatch_ray import Member, connect
from tuner.fleet.node_worker import Done, NodeWorker
from tuner.fleet.nodes import selector
from tuner.history.store import Store
from tuner.records import JSON, Candidate, Fidelity, Launch, Node, Violation
from tuner.tuning.context import Cores, LaunchJob, News, Pass, Serving
from tuner.tuning.study import Prepared, StudyFile, load, read
from tuner.tuning.trial import GateFailed, LimitsRefused, launch_spec


def a_member(name: str, gpus: int = 2, **labels: str) -> Member:
    return Member(ray_id=name, name=name, host=f"host-{name}", gpus=gpus, labels=labels)


HEAD = a_member("head", gpus=0)
CLUSTER = (HEAD, a_member("large", gpu="a100-80"), a_member("small", gpu="a4500"))


@pytest.fixture
def file(tmp_path: Path) -> StudyFile:
    return read(write(tmp_path))


def names(members: Sequence[Member]) -> list[str]:
    return [member.name for member in members]


def test_without_a_selector_the_nodes_with_gpus_are_meant(file: StudyFile) -> None:
    assert names(dispatch.choose(CLUSTER, selector([]), (), file)) == ["large", "small"]
    assert names(dispatch.choose((HEAD,), selector([]), (), file)) == ["head"]
    assert names(dispatch.choose(CLUSTER, selector(["name=head"]), (), file)) == ["head"]


def test_a_node_is_known_by_the_class_that_it_was_registered_with(file: StudyFile) -> None:
    known = [Node(name="large", gpu_class="h100-80x2"), Node(name="small", gpu_class="rtx-a4500-20x2")]
    bare = (a_member("large"), a_member("small"))
    assert names(dispatch.choose(bare, selector(["gpu=h100"]), known, file)) == ["large"]
    assert names(dispatch.choose(bare, selector(["class=rtx-a4500-20x2"]), known, file)) == ["small"]


def test_a_study_that_needs_more_gpus_than_a_node_has_is_refused_before_anything_starts(
    file: StudyFile,
) -> None:
    engine = file.engine.model_copy(update={"args": {"tensor_parallel_size": 2, "pipeline-parallel-size": 2}})
    wide = file.model_copy(update={"engine": engine})
    assert dispatch.needed_gpus(wide) == 4
    with pytest.raises(BadInput, match="node large has 2 GPUs in the cluster, the study needs 4"):
        dispatch.choose(CLUSTER, selector(["gpu=a100"]), (), wide)


def test_a_study_that_names_its_node_is_not_for_many(file: StudyFile) -> None:
    with pytest.raises(BadInput, match="remove `node` from the study file"):
        dispatch.choose(CLUSTER, selector([]), (), file.model_copy(update={"node": "large"}))


def test_a_simulated_engine_is_the_card_of_its_node(file: StudyFile) -> None:
    assert dispatch.engine_of(file, a_member("x", gpu="a4500")).engine.card == "a4500"
    assert dispatch.engine_of(file, a_member("x")).engine.card == file.engine.card
    assert dispatch.engine_of(file, a_member("x", gpus=4, gpu="a4500")).engine.cards == 4


ERRORS: Sequence[TunerError] = (
    Infeasible("too big", cause="kv", evidence="line", violation=Violation(kv=0.3)),
    Aborted("no port", cause="port"),
    StudyFailed("no model", cause="model_missing", evidence="404"),
    GateFailed(replace(a_measurement(), fidelity=Fidelity(failed=("late",)))),
    BadInput("wrong"),
    UnsupportedKnob("no such knob"),
    NotFound("nothing"),
    Conflict("held"),
    Unavailable("disk"),
)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_crosses_machines_whole(error: TunerError) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), str(back), back.exit_code) == (type(error), str(error), error.exit_code)
    for name in ("cause", "evidence", "violation", "measurement"):
        assert getattr(back, name, None) == getattr(error, name, None)


def test_what_a_worker_is_handed_can_cross_machines(tmp_path: Path) -> None:
    prepared = load(write(tmp_path), store=None, now=datetime.now(UTC))
    back: Prepared = pickle.loads(pickle.dumps(prepared))
    assert back.study == prepared.study
    assert back.trace.digest == prepared.trace.digest


def test_a_study_whose_replays_do_not_take_turns_is_another_study() -> None:
    study = a_study()
    assert dispatch.marked(study, False) is study
    marked = dispatch.marked(study, True)
    assert marked.id != study.id
    assert marked.identity == {**study.identity, "isolated": True}


async def heard(worker: NodeWorker) -> list[News | Done]:
    """All news of an order, to its end."""
    news: list[News | Done] = []
    while not news or not isinstance(news[-1], Done):
        news += await worker.news(len(news))
    return news


async def at_work(folder: Path, *, isolated: bool = False) -> tuple[NodeWorker, Prepared]:
    """A worker that was handed the tiny study, as a cluster's node would be."""
    prepared = load(write(folder), store=None, now=datetime.now(UTC))
    worker = NodeWorker()
    seen = await worker.look("n1", prepared.file.engine, str(folder), {"zone": "east"})
    assert seen.surveyed is not None
    assert (seen.surveyed.node.name, seen.surveyed.node.labels) == ("n1", {"zone": "east"})
    await worker.set_up(prepared, {}, isolated)
    return worker, prepared


def an_order(prepared: Prepared, folder: Path, **knobs: int) -> LaunchJob:
    spec = launch_spec(
        prepared, Candidate(knobs), folder / "of the controller", Cores(engine=None, sender=None)
    )
    return LaunchJob(spec=spec, passes=(Pass(slices=prepared.study.slices),), number=0)


@pytest.mark.slow
def test_a_worker_does_an_order_and_hands_back_records_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNER_HOME", str(tmp_path / "node"))

    async def work() -> list[News | Done]:
        worker, prepared = await at_work(tmp_path, isolated=True)
        await worker.begin(an_order(prepared, tmp_path, max_num_seqs=16))
        return await heard(worker)

    *news, done = asyncio.run(work())
    assert isinstance(done, Done)
    assert done.error is None
    (measured,) = done.measured
    assert measured.measurement.values["requests"] > 0
    assert any(each.startswith("isolated: ") for each in measured.measurement.fidelity.warnings)
    (row,) = measured.measurement.slices
    assert Path(row.outcomes_file or "").name in done.files
    assert b"max_num_seqs" in done.files["engine.log"]
    assert [each.effective["max_num_seqs"] for each in news if isinstance(each, Serving)] == [16]
    assert any("replaying" in each for each in news if isinstance(each, str))
    assert not list((tmp_path / "node" / "work").iterdir())
    assert not (tmp_path / "of the controller").exists()


def test_a_worker_tells_what_a_candidate_did_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNER_HOME", str(tmp_path / "node"))

    async def work() -> Done:
        worker, prepared = await at_work(tmp_path)
        await worker.begin(an_order(prepared, tmp_path, max_num_seqs=16, max_num_batched_tokens=8))
        done = (await heard(worker))[-1]
        assert isinstance(done, Done)
        return done

    done = asyncio.run(work())
    assert isinstance(done.error, Infeasible)
    assert "max_num_batched_tokens" in str(done.error)
    assert "engine.log" in done.files


def test_stopping_a_worker_leaves_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNER_HOME", str(tmp_path / "node"))

    async def work() -> str:
        worker, prepared = await at_work(tmp_path)
        order = an_order(prepared, tmp_path, max_num_seqs=16)
        await worker.begin(order)
        news = list(await worker.news(0))
        while not any(isinstance(each, Serving) for each in news):
            news += await worker.news(len(news))
        assert processes.tagged(order.spec.launch_id)
        await worker.stop()
        return order.spec.launch_id

    assert processes.tagged(asyncio.run(work())) == []


async def done_by(worker: NodeWorker, order: LaunchJob) -> Done:
    """The end of an order."""
    await worker.begin(order)
    done = (await heard(worker))[-1]
    assert isinstance(done, Done)
    return done


def staying(prepared: Prepared, folder: Path) -> tuple[LaunchJob, LaunchJob]:
    """An order that launches an engine whose limits can change, and one that measures others in it."""
    order = an_order(prepared, folder, max_num_seqs=16, max_num_batched_tokens=512)
    changing = adapter_of("simulated").live_limits
    assert changing is not None
    spec = replace(order.spec, argv=(*order.spec.argv, *changing.argv))
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 256}
    launch = replace(order, spec=spec, passes=(), stay=True)
    return launch, replace(order, spec=spec, stay=True, limits=limits)


@pytest.mark.slow
def test_M8_a_worker_measures_with_other_limits_in_an_engine_that_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNER_HOME", str(tmp_path / "node"))

    async def work() -> None:
        worker, prepared = await at_work(tmp_path)
        launch, measure = staying(prepared, tmp_path)
        tag = launch.spec.launch_id
        assert (await done_by(worker, launch)).error is None
        engine = {process.pid for process in processes.tagged(tag)}
        assert engine
        for number in (1, 2):
            done = await done_by(worker, replace(measure, number=number))
            assert done.error is None
            (measured,) = done.measured
            assert measured.measurement.values["requests"] > 0
            assert list(done.files) == [Path(measured.measurement.slices[0].outcomes_file or "").name]
        assert {process.pid for process in processes.tagged(tag)} == engine
        assert await worker.holds(tag)
        refused = await done_by(worker, replace(measure, limits={"max_num_seqs": 32}))
        assert isinstance(refused.error, LimitsRefused), "more than it was launched with"
        log = (await worker.release())["engine.log"]
        assert b"max_num_seqs" in log
        assert processes.tagged(tag) == []
        assert not await worker.holds(tag)
        gone = await done_by(worker, measure)
        assert isinstance(gone.error, Aborted)
        assert gone.error.cause == "stopped"
        assert not list((tmp_path / "node" / "work").iterdir())

    asyncio.run(work())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stop", "idle", "another order"])
def test_M8_an_engine_that_stays_ends_with_its_run_or_when_its_controller_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("TUNER_HOME", str(tmp_path / "node"))
    monkeypatch.setattr("tuner.fleet.node_worker.IDLE_S", 0.2 if how == "idle" else 300.0)

    async def work() -> None:
        worker, prepared = await at_work(tmp_path)
        launch, _ = staying(prepared, tmp_path)
        assert (await done_by(worker, launch)).error is None
        if how == "stop":
            await worker.stop()
        elif how == "another order":
            await done_by(worker, an_order(prepared, tmp_path, max_num_seqs=16))
        while how == "idle" and processes.tagged(launch.spec.launch_id):
            await asyncio.sleep(0.1)
        assert processes.tagged(launch.spec.launch_id) == []
        assert not await worker.holds(launch.spec.launch_id)

    asyncio.run(work())


def test_a_worker_ends_what_dead_controllers_left_behind_doors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNER_HOME", str(tmp_path / "node"))
    dead = {"one": ("sh", "-c", f"echo {{tag}} >> {tmp_path}/asked"), "two": ("/no/such/stop",), "three": ()}

    async def work() -> tuple[str, ...]:
        worker, prepared = await at_work(tmp_path)
        return await worker.set_up(prepared, dead)

    (problem,) = asyncio.run(work())
    assert "/no/such/stop" in problem
    assert (tmp_path / "asked").read_text() == "one\n"


def test_what_was_left_open_on_a_node_is_told_with_what_stops_it(store: Store) -> None:
    """Of every study of the node, not of the one alone that is tuned there now."""
    stop: list[JSON] = ["docker", "kill", "tuner-{tag}"]
    old, now = replace(a_study("old"), spec={"engine": {"stop_command": stop}}), a_study("now")
    for study in (old, now, a_study("other", node="n2")):
        store.add_study(study)
        for ended in (None, NOW):
            launch = Launch(id=f"{study.name}-{ended is None}", study_id=study.id, argv=(), started_at=NOW)
            store.add_launch(replace(launch, ended_at=ended))
    left = dispatch.left_open(store, "n1")
    assert left == {"old-True": ("docker", "kill", "tuner-{tag}"), "now-True": ()}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    found = Store(f"sqlite:///{tmp_path / 'history.db'}")
    found.upgrade()
    return found


def test_the_error_of_a_node_is_the_end_of_the_command() -> None:
    study = a_study()
    fine = dispatch.NodeResult(node="a", study=study)
    gone = dispatch.NodeResult(node="b", study=study, gone="node b is lost")
    broken = dispatch.NodeResult(node="c", study=study, error=StudyFailed("no model", cause="model"))
    assert dispatch.worst([fine]) is None
    assert str(dispatch.worst([fine, gone])) == "node b is lost"
    assert dispatch.worst([fine, gone, broken]) is broken.error


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--on", "somewhere"], "--on somewhere: give auto, HOST:PORT or ray://HOST:PORT"),
        (["--nodes", "gpu=a100"], "--nodes and --isolated need --on: they choose nodes of a cluster"),
        (["--on", "auto", "--nodes", "a100"], "'a100' is not KEY=VALUE"),
    ],
)
def test_what_is_wrong_with_the_command_is_told(words: list[str], sentence: str, tmp_path: Path) -> None:
    done = tuner(tmp_path, "tune", write(tmp_path), *words)
    assert (done.returncode, sentence in done.stderr) == (BadInput.exit_code, True), done.stderr
    assert not (tmp_path / "tuner.db").exists()


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_a_cluster_where_nobody_listens_is_told_at_once(scheme: str) -> None:
    with socket.socket() as bound:  # bound, and never listening: connections are refused
        bound.bind(("127.0.0.1", 0))
        address = f"{scheme}127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(Unavailable, match="no Ray cluster answers at"):
            connect(address)


SLOW_RAY = "import os, signal; os.kill(os.getpid(), signal.SIGTERM); whole = True"
ASKS = """
import signal, sys
signal.signal(signal.SIGTERM, signal.default_int_handler)
from tuner.fleet.dispatch_ray import connect
try:
    connect("auto")
except KeyboardInterrupt:
    print(sys.modules["ray"].whole)
"""


def test_a_signal_does_not_cut_the_import_of_ray_in_the_middle(tmp_path: Path) -> None:
    """The exit handler of a Ray that is half imported fails with a traceback."""
    (tmp_path / "ray.py").write_text(SLOW_RAY)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    words = [sys.executable, "-c", ASKS]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_parts_that_are_cancelled_write_their_ends_before_the_whole_returns() -> None:
    """One that ends at once must not take the leases from one that still writes; nor must one that fails."""
    written: list[str] = []

    async def part(name: str, end_s: float) -> dispatch.NodeResult:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(end_s)
            written.append(name)
        raise AssertionError

    async def fails() -> dispatch.NodeResult:
        raise OSError("disk")

    async def cancelled() -> None:
        whole = asyncio.ensure_future(dispatch.to_their_ends([part("quick", 0.0), part("slow", 0.2)]))
        await asyncio.sleep(0.01)
        whole.cancel()
        with pytest.raises(asyncio.CancelledError):
            await whole
        assert written == ["quick", "slow"]

    async def failed() -> None:
        with pytest.raises(OSError, match="disk"):
            await dispatch.to_their_ends([fails(), part("other", 0.1)])
        assert written[2:] == ["other"]

    asyncio.run(cancelled())
    asyncio.run(failed())


def test_what_ray_dumps_goes_to_the_log_and_what_we_say_does_not(tmp_path: Path) -> None:
    """A library writes to the descriptor, the tuner to `sys.stderr`."""
    log = tmp_path / "logs" / "ray.log"
    code = (
        "import os, sys, pathlib; from tuner.fleet.dispatch_ray import dumps_in\n"
        f"with dumps_in(pathlib.Path({str(log)!r})):\n"
        "    os.write(2, b'state dump\\n'); print('a sentence', file=sys.stderr)\n"
        "os.write(2, b'after'); print(' all', file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "a sentence\nafter all\n"
    assert log.read_text() == "state dump\n"
