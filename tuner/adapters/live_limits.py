"""Scheduler limits that change inside one running vLLM (`--scheduler-cls live_limits.LiveLimits`).

A single file without imports of ours: `tuner.engine.limits` copies it onto the target's path. It answers one
JSON line per connection on the Unix socket that TUNER_LIVE_LIMITS names:

    {"limits": {"max_num_seqs": 64}}  →  {"ok": true, "limits": {everything as read back}, ...}

Every reply has `steps`: what the scheduler counted since it began (see `Steps`). {} asks without a change.
Limits left out go back to their launched values. Only an idle engine is changed, nothing is raised above what
the engine was launched with, and what is set is read back (tests/engine/test_live_limits.py).
"""

import json
import os
import socket
import threading
import time

VARIABLE = "TUNER_LIVE_LIMITS"
VERSIONS = ((0, 10), (0, 33))
"""vLLM releases, from … to before …, whose scheduler has the attributes that are set here."""

ACTIVE_SINCE = (0, 32)
"""From here on admission is bounded by max_num_active_reqs. Lowering max_num_running_reqs, the model runner's
slots, would trip an assertion and kill the engine."""

NAMES = (
    "max_num_seqs",
    "max_num_active_seqs",
    "max_num_batched_tokens",
    "long_prefill_token_threshold",
    "watermark",
)


class LimitRefused(Exception):
    """The change is not made; the sentence says why."""


class LiveLimits:
    """Makes the scheduler that the engine would have used, of a class derived from it."""

    def __new__(cls, *args, **kwargs):
        config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
        scheduler = locked(base_class(config.scheduler_config))(*args, **kwargs)
        path = os.environ.get(VARIABLE)
        if path and config.parallel_config.data_parallel_size == 1:
            serve(LimitChanger(scheduler), path)
        return scheduler


def base_class(scheduler_config):
    """AsyncScheduler if async scheduling is on, else Scheduler: what vLLM itself would take."""
    if getattr(scheduler_config, "async_scheduling", False):
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler

        return AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    return Scheduler


def locked(base):
    """`base`, with each scheduling step under a lock that a change takes too."""

    class Locked(base):
        def __init__(self, *args, **kwargs):
            self.live_lock = threading.Lock()
            super().__init__(*args, **kwargs)
            self.live_steps = Steps(self)

        def schedule(self, *args, **kwargs):
            with self.live_lock:
                self.live_steps.begin(self)
                output = super().schedule(*args, **kwargs)
                self.live_steps.note(self, output)
                return output

    Locked.__name__ = Locked.__qualname__ = f"Live{base.__name__}"
    return Locked


class Steps:
    """What a scheduler did, in counters that only grow.

    `steps`, the `tokens` computed in them, `batch` (requests in a step → steps), `seconds` (duration to two
    digits → steps; from one step's begin to the next one's while requests go on), blocks `allocated` and
    `evicted` (cached ones that others got), and, summed over steps, `held` blocks and the tokens in them
    (`filled`). Nothing is counted if a version has other attributes; the engine goes on.
    """

    def __init__(self, scheduler):
        self.counts = {"steps": 0, "tokens": 0, "allocated": 0, "evicted": 0, "held": 0, "filled": 0}
        self.batch, self.seconds = {}, {}
        self.begun = None
        try:
            self.pool = scheduler.kv_cache_manager.block_pool
            self.counts["block_size"] = scheduler.cache_config.block_size
            self._count("get_new_blocks", "allocated", len)
            self._count("_maybe_evict_cached_block", "evicted", int)
            self.why_not = None
        except AttributeError as error:
            self.why_not = str(error)

    def _count(self, name, into, amount):
        """Count what a method of the pool gives back."""
        method = getattr(self.pool, name)

        def call(*args, **kwargs):
            found = method(*args, **kwargs)
            self.counts[into] += amount(found)
            return found

        setattr(self.pool, name, call)

    def begin(self, scheduler):
        """A step begins: the last one took until now, if its requests go on."""
        now, begun = time.perf_counter(), self.begun
        self.begun = now
        if self.why_not is None and begun is not None and scheduler.running:
            key = f"{now - begun:.2g}"
            self.seconds[key] = self.seconds.get(key, 0) + 1

    def note(self, scheduler, output):
        """A step was made up."""
        if self.why_not is not None:
            return
        try:
            requests, tokens = len(output.num_scheduled_tokens), output.total_num_scheduled_tokens
            held = self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks()
            filled = sum(request.num_computed_tokens for request in scheduler.running)
        except (AttributeError, TypeError) as error:
            self.why_not = str(error)
            return
        if tokens:
            for name, value in (("steps", 1), ("tokens", tokens), ("held", held), ("filled", filled)):
                self.counts[name] += value
            self.batch[requests] = self.batch.get(requests, 0) + 1

    def told(self):
        """All counters, {} if this version cannot be counted."""
        return (
            {} if self.why_not else {**self.counts, "batch": dict(self.batch), "seconds": dict(self.seconds)}
        )


def version():
    """The installed vLLM's release as (major, minor), (0, 0) when it does not say."""
    import vllm

    parts = str(getattr(vllm, "__version__", "")).split(".")
    return (
        (int(parts[0]), int(parts[1]))
        if len(parts) > 1 and parts[0].isdigit() and parts[1].isdigit()
        else (0, 0)
    )


class LimitChanger:
    """The limits of one scheduler: as launched, as they are, and how to change them."""

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.version = version()
        self.active = self.version >= ACTIVE_SINCE
        self.base = type(scheduler).__mro__[1].__name__
        self.why_not = self._why_not()
        self.launched = {} if self.why_not else self.read()

    def _why_not(self):
        """Why this engine's limits cannot be changed, or None."""
        if not VERSIONS[0] <= self.version < VERSIONS[1]:
            return f"vLLM {self.version} is outside {VERSIONS}"
        needed = ["max_num_running_reqs", "max_num_scheduled_tokens", "scheduler_config", "kv_cache_manager"]
        needed += ["max_num_active_reqs"] if self.active else []
        missing = [name for name in needed if not hasattr(self.scheduler, name)]
        return f"the scheduler has no {', '.join(missing)}" if missing else None

    def read(self):
        """The limits that the scheduler holds now, under the names of the knobs."""
        scheduler = self.scheduler
        running = scheduler.max_num_running_reqs
        found = {
            "max_num_seqs": min(running, scheduler.max_num_active_reqs) if self.active else running,
            "max_num_batched_tokens": scheduler.max_num_scheduled_tokens,
            "long_prefill_token_threshold": scheduler.scheduler_config.long_prefill_token_threshold,
        }
        blocks = getattr(scheduler.kv_cache_manager, "watermark_blocks", None)
        if blocks is not None:
            found["watermark_blocks"] = blocks
        return found

    def change(self, wanted):
        """Set every limit: as wanted, else as launched. LimitRefused: nothing was changed."""
        if self.why_not:
            raise LimitRefused(self.why_not)
        with self.scheduler.live_lock:
            unfinished = self.scheduler.get_num_unfinished_requests()
            if unfinished:
                raise LimitRefused(f"busy: {unfinished} unfinished requests")
            target = self._target(wanted)
            self._set(target)
            found = self.read()
        if any(found[name] != value for name, value in target.items()):
            raise LimitRefused(f"asked for {target}, read back {found}")
        return found

    def _target(self, wanted):
        """What the scheduler is to hold, checked against what it was launched with."""
        unknown = sorted(set(wanted) - set(NAMES))
        if unknown:
            raise LimitRefused(f"unknown limit {', '.join(unknown)}")
        if wanted.get("watermark") is not None and "watermark_blocks" not in self.launched:
            raise LimitRefused("this vLLM has no watermark")
        launched = self.launched
        seqs = wanted.get("max_num_seqs", launched["max_num_seqs"])
        target = {
            "max_num_seqs": min(seqs, wanted.get("max_num_active_seqs") or seqs),
            "max_num_batched_tokens": wanted.get(
                "max_num_batched_tokens", launched["max_num_batched_tokens"]
            ),
            "long_prefill_token_threshold": wanted.get(
                "long_prefill_token_threshold", launched["long_prefill_token_threshold"]
            ),
        }
        self._check(target)
        if "watermark_blocks" in launched:
            share = wanted.get("watermark")
            blocks = launched["watermark_blocks"] if share is None else int(share * self._blocks())
            if not 0 <= blocks < self._blocks():
                raise LimitRefused(f"watermark {share} is not a share of the cache")
            target["watermark_blocks"] = blocks
        return target

    def _check(self, target):
        for name, value in target.items():
            if (
                isinstance(value, bool)
                or not isinstance(value, int)
                or value < (name != "long_prefill_token_threshold")
            ):
                raise LimitRefused(f"{name} {value!r} is not a positive whole number")
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if target[name] > self.launched[name]:
                raise LimitRefused(
                    f"{name} {target[name]} is above its value at launch, {self.launched[name]}"
                )
        config = self.scheduler.scheduler_config
        tokens = target["max_num_batched_tokens"]
        if tokens < target["max_num_seqs"]:
            raise LimitRefused(
                f"max_num_batched_tokens {tokens} is below max_num_seqs {target['max_num_seqs']}"
            )
        chunked = getattr(config, "enable_chunked_prefill", True)
        if not chunked and tokens < self.scheduler.max_model_len:
            raise LimitRefused(
                f"max_num_batched_tokens {tokens} is below max_model_len, without chunked prefill"
            )

    def _blocks(self):
        return self.scheduler.kv_cache_manager.block_pool.num_gpu_blocks

    def _set(self, target):
        scheduler = self.scheduler
        if self.active:
            scheduler.max_num_active_reqs = target["max_num_seqs"]
        else:
            scheduler.max_num_running_reqs = target["max_num_seqs"]
        scheduler.max_num_scheduled_tokens = target["max_num_batched_tokens"]
        scheduler.scheduler_config.long_prefill_token_threshold = target["long_prefill_token_threshold"]
        if "watermark_blocks" in target:
            scheduler.kv_cache_manager.watermark_blocks = target["watermark_blocks"]

    def answer(self, line):
        """The reply to one line, never an exception: this runs inside the engine."""
        reply = {"ok": False, "version": list(self.version), "base": self.base, "launched": self.launched}
        reply["steps"] = self.scheduler.live_steps.told()
        try:
            asked = json.loads(line)
            reply["limits"] = self.change(asked["limits"]) if "limits" in asked else self.read()
            reply["ok"] = True
        except LimitRefused as refusal:
            reply["error"] = str(refusal)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reply["error"] = f"{type(error).__name__}: {error}"
        return reply


def serve(limits, path):
    """Answer on a Unix socket from a thread of its own; an address that is taken is left alone."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        server.bind(path)
    except OSError:
        server.close()
        return None
    server.listen(4)
    thread = threading.Thread(target=_loop, args=(limits, server), name="live-limits", daemon=True)
    thread.start()
    return server


def _loop(limits, server):
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        with connection:
            try:
                connection.settimeout(5.0)
                line = connection.makefile("rb").readline(65536)
                connection.sendall(json.dumps(limits.answer(line)).encode() + b"\n")
            except OSError:
                continue
