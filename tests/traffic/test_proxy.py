"""The proxy on the wire, before upstreams that write what they like."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from tests.traffic.upstream import proxied
from tuner.traffic.capture.files import Sink
from tuner.traffic.capture.recorder import Recorder
from tuner.traffic.importers import read_any
from tuner.traffic.trace import STATUSES, Trace

Answer = Callable[[int, bytes, asyncio.StreamWriter], Awaitable[None]]
USAGE = b'{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}'
LENGTH = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n" % len(USAGE)
WHOLE = LENGTH + b"\r\n" + USAGE
CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
BODY = b'{"model": "m", "prompt": [1, 2, 3]}'
WATCHDOG_S = 600.0


def ask(body: bytes = BODY, line: bytes = b"POST /v1/completions HTTP/1.1", headers: bytes = b"") -> bytes:
    size = b"content-length: %d\r\n" % len(body) if body else b""
    return line + b"\r\nhost: x\r\n" + headers + size + b"\r\n" + body


@asynccontextmanager
async def between(answer: Answer, file: Path) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A proxy before an upstream that calls `answer(number, head and body, writer)`; (port, heads it saw)."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
                body = await reader.readexactly(int(size or b"0"))
                heads.append(head)
                await answer(len(heads) - 1, head + body, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, proxied(f"http://127.0.0.1:{port}", Recorder(Sink(file))) as listening:
        yield listening, heads


async def talk(port: int, data: bytes, *, piece: int = 0) -> bytes:
    """Everything that comes back until the other side closes, or until nothing more is owed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for start in range(0, len(data), piece or len(data)):
        writer.write(data[start : start + (piece or len(data))])
        await writer.drain()
        await asyncio.sleep(0)
    found = await reader.read()
    writer.close()
    return found


def told(file: Path, answer: Answer, data: bytes, *, piece: int = 0) -> tuple[bytes, list[bytes], Trace]:
    async def go() -> tuple[bytes, list[bytes]]:
        async with asyncio.timeout(WATCHDOG_S), between(answer, file) as (port, heads):
            return await talk(port, data, piece=piece), heads

    back, heads = asyncio.run(go())
    return back, heads, read_any(file)


CLOSE = b"connection: close\r\n"


def test_split_at_every_byte_it_is_the_same(tmp_path: Path) -> None:
    events = [b"data: {}\n\n", b"data: " + USAGE + b"\n\n", b"data: [DONE]\n\n"]
    stream = CHUNKED + b"".join(b"%x\r\n%b\r\n" % (len(e), e) for e in events) + b"0\r\n\r\n"

    async def byte_by_byte(number: int, request: bytes, writer: asyncio.StreamWriter) -> None:
        assert request.endswith(BODY)
        for place in range(len(stream)):
            writer.write(stream[place : place + 1])
            await writer.drain()
            await asyncio.sleep(0)

    back, _, trace = told(tmp_path / "c.jsonl", byte_by_byte, ask(headers=CLOSE), piece=1)
    assert back.partition(b"\r\n\r\n")[2] == stream.partition(b"\r\n\r\n")[2]
    assert (trace.input_len.tolist(), trace.output_len.tolist()) == ([3], [2])


def test_pipelined_requests_are_answered_in_order(tmp_path: Path) -> None:
    async def numbered(number: int, request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nx-number: %d\r\ncontent-length: 0\r\n\r\n" % number)

    asked = ask() + ask(b"", b"GET /health HTTP/1.1") + ask(headers=CLOSE)
    back, heads, trace = told(tmp_path / "c.jsonl", numbered, asked)
    assert [part.split(b"\r\n")[0] for part in back.split(b"x-number: ")[1:]] == [b"0", b"1", b"2"]
    assert heads[1].startswith(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1:")
    assert len(trace) == 2


def test_words_between_upstream_and_proxy_stay_there(tmp_path: Path) -> None:
    """Interim answers and an upgrade are between two hops; a client that waits for a go-ahead gets it."""

    async def early(number: int, request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + LENGTH + b"Connection: close\r\n\r\n" + USAGE
        )

    more = b"expect: 100-continue\r\nconnection: upgrade, close\r\nupgrade: h2c\r\n"
    back, heads, trace = told(tmp_path / "c.jsonl", early, ask(headers=more))
    assert back.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")
    assert back.endswith(USAGE)
    assert not {b"expect", b"upgrade", b"connection"} & {
        line.partition(b":")[0] for line in heads[0].split(b"\r\n")
    }
    assert trace.output_len.tolist() == [2]


def test_a_chunked_request_arrives_whole(tmp_path: Path) -> None:
    async def whole(number: int, request: bytes, writer: asyncio.StreamWriter) -> None:
        assert request.endswith(b"\r\n\r\n" + BODY)
        writer.write(WHOLE)

    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    data = head + b"5\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (BODY[:5], len(BODY) - 5, BODY[5:])
    back, _, trace = told(tmp_path / "c.jsonl", whole, data, piece=7)
    assert back.endswith(USAGE)
    assert trace.input_len.tolist() == [3]


def test_an_answer_without_a_length_ends_with_the_connection(tmp_path: Path) -> None:
    async def until_close(number: int, request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + USAGE)
        writer.close()

    back, _, trace = told(tmp_path / "c.jsonl", until_close, ask())
    assert back.endswith(b"\r\n\r\n" + USAGE)
    assert [STATUSES[code] for code in trace.status] == ["ok"]


def test_an_upstream_that_breaks_off_breaks_off_for_the_client(tmp_path: Path) -> None:
    async def half(number: int, request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + b"5\r\ndata:\r\n")
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.transport.abort()

    back, _, trace = told(tmp_path / "c.jsonl", half, ask())
    assert back.endswith(b"\r\n\r\n5\r\ndata:\r\n")  # and no last chunk: the client sees that it is cut
    assert [STATUSES[code] for code in trace.status] == ["error"]


def test_a_kept_connection_gone_stale_is_replaced(tmp_path: Path) -> None:
    async def twice(number: int, request: bytes, writer: asyncio.StreamWriter) -> None:
        if number == 1:  # the second request meets a connection that dies unanswered
            writer.transport.abort()
            return
        writer.write(WHOLE)

    back, heads, trace = told(tmp_path / "c.jsonl", twice, ask() + ask(headers=CLOSE))
    assert back.count(USAGE) == 2
    assert len(heads) == 3
    assert [STATUSES[code] for code in trace.status] == ["ok", "ok"]


def test_an_upstream_that_says_nothing_or_nonsense_is_a_bad_gateway(tmp_path: Path) -> None:
    async def nothing(number: int, request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def nonsense(number: int, request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-nonsense\r\n\r\n")

    for number, answer in enumerate((nothing, nonsense)):
        back, _, trace = told(tmp_path / f"{number}.jsonl", answer, ask())
        assert not back or back.startswith(b"HTTP/1.1 502 ") or back.startswith(b"SSH")
        assert [STATUSES[code] for code in trace.status] == ["error"]


def test_what_is_not_http_is_refused(tmp_path: Path) -> None:
    async def never(number: int, request: bytes, writer: asyncio.StreamWriter) -> None:
        raise AssertionError("nothing should come here")

    async def go() -> bytes:
        async with asyncio.timeout(WATCHDOG_S), between(never, tmp_path / "c.jsonl") as (port, _):
            return await talk(port, b"\x16\x03\x01 hello\r\n\r\n")

    assert asyncio.run(go()).startswith(b"HTTP/1.1 400 Bad Request\r\n")


def test_head_and_old_clients_are_served(tmp_path: Path) -> None:
    async def head(number: int, request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(LENGTH + b"\r\n" + (b"" if request.startswith(b"HEAD") else USAGE))

    async def go() -> tuple[bytes, bytes]:
        async with asyncio.timeout(WATCHDOG_S), between(head, tmp_path / "c.jsonl") as (port, _):
            first = await talk(port, ask(b"", b"HEAD /v1/models HTTP/1.1") + ask(headers=CLOSE))
            return first, await talk(port, ask(line=b"POST /v1/completions HTTP/1.0"))

    both, old = asyncio.run(go())
    assert both.count(b"200 OK") == 2
    assert both.endswith(USAGE)
    assert b"connection: close" in old
    assert old.endswith(USAGE)


def test_a_packed_answer_is_counted_and_passes_packed(tmp_path: Path) -> None:
    data = gzip.compress(USAGE)
    start = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(data)

    async def packed(number: int, request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(start + data)

    back, _, trace = told(tmp_path / "c.jsonl", packed, ask(headers=CLOSE))
    assert back.endswith(data)
    assert trace.output_len.tolist() == [2]


def test_a_slow_client_holds_up_its_upstream_and_gets_everything(tmp_path: Path) -> None:
    """The proxy does not gather what a client does not read."""
    size, sent = 16 << 20, list[int]()

    async def flood(number: int, request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        for _ in range(size >> 16):
            writer.write(b"x" * (1 << 16))
            await writer.drain()
            sent.append(1 << 16)

    async def go() -> tuple[int, int]:
        async with asyncio.timeout(WATCHDOG_S), between(flood, tmp_path / "c.jsonl") as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
            writer.write(ask(headers=CLOSE))
            before = -1
            while before != sum(sent):  # until nothing moves any more
                before = sum(sent)
                await asyncio.sleep(0.2)
            taken = await reader.read()
            writer.close()
            return before, len(taken.partition(b"\r\n\r\n")[2])

    held, got = asyncio.run(go())
    assert held < size
    assert got == size


def test_a_client_that_leaves_in_the_middle_of_its_request_is_counted(tmp_path: Path) -> None:
    async def whole(number: int, request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(WHOLE)

    async def go() -> int:
        file = tmp_path / "c.jsonl"
        recorder = Recorder(Sink(file))
        async with asyncio.timeout(WATCHDOG_S), proxied("http://127.0.0.1:9", recorder) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(ask()[:-5])
            await writer.drain()
            await asyncio.sleep(0.05)
            writer.close()
            await writer.wait_closed()
            while not recorder.counts.taken:
                await asyncio.sleep(0.01)
        return recorder.counts.not_understood

    assert asyncio.run(go()) == 1
    assert json.loads((tmp_path / "c.jsonl").read_text())["capture"] == 1
