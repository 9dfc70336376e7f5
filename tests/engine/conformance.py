"""What every engine must do under the tuner's hands; inherited by one class per kind of engine."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.engine.helpers import leftovers
from tuner.engine import metrics
from tuner.engine.http import is_free
from tuner.engine.server import Server, serve
from tuner.errors import Aborted, EngineError, Infeasible, StudyFailed
from tuner.processes import tagged
from tuner.records import JSON, LaunchSpec

WRITER = "tuner.traffic.capture.writer"


class Launched:
    """One running engine shared by the tests that do not hurt it."""

    def __init__(self, launch: LaunchSpec) -> None:
        self.spec = launch
        self.loop = asyncio.new_event_loop()
        self._serving = serve(launch)
        try:
            self.server: Server = self.loop.run_until_complete(self._serving.__aenter__())
        except EngineError:
            self.loop.close()
            raise

    def close(self) -> None:
        self.loop.run_until_complete(self._serving.__aexit__(None, None, None))
        self.loop.close()


def completion(server: Server, tokens: int) -> JSON:
    return {
        "model": server.names[0],
        "prompt": list(range(20, 52)),
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0.0,
    }


class Conformance:
    """The suite. A subclass says how its engine is launched."""

    @classmethod
    def launch(cls, directory: Path, *argv: str) -> LaunchSpec:
        """How a healthy engine of this kind is launched, with more arguments."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def running(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
        launched = Launched(cls.launch(tmp_path_factory.mktemp("engine")))
        yield launched
        launched.close()
        assert leftovers(launched.spec) == []
        assert is_free(launched.server.port)

    def test_it_proves_that_it_is_ours(self, running: Launched) -> None:
        server = running.server
        answer = running.loop.run_until_complete(server.ask("GET", "/v1/models")).json()
        assert isinstance(answer, dict)
        listed = answer["data"]
        assert isinstance(listed, list)
        assert set(server.names) <= {entry["id"] for entry in listed if isinstance(entry, dict)}
        assert server.names[0] == running.spec.served_name

    def test_every_process_of_it_carries_the_tag(self, running: Launched) -> None:
        leader = psutil.Process(running.server.process.pid)
        # The writer of a capture inside the engine is untagged on purpose: it ends with its pipes.
        children = [c for c in leader.children(recursive=True) if WRITER not in c.cmdline()]
        family = {leader.pid, *(child.pid for child in children)}
        assert family == {process.pid for process in tagged(running.spec.launch_id)}

    def test_it_says_what_it_runs_with(self, running: Launched) -> None:
        server = running.server
        assert server.effective["max_num_seqs"] == 16
        assert isinstance(server.effective["block_size"], int)
        assert server.kv_tokens is not None
        assert server.kv_tokens > 0
        assert server.timeline["ready_s"] == server.ready_s > 0

    def test_it_has_a_version(self, running: Launched) -> None:
        assert running.loop.run_until_complete(running.server.version())

    def test_its_metrics_count_what_it_did(self, running: Launched) -> None:
        async def served() -> dict[str, float | None]:
            before = await running.server.metrics()
            reply = await running.server.ask(
                "POST", "/v1/completions", body=completion(running.server, 4), timeout_s=120
            )
            assert reply.status == 200
            return metrics.between(before, await running.server.metrics())

        delta = running.loop.run_until_complete(served())
        assert (delta["generation_tokens"] or 0) > 0
        assert (delta["iterations"] or 0) > 0
        assert delta["preemptions"] == 0
        assert delta["running"] == 0

    def test_its_prefix_cache_is_proved_empty_on_request(self, running: Launched) -> None:
        reset = running.loop.run_until_complete(running.server.reset_cache())
        assert (reset.proved, reset.how) == (True, "body")

    def test_nothing_is_wrong_with_it(self, running: Launched) -> None:
        assert running.server.alive
        assert running.loop.run_until_complete(running.server.fault("run")) is None


class Refusals:
    """What every engine must refuse; one launch each."""

    @classmethod
    def launch(cls, directory: Path, *argv: str) -> LaunchSpec:
        raise NotImplementedError

    def test_an_unknown_argument_is_the_studys_mistake(self, tmp_path: Path) -> None:
        launch = self.launch(tmp_path, "--no-such-flag", "1")
        with pytest.raises(StudyFailed) as caught:
            asyncio.run(_serve_once(launch))
        assert caught.value.cause == "bad_flag"
        assert "--no-such-flag" in str(caught.value)
        assert leftovers(launch) == []


class Deaths:
    """What every engine must be told of when it dies; one launch each."""

    @classmethod
    def launch(cls, directory: Path, *argv: str) -> LaunchSpec:
        raise NotImplementedError

    def test_a_killed_leader_takes_all_with_it(self, tmp_path: Path) -> None:
        launch = self.launch(tmp_path)

        async def kill_leader() -> EngineError | None:
            async with serve(launch) as server:
                os.kill(server.process.pid, signal.SIGKILL)
                return await server.fault("run")

        fault = asyncio.run(kill_leader())
        assert isinstance(fault, Aborted | Infeasible)
        assert fault.cause in ("killed", "host_oom")
        assert leftovers(launch) == []

    def test_a_cancelled_caller_still_stops_it(self, tmp_path: Path) -> None:
        launch = self.launch(tmp_path)

        async def cancelled() -> None:
            ready = asyncio.Event()

            async def use() -> None:
                async with serve(launch):
                    ready.set()
                    await asyncio.Event().wait()

            task = asyncio.create_task(use())
            await ready.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(cancelled())
        assert leftovers(launch) == []


async def _serve_once(launch: LaunchSpec) -> None:
    async with serve(launch):
        pass
