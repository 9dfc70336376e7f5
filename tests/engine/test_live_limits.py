"""Live limits: the rules on a scheduler of known behaviour, and the real thing on vLLM's CPU build."""

import asyncio
import importlib
import os
import sys
import threading
from collections.abc import Coroutine, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import pytest

from tests.engine.helpers import spec
from tests.vllm import ENGINE_BLOCK, Shared
from tuner.engine import limits, metrics
from tuner.engine.server import Server
from tuner.records import JSON, Value

T = TypeVar("T")

SCHEDULER = '''
class Blocks:
    num_gpu_blocks = 1000

class Cache:
    block_pool = Blocks()
    watermark_blocks = 10

class Scheduler:
    """Admits by one attribute, asserts by the other, as vLLM does since 0.32."""

    def __init__(self, vllm_config):
        self.scheduler_config = vllm_config.scheduler_config
        self.kv_cache_manager = Cache()
        self.max_model_len = 512
        self.max_num_running_reqs = self.scheduler_config.max_num_seqs
        ACTIVE
        self.max_num_scheduled_tokens = self.scheduler_config.max_num_batched_tokens
        self.running, self.waiting = [], []

    def get_num_unfinished_requests(self):
        return len(self.running) + len(self.waiting)

    def schedule(self, throttle=False):
        if hasattr(self, "cache_config"):
            return self.step()
        limit = getattr(self, "max_num_active_reqs", self.max_num_running_reqs)
        while self.waiting and len(self.running) < limit:
            self.running.append(self.waiting.pop())
        assert len(self.running) <= self.max_num_running_reqs
        return len(self.running)
'''


class Config:
    """What the scheduler reads of vLLM's configuration."""

    def __init__(self, **settings: object) -> None:
        self.max_num_seqs, self.max_num_batched_tokens = 16, 1024
        self.long_prefill_token_threshold = 0
        self.async_scheduling = False
        self.enable_chunked_prefill = True
        self.data_parallel_size = 1
        self.__dict__.update(settings)
        self.scheduler_config = self.parallel_config = self


class Engine:
    """A program that looks like an installed vLLM to the file under test, with its own copy of the file."""

    def __init__(self, directory: Path, version: str) -> None:
        package = directory / "vllm" / "v1" / "core" / "sched"
        package.mkdir(parents=True)
        (directory / "vllm" / "__init__.py").write_text(f"__version__ = {version!r}\n")
        active = "self.max_num_active_reqs = self.max_num_running_reqs" if version >= "0.32" else "pass"
        (package / "scheduler.py").write_text(SCHEDULER.replace("ACTIVE", active))
        (package / "async_scheduler.py").write_text(
            "from vllm.v1.core.sched.scheduler import Scheduler\n\n\nclass AsyncScheduler(Scheduler): ...\n"
        )
        self.installed = limits.install(directory, f"test-{os.getpid()}-{directory.name}"[-40:])
        self.address = Path(self.installed.env["TUNER_LIVE_LIMITS"])
        self.address.parent.mkdir(parents=True, exist_ok=True)
        self.spec = spec(directory, env=dict(self.installed.env))

    def module(self) -> ModuleType:
        return importlib.import_module("live_limits")


@pytest.fixture(params=["0.25.1", "0.32.0"])
def engine(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engine]:
    found = Engine(tmp_path, request.param)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "live_limits")
    monkeypatch.setenv("TUNER_LIVE_LIMITS", str(found.address))
    yield found
    for name in [n for n in sys.modules if n == "live_limits" or n.split(".")[0] == "vllm"]:
        del sys.modules[name]
    found.address.unlink(missing_ok=True)
    found.address.parent.rmdir()


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def change(engine: Engine, wanted: Mapping[str, Value], patience_s: float = 0.0) -> bool:
    return run(limits.change(engine, wanted, patience_s=patience_s))


def test_it_derives_from_what_the_engine_would_use(engine: Engine) -> None:
    module = engine.module()
    plain = module.LiveLimits(vllm_config=Config())
    assert [c.__name__ for c in type(plain).__mro__][:2] == ["LiveScheduler", "Scheduler"]
    assert run(limits.ask(engine, {})).base == "Scheduler"
    engine.address.unlink()
    quick = module.LiveLimits(vllm_config=Config(async_scheduling=True))
    assert [c.__name__ for c in type(quick).__mro__][:2] == ["LiveAsyncScheduler", "AsyncScheduler"]


def test_admission_is_lowered_and_the_engine_survives(engine: Engine) -> None:
    scheduler = engine.module().LiveLimits(vllm_config=Config())
    assert change(engine, {"max_num_seqs": 4})
    scheduler.waiting = list(range(20))
    assert scheduler.schedule() == 4
    scheduler.running, scheduler.waiting = [], []
    assert change(engine, {})
    scheduler.waiting = list(range(20))
    assert scheduler.schedule() == 16


def test_lowering_the_slots_alone_would_kill_it(tmp_path: Path, engine: Engine) -> None:
    """The trap itself, so that the test above is known to be able to fail."""
    scheduler = engine.module().LiveLimits(vllm_config=Config())
    scheduler.max_num_running_reqs = 4
    scheduler.waiting = list(range(20))
    if hasattr(scheduler, "max_num_active_reqs"):
        with pytest.raises(AssertionError):
            scheduler.schedule()
    else:
        assert scheduler.schedule() == 4


def test_every_limit_is_set_and_read_back(engine: Engine) -> None:
    scheduler = engine.module().LiveLimits(vllm_config=Config())
    wanted: dict[str, Value] = {
        "max_num_seqs": 8, "max_num_active_seqs": 6, "max_num_batched_tokens": 256,
        "long_prefill_token_threshold": 128, "watermark": 0.05,
    }  # fmt: skip
    assert change(engine, wanted)
    state = run(limits.ask(engine, {}))
    assert state.limits == {
        "max_num_seqs": 6, "max_num_batched_tokens": 256, "long_prefill_token_threshold": 128,
        "watermark_blocks": 50,
    }  # fmt: skip
    assert scheduler.max_num_scheduled_tokens == 256
    assert change(engine, {})
    assert run(limits.ask(engine, {})).limits == state.launched


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"max_num_seqs": 17}, "above its value at launch, 16"),
        ({"max_num_batched_tokens": 2048}, "above its value at launch, 1024"),
        ({"max_num_batched_tokens": 8}, "below max_num_seqs"),
        ({"max_num_seqs": 0}, "not a positive whole number"),
        ({"max_num_seqs": True}, "not a positive whole number"),
        ({"max_num_seqs": "4"}, "TypeError"),
        ({"watermark": 1.5}, "not a share"),
        ({"block_size": 32}, "unknown limit block_size"),
    ],
)
def test_what_must_not_be_is_refused_and_nothing_changes(
    engine: Engine, wanted: dict[str, Value], words: str
) -> None:
    engine.module().LiveLimits(vllm_config=Config())
    before = run(limits.ask(engine, {})).limits
    state = run(limits.ask(engine, {"limits": dict(wanted)}))
    assert not state.ok
    assert words in (state.error or "") or "not a positive whole number" in (state.error or "")
    assert not change(engine, wanted)
    assert run(limits.ask(engine, {})).limits == before


def test_without_chunked_prefill_a_prompt_must_still_fit(engine: Engine) -> None:
    engine.module().LiveLimits(vllm_config=Config(enable_chunked_prefill=False))
    assert not change(engine, {"max_num_batched_tokens": 256})
    assert change(engine, {"max_num_batched_tokens": 512})


def test_a_busy_engine_is_waited_for_not_changed(engine: Engine) -> None:
    scheduler = engine.module().LiveLimits(vllm_config=Config())
    scheduler.waiting = [1, 2]
    assert not change(engine, {"max_num_seqs": 4})
    assert run(limits.ask(engine, {"limits": {"max_num_seqs": 4}})).error == "busy: 2 unfinished requests"

    async def finishes_meanwhile() -> bool:
        task = asyncio.ensure_future(limits.change(engine, {"max_num_seqs": 4}, patience_s=30))
        await limits.ask(engine, {})
        scheduler.waiting = []
        return await task

    assert run(finishes_meanwhile())


def test_a_change_waits_for_the_step_that_runs(engine: Engine) -> None:
    scheduler = engine.module().LiveLimits(vllm_config=Config())
    done = threading.Event()

    def ask() -> None:
        assert change(engine, {"max_num_seqs": 4})
        done.set()

    with scheduler.live_lock:
        thread = threading.Thread(target=ask)
        thread.start()
        assert not done.wait(0.2)
        assert scheduler.get_num_unfinished_requests() == 0
    thread.join(30)
    assert done.is_set()


def test_an_unknown_version_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("0.9.2", "0.33.0", "dev"):
        home = tmp_path / version
        home.mkdir()
        with monkeypatch.context() as patch:
            strange = Engine(home, version)
            patch.syspath_prepend(home)
            patch.syspath_prepend(home / "live_limits")
            patch.setenv("TUNER_LIVE_LIMITS", str(strange.address))
            strange.module().LiveLimits(vllm_config=Config())
            state = run(limits.ask(strange, {"limits": {"max_num_seqs": 4}}))
            assert "outside" in (state.error or "")
            assert not change(strange, {"max_num_seqs": 4})
            for name in [n for n in sys.modules if n == "live_limits" or n.split(".")[0] == "vllm"]:
                del sys.modules[name]
            strange.address.unlink()
            strange.address.parent.rmdir()


def test_several_engine_cores_are_not_served(engine: Engine) -> None:
    engine.module().LiveLimits(vllm_config=Config(data_parallel_size=2))
    assert not engine.address.exists()
    assert not change(engine, {"max_num_seqs": 4})


def test_silence_means_relaunch(tmp_path: Path) -> None:
    class Deaf:
        spec = spec(tmp_path)

    assert not run(limits.change(Deaf(), {"max_num_seqs": 4}))
    assert "without live limits" in (run(limits.ask(Deaf(), {})).error or "")


def test_what_can_change_without_a_relaunch() -> None:
    launched: dict[str, Value] = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "block_size": 16}
    assert limits.changeable(launched, {**launched, "max_num_seqs": 32}) == {
        "max_num_seqs": 32, "max_num_batched_tokens": 2048,
    }  # fmt: skip
    assert limits.changeable(launched, {**launched, "max_num_seqs": 65}) is None
    assert limits.changeable(launched, {**launched, "block_size": 32}) is None
    assert limits.changeable(launched, {**launched, "watermark": 0.1}) is not None


async def steps(server: Server, count: int, length: int = 300) -> int:
    """Serve requests sent all at once on an empty cache; engine steps that gave a token (as vLLM counts)."""
    bodies: list[JSON] = [
        {"model": server.names[0], "prompt": [(7 * i + k) % 2000 + 10 for k in range(length)],
         "max_tokens": 60, "ignore_eos": True}
        for i in range(count)
    ]  # fmt: skip
    assert (await server.reset_cache()).proved
    before = await counted(server)
    asked = [server.ask("POST", "/v1/completions", body=body, timeout_s=300) for body in bodies]
    assert [reply.status for reply in await asyncio.gather(*asked)] == [200] * count
    return await counted(server) - before


async def counted(server: Server) -> int:
    """Steps so far, of vLLM's histogram of tokens per step."""
    lines = (await server.ask("GET", "/metrics")).text.splitlines()
    return sum(int(float(x.split()[-1])) for x in lines if x.startswith("vllm:iteration_tokens_total_count"))


def test_M15_steps_batches_and_blocks_are_counted_and_folded() -> None:
    before = {
        "allocated": 2, "evicted": 0, "held": 10, "filled": 100, "block_size": 16, "batch": {"1": 4},
        "seconds": {"0.01": 1},
    }  # fmt: skip
    after = {
        "allocated": 42, "evicted": 10, "held": 110, "filled": 1300, "block_size": 16,
        "batch": {"1": 4, "8": 9, "3": 1}, "seconds": {"0.01": 2, "0.02": 8, "0.5": 1},
    }  # fmt: skip
    found = limits.stepped(before, after, 20.0)
    assert (found["blocks_allocated_per_s"], found["blocks_evicted_per_s"]) == (2.0, 0.5)
    assert found["kv_fragmentation"] == pytest.approx(1 - 1200 / 1600)
    assert found["batch_requests_p50"] == 8.0
    assert found["step_ms_p50"] == pytest.approx(20.0)
    assert found["step_ms_p95"] > 100
    assert limits.stepped({}, after, 20.0) == {}, "an engine that does not count says nothing"


def test_M15_the_scheduler_counts_what_its_steps_hold(engine: Engine) -> None:
    module = engine.module()
    scheduler = module.LiveLimits(vllm_config=Config())
    assert run(limits.ask(engine, {})).steps == {}, "this version has other attributes: nothing is counted"
    scheduler.cache_config = type("C", (), {"block_size": 16})
    pool = scheduler.kv_cache_manager.block_pool = Blocks()
    scheduler.live_steps = module.Steps(scheduler)
    scheduler.step = lambda: (pool.get_new_blocks(3), pool._maybe_evict_cached_block(1), Output())[-1]
    scheduler.running = [type("R", (), {"num_computed_tokens": 40})]
    for _ in range(3):
        scheduler.schedule()
    told = run(limits.ask(engine, {})).steps
    assert (told["steps"], told["tokens"], told["allocated"], told["evicted"]) == (3, 21, 9, 3)
    assert (told["batch"], told["filled"]) == ({"2": 3}, 120)
    assert told["held"] == (3 + 6 + 9)
    assert sum(told["seconds"].values()) == 2, "the first step has none before it"


class Blocks:
    """A pool of KV blocks, as vLLM's."""

    num_gpu_blocks, taken = 101, 0

    def get_new_blocks(self, count: int) -> list[int]:
        self.taken += count
        return [0] * count

    def get_num_free_blocks(self) -> int:
        return 100 - self.taken

    def _maybe_evict_cached_block(self, block: int) -> bool:
        return bool(block)


class Output:
    """What a scheduler makes of a step: two requests, seven tokens."""

    num_scheduled_tokens, total_num_scheduled_tokens = {"a": 6, "b": 1}, 7


@pytest.mark.vllm
def test_M15_the_real_engine_counts_its_steps_and_blocks(real_server: Shared) -> None:
    server = real_server.server

    async def story() -> None:
        before = await server.steps()
        assert before, "this version can be counted"
        scraped = await server.metrics()
        await steps(server, 8)
        after = await server.steps()
        made = {
            name: after[name] - before[name] for name in ("steps", "tokens", "allocated", "held", "filled")
        }
        assert made["tokens"] >= 8 * (300 + 59)
        assert made["allocated"] >= 8 * -(-359 // ENGINE_BLOCK)
        found = limits.stepped(before, after, 10.0)
        assert 1 <= found["batch_requests_p50"] <= found["batch_requests_p95"] <= 8
        assert 0 < found["step_ms_p50"] <= found["step_ms_p95"]
        assert 0 < found["kv_fragmentation"] < 1
        told = metrics.between(scraped, await server.metrics())
        assert 0 < (told["batch_tokens_p50"] or 0) <= (told["batch_tokens_p95"] or 0)

    real_server.loop.run_until_complete(story())


@pytest.mark.vllm
def test_the_real_engine_schedules_by_its_new_limits(real_server: Shared) -> None:
    """Not by the histogram's tokens: it counts a prompt as a whole in the step that ends it."""
    server = real_server.server

    async def story() -> None:
        state = await limits.ask(server, {})
        expected = "AsyncScheduler" if server.effective.get("async_scheduling") else "Scheduler"
        assert (state.ok, state.base) == (True, expected), state
        as_launched = await steps(server, 16)
        assert await limits.change(server, {"max_num_seqs": 3})
        assert await steps(server, 16) >= 16 * 60 / 3 - 1 > as_launched
        assert not await limits.change(server, {"max_num_seqs": 32})
        assert await limits.change(server, {})
        as_launched = await steps(server, 8, 1500)
        assert await limits.change(server, {"max_num_batched_tokens": 64})
        before_the_first_token = 1500 // 64
        assert await steps(server, 8, 1500) >= 8 * 1500 / 64 + 59 - before_the_first_token > as_launched
        assert await limits.change(server, {})
        assert (await limits.ask(server, {})).limits == state.launched
        assert await server.fault() is None

    real_server.loop.run_until_complete(story())
