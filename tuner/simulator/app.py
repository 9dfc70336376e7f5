"""The simulated engine as a process: `python -m tuner.simulator.app` takes the argv of vLLM's API server.

What is not vLLM's is set by the environment alone: TUNER_SIM_CARD (a preset), TUNER_SIM_COEFFICIENTS (JSON,
from a calibration), TUNER_SIM_SPEED (2 = twice real time), TUNER_SIM_NOISE (relative, one standard deviation
per step), TUNER_SIM_SEED, TUNER_SIM_STARTUP_S (how long it pretends to load) and TUNER_SIM_BLIND=1 (every
step takes 10 ms whatever the knobs say).
"""

import asyncio
import itertools
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from tuner.engine.live_limits import VARIABLE
from tuner.errors import TunerError
from tuner.knobs.model import ModelFacts, read
from tuner.simulator import live
from tuner.simulator.completions import Completion, Rejected, read_order
from tuner.simulator.cost import GIB, Card, Coefficients, StepCost, card_of, preset
from tuner.simulator.engine import Engine, Pace
from tuner.simulator.http import REASONS, Connection
from tuner.simulator.memory import Memory, profile
from tuner.simulator.options import VERSION, Options, Refused, host_blocks, parser, resolve
from tuner.simulator.scheduler import Scheduler

_SOURCES = {"APIServer": "api_server.py:1", "EngineCore": "core.py:1", "Worker": "gpu_worker.py:1"}


def log(who: str, words: str, level: str = "INFO") -> None:
    """One line in vLLM's format, on standard output, per line of `words`."""
    stamp = datetime.now().strftime("%m-%d %H:%M:%S")
    for line in words.split("\n"):
        print(f"({who} pid={os.getpid()}) {level} {stamp} [{_SOURCES[who]}] {line}", flush=True)


def check_memory(options: Options, memory: Memory, facts: ModelFacts, card: Card) -> None:
    """What vLLM finds at start-up: Refused for too little KV memory, a bad block size, out of memory."""
    size, length = options.limits.block_size, options.limits.max_model_len
    step, backend = (32, "CPU_ATTN") if card.platform == "cpu" else (16, "FLASH_ATTN")
    if memory.kv_gib <= 0:
        raise Refused(
            "ValueError",
            "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
            "initializing the engine. See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ "
            "for more details.",
            where="EngineCore",
        )
    if memory.tokens(size) < length:
        per_token = facts.kv_bytes_per_token * options.budget.kv_scale / GIB
        need, have = length * per_token, memory.tokens(size) * per_token
        raise Refused(
            "ValueError",
            f"To serve at least one request with the model's max seq len ({length}), ({need:.2f} GiB KV "
            f"cache is needed, which is larger than the available KV cache memory ({have:.2f} GiB). Based on "
            f"the available memory, the estimated maximum model length is {memory.tokens(size)}. Try "
            "increasing `gpu_memory_utilization` (which also controls CPU memory on the CPU backend) or "
            "decreasing `max_model_len` when initializing the engine. See "
            "https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details.",
            where="EngineCore",
        )
    if size % step:
        raise Refused(
            "ValueError",
            f"No common block size for {size} ({backend}: [MultipleOf({step})]).",
            where="Worker",
        )
    if memory.missing_gib > 0:
        raise Refused(
            "RuntimeError",
            f"CUDA out of memory occurred when warming up sampler with {options.limits.max_num_seqs} dummy "
            "requests. Please try lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the "
            "engine.",
            where="Worker",
        )


def refuse(refused: Refused) -> int:
    """Print the failure as the process that finds it would, wrapped as vLLM wraps it; the exit code."""
    if refused.where == "APIServer":
        print(f"Traceback (most recent call last):\n{refused.kind}: {refused}", file=sys.stderr, flush=True)
        return 1
    if refused.where == "Worker":
        log("Worker", f"Traceback (most recent call last):\n{refused.kind}: {refused}", "ERROR")
    log("EngineCore", "EngineCore failed to start.", "ERROR")
    log("EngineCore", f"Traceback (most recent call last):\n{refused.kind}: {refused}", "ERROR")
    print(
        "Traceback (most recent call last):\nRuntimeError: Engine core initialization failed. "
        "See root cause above. Failed core proc(s): {}",
        file=sys.stderr,
        flush=True,
    )
    return 1


COMPLETIONS = ("/v1/completions", "/v1/chat/completions")


class Server:
    """The routes of the API server over one engine."""

    def __init__(
        self, options: Options, memory: Memory, engine: Engine, facts: ModelFacts, dev: bool
    ) -> None:
        self.options, self.memory, self.engine, self.facts, self.dev = options, memory, engine, facts, dev
        self._numbers = itertools.count()
        self._started = int(datetime.now().timestamp())

    def handle(self, connection: Connection, method: str, url: str, body: bytes) -> None:
        path = url.partition("?")[0]
        if method == "POST" and path in COMPLETIONS:
            self._complete(connection, body, method, path)
            return
        status, answer, kind = self._answer(method, path)
        self._access(connection, method, path, status)
        connection.answer(status, answer, kind)

    def _answer(self, method: str, path: str) -> tuple[int, bytes, str]:
        known = {"/health": "GET", "/ping": "GET", "/v1/models": "GET", "/version": "GET", "/metrics": "GET"}
        if self.dev:
            known |= {"/server_info": "GET", "/reset_prefix_cache": "POST"}
        if path not in known and path not in COMPLETIONS:
            return 404, b'{"detail":"Not Found"}', "application/json"
        if known.get(path, "POST") != method:
            return 405, b'{"detail":"Method Not Allowed"}', "application/json"
        if path in ("/health", "/ping"):
            return 200, b"", "text/plain"
        if path == "/metrics":
            page = self.engine.counters.page(
                self.options.names[0], self.engine.gauges(), self._cache_config()
            )
            return 200, page.encode(), "text/plain; version=0.0.4; charset=utf-8"
        found: Any
        if path == "/version":
            found = {"version": VERSION}
        elif path == "/v1/models":
            found = {"object": "list", "data": [self._model(name) for name in self.options.names]}
        elif path == "/reset_prefix_cache":
            found = {"success": self._reset()}
        else:
            found = self._info()
        return 200, json.dumps(found).encode(), "application/json"

    def _access(self, connection: Connection, method: str, path: str, status: int) -> None:
        if self.options.access_log:
            words = REASONS.get(status, "")
            print(f'INFO:     {connection.peer} - "{method} {path} HTTP/1.1" {status} {words}', flush=True)

    def _complete(self, connection: Connection, body: bytes, method: str, path: str) -> None:
        limits = self.options.limits
        try:
            chat, sizes = path == COMPLETIONS[1], (limits.max_model_len, self.facts.vocab_size)
            order = read_order(body, self.options.names, *sizes, chat=chat)
        except Rejected as rejected:
            self._access(connection, method, path, rejected.status)
            connection.answer(rejected.status, rejected.body())
            return
        done = Completion(
            connection,
            order,
            details=self.options.prompt_details,
            interval=self.options.stream_interval,
            finished=lambda: self._access(connection, method, path, 200),
        )
        connection.on_lost = lambda: [self.engine.abort(request) for request in done.requests]  # type: ignore[assignment, func-returns-value]
        done.start(self.engine, self._numbers, caching=limits.enable_prefix_caching)

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "vllm",
            "root": self.options.model,
            "parent": None,
            "max_model_len": self.options.limits.max_model_len,
            "permission": [],
        }

    def _reset(self) -> bool:
        log("APIServer", "Resetting prefix cache...")
        pool = self.engine.scheduler.pool
        if pool.forget():
            log("EngineCore", "Successfully reset prefix cache")
            return True
        held = pool.total - pool.free
        words = f"Failed to reset prefix cache because some blocks ({held}) are not freed yet"
        log("EngineCore", words, "WARNING")
        return False

    def _cache_config(self) -> dict[str, object]:
        limits, budget = self.options.limits, self.options.budget
        tokens = limits.num_blocks * limits.block_size
        return {
            "block_size": limits.block_size,
            "cache_dtype": self.options.given.get("kv_cache_dtype", "auto"),
            "effective_attention_block_size": limits.block_size,
            "enable_prefix_caching": limits.enable_prefix_caching,
            "engine": 0,
            "gpu_memory_utilization": budget.utilization,
            "kv_cache_max_concurrency": round(tokens / limits.max_model_len, 3),
            "kv_cache_memory_bytes": budget.kv_bytes,
            "kv_cache_size_tokens": tokens,
            "kv_offloading_size": self.options.offload_gib or None,
            "num_cpu_blocks": None,
            "num_gpu_blocks": limits.num_blocks,
            "num_gpu_blocks_override": budget.blocks,
            "prefix_caching_hash_algo": "sha256",
            "user_specified_block_size": self.options.user_block_size,
        }

    def _info(self) -> dict[str, Any]:
        limits = self.options.limits
        cache = {key: value for key, value in self._cache_config().items() if key != "engine"}
        scheduler = {
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "max_num_seqs": limits.max_num_seqs,
            "max_num_active_seqs": limits.max_num_active_seqs,
            "long_prefill_token_threshold": limits.long_prefill_token_threshold,
            "long_prefill_token_threshold_adaptive": limits.long_prefill_token_threshold_adaptive,
            "scheduler_reserve_full_isl": limits.scheduler_reserve_full_isl,
            "enable_chunked_prefill": limits.enable_chunked_prefill,
            "policy": limits.policy,
            "watermark": limits.watermark,
            "async_scheduling": limits.async_scheduling,
        }
        given = self.options.given
        config = {
            "model_config": {
                "model": self.options.model,
                "max_model_len": limits.max_model_len,
                "enforce_eager": given.get("enforce_eager", False),
            },
            "cache_config": cache,
            "scheduler_config": scheduler,
            "compilation_config": {"max_cudagraph_capture_size": self.options.budget.capture_most},
            "performance_mode": given.get("performance_mode", "balanced"),
        }
        return {"vllm_config": config, "simulated": {"flushes": self.engine.punctuality.report()}}


def _coefficients(card: Card, env: Mapping[str, str]) -> Coefficients:
    given = env.get("TUNER_SIM_COEFFICIENTS")
    return Coefficients(**json.loads(given)) if given else preset(card)


def _announce(options: Options, memory: Memory) -> None:
    length = options.limits.max_model_len
    tokens = memory.tokens(options.limits.block_size)
    log("APIServer", f"version {VERSION}")
    log("APIServer", f"non-default args: {dict(options.given)}")
    log("APIServer", f"Using max model len {length}")
    log("EngineCore", f"Initializing a V1 LLM engine (v{VERSION}) with config: model='{options.model}'")
    log("Worker", "Loading weights took 0.00 seconds")
    log("Worker", f"Model loading took {memory.weights_gib:.2f} GiB memory and 0.000000 seconds")
    log("Worker", f"Available KV cache memory: {memory.kv_gib:.2f} GiB")
    log("EngineCore", f"GPU KV cache size: {tokens:,} tokens")
    log("EngineCore", f"Maximum concurrency for {length:,} tokens per request: {tokens / length:.2f}x")


async def serve(
    options: Options, memory: Memory, cost: StepCost, facts: ModelFacts, env: Mapping[str, str]
) -> int:
    """Listen until SIGTERM or SIGINT; 0 on a clean stop, 1 when the port is taken."""
    loop = asyncio.get_running_loop()
    pace = Pace(
        speed=float(env.get("TUNER_SIM_SPEED", "1")),
        noise=float(env.get("TUNER_SIM_NOISE", "0")),
        seed=int(env.get("TUNER_SIM_SEED", "0")),
        blind=env.get("TUNER_SIM_BLIND", "") in ("1", "true"),
    )
    engine = Engine(Scheduler(options.limits, tell=True), cost, pace, loop)
    server = Server(options, memory, engine, facts, env.get("VLLM_SERVER_DEV_MODE") == "1")
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((options.host, options.port))
    except OSError as error:
        print(f"Traceback (most recent call last):\nOSError: {error}", file=sys.stderr, flush=True)
        return 1
    _announce(options, memory)
    try:
        await asyncio.wait_for(stop.wait(), float(env.get("TUNER_SIM_STARTUP_S", "0")) or 0.001)
        return 0
    except TimeoutError:
        pass
    log("EngineCore", "init engine (profile, create kv cache, warmup model) took 0.00 s")
    listener = await loop.create_server(lambda: Connection(server.handle), sock=bound, backlog=4096)
    limits = env.get(VARIABLE) if "scheduler_cls" in options.given else None
    changing = await live.serve(engine.scheduler, limits) if limits else None
    log("APIServer", f"Starting vLLM server on http://{options.host}:{options.port}")
    print("INFO:     Application startup complete.", flush=True)
    await stop.wait()
    listener.close()
    if changing is not None:
        changing.close()
    log("APIServer", "[shutdown] API server: shutdown triggered")
    return 0


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Run one simulated engine; the exit code (argparse ends the process with 2 itself)."""
    args = parser().parse_args(list(argv))
    try:
        card = card_of(env.get("TUNER_SIM_CARD", "h100-80"))
    except TunerError as error:
        print(f"TUNER_SIM_CARD: {error}", file=sys.stderr, flush=True)
        return 1
    try:
        facts = read(args.model_tag or args.model, env=env)
    except TunerError as error:
        print(f"huggingface_hub.errors.LocalEntryNotFoundError: {error}", file=sys.stderr, flush=True)
        return 1
    try:
        options = resolve(argv, card, facts, env)
        memory = profile(facts, card, options.budget)
        check_memory(options, memory, facts, card)
    except Refused as refused:
        return refuse(refused)
    options = options.with_blocks(memory.blocks, host_blocks(facts, options))
    cost = StepCost(
        facts,
        card,
        _coefficients(card, env),
        block_size=options.limits.block_size,
        capture_most=options.budget.capture_most,
        kv_scale=options.budget.kv_scale,
    )
    import uvloop  # here: refusals need not pay for it

    return uvloop.run(serve(options, memory, cost, facts, env))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
