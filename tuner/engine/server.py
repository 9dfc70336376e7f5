"""One engine process tree: started, checked until it is ready, and always stopped. While it runs, its step
counter says whether it still computes (/health answers 200 when it is frozen).
"""

import asyncio
import math
import os
import re
import shutil
import signal
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from tuner.adapters import adapter_of
from tuner.engine import boots, failures, limits, log, metrics
from tuner.engine.failures import KINDS, LaunchFailure, Phase, failed
from tuner.engine.gpu import Gpus, visible_devices
from tuner.engine.http import Reply, ask, fresh_port, strangers, stream_has_token
from tuner.engine.metrics import EngineMetrics, parse, read_effective
from tuner.errors import BadInput, EngineError, StudyFailed
from tuner.processes import HOST, TAG, Process, ProcessTable, Stopped, spawn, stop
from tuner.records import JSON, LaunchSpec, Value

_NEEDED = (
    "running",
    "waiting",
    "generation_tokens",
    "prompt_tokens",
    "preemptions",
    "iterations",
)


@cache
def _needed(engine: str) -> re.Pattern[str]:
    """The lines of /metrics that are needed here: this check runs more often than the whole page is
    parsed.
    """
    names = [name for ours in _NEEDED for name in adapter_of(engine).metrics.get(ours, ())]
    return re.compile(rf"^(?:{'|'.join(map(re.escape, names))})\b.*$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    at_s: float
    iterations: float | None
    tokens: float
    preemptions: float


class Liveness:
    """Takes scrapes during a replay and reports when the engine made no progress for `grace_s` seconds.

    Frozen: requests run, and no step ends. Thrash: no token comes while preemptions rise. An engine that
    exports neither steps nor tokens is not checked; one that does not export tokens is not checked for
    thrash.
    """

    def __init__(self, *, grace_s: float = 30.0, engine: str = "vllm") -> None:
        self.grace_s, self.engine = grace_s, engine
        self._step: _Mark | None = None
        self._token: _Mark | None = None

    def observe(self, metrics: EngineMetrics, now_s: float) -> LaunchFailure | None:
        """The verdict on an engine without progress; None while it progresses, idles, or exports nothing."""
        mark = _Mark(
            at_s=now_s,
            iterations=metrics["iterations"],
            tokens=(metrics["generation_tokens"] or 0.0) + (metrics["prompt_tokens"] or 0.0),
            preemptions=metrics["preemptions"] or 0.0,
        )
        silent = metrics["iterations"] is None and metrics["generation_tokens"] is None
        if silent or not metrics.busy or self._step is None or self._token is None:
            self._step = self._token = mark
            return None
        if mark.iterations != self._step.iterations or mark.tokens != self._step.tokens:
            self._step = mark
        if mark.tokens != self._token.tokens or metrics["generation_tokens"] is None:
            self._token = mark
        return self._judge(self._step, self._token, mark)

    def _judge(self, step: _Mark, token: _Mark, now: _Mark) -> LaunchFailure | None:
        rising = now.preemptions > token.preemptions
        if rising and now.at_s - token.at_s > self.grace_s:
            more = now.preemptions - token.preemptions
            return failed(
                "thrash", detail=f"{more:.0f} preemptions in {now.at_s - token.at_s:.0f} s", phase="run"
            )
        if now.at_s - step.at_s > self.grace_s:
            return failed("frozen", detail=f"no step in {now.at_s - step.at_s:.0f} s", phase="run")
        return None


async def watch(
    scrape: Callable[[], Awaitable[str]],
    liveness: Liveness,
    *,
    interval_s: float,
    clock: Callable[[], float] = time.monotonic,
    heard: Callable[[], float] = lambda: -math.inf,
) -> LaunchFailure:
    """Check a running engine until it makes no progress; returns that verdict.

    `scrape` gives the exposition text and raises OSError when there is none. No answer for the whole grace is
    no progress too, unless tokens came meanwhile (`heard`: the time of the last ones, by the same clock).
    """
    answered = clock()
    while True:
        await asyncio.sleep(interval_s)
        try:
            needed = _needed(liveness.engine).findall(await scrape())
        except OSError:
            silent = clock() - max(answered, heard())
            if silent > liveness.grace_s:
                return failed(
                    "frozen", detail=f"no token and no answer to /metrics for {silent:.0f} s", phase="run"
                )
            continue
        answered = clock()
        try:
            scraped = parse("\n".join((*needed, "")), liveness.engine)
        except ValueError:  # it answers, so it is alive, but this text cannot be read
            continue
        if (found := liveness.observe(scraped, answered)) is not None:
            return found


def oom_kills() -> int:
    """How many processes the kernel's out-of-memory killer has killed on this host; 0 if it does
    not count.
    """
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


HOST_NAME = "127.0.0.1"
REFUSAL_S = 10.0
HEALTH_S = 2.0
SLOW, GONE = 0, -1  # no answer to /health within HEALTH_S, and no connection at all


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReset:
    """Whether the prefix cache is empty. `how`: body (the engine confirmed it), status (200 without a word),
    refused, absent (no such endpoint).
    """

    proved: bool
    how: str


class Server:
    """A running engine. Its own report is read once, when it is ready."""

    def __init__(self, spec: LaunchSpec, process: Process, port: int, nonce: str) -> None:
        self.spec = spec
        self.kind = spec.kind
        self.adapter = adapter_of(spec.kind)
        self.process = process
        self.host = HOST_NAME
        self.port = port
        self.names = (spec.served_name, nonce)
        self.log = Path(spec.directory) / "engine.log"
        self.effective: Mapping[str, Value] = {}
        self.kv_tokens: int | None = None
        self.timeline: Mapping[str, float] = {}
        self.ready_s = 0.0
        self.compiled_anew = False
        self.first_kv_tokens: int | None = None
        self.stopped: Stopped | None = None
        self.held_gib = 0.0
        self.heard_at = -math.inf
        self._oom_kills = oom_kills()
        self._latched: LaunchFailure | None = None

    @property
    def cause(self) -> str | None:
        """The kind of the verdict on this launch, None while there is none."""
        return None if self._latched is None else self._latched.kind

    @property
    def alive(self) -> bool:
        """Whether the leader process runs; its children may still have failed (ask `fault`)."""
        return self.process.code is None

    async def ask(self, method: str, path: str, *, body: JSON = None, timeout_s: float = 10.0) -> Reply:
        """One HTTP question. OSError when no answer came."""
        return await ask(self.host, self.port, method, path, body=body, timeout_s=timeout_s)

    async def metrics(self) -> metrics.EngineMetrics:
        """One scrape of /metrics. OSError when no answer came."""
        return metrics.parse(await self.exposition(), self.kind)

    async def exposition(self, timeout_s: float = 10.0) -> str:
        """The raw text of /metrics."""
        return (await self.ask("GET", "/metrics", timeout_s=timeout_s)).text

    async def steps(self) -> Mapping[str, Any]:
        """What its scheduler counted so far (`live_limits.Steps`); empty if it does not."""
        return (await limits.ask(self, {})).steps

    def heard(self) -> None:
        """Note that tokens arrived just now: the engine computes, even if its other endpoints are silent."""
        self.heard_at = time.monotonic()

    async def version(self) -> str | None:
        """The answer of /version, None without one."""
        said = (await self.ask("GET", "/version")).json()
        version = said.get("version") if isinstance(said, dict) else None
        return version if isinstance(version, str) else None

    async def reset_cache(self, *, tries: int = 5, pause_s: float = 0.2) -> CacheReset:
        """Empty the prefix cache; repeated while the engine refuses because requests still run."""
        external = any("kv-transfer" in part or "kv-offload" in part for part in self.spec.argv)
        path = self.adapter.reset_path + ("?reset_external=true" if external else "")
        for _ in range(tries):
            reply = await self.ask("POST", path, timeout_s=60.0)
            said = reply.json()
            if reply.status == 404:
                return CacheReset(proved=False, how="absent")
            if reply.status == 200 and not (isinstance(said, dict) and "success" in said):
                return CacheReset(proved=False, how="status")
            if reply.status == 200 and isinstance(said, dict) and said["success"] is True:
                return CacheReset(proved=True, how="body")
            await asyncio.sleep(pause_s)
        return CacheReset(proved=False, how="refused")

    async def fault(self, phase: str = "run") -> EngineError | None:
        """What killed or broke the engine, None when it is fine. The first answer stays, whatever follows."""
        if self._latched is None:
            found = await self._look("startup" if phase == "startup" else "run")
            self._latched = self._latched or found  # the watch may have come to a verdict meanwhile
        return None if self._latched is None else self._latched.error()

    async def _look(self, phase: Phase) -> LaunchFailure | None:
        """No answer is not a failure yet: an overloaded server may not answer for seconds. While it lives,
        only the watch decides whether it makes no progress for too long.
        """
        said = await self._health()
        if self.alive and said in (200, SLOW):
            return None
        await self._until_gone()  # one that dies answers 503, or nothing, a while before its end is seen
        if self.alive and await self._health() in (200, SLOW, GONE):
            return None
        return await self.verdict(phase)

    async def _health(self) -> int:
        """What /health answers: a status, SLOW or GONE."""
        try:
            return (await self.ask("GET", "/health", timeout_s=HEALTH_S)).status
        except TimeoutError:
            return SLOW
        except OSError:
            return GONE

    def say(self, kind: str, detail: str) -> LaunchFailure:
        """A verdict that we came to ourselves, with the log's last line as evidence."""
        return failures.failed(kind, detail=detail, evidence=failures.last_line(log.read(self.log)))

    async def verdict(self, phase: Phase, *, patience_s: float = 1.0) -> LaunchFailure:
        """Why the engine ended, from its log and its exit code as first seen. Waits a little for the last
        lines of the log.
        """
        deadline = time.monotonic() + patience_s
        while self.process.writing and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self.process.log_lost is not None:
            return failures.failed("disk_full", detail=f"{self.log}: {self.process.log_lost.strerror}")
        return failures.classify(
            log.read(self.log),
            self.process.code,
            phase,
            asked=(*self.spec.asked, *self.spec.asked_argv),
            oom_killed=oom_kills() > self._oom_kills,
            held_gib=self.held_gib,
            engine=self.kind,
        )

    def latch(self, verdict: LaunchFailure) -> EngineError:
        """Record what ended this launch, unless something did before."""
        self._latched = self._latched or verdict
        return self._latched.error()

    async def _until_gone(self, seconds: float = 6.0) -> None:
        """An engine whose core died answers 503 for some seconds, then exits (0, of all codes)."""
        deadline = time.monotonic() + seconds
        while self.alive and time.monotonic() < deadline:
            await asyncio.sleep(0.05)


@asynccontextmanager
async def serve(
    spec: LaunchSpec,
    *,
    gpus: Gpus | None = None,
    settle: bool | None = None,
    note: Callable[[str], None] = lambda phase: None,
    grace_s: float = 60.0,
    kill_timeout_s: float = 60.0,
    table: ProcessTable = HOST,
) -> AsyncIterator[Server]:
    """Launch an engine, wait until it is ready, yield it, and stop it, also when the caller is cancelled.

    With `gpus`, waits first until their memory is free. `settle` (default: on GPUs): a boot that compiled
    anew may get less KV cache than the next one, so it is thrown away and booted again; the timeline then
    notes the difference. An engine without progress for `grace_s` under load is killed (see liveness); a
    process that lives `kill_timeout_s` after SIGKILL is a hard fault. Raises Infeasible | Aborted |
    StudyFailed.
    """
    terms = _Terms(gpus=gpus, note=note, grace_s=grace_s, kill_timeout_s=kill_timeout_s, table=table)
    if settle is None:
        settle = bool(spec.gpus)
    async with _boot(spec, terms) as server:
        if not (settle and server.compiled_anew):
            yield server
            return
        first = server
    note("booting again with the compiled code")
    first.log.rename(first.log.with_name("engine-first.log"))
    async with _boot(spec, terms) as server:
        server.first_kv_tokens = first.kv_tokens
        drift = {}
        if server.kv_tokens and first.kv_tokens:
            drift[boots.FIRST_DRIFT] = (first.kv_tokens - server.kv_tokens) / server.kv_tokens
        server.timeline = {**server.timeline, boots.FIRST_S: first.ready_s, **drift}
        yield server


@dataclass(frozen=True, slots=True, kw_only=True)
class _Terms:
    """The arguments of `serve`, apart from the spec."""

    gpus: Gpus | None
    note: Callable[[str], None]
    grace_s: float
    kill_timeout_s: float
    table: ProcessTable


@asynccontextmanager
async def _boot(spec: LaunchSpec, terms: _Terms) -> AsyncIterator[Server]:
    if terms.gpus is not None:
        terms.gpus.refuse_foreign()
        terms.note("waiting for GPU memory")
        await terms.gpus.wait_free()
    with boots.claimed_cache(spec.env, spec.kind) as cache:
        devices = visible_devices(spec.gpus, terms.gpus, spec.env)
        server = _launch(replace(spec, env={**devices, **spec.env, **cache}))
        if terms.gpus is not None:
            server.held_gib = max((n / 2**30 for n in terms.gpus.baseline.values()), default=0.0)
        try:
            await _until_ready(server, terms.note)
            guard = asyncio.ensure_future(_kill_when_still(server, terms.grace_s))
            try:
                yield server
            finally:
                guard.cancel()
        finally:
            await _stop_surely(server, terms)


async def _kill_when_still(server: Server, grace_s: float) -> None:
    """Kill an engine that no longer computes, so that the caller learns of the failure at once."""
    liveness = Liveness(grace_s=grace_s, engine=server.kind)
    found = await watch(
        partial(server.exposition, min(10.0, grace_s)),
        liveness,
        interval_s=grace_s / 12,
        heard=lambda: server.heard_at,
    )
    server.latch(found)
    server.process.asked = True
    HOST.kill(server.process.pid, signal.SIGKILL)


def arguments(spec: LaunchSpec, port: int, nonce: str) -> list[str]:
    """The complete command line of a launch. In its command prefix `{tag}` becomes the launch's id and a word
    `{env}` becomes `--env NAME` for every variable of the launch (a container does not inherit them).
    """
    environment = adapter_of(spec.kind).environment
    names = sorted({*(name for name, value in environment.items() if value), *spec.env, TAG})
    passed = [word for name in names for word in ("--env", name)]
    prefix = [
        word
        for part in spec.command
        for word in (passed if part == "{env}" else [part.replace("{tag}", spec.launch_id)])
    ]
    fixed = ["--model", spec.model, "--host", HOST_NAME, "--port", str(port)]
    return [*prefix, *fixed, "--served-model-name", spec.served_name, nonce, *spec.argv]


def _launch(spec: LaunchSpec) -> Server:
    directory = Path(spec.directory)
    directory.mkdir(parents=True, exist_ok=True)
    if spec.stop_command and shutil.which(spec.stop_command[0]) is None:
        raise StudyFailed(f"there is no stop command {spec.stop_command[0]!r}", cause="no_program")
    port, nonce = fresh_port(), f"tuner-{uuid.uuid4().hex[:12]}"
    try:
        process = spawn(
            arguments(spec, port, nonce),
            env={**adapter_of(spec.kind).environment, **spec.env},
            directory=directory,
            log=directory / "engine.log",
            tag=spec.launch_id,
            cores=spec.cores,
            redact=log.redactor({**os.environ, **spec.env}),
            stop_command=spec.stop_command,
        )
    except BadInput as error:
        raise StudyFailed(str(error), cause="no_program") from error
    return Server(spec, process, port, nonce)


async def _until_ready(server: Server, note: Callable[[str], None]) -> None:
    begun = time.monotonic()
    deadline = begun + server.spec.ready_timeout_s
    step = "starting"
    answered: float | None = None
    note(step)
    while True:
        if not server.alive:
            raise server.latch(await server.verdict("startup"))
        if time.monotonic() > deadline:
            raise server.latch(await _timed_out(server, step))
        try:
            step = await _step(server, deadline)
        except OSError:
            await asyncio.sleep(0.05)
            continue
        if step == "ready":
            break
        answered = (answered or time.monotonic()) if step.startswith("answering") else None
        if answered is not None and time.monotonic() - answered > REFUSAL_S:
            raise server.latch(server.say("refused", f"still {step} after {REFUSAL_S:.0f} s"))
        await asyncio.sleep(0.05)
    server.ready_s = time.monotonic() - begun
    await _introduce(server)
    note("ready")


async def _step(server: Server, deadline: float) -> str:
    """One look at a starting engine: how far it is. OSError while it does not listen."""
    if (await server.ask("GET", "/health", timeout_s=5.0)).status != 200:
        return "unhealthy"
    models = (await server.ask("GET", "/v1/models", timeout_s=5.0)).json()
    data = models.get("data") if isinstance(models, dict) else None
    names = [entry.get("id") for entry in data if isinstance(entry, dict)] if isinstance(data, list) else []
    foreign = strangers(server.port, HOST.members(server.process))
    if server.names[1] not in names or (foreign and not server.spec.stop_command):
        raise server.latch(failures.failed("stale_server", detail=f"port {server.port}, pids {foreign}"))
    left = max(1.0, deadline - time.monotonic())
    body: JSON = {"model": server.names[1], "prompt": [11, 12, 13, 14], "max_tokens": 1, "stream": True}
    reply = await server.ask("POST", "/v1/completions", body=body, timeout_s=left)
    return "ready" if stream_has_token(reply) else f"answering {reply.status} to a completion"


async def _timed_out(server: Server, step: str) -> LaunchFailure:
    """The verdict on an engine that is not ready at its deadline: its log's cause, else the wait."""
    text = log.read(server.log)
    found = failures.first_cause(text, server.kind)
    if found is not None and KINDS[found[0]].rank == 0:
        return await server.verdict("startup", patience_s=0.0)
    detail = f"after {server.spec.ready_timeout_s:.0f} s still {step}"
    return failures.failed("init_timeout", detail=detail, evidence=failures.last_line(text))


async def _introduce(server: Server) -> None:
    """Read the engine's own report; refuse another engine than the one asked for."""
    text = log.read(server.log)
    if (line := failures.line_of("v0_fallback", text, server.kind)) is not None:
        raise server.latch(failures.failed("v0_fallback", evidence=line))
    try:
        scraped = await server.metrics()
        info = (await server.ask("GET", server.adapter.config_path, timeout_s=30.0)).json()
    except (OSError, ValueError) as error:
        fault = await server.fault("startup")
        raise fault or server.latch(failures.failed("refused", detail=str(error))) from error
    server.effective = read_effective(server.spec, scraped, info, text)
    server.kv_tokens = metrics.kv_tokens(scraped) or log.kv_tokens(text)
    server.compiled_anew = boots.compiled_anew(text)
    server.timeline = {**log.timeline(text), "ready_s": server.ready_s}


async def _stop_surely(server: Server, terms: _Terms) -> None:
    """Stop the tree even while we are being cancelled; the cancellation goes on afterwards."""
    task = asyncio.ensure_future(
        stop(
            server.process,
            timeout_s=server.spec.stop_timeout_s,
            kill_timeout_s=terms.kill_timeout_s,
            table=terms.table,
        )
    )
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    server.stopped = task.result()
    if server.cause == "compile_cache":
        boots.wipe_cache(server.spec.env, server.kind)
    if server.stopped.survivors:
        pids = ", ".join(str(pid) for pid in server.stopped.survivors)
        raise server.latch(failures.failed("hard_fault", detail=f"pids {pids}"))
    if cancelled is not None:
        raise cancelled
