"""The recorder puts what the proxy saw into a bounded queue, and sends it to the writer process.

It parses nothing. A thread writes times and references to the forwarded bytes into a pipe. The writer
(capture/writer.py) is another process, which parses, hashes and writes.
"""

import fcntl
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from time import monotonic_ns
from typing import IO

from tuner import processes
from tuner.errors import BadInput, Unavailable
from tuner.traffic.capture.files import Sink
from tuner.traffic.capture.writer import Counts, frame

_log = logging.getLogger(__name__)
_PIPE_BYTES = 1 << 20  # the most that Linux gives without privileges
RECORDED = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses"})
MOST_ANSWER_BYTES = 16 << 20  # of an answer; the rest is forwarded, but not counted
SESSION_HEADERS = (b"x-session-id", b"x-conversation-id", b"x-claude-code-session-id")
RAW_NOTICE = "raw capture: whole request and answer bodies are stored, prompts and personal data included"


@dataclass(slots=True, eq=False)
class RecordedExchange:
    """What the proxy notes about one request: times and references to the bytes that passed."""

    at_ns: int
    client: str | None = field(default=None, repr=False)
    session: str | None = None
    body: list[bytes] = field(default_factory=list, repr=False)
    answer: list[bytes] = field(default_factory=list, repr=False)
    answer_bytes: int = 0
    first_ns: int = 0
    end_ns: int = 0
    code: int = 0
    content_type: str = ""
    packed: bool = False
    cut: bool = False
    whole: bool = False
    number: int = -1

    @classmethod
    def begun(cls, peer: str | None, headers: Iterable[tuple[bytes, bytes]]) -> "RecordedExchange":
        """The head of a request has arrived. Header names are in lower case."""
        exchange = cls(at_ns=monotonic_ns(), client=peer)
        for name, value in headers:
            if name == b"authorization":
                exchange.client = value.decode("latin-1")
            elif name in SESSION_HEADERS:
                exchange.session = value.decode("latin-1")
        return exchange

    def answering(self, code: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """The head of the answer has arrived. Header names are in lower case."""
        self.code = code
        for name, value in headers:
            if name == b"content-type":
                self.content_type = value.decode("latin-1")
            elif name == b"content-encoding":
                self.packed = True

    def passed(self, body: bytes) -> None:
        """A part of the answer's body was forwarded."""
        if not self.first_ns:
            self.first_ns = monotonic_ns()
        if self.answer_bytes < MOST_ANSWER_BYTES:
            self.answer.append(body)
            self.answer_bytes += len(body)

    @property
    def status(self) -> str | None:
        """The outcome as HTTP; None if nothing is wrong."""
        if self.cut and not self.whole:
            return "cancelled"
        return None if self.whole and 200 <= self.code < 300 else "error"


class Recorder:
    """Takes exchanges without blocking. Exchanges beyond `most` requests or `most_bytes` in the queue are
    dropped.

    `tokenizer` is the model's tokenizer.json or its directory.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        tokenizer: str | Path | None = None,
        raw: bool = False,
        most: int = 4096,
        most_bytes: int = 256 << 20,
    ) -> None:
        self.counts = Counts()
        self._options = {
            "sink": sink.as_json(),
            "tokenizer": None if tokenizer is None else str(tokenizer),
            "raw": raw,
        }
        self._most, self._most_bytes = most, most_bytes
        self._bytes_in = self._bytes_out = 0
        self._queue: SimpleQueue[tuple[RecordedExchange, bool] | None] = SimpleQueue()
        self._number = self._told_dropped = 0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the writer and takes exchanges from now on. Unavailable or BadInput if the file cannot be
        written.
        """
        if self._options["raw"]:
            _log.warning(RAW_NOTICE)
        root = str(Path(__file__).resolve().parents[3])  # the writer must find us as we were found
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        command = (sys.executable, "-m", "tuner.traffic.capture.writer", json.dumps(self._options))
        writer = processes.helper(command, env={"PYTHONPATH": path})
        if writer.stdin is None or writer.stdout is None:
            raise Unavailable("the capture's writer has no pipes")
        said = json.loads(writer.stdout.readline() or b"{}")
        if "ready" not in said:
            writer.communicate()
            sentence = said.get("sentence", "the capture's writer did not start")
            raise (BadInput if said.get("error") == "BadInput" else Unavailable)(sentence)
        fcntl.fcntl(writer.stdin, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        ends = (writer.stdin, writer.stdout, writer.wait)
        self._thread = threading.Thread(target=self._work, args=ends, name="capture", daemon=True)
        self._thread.start()

    def begin(self, exchange: RecordedExchange) -> None:
        """A request has arrived completely."""
        size = sum(map(len, exchange.body))
        if self._queue.qsize() >= self._most or self._bytes_in - self._bytes_out + size > self._most_bytes:
            self.counts.dropped += 1
            exchange.number = -2
            return
        self._number += 1
        self.counts.taken += 1
        exchange.number = self._number
        self._bytes_in += size
        self._queue.put((exchange, False))

    def end(self, exchange: RecordedExchange) -> None:
        """The answer of a request has ended, or was interrupted."""
        if exchange.number == -1:
            self.begin(exchange)
        if exchange.number >= 0:
            self._bytes_in += exchange.answer_bytes
            self._queue.put((exchange, True))

    def stop(self, timeout_s: float = 30.0) -> None:
        """Waits until everything in the queue is written, the file is closed, and the key is destroyed."""
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _work(self, pipe: IO[bytes], answers: IO[bytes], wait: Callable[[], int]) -> None:
        """The thread: sends to the writer until `stop`, then reads the writer's counts."""
        lost: OSError | None = None
        while (item := self._queue.get()) is not None:
            try:
                if lost is None:
                    self._hand_over(pipe, *item)
                else:
                    self.counts.unwritten += 1
            except OSError as error:
                lost = error
                _log.error("the capture's writer is gone, nothing more is recorded: %s", error)
        with suppress(OSError):
            pipe.write(frame("d", self.counts.dropped))
            pipe.close()
        said = json.loads(answers.readline() or b"{}")
        self.counts.not_understood += said.get("not_understood", 0)
        self.counts.unwritten += said.get("unwritten", 0)
        answers.close()
        wait()

    def _hand_over(self, pipe: IO[bytes], exchange: RecordedExchange, ended: bool) -> None:
        if self.counts.dropped != self._told_dropped:
            self._told_dropped = self.counts.dropped
            pipe.write(frame("d", self.counts.dropped))
        one = exchange
        if ended:
            data, one.answer = b"".join(one.answer), []
            self._bytes_out += one.answer_bytes
            pipe.write(
                frame(
                    "e", one.number, one.first_ns, one.end_ns, one.status, one.content_type, one.packed, data
                )
            )
        else:
            data, one.body = b"".join(one.body), []
            self._bytes_out += len(data)
            pipe.write(frame("b", one.number, one.at_ns, one.client, one.session, data))
        pipe.flush()
