"""What a sender takes and gives (`Job`, `Sent`), and their form on a pipe between the processes of a replay.

A frame on a pipe is its kind (1 byte), the length of its payload (4), and the payload.
"""

import asyncio
import marshal
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from tuner.records import Outcome
from tuner.replay.sse import StreamedAnswer
from tuner.replay.wire import HttpExchange

PATH = "/v1/completions"
_FRAME = struct.Struct("<cI")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """One request to send `at_s` after the zero. `counted` = scheduled inside the window.

    `cancel_s`: when the recorded client hung up, after `at_s`; `deadline_s` counts from `at_s` too.
    `parent` is the key of the turn before (-1: none), `children` whether turns wait for this one. In a live
    history `prompt` is the span of the prompt's JSON list in the body, and `delta` the JSON ids (without
    brackets) that this turn adds to its parent's prompt and answer.
    """

    key: int
    row: int
    at_s: float
    body: bytes
    expected_input: int
    expected_output: int
    choices: int = 1
    counted: bool = True
    cancel_s: float | None = None
    deadline_s: float = math.inf
    parent: int = -1
    think_s: float = 0.0
    children: bool = False
    prompt: tuple[int, int] = (0, 0)
    delta: bytes = b""
    path: str = PATH

    def after(self, ended: "Ended") -> "Job":
        """The job with its live prompt: the parent's prompt and answer, then its own delta."""
        if not self.delta or not ended.prompt or not ended.answer:
            return self
        start, stop = self.prompt
        live = ended.prompt[:-1] + b"," + ended.answer + b"," + self.delta + b"]"
        return replace(
            self, body=self.body[:start] + live + self.body[stop:], prompt=(start, start + len(live))
        )

    def pack(self) -> bytes:
        """The job as bytes for `unpack`, in a process of the same Python."""
        return marshal.dumps([getattr(self, name) for name in self.__slots__])

    @staticmethod
    def unpack(raw: bytes) -> "Job":
        """What `pack` made bytes of."""
        return Job(**dict(zip(Job.__slots__, marshal.loads(raw), strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of a turn that others wait for: when, and for a live history its prompt and answered ids."""

    key: int
    at_s: float
    prompt: bytes
    answer: bytes

    @staticmethod
    def of(job: Job, exchange: HttpExchange, answer: StreamedAnswer, zero_ns: int) -> "Ended":
        """From what the wire holds; a failed turn gives no live history."""
        whole = answer.error is None and exchange.failure is None
        return Ended(
            key=job.key,
            at_s=(exchange.end_ns - zero_ns) / 1e9,
            prompt=job.body[job.prompt[0] : job.prompt[1]] if whole else b"",
            answer=b",".join(b"%d" % one for one in answer.ids) if whole else b"",
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sent:
    """An outcome with what only the connection saw: `engine` are the engine's own numbers of this request,
    `waited_s` how long the request waited for a connection.
    """

    key: int
    outcome: Outcome
    counted: bool = True
    resent: bool = False
    waited_s: float = 0.0
    engine: Mapping[str, float] = field(default_factory=dict)

    def pack(self) -> bytes:
        """The record as bytes for `unpack`, in a process of the same Python."""
        outcome = {name: getattr(self.outcome, name) for name in self.outcome.__slots__}
        outcome |= {name: outcome[name].tobytes() for name in ("chunk_s", "chunk_tokens")}
        return marshal.dumps((self.key, outcome, self.counted, self.resent, self.waited_s, dict(self.engine)))

    @staticmethod
    def unpack(raw: bytes) -> "Sent":
        """What `pack` made bytes of."""
        key, outcome, counted, resent, waited_s, engine = marshal.loads(raw)
        outcome["chunk_s"] = np.frombuffer(outcome["chunk_s"], np.float64)
        outcome["chunk_tokens"] = np.frombuffer(outcome["chunk_tokens"], np.int32)
        return Sent(
            key=key, outcome=Outcome(**outcome), counted=counted, resent=resent, waited_s=waited_s,
            engine=engine,
        )  # fmt: skip


def sent_of(job: Job, exchange: HttpExchange, answer: StreamedAnswer, zero_ns: int) -> Sent:
    """Fold one exchange into an outcome; times become seconds after the zero."""
    chunks = (np.asarray(answer.chunk_ns, dtype=np.int64) - zero_ns) / 1e9
    outcome = Outcome(
        row=job.row,
        scheduled_s=job.at_s,
        sent_s=(exchange.sent_ns - zero_ns) / 1e9 if exchange.sent_ns else None,
        first_token_s=float(chunks[0]) if len(chunks) else None,
        last_token_s=float(chunks[-1]) if len(chunks) else None,
        end_s=(exchange.end_ns - zero_ns) / 1e9,
        input_tokens=answer.prompt_tokens or 0,
        expected_input=job.expected_input,
        output_tokens=answer.completion_tokens if answer.completion_tokens is not None else answer.tokens,
        expected_output=job.expected_output,
        cached_tokens=answer.cached_tokens,
        chunk_s=chunks,
        chunk_tokens=np.asarray(answer.chunk_tokens, dtype=np.int32),
        error=exchange.failure or answer.error,
    )
    waited_ns = (exchange.written_ns or exchange.end_ns) - exchange.sent_ns if exchange.sent_ns else 0
    return Sent(
        key=job.key, outcome=outcome, counted=job.counted, resent=exchange.resent, waited_s=waited_ns / 1e9,
        engine=dict(answer.engine),
    )  # fmt: skip


def never_sent(job: Job, reason: str) -> Sent:
    """The record of a job that was never sent, because its parent was not answered."""
    outcome = Outcome(
        row=job.row,
        scheduled_s=job.at_s,
        expected_input=job.expected_input,
        expected_output=job.expected_output,
        error=f"not sent, because its parent got no answer: {reason}",
    )
    return Sent(key=job.key, outcome=outcome, counted=job.counted)


def late(deadline_s: float) -> str:
    """The error of a request that was not answered in time."""
    return f"no complete answer within the deadline of {deadline_s:g} s"


def frame(kind: bytes, payload: bytes = b"") -> bytes:
    """One frame, ready to write."""
    return _FRAME.pack(kind, len(payload)) + payload


async def read_frame(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """(kind, payload) of the next frame. asyncio.IncompleteReadError when the other process has ended."""
    kind, length = _FRAME.unpack(await reader.readexactly(_FRAME.size))
    return kind, await reader.readexactly(length)
