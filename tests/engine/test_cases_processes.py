"""Public faults of engines that are about processes and ports; the numbers are those of docs/cases.md."""

import asyncio
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.engine.helpers import FAULT_ENGINE, alive, ending, leftovers, spec
from tuner.engine import server as server_module
from tuner.engine.failures import NODE_FAULTS, classify
from tuner.engine.http import fresh_port, is_free, strangers
from tuner.engine.server import Server, arguments, serve
from tuner.errors import Aborted, EngineError, Infeasible
from tuner.processes import HOST, HostTable, Process, reap, run, spawn, stop, tagged
from tuner.records import JSON, LaunchSpec

PATIENCE_S = 600.0


async def until(condition: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        await asyncio.sleep(0.01)


def body(server: Server, tokens: int = 1) -> JSON:
    return {"model": server.names[0], "prompt": [11, 12, 13], "max_tokens": tokens, "stream": True}


async def fault_under_load(launch: LaunchSpec, *, grace_s: float = 60.0) -> tuple[EngineError | None, Server]:
    """Serve, send one request, wait for the engine's end, and hear what is said of it."""
    async with serve(launch, grace_s=grace_s) as server:
        request = asyncio.ensure_future(server.ask("POST", "/v1/completions", body=body(server)))
        await until(lambda: not server.alive)
        fault = await server.fault("run")
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    return fault, server


def test_case_01_children_of_a_killed_server_are_swept(tmp_path: Path) -> None:
    launch = spec(tmp_path, "child", "grandchild")

    async def kill_leader() -> list[int]:
        async with serve(launch) as server:
            members = HOST.members(server.process)
            os.kill(server.process.pid, signal.SIGKILL)
            await until(lambda: not server.alive)
            assert len(alive(members)) == 2  # both children outlive their server
        return members

    assert alive(asyncio.run(kill_leader())) == []
    assert leftovers(launch) == []


def test_case_02_a_dead_engine_that_exits_with_0_is_no_success(tmp_path: Path) -> None:
    fault, server = asyncio.run(fault_under_load(spec(tmp_path, "die_in_window=engine_dead")))
    assert isinstance(fault, Infeasible)
    assert fault.cause == "engine_dead"
    assert server.process.code == 0


def test_case_03_a_swallowed_sigterm_is_followed_by_another(tmp_path: Path) -> None:
    launch = spec(tmp_path, "swallow_sigterm=1", "hang", ready_timeout_s=1.0)
    assert asyncio.run(ending(launch)).cause == "init_timeout"
    assert leftovers(launch) == []


def test_case_03_one_who_swallows_all_is_killed(tmp_path: Path) -> None:
    launch = spec(tmp_path, "swallow_sigterm=1000", stop_timeout_s=0.5)

    async def stopped() -> str:
        async with serve(launch) as server:
            pass
        assert server.stopped is not None
        return server.stopped.how

    assert asyncio.run(stopped()) == "killed"
    assert leftovers(launch) == []


def test_case_04_a_stale_server_on_the_port_is_found_before_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both listen with SO_REUSEPORT: the kernel would share our requests out among the two."""
    port = fresh_port()
    stale = spawn(
        [*FAULT_ENGINE, "--port", str(port), "--fault", "reuse_port", "--served-model-name", "study"],
        env={}, directory=tmp_path, log=tmp_path / "stale.log", tag=uuid.uuid4().hex,
    )  # fmt: skip
    monkeypatch.setattr(server_module, "fresh_port", lambda: port)

    async def launch_beside() -> EngineError:
        await until(lambda: not is_free(port))
        return await ending(spec(tmp_path / "ours", "reuse_port"))

    try:
        error = asyncio.run(launch_beside())
    finally:
        asyncio.run(stop(stale, timeout_s=10))
    assert isinstance(error, Aborted)
    assert error.cause == "stale_server"


def test_case_04_a_fresh_port_has_no_listener_even_with_reuseport(tmp_path: Path) -> None:
    port = fresh_port()
    assert is_free(port)
    stale = spawn(
        [*FAULT_ENGINE, "--port", str(port), "--fault", "reuse_port"],
        env={}, directory=tmp_path, log=tmp_path / "stale.log", tag=uuid.uuid4().hex,
    )  # fmt: skip
    try:
        asyncio.run(until(lambda: strangers(port, ())))
        assert strangers(port, ()) == [stale.pid]
        assert strangers(port, [stale.pid]) == []
        assert not is_free(port)
    finally:
        asyncio.run(stop(stale, timeout_s=10))


def test_case_05_healthy_but_hanging_is_not_ready(tmp_path: Path) -> None:
    error = asyncio.run(ending(spec(tmp_path, "hang_streams", ready_timeout_s=2.0)))
    assert isinstance(error, Infeasible)
    assert error.cause == "init_timeout"


def test_case_05_frozen_in_the_window_is_found_by_the_step_counter(tmp_path: Path) -> None:
    fault, server = asyncio.run(fault_under_load(spec(tmp_path, "freeze"), grace_s=0.5))
    assert isinstance(fault, Infeasible)
    assert fault.cause == "frozen"
    assert leftovers(server.spec) == []


def test_an_overloaded_server_is_not_a_frozen_one(tmp_path: Path) -> None:
    """/health and /metrics say nothing any more, while completions are answered."""

    async def ask() -> tuple[list[EngineError | None], bool]:
        async with serve(spec(tmp_path, "deaf")) as server:
            found = []
            for _ in range(2):
                reply = await server.ask("POST", "/v1/completions", body=body(server))
                assert reply.status == 200
                found.append(await server.fault("run"))
            return found, server.alive

    assert asyncio.run(ask()) == ([None, None], True)


def test_one_that_is_silent_for_the_whole_grace_is_frozen(tmp_path: Path) -> None:
    fault, server = asyncio.run(fault_under_load(spec(tmp_path, "deaf"), grace_s=0.5))
    assert isinstance(fault, Infeasible)
    assert fault.cause == "frozen"
    assert "no token and no answer to /metrics" in str(fault)
    assert leftovers(server.spec) == []


def test_case_06_death_right_after_ready_is_a_failed_start(tmp_path: Path) -> None:
    async def die() -> EngineError | None:
        async with serve(spec(tmp_path, "die_after_ready")) as server:
            await until(lambda: not server.alive)
            return await server.fault("startup")

    fault = asyncio.run(die())
    assert isinstance(fault, Infeasible)
    assert fault.cause == "crashed"
    assert "exit code 0" in str(fault)


def test_one_that_is_sick_for_good_is_dead(tmp_path: Path) -> None:
    async def sicken() -> EngineError | None:
        async with serve(spec(tmp_path, "sicken")) as server:
            await server.ask("POST", "/v1/completions", body=body(server))
            return await server.fault("run")

    fault = asyncio.run(sicken())
    assert isinstance(fault, Infeasible)
    assert fault.cause == "crashed"


def test_what_was_inherited_and_would_mislead_is_kept_from_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setenv("VLLM_PORT", "tcp://10.0.0.1:8000")

    async def environment() -> dict[str, str]:
        async with serve(spec(tmp_path)) as server:
            return psutil.Process(server.process.pid).environ()

    found = asyncio.run(environment())
    assert not {"PROMETHEUS_MULTIPROC_DIR", "VLLM_PORT"} & set(found)
    assert found["VLLM_SERVER_DEV_MODE"] == "1"
    assert found["VLLM_ENABLE_STARTUP_PLAN"] == "0"


class Unkillable(HostTable):
    """A process table in which one process does not die of SIGKILL."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def members(self, process: Process) -> list[int]:
        return [*super().members(process), self.pid]


def test_case_09_a_process_that_survives_sigkill_is_a_hard_fault(tmp_path: Path) -> None:
    launch = spec(tmp_path)
    stuck = subprocess.Popen(["sleep", "600"])

    class Table(Unkillable):
        def kill(self, pid: int, number: signal.Signals) -> None:
            if pid != self.pid:
                super().kill(pid, number)

    async def serve_it() -> None:
        async with serve(launch, table=Table(stuck.pid), kill_timeout_s=0.5):
            pass

    try:
        with pytest.raises(Aborted) as caught:
            asyncio.run(serve_it())
    finally:
        stuck.kill()
        stuck.wait()
        reap(launch.launch_id)
    assert caught.value.cause == "hard_fault"
    assert str(stuck.pid) in str(caught.value)
    assert caught.value.cause in NODE_FAULTS


def test_case_10_workers_of_a_server_that_gave_up_are_swept(tmp_path: Path) -> None:
    launch = spec(tmp_path, "child", "grandchild", "print=init_timeout")
    error = asyncio.run(ending(launch))
    assert (type(error), error.cause) == (Infeasible, "init_timeout")
    assert leftovers(launch) == []


def test_case_11_only_our_own_shared_memory_is_removed(tmp_path: Path) -> None:
    older = Path("/dev/shm", f"vllm_offload_{uuid.uuid4().hex}.mmap")
    older.write_bytes(b"another engine's")
    os.utime(older, (time.time() - 60, time.time() - 60))
    ours = f"vllm_offload_{uuid.uuid4().hex}.mmap"
    launch = spec(tmp_path, f"shm={ours}", "scratch")

    async def serve_it() -> None:
        async with serve(launch):
            assert Path("/dev/shm", ours).exists()

    try:
        asyncio.run(serve_it())
        assert not Path("/dev/shm", ours).exists()
        assert older.exists()
        assert leftovers(launch) == []
    finally:
        older.unlink()


def test_case_18_out_of_memory_under_load_is_worse_than_at_start(tmp_path: Path) -> None:
    fault, _ = asyncio.run(fault_under_load(spec(tmp_path / "load", "die_in_window=oom")))
    at_start = asyncio.run(ending(spec(tmp_path / "start", "print=oom")))
    assert isinstance(fault, Infeasible)
    assert isinstance(at_start, Infeasible)
    assert fault.cause == at_start.cause == "oom"
    assert (fault.violation.oom or 0) > (at_start.violation.oom or 0) > 0


def test_case_20_preemption_thrash_ends_the_replay(tmp_path: Path) -> None:
    fault, _ = asyncio.run(fault_under_load(spec(tmp_path, "thrash"), grace_s=0.5))
    assert isinstance(fault, Infeasible)
    assert fault.cause == "thrash"


def test_case_22_a_silent_start_is_killed_at_its_deadline(tmp_path: Path) -> None:
    launch = spec(tmp_path, "hang", ready_timeout_s=1.0)
    error = asyncio.run(ending(launch))
    assert isinstance(error, Infeasible)
    assert error.cause == "init_timeout"
    assert "1 s" in str(error)
    assert (tmp_path / "engine.log").exists()
    assert leftovers(launch) == []


def test_case_26_the_first_cause_stays_when_we_stop_it_later(tmp_path: Path) -> None:
    async def crash_then_stop() -> tuple[EngineError | None, EngineError | None, Server]:
        async with serve(spec(tmp_path, "die_in_window=oom", "child")) as server:
            with pytest.raises(ConnectionError):
                await server.ask("POST", "/v1/completions", body=body(server))
            await until(lambda: not server.alive)
            first = await server.fault("run")
        return first, await server.fault("run"), server

    first, later, server = asyncio.run(crash_then_stop())
    assert first is not None
    assert later is not None
    assert first.cause == later.cause == "oom"
    assert server.process.ended_unasked
    assert server.stopped is not None
    assert server.stopped.how == "exited"


CONTROLLER = """
import asyncio, signal, sys
from pathlib import Path
from tests.engine.helpers import spec
from tuner.engine.server import serve
async def main():
    async with serve(spec(Path(sys.argv[1]), "child", "grandchild", launch_id=sys.argv[2])) as server:
        print(server.port, flush=True)
        await asyncio.Event().wait()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are born ignoring it
asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_case_27_a_controller_that_dies_leaves_no_engine(tmp_path: Path, how: signal.Signals) -> None:
    launch_id = uuid.uuid4().hex
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, str(tmp_path), launch_id],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert controller.stdout is not None
    with controller.stdout:
        port = int(controller.stdout.readline())
    assert len(tagged(launch_id)) == 3
    controller.send_signal(how)
    controller.wait()
    asyncio.run(until(lambda: leftovers(replace(spec(tmp_path), launch_id=launch_id)) == []))
    assert is_free(port)


def test_case_28_a_zombie_in_the_group_does_not_count_as_alive(tmp_path: Path) -> None:
    process = spawn(
        [sys.executable, "-c", "pass"],
        env={}, directory=tmp_path, log=tmp_path / "log", tag=uuid.uuid4().hex,
    )  # fmt: skip
    asyncio.run(until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE))
    assert os.getpgid(process.pid) == process.pid
    assert HOST.members(process) == []
    assert classify("", process.code, "startup").kind == "crashed"
    asyncio.run(stop(process, timeout_s=10))


def test_a_command_prefix_hears_the_tag_and_the_names_of_the_environment(tmp_path: Path) -> None:
    prefix = ("docker", "run", "--name", "tuner-{tag}", "{env}", "image", "python")
    words = arguments(spec(tmp_path, command=prefix, env={"HF_TOKEN": "secret"}), 1234, "nonce")
    launch_id = words[3].removeprefix("tuner-")
    assert len(launch_id) == 32
    assert words[words.index("HF_TOKEN") - 1] == "--env"
    assert "TUNER_LAUNCH_ID" in words
    assert "secret" not in " ".join(words)
    assert words[words.index("image") :][:4] == ["image", "python", "--model", "tiny"]


def test_an_engine_behind_a_pid_namespace_is_served_and_stopped(tmp_path: Path) -> None:
    prefix = ("unshare", "--pid", "--fork", "setsid")
    if run([*prefix, "true"], timeout_s=PATIENCE_S).code != 0:
        pytest.skip("this host lets us make no PID namespace")
    inside = tmp_path / "pid"
    code = f"import os,sys,runpy; open({str(inside)!r},'w').write(str(os.getpid())); sys.argv=sys.argv[1:]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    command = (*prefix, sys.executable, "-c", code, FAULT_ENGINE[1])
    launch = spec(tmp_path, command=command, stop_command=("sh", "-c", f"echo {{tag}} > {tmp_path}/asked"))

    async def serve_it() -> Server:
        async with serve(launch) as server:
            assert (await server.ask("GET", "/health")).status == 200
        return server

    server = asyncio.run(serve_it())
    assert inside.read_text() == "1"
    assert (tmp_path / "asked").read_text().strip() == launch.launch_id
    assert leftovers(launch) == []
    assert is_free(server.port)
