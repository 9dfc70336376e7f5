"""The recorder: exchanges go into a bounded queue, a thread of its own turns them into lines without text.

The lines (importers/captured.py reads them): a header; {"r", "t", ...} when a request came; {"r", "e", ...}
when its answer ended; {"dropped": n} for what the queue did not take. Times: t in ns since the file began,
f and e in microseconds since t.
"""

import json
import logging
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from tuner.errors import TunerError
from tuner.records import JSON
from tuner.traffic.capture.files import Sink
from tuner.traffic.exchange import Answered, Asked, answered, asked, lengths
from tuner.traffic.fingerprint import TOKEN_BLOCK, Fingerprints, runs
from tuner.traffic.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
_FLUSH_S = 0.25
RAW_NOTICE = "raw capture: whole request and answer bodies are stored, prompts and personal data included"


@dataclass(slots=True, eq=False)
class Exchange:
    """What the hot path knows of one request: stamps and references to the bytes that passed."""

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
    asked: Asked | None = field(default=None, repr=False)
    size: int | None = None


@dataclass(slots=True)
class Counts:
    """What a capture did: requests taken, dropped (queue full), not understood, lines the disk refused."""

    taken: int = 0
    dropped: int = 0
    not_understood: int = 0
    unwritten: int = 0


class Recorder:
    """Takes exchanges without ever blocking; beyond `most` requests or `most_bytes` waiting it drops."""

    def __init__(
        self,
        sink: Sink,
        *,
        tokenizer: Tokenizer | None = None,
        raw: bool = False,
        most: int = 4096,
        most_bytes: int = 256 << 20,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.counts = Counts()
        self._sink, self._tokenizer, self._now = sink, tokenizer, now
        self._most, self._most_bytes = most, most_bytes
        self._bytes_in = self._bytes_out = 0
        self._queue: SimpleQueue[tuple[Exchange, bool] | None] = SimpleQueue()
        self._prints = Fingerprints()
        self._raw_file: Any = None
        self._raw = raw
        self._lines: list[bytes] = []
        self._number = self._told_dropped = 0
        self._zero_ns = time.monotonic_ns()
        self._thread = threading.Thread(target=self._work, name="capture", daemon=True)

    def start(self) -> None:
        """Open the file and begin to take. Unavailable or BadInput when it cannot be written."""
        if self._raw:
            _log.warning(RAW_NOTICE)
        self._begin_file()
        self._thread.start()

    def begin(self, exchange: Exchange) -> None:
        """A request has come whole."""
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

    def end(self, exchange: Exchange) -> None:
        """Its answer has ended, or was cut."""
        if exchange.number == -1:
            self.begin(exchange)
        if exchange.number >= 0:
            self._bytes_in += exchange.answer_bytes
            self._queue.put((exchange, True))

    def stop(self, timeout_s: float = 30.0) -> None:
        """Write what waits, close the file, destroy the key."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _begin_file(self) -> None:
        now = self._now()
        self._sink.open(now)
        self._prints.destroy()
        self._prints = Fingerprints()
        self._zero_ns = time.monotonic_ns()
        header: dict[str, JSON] = {
            "capture": 1,
            "block_size": TOKEN_BLOCK,
            "started_at": now.isoformat(),
            "blocks_from": "bytes" if self._tokenizer is None else "tokens",
            "tokenizer": None if self._tokenizer is None else self._tokenizer.name,
            "exact_chat": self._tokenizer is not None and self._tokenizer.exact_chat,
            "raw": self._raw,
        }
        self._sink.write(_line(header))
        if self._raw:
            path = Path(f"{self._sink.path}.raw")
            path.touch(mode=0o600)
            self._raw_file = path.open("ab")

    def _work(self) -> None:
        """The thread: take, turn into lines, write at least every quarter of a second."""
        flushed = time.monotonic()
        open_ = True
        while open_:
            try:
                item = self._queue.get(timeout=_FLUSH_S)
                if item is None:
                    open_ = False
                else:
                    self._take(*item)
            except Empty:
                pass
            if not open_ or time.monotonic() - flushed >= _FLUSH_S or len(self._lines) > 512:
                self._flush()
                flushed = time.monotonic()
        self._sink.close()
        self._prints.destroy()
        if self._raw_file is not None:
            self._raw_file.close()

    def _take(self, exchange: Exchange, ended: bool) -> None:
        try:
            if not ended:
                self._bytes_out += sum(map(len, exchange.body))
                self._lines.append(_line(self._began(exchange)))
            else:
                self._bytes_out += exchange.answer_bytes
                if exchange.asked is not None:
                    self._lines.append(_line(self._ended(exchange)))
        except (ValueError, TypeError, RecursionError, ArithmeticError, LookupError):
            self.counts.not_understood += 1

    def _began(self, exchange: Exchange) -> dict[str, JSON]:
        body = b"".join(exchange.body)
        document = json.loads(body)
        request = asked(document if isinstance(document, dict) else {})
        size, _, blocks, _ = lengths(request, Answered(), self._prints, self._tokenizer)
        if self._raw_file is not None:
            self._raw_file.write(_line({"r": exchange.number, "request": document}))
        exchange.body, exchange.size = [], size
        exchange.asked = Asked(n=request.n, max_tokens=request.max_tokens)
        line: dict[str, JSON] = {"r": exchange.number, "t": exchange.at_ns - self._zero_ns}
        named = (("c", "client", request.client or exchange.client), ("a", "model", request.model or None))
        for key, kind, text in (*named, ("s", "session", request.session or exchange.session)):
            if text is not None:
                line[key] = self._prints.name(kind, text)
        for key, value, usual in (
            ("i", size, None),
            ("y", None if size is not None or request.text is None else len(request.text.encode()), None),
            ("m", request.max_tokens, -1),
            ("n", request.n, 1),
            ("p", request.priority, 0),
        ):
            if value != usual:
                line[key] = value
        if blocks:
            line["b"] = [list(run) for run in runs(blocks)]
        return line

    def _ended(self, exchange: Exchange) -> dict[str, JSON]:
        data = b"".join(exchange.answer)
        if exchange.packed:
            data = _unpacked(data)
        answer = answered(data, exchange.content_type)
        if self._raw_file is not None:
            self._raw_file.write(_line({"r": exchange.number, "answer": data.decode("utf-8", "replace")}))
        exchange.answer = []
        line: dict[str, JSON] = {"r": exchange.number, "e": (exchange.end_ns - exchange.at_ns) // 1000}
        if exchange.first_ns:
            line["f"] = (exchange.first_ns - exchange.at_ns) // 1000
        if exchange.size is None and answer.input_tokens is not None:
            line["i"] = answer.input_tokens
        output, by = answer.output_tokens, "usage"
        if output is None and self._tokenizer is not None and answer.text:
            output, by = len(self._tokenizer.encode(answer.text, special=False)), "tokenizer"
        if output is None:
            output, by = answer.chunks, "chunks"
        parallel = 1 if exchange.asked is None else max(1, exchange.asked.n)
        line["o"] = -(-output // parallel)
        if by != "usage":
            line["by"] = by
        if answer.cached_tokens is not None:
            line["k"] = answer.cached_tokens
        status = _status(exchange, answer)
        if status != "ok":
            line["st"] = status
        return line

    def _flush(self) -> None:
        if self.counts.dropped != self._told_dropped:
            self._told_dropped = self.counts.dropped
            self._lines.append(_line({"dropped": self.counts.dropped}))
        lines, self._lines = self._lines, []
        try:
            if lines:
                self._sink.write(b"".join(lines))
            if self._raw_file is not None:
                self._raw_file.flush()
            if self._sink.due(self._now()):
                self._sink.close()
                self._begin_file()
        except (OSError, TunerError) as error:
            self.counts.unwritten += len(lines)
            _log.error("capture cannot be written: %s", error)


def _status(exchange: Exchange, answer: Answered) -> str:
    if exchange.cut and not exchange.whole:
        return "cancelled"
    return "error" if answer.failed or not 200 <= exchange.code < 300 or not exchange.whole else "ok"


def _unpacked(data: bytes) -> bytes:
    try:
        return zlib.decompressobj(47).decompress(data)
    except zlib.error:
        return b""


def _line(value: JSON) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"
