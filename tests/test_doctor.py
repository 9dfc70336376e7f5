"""The doctor: each finding says what to do, and has an exit code of its own."""

import asyncio
import json
import os
import sys
import uuid
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.history.records import NOW, a_study
from tuner.doctor import EXIT_CODES, Check, disk, examine, exit_code, flags, gpus, shared_memory
from tuner.engine.gpu import Gpu, Gpus, GpuSample, User
from tuner.history.store import Store
from tuner.processes import run, spawn, stop
from tuner.records import Launch
from tuner.settings import Settings

GIB = 1 << 30


class Driver:
    """One card of which somebody holds `used_gib`."""

    def __init__(self, used_gib: float, pids: Sequence[int]) -> None:
        self._used_gib, self._pids = used_gib, pids

    def gpus(self) -> Sequence[Gpu]:
        return [Gpu(uuid="GPU-1", name="NVIDIA H100", memory_bytes=80 * GIB)]

    def sample(self, uuid: str) -> GpuSample:
        return GpuSample(uuid=uuid, at_s=0.0, used_bytes=int(self._used_gib * GIB))

    def users(self, uuid: str) -> Sequence[User]:
        return [User(uuid=uuid, pid=pid, memory_bytes=30 * GIB) for pid in self._pids]

    def driver(self) -> str | None:
        return None


def test_every_check_has_an_exit_code_of_its_own(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home", database_url="")
    found = list(examine(settings, None, clock=lambda: datetime.now(UTC)))
    assert {check.name for check in found} <= set(EXIT_CODES)
    assert len(set(EXIT_CODES.values())) == len(EXIT_CODES)
    assert all(check.mend for check in found if check.verdict != "ok")
    assert not (tmp_path / "home").exists()


def test_the_first_error_decides_the_exit_code_and_warnings_do_not() -> None:
    fine = Check(name="python", verdict="ok", found="")
    warned = Check(name="cores", verdict="warning", found="")
    broken = Check(name="gpus", verdict="error", found="")
    worse = Check(name="port", verdict="error", found="")
    assert exit_code([fine, warned]) == 0
    assert exit_code([fine, broken, worse]) == EXIT_CODES["gpus"]


def test_a_gpu_in_use_is_an_error_that_names_who() -> None:
    check = gpus(Gpus.open({}, nvml=Driver(30.0, [os.getpid()])))
    assert check.verdict == "error"
    assert f"({os.getpid()}) with 30.0 GiB" in check.found
    assert "30.0 GiB in use" in check.found


def test_a_gpu_in_use_by_a_pid_of_the_host_is_told_as_far_as_known() -> None:
    check = gpus(Gpus.open({}, nvml=Driver(30.0, [4_000_000])))
    assert "pid 4000000 outside this container" in check.found
    assert gpus(Gpus.open({}, nvml=Driver(30.0, []))).found.endswith("the driver does not name the process")


def test_a_gpu_that_a_run_of_ours_uses_is_only_a_warning() -> None:
    assert gpus(Gpus.open({}, nvml=Driver(30.0, [])), busy_with_ours=True).verdict == "warning"
    assert gpus(Gpus.open({}, nvml=Driver(0.3, []))).verdict == "ok"


def test_engines_of_our_history_are_told_from_those_of_another_home(tmp_path: Path) -> None:
    tag, settings = uuid.uuid4().hex, Settings(home=tmp_path, database_url="")
    engine = spawn(["sleep", "600"], env={}, directory=tmp_path, log=tmp_path / "log", tag=tag)

    def found() -> Check:
        checks = examine(settings, None, clock=lambda: NOW)
        return next(check for check in checks if check.name == "processes")

    try:
        with closing(Store(settings.url)) as store:
            assert f"{engine.pid}" in found().found
            assert "another TUNER_HOME" in found().found
            assert "tuner tune" not in found().mend
            store.add_study(a_study())
            store.add_launch(Launch(id=tag, study_id=a_study().id, argv=(), started_at=NOW))
        assert found().found == f"engines of a run are alive: {engine.pid}"
        assert "`tuner tune` with the same study ends the engines" in found().mend
    finally:
        asyncio.run(stop(engine, timeout_s=10))


def test_offload_files_of_dead_engines_are_named(tmp_path: Path) -> None:
    (tmp_path / "vllm_offload_1.mmap").write_bytes(b"0" * 1024)
    check = shared_memory(tmp_path)
    assert check.verdict == "warning"
    assert str(tmp_path / "vllm_offload_1.mmap") in check.mend


def test_no_shared_memory_is_an_error(tmp_path: Path) -> None:
    assert shared_memory(tmp_path / "missing").verdict == "error"


@pytest.mark.parametrize(("free", "verdict"), [(50.0, "ok"), (1.0, "warning"), (0.01, "error")])
def test_a_full_disk_is_told(free: float, verdict: str) -> None:
    assert disk(Path("/"), free).verdict == verdict


def test_flags_that_the_engine_lacks_are_listed_with_the_reason() -> None:
    assert flags({}).verdict == "ok"
    check = flags({"watermark": "vLLM 0.11 does not have it"})
    assert check.verdict == "warning"
    assert "watermark: vLLM 0.11 does not have it" in check.found


def test_a_study_that_is_not_there_ends_the_command_with_its_code(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.yaml")
    done = run(
        [sys.executable, "-m", "tuner", "doctor", missing, "--json"],
        timeout_s=120,
        env={"TUNER_HOME": str(tmp_path / "home"), "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    found = {check["name"]: check for check in json.loads(done.out)}
    assert found["study"]["verdict"] == "error"
    assert missing in found["study"]["found"]
    codes = [EXIT_CODES[name] for name, check in found.items() if check["verdict"] == "error"]
    assert done.code == codes[0]
