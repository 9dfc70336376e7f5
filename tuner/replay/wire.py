"""HTTP/1.1 on raw sockets in an event loop: one write per request, bytes stamped by the kernel, parsed later.

The number of requests in flight has no limit: a request that finds no idle connection gets a new one. Every
stamp is on the clock of `time.perf_counter_ns()`. The kernel stamps what it receives, so a late read does not
make the answer late; without kernel stamps, a read is stamped before its bytes are parsed.

An answer gives tokens per chunk (from continuous usage), the final usage, or an error. Its server-sent events
may be split anywhere, end in LF, CRLF or CR, and contain comments; one read may hold several. An event gets
the stamp of the read that completed it.
"""

import asyncio
import json
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter_ns

from tuner.replay.timing import SO_TIMESTAMPNS, Alarm, stamp

OPEN_S = 10.0
READ, SAID = 1 << 14, 64  # bytes of a read, and of the kernel's stamp beside it


class HttpExchange:
    """One request and the raw bytes of its answer; `done` is called once, also after a failure.

    `sent_ns` is taken just before the request's write, or before the connect that it waits for; `written_ns`
    just before its last write (0: there was none); `stamps[k]` when `parts[k]` came. `failure` is None if the
    HTTP answer is complete; `sse.read` reads its content.
    """

    __slots__ = (
        "done", "end_ns", "failure", "key", "parts", "request", "resent", "sent_ns", "stamps", "written_ns",
    )  # fmt: skip

    def __init__(self, key: int, request: bytes, done: Callable[["HttpExchange"], None]) -> None:
        self.key = key
        self.request = request
        self.done = done
        self.sent_ns = 0
        self.written_ns = 0
        self.end_ns = 0
        self.stamps: list[int] = []
        self.parts: list[bytes] = []
        self.failure: str | None = None
        self.resent = False


class Framing:
    """Finds the end of an HTTP/1.1 answer with little work; only `complete` shows whether all of it came."""

    __slots__ = ("_body", "_buffer", "_mode", "_need", "_taken", "keep", "status")

    def __init__(self) -> None:
        self._mode = "head"
        self._buffer = b""
        self._taken = 0
        self._need = 0
        self._body = 0
        self.keep = True
        self.status = 0

    def complete(self, parts: list[bytes]) -> bool:
        """Whether the answer ends with the last part. Chunked answers are walked only where they may end."""
        if self._mode == "head" and not self._head(parts):
            return False
        if self._mode == "length":
            self._body += sum(len(part) for part in parts[self._taken :])
            self._taken = len(parts)
            return self._body >= self._need
        if self._mode == "close" or not _may_end(parts):
            return False
        return self._walk(parts)

    def _head(self, parts: list[bytes]) -> bool:
        self._buffer += b"".join(parts[self._taken :])
        self._taken = len(parts)
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        lines = self._buffer[:end].lower().split(b"\r\n")
        self.status = int(lines[0].split(b" ", 2)[1])
        headers = dict(line.split(b":", 1) for line in lines[1:] if b":" in line)
        self._buffer = self._buffer[end + 4 :]
        self.keep = headers.get(b"connection", b"").strip() != b"close" and lines[0].startswith(b"http/1.1")
        if b"chunked" in headers.get(b"transfer-encoding", b""):
            self._mode = "chunked"
        elif b"content-length" in headers:
            self._mode = "length"
            self._need = int(headers[b"content-length"])
            self._body = len(self._buffer)
        else:
            self._mode = "close"
            self.keep = False
        return True

    def _walk(self, parts: list[bytes]) -> bool:
        buffer = self._buffer + b"".join(parts[self._taken :])
        self._taken = len(parts)
        position = 0
        while True:
            line = buffer.find(b"\r\n", position)
            if line < 0:
                break
            size = int(buffer[position:line].split(b";", 1)[0], 16)
            if size == 0:
                if buffer[line : line + 4] == b"\r\n\r\n" or b"\r\n\r\n" in buffer[line:]:
                    return True
                break
            if line + 2 + size + 2 > len(buffer):
                break
            position = line + 2 + size + 2
        self._buffer = buffer[position:]
        return False

    @property
    def until_close(self) -> bool:
        """Whether the answer ends when the connection does."""
        return self._mode == "close"


def _may_end(parts: list[bytes]) -> bool:
    last = parts[-1]
    if len(last) >= 4 or len(parts) == 1:
        return last.endswith(b"\r\n\r\n")
    return b"".join(parts[-4:]).endswith(b"\r\n\r\n")


class Connection:
    """A keep-alive connection that carries one exchange at a time. It reads with the kernel's stamps."""

    __slots__ = ("_fd", "_framing", "_left", "_loop", "exchange", "open", "pool", "sock", "used")

    def __init__(self, pool: "Pool", sock: socket.socket) -> None:
        self.pool = pool
        self.sock = sock
        self.open = True
        self.exchange: HttpExchange | None = None
        self.used = False
        self._framing = Framing()
        self._left: memoryview = memoryview(b"")
        self._fd = sock.fileno()
        self._loop = asyncio.get_running_loop()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self._loop.add_reader(self._fd, self._readable)
        pool.opened += 1

    def send(self, exchange: HttpExchange) -> None:
        """Write head and body in one go; the stamp is taken before."""
        self.exchange = exchange
        self._framing = Framing()
        exchange.written_ns = perf_counter_ns()
        exchange.sent_ns = exchange.sent_ns or exchange.written_ns
        self._left = memoryview(exchange.request)
        self._write()
        if self._left:
            self._loop.add_writer(self._fd, self._writable)

    def _write(self) -> None:
        """Write what the kernel takes now; a broken connection shows at the next read."""
        try:
            self._left = self._left[self.sock.send(self._left) :]
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._left = memoryview(b"")

    def _writable(self) -> None:
        self._write()
        if not self._left:
            self._loop.remove_writer(self._fd)

    def _readable(self) -> None:
        try:
            data, said, _, _ = self.sock.recvmsg(READ, SAID)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._lost(error)
            return
        if not data:
            self._lost(None)
            return
        if self.exchange is None:
            self.close()
            return
        now = perf_counter_ns()
        self._received(self.exchange, data, stamp(now, said))
        alarm = self.pool.alarm
        if alarm is not None and alarm.next_ns <= now:
            alarm.look(1)

    def _received(self, exchange: HttpExchange, data: bytes, at_ns: int) -> None:
        exchange.stamps.append(at_ns)
        exchange.parts.append(data)
        try:
            complete = self._framing.complete(exchange.parts)
        except (ValueError, IndexError):
            self._finish("malformed HTTP answer")
            self.close()
            return
        if self._framing.status == 200:
            self.pool.received += 1
        if complete:
            self._finish(None)
            if self._framing.keep and not self._left:
                self.used = True
                self.pool.idle.append(self)
            else:
                self.close()

    def _lost(self, error: OSError | None) -> None:
        """The other side closed the connection, or it broke."""
        self.close()
        if self in self.pool.idle:
            self.pool.idle.remove(self)
        exchange = self.exchange
        if exchange is None:
            return
        if self._framing.until_close and error is None:
            self._finish(None)
        elif self.used and not exchange.parts and not exchange.resent:
            self.exchange = None
            exchange.resent = True
            self.pool.send(exchange)
        else:
            self._finish("connection " + ("reset" if error or exchange.parts else "closed without an answer"))

    def cut(self, reason: str) -> None:
        """Give the exchange up: close the socket, so that the server sees its client go."""
        self._finish(reason)
        self.close()

    def close(self) -> None:
        """Let go of the socket."""
        if self.open:
            self.open = False
            self._loop.remove_reader(self._fd)
            if self._left:
                self._loop.remove_writer(self._fd)
            self.sock.close()

    def _finish(self, failure: str | None) -> None:
        exchange = self.exchange
        self.exchange = None
        if exchange is None:
            return
        exchange.failure = failure
        exchange.end_ns = perf_counter_ns() if failure or not exchange.stamps else exchange.stamps[-1]
        self.pool.flying.pop(exchange.key, None)
        exchange.done(exchange)


class Pool:
    """Connections to one server: as many as are needed at once, reused last in, first out. `received` counts
    pieces of good answers; `alarm` is looked at after every read, so that reading makes no send late.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self.idle: list[Connection] = []
        self.flying: dict[int, Connection | None] = {}
        self.opened = 0
        self.received = 0
        self.alarm: Alarm | None = None
        self._family: int | None = None
        self._opening: set[asyncio.Task[None]] = set()

    async def open(self, count: int) -> None:
        """Open connections until `count` are idle, so that the first burst finds them; fewer if a server
        takes more than OPEN_S to accept them. OSError when the server is not there.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + OPEN_S
        while len(self.idle) < count and loop.time() < end:
            self.idle.append(await self._connected())

    async def _connected(self) -> Connection:
        loop = asyncio.get_running_loop()
        if self._family is None:
            self._family = (await loop.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM))[0][0]
        sock = socket.socket(self._family, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, (self.host, self.port))
        except BaseException:
            sock.close()
            raise
        return Connection(self, sock)

    def send(self, exchange: HttpExchange) -> None:
        """Send at once; never waits, never refuses."""
        while self.idle:
            connection = self.idle.pop()
            if connection.open:
                self.flying[exchange.key] = connection
                connection.send(exchange)
                return
        self.flying[exchange.key] = None
        task = asyncio.get_running_loop().create_task(self._connect_and_send(exchange))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connect_and_send(self, exchange: HttpExchange) -> None:
        exchange.sent_ns = exchange.sent_ns or perf_counter_ns()
        try:
            connection = await self._connected()
        except OSError as error:
            if self.flying.pop(exchange.key, self) is None:
                exchange.failure = f"connect: {error.strerror or error}"
                exchange.end_ns = perf_counter_ns()
                exchange.done(exchange)
            return
        if self.flying.get(exchange.key, self) is None:
            self.flying[exchange.key] = connection
            connection.send(exchange)
        else:
            self.idle.append(connection)

    def cut(self, exchange: HttpExchange, reason: str) -> None:
        """End an exchange that is still in flight, because of its deadline or the end of the replay."""
        if exchange.key not in self.flying:
            return
        connection = self.flying[exchange.key]
        if connection is not None:
            connection.cut(reason)
            return
        del self.flying[exchange.key]
        exchange.failure = reason
        exchange.end_ns = perf_counter_ns()
        exchange.done(exchange)

    async def close(self) -> None:
        """Close every connection and wait for pending connects."""
        for connection in [*self.idle, *(c for c in self.flying.values() if c is not None)]:
            connection.close()
            connection.exchange = None
        self.idle.clear()
        for task in list(self._opening):
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)


def post(host: str, port: int, path: str, body: bytes) -> bytes:
    """The bytes of a POST request with a JSON body."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        f"Accept: text/event-stream\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def get(host: str, port: int, path: str) -> bytes:
    """The bytes of a GET request."""
    return f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nAccept: */*\r\n\r\n".encode()


EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r|\n\r\n|\r\n\n")
COMPLETION = b'"completion_tokens":'
CHOICES = b'"choices":'
NO_CHOICES = re.compile(rb"\s*\[\s*\]")
DIGITS = re.compile(rb"\s*(\d+)")

# Events parsed between two pauses of `answer_reader`.
EVENTS_AT_ONCE = 16


@dataclass(slots=True)
class StreamedAnswer:
    """One parsed answer; stamps in nanoseconds of the wire's clock. `error` None = complete.

    `keep_ids` asks for the answered token ids in `ids`. `guessed` chunks carried text but no usage and were
    counted as one token each. `answer_ns` is the first chunk that is not reasoning. `engine` holds the
    engine's own per-request metrics if it sends them.
    """

    keep_ids: bool = False
    status: int = 0
    chunk_ns: list[int] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    answer_ns: int | None = None
    finished: bool = False
    guessed: int = 0
    error: str | None = None
    engine: Mapping[str, float] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Completion tokens that came."""
        return sum(self.chunk_tokens)


def answer_reader(
    answer: StreamedAnswer, stamps: Sequence[int], parts: Sequence[bytes], choices: int = 1
) -> Iterator[None]:
    """Parse into `answer`, yielding between batches of events so that the caller can attend to its clock."""
    start = _head(answer, parts)
    if start is None:
        answer.error = "no HTTP answer"
        return
    first, body, chunked = start
    if answer.status != 200:
        answer.error = _refusal(answer.status, _whole(body, parts[first + 1 :], chunked))
        return
    counts = [0] * choices
    framed, need, pending, seen = body, 0, b"", 0
    for number in range(first, len(parts)):
        if number > first:
            framed += parts[number]
        if chunked:
            piece, framed, need = _unchunk(framed, need)
        else:
            piece, framed = framed, b""
        events, pending = _events(pending + piece)
        stamp = stamps[number]
        for event in events:
            _event(answer, event, stamp, counts)
            seen += 1
            if not seen % EVENTS_AT_ONCE:
                yield
    _conclude(answer, pending)


def status_and_body(parts: Sequence[bytes]) -> tuple[int, bytes]:
    """(HTTP status, body) of a complete answer; (0, b"") of none. ValueError when it is malformed."""
    answer = StreamedAnswer()
    start = _head(answer, parts)
    return (answer.status, _whole(start[1], parts[start[0] + 1 :], start[2])) if start else (0, b"")


def _head(answer: StreamedAnswer, parts: Sequence[bytes]) -> tuple[int, bytes, bool] | None:
    """Where the head ends: its part's number, what follows it there, and whether the body is chunked."""
    head = b""
    for number, part in enumerate(parts):
        head += part
        end = head.find(b"\r\n\r\n")
        if end >= 0:
            answer.status = int(head[:end].split(b" ", 2)[1])
            return number, head[end + 4 :], b"transfer-encoding: chunked" in head[:end].lower()
    return None


def _unchunk(framed: bytes, need: int = 0) -> tuple[bytes, bytes, int]:
    """(the bytes in the HTTP chunks, the rest of an unfinished size line, how many bytes the unfinished chunk
    still needs, with its line end).
    """
    pieces: list[bytes] = []
    position, end = 0, len(framed)
    while position < end:
        if need == 0:
            line = framed.find(b"\r\n", position)
            size = int(framed[position:line].partition(b";")[0], 16) if line >= 0 else 0
            if size == 0:
                break
            need, position = size + 2, line + 2
        stop = min(position + need, end)
        if need > 2:
            pieces.append(framed[position : min(stop, position + need - 2)])
        need -= stop - position
        position = stop
    return b"".join(pieces), framed[position:], need


def _events(body: bytes) -> tuple[list[bytes], bytes]:
    """The complete events, without their ends, and the rest of an unfinished one."""
    found = EVENT_END.split(body) if b"\r" in body else body.split(b"\n\n")
    return found, found.pop()


def _whole(body: bytes, parts: Sequence[bytes], chunked: bool) -> bytes:
    whole = body + b"".join(parts)
    return _unchunk(whole)[0] if chunked else whole


def _refusal(status: int, body: bytes) -> str:
    text = body.decode("utf-8", "replace")
    try:
        said = json.loads(text)
    except ValueError:
        said = None
    if isinstance(said, dict):
        inner = said.get("error", said)
        text = str(inner.get("message", inner)) if isinstance(inner, dict) else str(inner)
    return f"HTTP {status}: {text[:200].strip()}"


def _data(event: bytes) -> bytes:
    """The payload of an event: its data lines joined; comments and other fields dropped."""
    if event.startswith(b"data: ") and b"\n" not in event and b"\r" not in event:
        return event[6:]
    lines = (line for line in re.split(rb"\r\n|\n|\r", event) if line.startswith(b"data:"))
    return b"\n".join(line[6:] if line[5:6] == b" " else line[5:] for line in lines)


def _event(answer: StreamedAnswer, event: bytes, stamp: int, counts: list[int]) -> None:
    data = _data(event)
    if not data or answer.error is not None:
        return
    if data == b"[DONE]":
        answer.finished = True
        return
    found = -1 if answer.keep_ids else data.rfind(COMPLETION)
    if found >= 0 and len(counts) == 1 and answer.answer_ns is not None and not _without_choices(data):
        digits = DIGITS.match(data, found + len(COMPLETION))
        if digits is not None:
            _count(answer, stamp, counts, 0, int(digits[1]))
            return
    _slow_event(answer, data, stamp, counts)


def _without_choices(data: bytes) -> bool:
    found = data.find(CHOICES) + len(CHOICES)
    return data[found : found + 2] != b"[{" and (
        found < len(CHOICES) or NO_CHOICES.match(data, found) is not None
    )


def _slow_event(answer: StreamedAnswer, data: bytes, stamp: int, counts: list[int]) -> None:
    try:
        said = json.loads(data)
    except ValueError:
        answer.error = "malformed event"
        return
    if not isinstance(said, dict):
        answer.error = "malformed event"
    elif "error" in said:
        inner = said["error"]
        message = inner.get("message", inner) if isinstance(inner, dict) else inner
        answer.error = f"error in the stream: {str(message)[:200]}"
    else:
        _chunk(answer, said, stamp, counts)


def _chunk(answer: StreamedAnswer, said: dict[str, object], stamp: int, counts: list[int]) -> None:
    usage = said.get("usage")
    choices = said.get("choices")
    if isinstance(usage, dict) and not choices:
        _final(answer, usage, said.get("metrics"))
        return
    if not isinstance(choices, list) or not choices:
        return
    choice = choices[0]
    delta = choice.get("delta") or choice
    reasoning = delta.get("reasoning") or delta.get("reasoning_content")
    before = len(answer.chunk_ns)
    if answer.keep_ids and isinstance(choice.get("token_ids"), list):
        answer.ids.extend(choice["token_ids"])
    if isinstance(usage, dict) and "completion_tokens" in usage:
        _count(answer, stamp, counts, int(choice.get("index", 0)), int(usage["completion_tokens"]))
        answer.prompt_tokens = int(usage.get("prompt_tokens", answer.prompt_tokens or 0))
    elif reasoning or delta.get("text") or delta.get("content") or delta.get("tool_calls"):
        answer.guessed += 1
        answer.chunk_ns.append(stamp)
        answer.chunk_tokens.append(1)
    if answer.answer_ns is None and len(answer.chunk_ns) > before and not reasoning:
        answer.answer_ns = stamp


def _count(answer: StreamedAnswer, stamp: int, counts: list[int], index: int, total: int) -> None:
    if index >= len(counts):
        answer.error = f"unexpected choice {index}"
        return
    fresh = total - counts[index]
    if fresh > 0:
        counts[index] = total
        answer.chunk_ns.append(stamp)
        answer.chunk_tokens.append(fresh)


def _final(answer: StreamedAnswer, usage: dict[str, object], metrics: object) -> None:
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
    details = usage.get("prompt_tokens_details")
    if isinstance(prompt, int):
        answer.prompt_tokens = prompt
    if isinstance(completion, int):
        answer.completion_tokens = completion
    if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
        answer.cached_tokens = details["cached_tokens"]
    if isinstance(metrics, dict):
        answer.engine = {k: float(v) for k, v in metrics.items() if isinstance(v, int | float)}


def _conclude(answer: StreamedAnswer, rest: bytes) -> None:
    """Set the error of an answer that ended too early; replace guessed token counts by the final usage."""
    if answer.error is None and not answer.finished:
        answer.error = "the answer ended before [DONE]" if answer.chunk_ns or rest.strip() else "empty answer"
    if answer.error is None and answer.guessed and answer.completion_tokens is not None:
        missing = answer.completion_tokens - answer.tokens
        if answer.chunk_tokens and missing > 0:
            answer.chunk_tokens[-1] += missing
