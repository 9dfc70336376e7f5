"""What a sender takes and gives (`Job`, `Sent`), and their form on a pipe between the processes of a replay.

A frame on a pipe is its kind (1 byte), the length of its payload (4), and the payload.
"""

import asyncio
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from tuner.records import Outcome
from tuner.replay.sse import StreamedAnswer
from tuner.replay.wire import HttpExchange

PATH = "/v1/completions"
_JOB = struct.Struct("<qqdqdddiiiiiI??")
_SENT = struct.Struct("<qqddddddiiiiiI??")
_LENGTHS = struct.Struct("<III")
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

    def due_at(self, at_s: float) -> "Job":
        """The same job, due at another time."""
        return replace(self, at_s=at_s)

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
        """The job as bytes for `unpack`."""
        return (
            _JOB.pack(
                self.key, self.row, self.at_s, self.parent, self.think_s, self.deadline_s,
                math.nan if self.cancel_s is None else self.cancel_s,
                self.expected_input, self.expected_output, self.choices, *self.prompt, len(self.delta),
                self.counted, self.children,
            )
            + self.delta
            + self.body
        )  # fmt: skip

    @staticmethod
    def unpack(raw: bytes) -> "Job":
        """What `pack` made bytes of."""
        (
            key, row, at_s, parent, think_s, deadline_s, cancel_s, expected_input, expected_output, choices,
            start, stop, delta, counted, children,
        ) = _JOB.unpack_from(raw)  # fmt: skip
        return Job(
            key=key,
            row=row,
            at_s=at_s,
            body=raw[_JOB.size + delta :],
            expected_input=expected_input,
            expected_output=expected_output,
            choices=choices,
            counted=counted,
            cancel_s=None if math.isnan(cancel_s) else cancel_s,
            deadline_s=deadline_s,
            parent=parent,
            think_s=think_s,
            children=children,
            prompt=(start, stop),
            delta=raw[_JOB.size : _JOB.size + delta],
        )


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
        """The record as bytes for `unpack`."""
        o = self.outcome
        error = b"" if o.error is None else o.error.encode()
        engine = json.dumps(dict(self.engine)).encode() if self.engine else b""
        head = _SENT.pack(
            self.key, o.row, o.scheduled_s, _nan(o.sent_s), _nan(o.first_token_s), _nan(o.last_token_s),
            _nan(o.end_s), self.waited_s, o.input_tokens, o.expected_input, o.output_tokens,
            o.expected_output, -1 if o.cached_tokens is None else o.cached_tokens, len(o.chunk_s),
            self.counted, self.resent,
        )  # fmt: skip
        arrays = o.chunk_s.tobytes() + o.chunk_tokens.tobytes()
        return head + _LENGTHS.pack(len(error), len(engine), 0) + arrays + error + engine

    @staticmethod
    def unpack(raw: bytes) -> "Sent":
        """What `pack` made bytes of."""
        (
            key, row, scheduled_s, sent_s, first_s, last_s, end_s, waited_s, input_tokens, expected_input,
            output_tokens, expected_output, cached, chunks, counted, resent,
        ) = _SENT.unpack_from(raw)  # fmt: skip
        error, engine, _ = _LENGTHS.unpack_from(raw, _SENT.size)
        at = _SENT.size + _LENGTHS.size
        texts = at + 12 * chunks
        outcome = Outcome(
            row=row,
            scheduled_s=scheduled_s,
            sent_s=_none(sent_s),
            first_token_s=_none(first_s),
            last_token_s=_none(last_s),
            end_s=_none(end_s),
            input_tokens=input_tokens,
            expected_input=expected_input,
            output_tokens=output_tokens,
            expected_output=expected_output,
            cached_tokens=None if cached < 0 else cached,
            chunk_s=np.frombuffer(raw, np.float64, chunks, at),
            chunk_tokens=np.frombuffer(raw, np.int32, chunks, at + 8 * chunks),
            error=raw[texts : texts + error].decode() or None,
        )
        said = raw[texts + error : texts + error + engine]
        return Sent(
            key=key, outcome=outcome, counted=counted, resent=resent, waited_s=waited_s,
            engine=json.loads(said) if said else {},
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
        error=f"never sent, its parent was not answered: {reason}",
    )
    return Sent(key=job.key, outcome=outcome, counted=job.counted)


def late(deadline_s: float) -> str:
    """The error of a request that was not answered in time."""
    return f"no complete answer within the deadline of {deadline_s:g} s"


def _nan(value: float | None) -> float:
    return math.nan if value is None else value


def _none(value: float) -> float | None:
    return None if math.isnan(value) else value


def frame(kind: bytes, payload: bytes = b"") -> bytes:
    """One frame, ready to write."""
    return _FRAME.pack(kind, len(payload)) + payload


async def read_frame(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """(kind, payload) of the next frame. asyncio.IncompleteReadError when the other process has ended."""
    kind, length = _FRAME.unpack(await reader.readexactly(_FRAME.size))
    return kind, await reader.readexactly(length)
