"""A feeder process, `python -m tuner.replay.feeder DIRECTORY`: builds bodies ahead for the senders. Prompts
have exact lengths and shared prefixes as in production, but none of its text.

The senders connect to DIRECTORY/jobs and send their number; they get J a job, P enough jobs to start, E the
end of this stretch. The controller listens at DIRECTORY/feeder and sends B the pickled `Source`, S a pickled
`Stretch`, Z zero of the clock, C cut this stretch. The feeder ends when that connection ends. All messages
are frames (sender.py).
"""

import asyncio
import hashlib
import json
import math
import os
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter_ns

import numpy as np
import uvloop
from numpy.typing import NDArray

from tuner.replay.plan import KINDS, Load, SendSchedule, cancel_after
from tuner.replay.sender import AHEAD_BYTES, Job, frame, read_frame
from tuner.replay.timing import give_way
from tuner.traffic.trace import Trace

# Fragments that are kept: 48 MiB, counting eight bytes for each token.
_CACHE_BYTES = 48 << 20
_BYTES_PER_TOKEN = 8


def salt(study_seed: int, number: int, repeat: int) -> bytes:
    """16 bytes for one (study seed, trial number, repeat); other numbers give prompts that share no block."""
    return hashlib.blake2b(f"{study_seed}/{number}/{repeat}".encode(), digest_size=16).digest()


def plain_range(vocabulary: int) -> tuple[int, int]:
    """The half-open range of token ids that prompts use: without the ends, where special tokens live.

    Control tokens are the first (up to 1,000) or the last (up to 2 %) ids of the usual vocabularies.
    ValueError below 64.
    """
    if vocabulary < 64:
        raise ValueError(f"a vocabulary of {vocabulary} tokens is too small for prompts that differ")
    return (1000 if vocabulary >= 8192 else 10), vocabulary - vocabulary // 50


class Prompts:
    """The prompts of a trace for one salt; the same bytes in any process, at any time.

    A block id gives the same tokens everywhere (a partial block: the first of them); the rest of a prompt is
    unique to the row. It keeps a bounded cache of JSON fragments.
    """

    def __init__(self, trace: Trace, vocabulary: int, salt: bytes) -> None:
        self.trace = trace
        self._low, high = plain_range(vocabulary)
        self._span = np.uint64(high - self._low)
        self._salt = salt
        self._fragments: OrderedDict[int, bytes] = OrderedDict()
        self._most = max(16, _CACHE_BYTES // (_BYTES_PER_TOKEN * max(1, trace.block_size)))

    def tokens(self, row: int) -> NDArray[np.int32]:
        """Token ids of a row's prompt, int32[input_len]."""
        size, length = self.trace.block_size, int(self.trace.input_len[row])
        parts = [self._draw(b"block", int(block), size) for block in self.trace.row_blocks(row)]
        covered = min(length, size * len(parts))
        parts.append(self._draw(b"row", row, length - covered))
        return np.concatenate(parts)[:length] if covered == length else np.concatenate(parts)

    def token_json(self, row: int) -> bytes:
        """The same prompt as a JSON list, put together from ready fragments."""
        size, length = self.trace.block_size, int(self.trace.input_len[row])
        ids = self.trace.row_blocks(row)
        whole = min(len(ids), length // size) if size else 0
        parts = [self._fragment(int(block)) for block in ids[:whole]]
        left = length - whole * size
        if left and whole < len(ids):
            parts.append(_text(self._draw(b"block", int(ids[whole]), size)[:left]))
        elif left:
            parts.append(_text(self._draw(b"row", row, left)))
        return b"[" + b",".join(parts) + b"]"

    def _fragment(self, block: int) -> bytes:
        found = self._fragments.get(block)
        if found is not None:
            self._fragments.move_to_end(block)
            return found
        made = _text(self._draw(b"block", block, self.trace.block_size))
        self._fragments[block] = made
        if len(self._fragments) > self._most:
            self._fragments.popitem(last=False)
        return made

    def _draw(self, kind: bytes, number: int, count: int) -> NDArray[np.int32]:
        """`count` token ids: BLAKE2b keyed by the salt gives a seed, SHAKE-128 stretches it."""
        seed = hashlib.blake2b(kind + b"%d" % number, key=self._salt, digest_size=32).digest()
        raw = np.frombuffer(hashlib.shake_128(seed).digest(4 * count), "<u4").astype(np.uint64)
        return ((raw * self._span >> np.uint64(32)) + np.uint64(self._low)).astype(np.int32)


def tokens(trace: Trace, row: int, salt: bytes, vocabulary: int) -> NDArray[np.int32]:
    """One prompt without keeping a `Prompts`: int32[input_len]."""
    return Prompts(trace, vocabulary, salt).tokens(row)


def _text(ids: NDArray[np.int32]) -> bytes:
    return ",".join(map(str, ids.tolist())).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a job waits for: its parent's key (-1: nothing), think time, whether others wait for it."""

    parent: int = -1
    think_s: float = 0.0
    children: bool = False


ALONE = Turn()


class Bodies:
    """Request bodies of one trace for one (seed, number, repeat). Measured requests have the kind "".

    Other kinds (warm-up, filler) have salts of their own: the same lengths and shared prefixes, but no block
    in common with measured requests. `priorities`: whether the engine takes a priority.
    """

    def __init__(self, trace: Trace, load: Load, *, priorities: bool = False) -> None:
        self.trace = trace
        self.load = load
        self._priorities = priorities
        self._salt = salt(load.seed, load.number, load.repeat)
        self._prompts: dict[str, Prompts] = {}
        self._head = f'{{"model":{json.dumps(load.model)},"prompt":'.encode()

    def prompts(self, kind: str = "") -> Prompts:
        """The prompts of a kind; one cache each."""
        found = self._prompts.get(kind)
        if found is None:
            own = (
                hashlib.blake2b(kind.encode(), key=self._salt, digest_size=16).digest()
                if kind
                else self._salt
            )
            found = self._prompts[kind] = Prompts(self.trace, self.load.vocabulary, own)
        return found

    def job(
        self,
        key: int,
        row: int,
        at_s: float,
        *,
        kind: str = "",
        tokens: int | None = None,
        counted: bool = True,
        turn: Turn = ALONE,
    ) -> Job:
        """A row as a job. `tokens` overrides the recorded answer length (warm-up, priming)."""
        text = self.prompts(kind).token_json(row)
        choices = self.choices(row)
        live = self.load.history == "live"
        cancel_s = cancel_after(self.trace, row) if tokens is None else None
        length = self.answer(row) if cancel_s is None else self.unfinished(row)
        length = length if tokens is None else tokens
        return Job(
            key=key,
            row=row,
            at_s=at_s,
            body=self._head + text + self._tail(row, length, choices, ids=live and turn.children) + b"}",
            expected_input=int(self.trace.input_len[row]),
            expected_output=length * choices,
            choices=choices,
            counted=counted,
            cancel_s=cancel_s,
            deadline_s=self.load.deadline,
            parent=turn.parent,
            think_s=turn.think_s,
            children=turn.children,
            prompt=(len(self._head), len(self._head) + len(text)),
            delta=self._delta(row, turn) if live else b"",
        )

    def _tail(self, row: int, length: int, choices: int, *, ids: bool) -> bytes:
        priority = int(self.trace.priority[row])
        tail = (
            f',"max_tokens":{length},"min_tokens":{length},"ignore_eos":true,"stream":true,'
            '"stream_options":{"include_usage":true,"continuous_usage_stats":true},'
        )
        if choices > 1:
            tail += f'"n":{choices},"temperature":1.0,"seed":{row}'
        else:
            tail += '"temperature":0.0'
        if self._priorities and priority:
            tail += f',"priority":{priority}'
        if ids:
            tail += ',"return_token_ids":true'
        return tail.encode()

    def _delta(self, row: int, turn: Turn) -> bytes:
        """The ids that a turn adds to its parent's prompt and answer; none if it does not extend them."""
        if turn.parent < 0:
            return b""
        parent = int(self.trace.parent[row])
        covered = int(self.trace.input_len[parent]) + self.answer(parent)
        own = self.prompts().tokens(row)[covered:]
        return b",".join(b"%d" % one for one in own.tolist())

    def answer(self, row: int) -> int:
        """Tokens to ask for: as recorded, at least one."""
        return max(1, int(self.trace.output_len[row]))

    def unfinished(self, row: int) -> int:
        """Tokens to ask for if the client hung up: more than came by then, or the engine ends first."""
        enough = 4 * self.answer(row) + 256
        declared = int(self.trace.max_tokens[row])
        return min(declared, enough) if declared > 0 else enough

    def choices(self, row: int) -> int:
        """The recorded `n`, at least one."""
        return max(1, int(self.trace.n[row]))


# Before the clock starts at least this much of the schedule is built, and as much as can be built in this
# time, unless one sender holds AHEAD_BYTES earlier: bodies built later take CPU time from the measurement.
AHEAD_S, BUILD_S = 15.0, 5.0

# Jobs, or bytes of them, that are built before the links are drained.
BATCH, BATCH_BYTES = 64, 1 << 20

# Once the clock runs, so much of the schedule is built at a time.
PACE_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What bodies are made of, and the number of senders that share them."""

    trace: Trace
    load: Load
    priorities: bool
    senders: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """What is sent as one stream: the rows and their times. For each position it also has the parent turn
    (-1: none) and the root turn. A session is one group, and stays with one sender.
    """

    timetable: SendSchedule
    parents: NDArray[np.int64]
    roots: NDArray[np.int64]

    def jobs(self, bodies: Bodies) -> Iterator[tuple[int, Callable[[], Job]]]:
        """(group, maker) of every job in order."""
        timetable, trace = self.timetable, bodies.trace
        awaited = np.isin(np.arange(len(self.parents)), self.parents)
        for k in range(len(timetable)):
            row = int(timetable.rows[k])
            think = float(trace.think_s[row])
            turn = Turn(
                parent=int(self.parents[k]),
                think_s=0.0 if math.isnan(think) else max(0.0, think) / bodies.load.speed,
                children=bool(awaited[k]),
            )
            yield (
                int(self.roots[k]),
                partial(
                    bodies.job, k, row, float(timetable.at_s[k]),
                    kind=KINDS[int(timetable.filler[k])], counted=bool(timetable.measured[k]), turn=turn,
                ),
            )  # fmt: skip


class Feeder:
    """Feeds one stretch after another to the senders' links."""

    def __init__(self, links: dict[int, asyncio.StreamWriter]) -> None:
        self.links = links
        self.begin()

    def begin(self) -> None:
        """Begin a new stretch."""
        self.zero_ns = 0
        self.started, self.stopped = asyncio.Event(), asyncio.Event()

    def go(self, zero_ns: int) -> None:
        """Start the clock."""
        self.zero_ns = zero_ns
        self.started.set()

    def stop(self) -> None:
        """End the stretch, wherever it is."""
        self.stopped.set()
        self.started.set()

    async def feed(self, jobs: Iterable[tuple[int, Callable[[], Job]]]) -> None:
        """Build and hand over jobs in order. P once enough of them, or all, are over there; from then on as
        the clock goes, and as the senders take them."""
        ahead, size, first, lead = dict.fromkeys(self.links, 0), 0, None, None
        begun = perf_counter_ns()
        for count, (group, make) in enumerate(jobs, 1):
            job = make()
            number = group % len(self.links)
            self._tell(number, b"J", job.pack())
            ahead[number] += len(job.body)
            size += len(job.body)
            first = job.at_s if first is None else first
            if lead is not None:
                await self._keep_pace(job.at_s, lead)
            elif max(ahead.values()) > AHEAD_BYTES or (
                job.at_s - first > AHEAD_S and (perf_counter_ns() - begun) / 1e9 > BUILD_S
            ):
                lead = job.at_s - first
                self._tell_all(b"P")
            if size > BATCH_BYTES or not count % BATCH:
                size = 0
                await self._drain()
            if self.stopped.is_set():
                break
        if lead is None:
            self._tell_all(b"P")
        self._tell_all(b"E")
        await self._drain()

    async def _keep_pace(self, at_s: float, lead_s: float) -> None:
        """Wait until at most `lead_s` of the schedule is built ahead."""
        await self.started.wait()
        ahead = at_s - (perf_counter_ns() - self.zero_ns) / 1e9
        if ahead > lead_s + PACE_S:
            with suppress(TimeoutError):
                async with asyncio.timeout(ahead - lead_s):
                    await self.stopped.wait()

    def _tell(self, number: int, kind: bytes, payload: bytes = b"") -> None:
        self.links[number].write(frame(kind, payload))

    def _tell_all(self, kind: bytes) -> None:
        for number in self.links:
            self._tell(number, kind)

    async def _drain(self) -> None:
        """Wait while the senders take no more; other tasks get their turn."""
        await asyncio.sleep(0)
        with suppress(ConnectionError):
            await asyncio.gather(*(link.drain() for link in self.links.values()))


async def serve(directory: Path) -> None:
    """Obey the controller until its link ends."""
    links: dict[int, asyncio.StreamWriter] = {}
    came = asyncio.Condition()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = int(await reader.readline())
        async with came:
            links[number] = writer
            came.notify_all()

    server = await asyncio.start_unix_server(accept, str(directory / "jobs"))
    link = await asyncio.open_unix_connection(str(directory / "feeder"))
    try:
        source = pickle.loads((await read_frame(link[0]))[1])
        bodies, feeder = Bodies(source.trace, source.load, priorities=source.priorities), Feeder(links)
        async with asyncio.TaskGroup() as group:
            while True:
                kind, payload = await read_frame(link[0])
                if kind == b"S":
                    async with came:
                        await came.wait_for(lambda: len(links) == source.senders)
                    feeder.begin()
                    group.create_task(feeder.feed(pickle.loads(payload).jobs(bodies)))
                elif kind == b"Z":
                    feeder.go(int(payload))
                else:
                    feeder.stop()
    except* (asyncio.IncompleteReadError, ConnectionError):
        server.close()
        os._exit(0)


if __name__ == "__main__":
    give_way()
    uvloop.run(serve(Path(sys.argv[1])))
