"""The writer of a capture, a separate process. It reads exchanges from a pipe and writes lines without text.

importers/captured.py reads these lines: a header; {"r", "t", ...} when a request came; {"r", "e", ...} when
its answer ended; {"dropped": n} for requests that did not fit into the queue. Times: t is in ns since the
file began, f and e are in microseconds since t. If a request ends after the next file has begun, its end is
still written to its own file.
"""

import json
import marshal
import os
import select
import signal
import struct
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from tuner.errors import TunerError
from tuner.records import JSON
from tuner.traffic.capture.files import Sink
from tuner.traffic.exchange import (
    TOKEN_BLOCK,
    Fingerprints,
    ResponseFacts,
    Tokenizer,
    count_tokens,
    read_request,
    read_response,
    runs,
)

FLUSH_S = 0.25  # what a kill of all processes can lose

# How long a rotated file waits for its last answers.
RETIRE_S = 600.0
LENGTH = struct.Struct("<I")


@dataclass(slots=True)
class Counts:
    """The counts of a capture: requests that were taken, dropped (queue full) or not understood, and lines
    that the disk did not take.
    """

    taken: int = 0
    dropped: int = 0
    not_understood: int = 0
    unwritten: int = 0


@dataclass(slots=True, eq=False)
class _File:
    """One file. `waiting` counts its requests that have not ended. After the next file has begun, it stays
    open `until` this time.
    """

    sink: Sink
    zero_ns: int
    raw: BinaryIO | None = None
    lines: list[bytes] = field(default_factory=list)
    waiting: int = 0
    until: float = 0.0
    closed: bool = False


@dataclass(slots=True, eq=False)
class _InFlight:
    """What the end of a request needs to know about its beginning."""

    file: _File
    at_ns: int
    n: int
    size: int | None


class Writer:
    """Turns beginnings and ends of requests into lines. `now` is the time of day, which names the files and
    decides when the next one begins.

    `retired` are earlier files that still wait for answers.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        tokenizer: Tokenizer | None = None,
        raw: bool = False,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.counts = Counts()
        self._tokenizer, self._raw, self._now = tokenizer, raw, now
        self._prints = Fingerprints()
        self._open: dict[int, _InFlight] = {}
        self.retired: list[_File] = []
        self._told_dropped = 0
        self._file = self._begin(sink)

    def take(self, parts: tuple[Any, ...]) -> None:
        """Takes one frame of the recorder: ("b" | "e" | "d", ...)."""
        kind, *rest = parts
        if kind == "d":
            (self.counts.dropped,) = rest
            return
        self.counts.taken += kind == "b"
        try:
            if kind == "b":
                self._began(*rest)
            else:
                self._ended(*rest)
        except (ValueError, TypeError, RecursionError, ArithmeticError, LookupError):
            self.counts.not_understood += 1

    def flush(self) -> None:
        """Writes the lines that wait, and begins a new file if it is time."""
        if self.counts.dropped != self._told_dropped:
            self._told_dropped = self.counts.dropped
            self._file.lines.append(_line({"dropped": self.counts.dropped}))
        for file in (*self.retired, self._file):
            self._write(file)
        now = time.monotonic()
        for file in [one for one in self.retired if not one.waiting or now > one.until]:
            self.retired.remove(file)
            _close(file)
        if self._file.sink.due(self._now()):
            try:
                fresh = self._begin(self._file.sink.again())
            except TunerError as error:
                _complain(error)
                return
            self._file.until = now + RETIRE_S
            self.retired.append(self._file)
            self._file = fresh

    def close(self) -> None:
        """Writes everything, closes the files and destroys the key."""
        self.flush()
        for file in (*self.retired, self._file):
            _close(file)
        self._prints.destroy()

    def _begin(self, sink: Sink) -> _File:
        now = self._now()
        sink.open(now)
        self._prints.destroy()
        self._prints = Fingerprints()
        tokenizer = self._tokenizer
        header: dict[str, JSON] = {
            "capture": 1,
            "block_size": TOKEN_BLOCK,
            "started_at": now.isoformat(),
            "blocks_from": "bytes" if tokenizer is None else "tokens",
            "tokenizer": None if tokenizer is None else tokenizer.name,
            "exact_chat": tokenizer is not None and tokenizer.exact_chat,
            "raw": self._raw,
        }
        sink.write(_line(header))
        raw = None
        if self._raw:
            path = Path(f"{sink.path}.raw")
            path.touch(mode=0o600)
            raw = path.open("ab")
        return _File(sink=sink, zero_ns=time.monotonic_ns(), raw=raw)

    def _began(self, number: int, at_ns: int, client: str | None, session: str | None, body: bytes) -> None:
        document = json.loads(body)
        request = read_request(document if isinstance(document, dict) else {})
        size, _, blocks, _ = count_tokens(request, ResponseFacts(), self._prints, self._tokenizer)
        file = self._file
        if file.raw is not None:
            file.raw.write(_line({"r": number, "request": document}))
        line: dict[str, JSON] = {"r": number, "t": at_ns - file.zero_ns}
        named = (("c", "client", request.client or client), ("a", "model", request.model or None))
        for key, kind, text in (*named, ("s", "session", request.session or session)):
            if text is not None:
                line[key] = self._prints.name(kind, text)
        for key, value, usual in (
            ("i", size, None),
            ("y", None if size is not None or request.text is None else len(request.text.encode()), None),
            ("m", request.max_tokens, -1),
            ("n", request.n, 1),
            ("w", request.beam, 0),
            ("p", request.priority, 0),
        ):
            if value != usual:
                line[key] = value
        if blocks:
            line["b"] = [list(run) for run in runs(blocks)]
        file.lines.append(_line(line))
        file.waiting += 1
        self._open[number] = _InFlight(file=file, at_ns=at_ns, n=max(1, request.n), size=size)

    def _ended(
        self,
        number: int,
        first_ns: int,
        end_ns: int,
        status: str | None,
        content_type: str,
        packed: bool,
        data: bytes,
    ) -> None:
        began = self._open.pop(number, None)
        if began is None:
            return
        began.file.waiting -= 1
        if began.file.closed:
            self.counts.unwritten += 1
            return
        data = _unpacked(data) if packed else data
        answer = read_response(data, content_type)
        if began.file.raw is not None:
            began.file.raw.write(_line({"r": number, "answer": data.decode("utf-8", "replace")}))
        line: dict[str, JSON] = {"r": number, "e": (end_ns - began.at_ns) // 1000}
        if first_ns:
            line["f"] = (first_ns - began.at_ns) // 1000
        if began.size is None and answer.input_tokens is not None:
            line["i"] = answer.input_tokens
        output, by = self._output(answer)
        line["o"] = -(-output // began.n)
        if by != "usage":
            line["by"] = by
        if answer.cached_tokens is not None:
            line["k"] = answer.cached_tokens
        if status is None and answer.failed:
            status = "error"
        if status is not None:
            line["st"] = status
        began.file.lines.append(_line(line))

    def _output(self, answer: ResponseFacts) -> tuple[int, str]:
        """(tokens of the answer, the source of this number). The source is the usage, otherwise the
        tokenizer, otherwise the number of chunks.
        """
        if answer.output_tokens is not None:
            return answer.output_tokens, "usage"
        if self._tokenizer is not None and answer.text:
            return len(self._tokenizer.encode(answer.text, special=False)), "tokenizer"
        return answer.chunks, "chunks"

    def _write(self, file: _File) -> None:
        lines, file.lines = file.lines, []
        try:
            if lines:
                file.sink.write(b"".join(lines))
            if file.raw is not None:
                file.raw.flush()
        except OSError as error:
            self.counts.unwritten += len(lines)
            _complain(error)


def _close(file: _File) -> None:
    file.closed = True
    file.sink.close()
    if file.raw is not None:
        file.raw.close()


def _unpacked(data: bytes) -> bytes:
    try:
        return zlib.decompressobj(47).decompress(data)
    except zlib.error:
        return b""


def _line(value: JSON) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _complain(error: Exception) -> None:
    sys.stderr.write(f"capture cannot be written: {error}\n")


def frame(*parts: str | int | bytes | None) -> bytes:
    """The bytes of parts for the pipe: their length, then marshal's bytes (both ends run the same Python)."""
    data = marshal.dumps(parts)
    return LENGTH.pack(len(data)) + data


def _frames(file: int) -> Iterator[tuple[Any, ...] | None]:
    """The frames until the pipe is closed. None after each pause, so that lines are flushed."""
    buffer = bytearray()
    while True:
        if not select.select([file], [], [], FLUSH_S)[0]:
            yield None
            continue
        data = os.read(file, 1 << 20)
        if not data:
            return
        buffer += data
        place = 0
        while len(buffer) - place >= LENGTH.size:
            (length,) = LENGTH.unpack_from(buffer, place)
            end = place + LENGTH.size + length
            if len(buffer) < end:
                break
            yield marshal.loads(bytes(buffer[place + LENGTH.size : end]))
            place = end
        del buffer[:place]
        yield None


def main() -> None:
    """Reads the options from the command line, and frames from standard input until it is closed.

    First it prints {"ready": true} or {"error": kind, "sentence": ...}, and at the end the counts.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # the recorder ends it, by closing the pipe
        signal.signal(number, signal.SIG_IGN)
    options = json.loads(sys.argv[1])
    try:
        tokenizer = Tokenizer(options["tokenizer"]) if options["tokenizer"] else None
        writer = Writer(Sink.of(options["sink"]), tokenizer=tokenizer, raw=options["raw"])
    except TunerError as error:
        print(json.dumps({"error": type(error).__name__, "sentence": str(error)}), flush=True)
        return
    print(json.dumps({"ready": True}), flush=True)
    flushed = time.monotonic()
    for parts in _frames(sys.stdin.fileno()):
        if parts is not None:
            writer.take(parts)
        if time.monotonic() - flushed >= FLUSH_S:
            writer.flush()
            flushed = time.monotonic()
    writer.close()
    with suppress(BrokenPipeError):  # the recorder may be gone
        os.write(sys.stdout.fileno(), _line(asdict(writer.counts)))


if __name__ == "__main__":
    main()
