"""The suite and the cases that a CPU can show, on the real vLLM: the shared launch and four of its own."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.engine.conformance import Conformance, Deaths, Launched, completion
from tests.engine.helpers import alive, ending, leftovers
from tests.engine.real import INTERPRETER, MODEL, model, real
from tests.engine.test_cases_processes import until
from tests.vllm import Shared
from tuner.engine import failures, log
from tuner.engine.server import Server, serve
from tuner.errors import EngineError, Infeasible, StudyFailed
from tuner.processes import HOST, run, tagged
from tuner.records import LaunchSpec

CONTROLLER = """
import asyncio, sys
from pathlib import Path
from tests.engine.real import real
from tuner.engine import failures, log
from tuner.engine.server import serve
async def main():
    async with serve(real(Path(sys.argv[1]), launch_id=sys.argv[2])) as server:
        print("ready", flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


def core_of(server: Server) -> psutil.Process:
    """The engine core: a child of the API server that is not its resource tracker."""
    children = psutil.Process(server.process.pid).children()
    return next(child for child in children if "resource_tracker" not in " ".join(child.cmdline()))


class Real:
    @classmethod
    def launch(cls, directory: Path, *argv: str) -> LaunchSpec:
        return real(directory, *argv)


@pytest.mark.vllm
class TestRealVllm(Real, Conformance):
    """On the engine that all rooms share, and one refusal."""

    @pytest.fixture(scope="class")
    @classmethod
    def running(cls, real_server: Shared) -> Launched:
        return real_server

    def test_case_15_a_reset_is_refused_while_requests_run_and_proved_after(self, running: Launched) -> None:
        server = running.server

        async def keep_busy(enough: asyncio.Event) -> None:
            while not enough.is_set():
                body = completion(server, 1500)
                assert (await server.ask("POST", "/v1/completions", body=body, timeout_s=300)).status == 200

        async def reset_under_load() -> bool:
            """The server answers late while it is busy, so one refusal among many resets is waited for."""
            enough = asyncio.Event()
            busy = [asyncio.create_task(keep_busy(enough)) for _ in range(4)]
            async with asyncio.timeout(600):
                while (await server.reset_cache(tries=1)).proved:
                    await asyncio.sleep(0.05)
            enough.set()
            await asyncio.gather(*busy)
            return (await server.reset_cache()).proved

        assert running.loop.run_until_complete(reset_under_load())

    def test_case_12_the_preemption_mode_of_old_is_refused(self, tmp_path: Path) -> None:
        launch = real(tmp_path, "--preemption-mode", "swap")
        error = asyncio.run(ending(launch))
        assert (type(error), error.cause) == (StudyFailed, "bad_flag")
        assert "--preemption-mode" in str(error)
        knob = failures.classify(log.read(tmp_path / "engine.log"), 2, "startup", asked=["preemption"])
        assert knob.outcome == "infeasible"
        assert leftovers(launch) == []

    def test_its_log_tells_where_start_up_went(self, running: Launched) -> None:
        assert {"imports_s", "init_s", "serving_s", "ready_s"} <= set(running.server.timeline)

    def test_case_02_a_killed_engine_core_is_a_death_though_the_server_exits_with_0(
        self, dying_server: Shared
    ) -> None:
        server, loop = dying_server.server, dying_server.loop
        core_of(server).kill()
        loop.run_until_complete(until(lambda: not server.alive, 600.0))
        fault = loop.run_until_complete(server.fault("run"))
        assert isinstance(fault, Infeasible)
        assert fault.cause in ("engine_dead", "host_oom")
        assert server.process.code == 0


@pytest.mark.vllm
def test_case_01_the_core_of_a_killed_server_is_swept(tmp_path: Path) -> None:
    launch = real(tmp_path)

    async def kill_leader() -> list[int]:
        async with serve(launch) as server:
            leader = server.process.pid
            members = HOST.members(server.process)
            orphans = [pid for pid in members if pid != leader]
            for pid in orphans:
                os.kill(pid, signal.SIGSTOP)  # so that they cannot end by themselves
            os.kill(leader, signal.SIGKILL)
            await until(lambda: not server.alive, 600.0)
            assert alive(orphans) == orphans != []
        return members

    assert alive(asyncio.run(kill_leader())) == []
    assert leftovers(launch) == []


@pytest.mark.vllm
def test_case_03_sigterm_while_it_starts(tmp_path: Path) -> None:
    launch = real(tmp_path, stop_timeout_s=20.0)

    async def cancelled_in_start_up() -> None:
        async def use() -> None:
            async with serve(launch):
                raise AssertionError("it became ready before it was stopped")

        task = asyncio.create_task(use())
        await until(lambda: "Initializing a V1 LLM engine" in told(tmp_path), 600.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled_in_start_up())
    assert leftovers(launch) == []


@pytest.mark.vllm
def test_case_27_a_killed_controller_leaves_no_engine(tmp_path: Path) -> None:
    launch = real(tmp_path)
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, str(tmp_path), launch.launch_id],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
    )
    assert controller.stdout is not None
    with controller.stdout:
        assert controller.stdout.readline() == b"ready\n"
    assert len(tagged(launch.launch_id)) >= 2
    controller.kill()
    controller.wait()
    asyncio.run(until(lambda: leftovers(launch) == []))


@pytest.mark.vllm
def test_case_25_the_engines_own_parser_reads_what_we_export(tmp_path: Path) -> None:
    """No launch: its parser alone, on the file as `--config FILE`."""
    real(tmp_path)
    file = tmp_path / "vllm.yaml"
    file.write_text("max-num-seqs: 64\nno-enable-prefix-caching: true\n")
    code = (
        "import sys\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "from vllm.entrypoints.launchers.cli_args import make_arg_parser\n"
        f"words = ['serve', {model(MODEL)!r}, '--config', {str(file)!r}]\n"
        "parser = FlexibleArgumentParser()\n"
        "serve = parser.add_subparsers(dest='subparser').add_parser('serve')\n"
        "make_arg_parser(serve)\n"
        "args = parser.parse_args(words)\n"
        "print('read', args.max_num_seqs, args.enable_prefix_caching)\n"
    )
    done = run([INTERPRETER, "-c", code], timeout_s=300, env={"VLLM_LOGGING_LEVEL": "ERROR"})
    assert "read 64 False" in done.out, done.err[-2000:]


@pytest.mark.vllm_full
class TestRealVllmDies(Real, Deaths):
    pass


@pytest.mark.vllm_full
def test_case_06_death_right_after_ready(tmp_path: Path) -> None:
    async def die() -> EngineError | None:
        async with serve(real(tmp_path)) as server:
            core_of(server).kill()
            await until(lambda: not server.alive)
            return await server.fault("startup")

    assert isinstance(asyncio.run(die()), Infeasible)


@pytest.mark.vllm_full
def test_case_10_a_start_that_missed_its_deadline_leaves_no_worker(tmp_path: Path) -> None:
    """It is halted as soon as it speaks, so that no machine is too fast for the deadline."""
    launch = real(tmp_path, ready_timeout_s=60.0, stop_timeout_s=20.0)

    async def never_ready() -> tuple[EngineError, list[int]]:
        start = asyncio.create_task(ending(launch))
        await until(lambda: start.done() or "Initializing a V1 LLM engine" in told(tmp_path), 600.0)
        halted = [process.pid for process in tagged(launch.launch_id)]
        for pid in halted:
            os.kill(pid, signal.SIGSTOP)
        return await start, halted

    error, halted = asyncio.run(never_ready())
    assert error.cause == "init_timeout"
    assert halted
    assert leftovers(launch) == []


def told(directory: Path) -> str:
    """What the engine's log says so far."""
    file = directory / "engine.log"
    return file.read_text(errors="replace") if file.exists() else ""


@pytest.mark.vllm_full
def test_a_block_size_that_the_backend_refuses_is_infeasible(tmp_path: Path) -> None:
    error = asyncio.run(ending(real(tmp_path, "--block-size", "7", asked={})))
    assert (type(error), error.cause) == (Infeasible, "block_size")
    assert "CPU_ATTN" in str(error)
