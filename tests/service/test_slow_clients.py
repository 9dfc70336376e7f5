"""Clients that never finish a request, or send more than they take: anyone on the network can be one."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import uvicorn

from tuner.service import connections

WHOLE = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def fine(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[tuple[uvicorn.Server, Any]]:
    """(an application's server, its address) for as long as the block lasts."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        config = uvicorn.Config(app, http=connections.TimedHead, lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        task = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        yield server, listener.getsockname()
        server.should_exit = True
        await task


async def talked(first: bytes, more: bytes, app: Any = fine) -> bytes:
    """What a client gets that sends `first`, waits for an answer to it, and then sends `more` and no end."""
    async with served(app) as (_, address):
        reader, writer = await asyncio.open_connection(*address)
        got = b""
        if first:
            writer.write(first)
            got = await reader.readuntil(b"ok")
        writer.write(more)
        with suppress(ConnectionError):
            got += await asyncio.wait_for(reader.read(), 30)
        writer.close()
        return got


async def patient(scope: Any, receive: Any, send: Any) -> None:
    """Reads the body, as a route does that takes one."""
    while (await receive()).get("more_body"):
        pass
    await fine(scope, receive, send)


@pytest.mark.parametrize("more", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\nX-a: "])
@pytest.mark.parametrize("first", [b"", WHOLE])
def test_20_attack_a_head_that_never_ends_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, first: bytes, more: bytes
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.2)
    got = asyncio.run(talked(first, more))
    assert got.count(b"200 OK") == (1 if first else 0)


@pytest.mark.parametrize("length", [b"Content-Length: 9", b"Transfer-Encoding: chunked"])
def test_20_attack_a_body_that_never_ends_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, length: bytes
) -> None:
    monkeypatch.setattr(connections, "BODY_S", 0.2, raising=False)
    begun = b"POST / HTTP/1.1\r\nHost: x\r\n" + length + b"\r\n\r\n1\r\na\r\n"
    assert b"200 OK" not in asyncio.run(talked(b"", begun, patient))


@pytest.mark.parametrize(
    "more",
    [
        b"GET /" + b"a" * 2**21,
        b"GET / HTTP/1.1\r\nX-a: " + b"a" * 2**21,
        b"GET / HTTP/1.1\r\n" + b"X-a: b\r\n" * 2**18,
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-a: " + b"a" * 2**21,
    ],
    ids=["path", "header", "headers", "trailer"],
)
@pytest.mark.parametrize("first", [b"", WHOLE])
def test_20_attack_a_head_of_any_size_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, first: bytes, more: bytes
) -> None:
    monkeypatch.setattr(connections, "LARGEST_REQUEST", 2**20, raising=False)
    got = asyncio.run(talked(first, more, patient))
    assert got.count(b"200 OK") == (1 if first else 0)


def test_20_attack_headers_after_the_body_are_not_kept() -> None:
    seen: list[int] = []

    async def counts(scope: Any, receive: Any, send: Any) -> None:
        await patient(scope, receive, send)
        seen.append(len(scope["headers"]))

    chunked = b"POST / HTTP/1.1\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
    assert b"200 OK" in asyncio.run(talked(b"", chunked + b"X-a: b\r\n" * 100 + b"\r\n", counts))
    assert seen == [2]


def test_20_attack_requests_that_wait_are_counted() -> None:
    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.3)
        await fine(scope, receive, send)

    assert asyncio.run(talked(b"", WHOLE * 1000, slow)).count(b"200 OK") <= 1
    few = WHOLE * 3 + WHOLE.replace(b"Host", b"Connection: close\r\nHost")
    assert asyncio.run(talked(b"", few)).count(b"200 OK") == 4


def test_20_attack_an_answer_that_is_not_taken_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "TAKE_S", 0.2, raising=False)
    part, ended = b"a" * 2**20, asyncio.Event()

    async def large(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(64):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        ended.set()

    async def deaf() -> int:
        """How much is there to read for a client that reads once the service has given up."""
        async with served(large) as (server, address):
            client = socket.create_connection(address)
            client.sendall(WHOLE)
            await asyncio.wait_for(ended.wait(), 20)
            client.close()
        return len(server.server_state.connections)

    assert asyncio.run(deaf()) == 0


def test_20_attack_headers_are_counted() -> None:
    """Sixty thousand in one piece took a tenth of a second of the loop, each time, and megabytes."""
    many = b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a:\r\n" * 200 + b"\r\n"
    assert asyncio.run(talked(b"", many)).startswith(b"HTTP/1.1 400")
    few = b"GET / HTTP/1.1\r\nConnection: close\r\n" + b"a:\r\n" * 90 + b"\r\n"
    assert asyncio.run(talked(b"", few)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("where", [b"GET /%b HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nX-a: %b\r\n\r\n"])
def test_20_attack_a_head_that_comes_in_one_piece_is_limited_too(where: bytes) -> None:
    assert b"200 OK" not in asyncio.run(talked(b"", where % (b"a" * 50_000)))


def test_20_attack_empty_lines_between_requests_do_not_hold_a_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.2)
    assert asyncio.run(talked(WHOLE, b"\r\n" * 3)).count(b"200 OK") == 1


@pytest.mark.parametrize(
    "line",
    [
        b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
        b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"CONNECT / HTTP/1.1\r\n\r\n",
    ],
    ids=["h2c", "websocket", "connect"],
)
def test_20_attack_another_protocol_is_answered_once_and_closed(
    line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    got = asyncio.run(talked(b"", line + b"x" * 100 + WHOLE))
    assert got.count(b"200 OK") == 1
    assert b"connection: close" in got
    assert "upgrade" not in caplog.text.lower()


async def crowded(count: int, first: bytes) -> tuple[int, bytes]:
    """How many connections are open where `count` clients send the first bytes and no more, and what the
    next client gets.
    """
    async with served(patient) as (server, address):
        held = [await asyncio.open_connection(*address) for _ in range(count)]
        for _, writer in held:
            writer.write(first)
        await asyncio.sleep(0.2)
        most = len(server.server_state.connections)
        reader, writer = await asyncio.open_connection(*address)
        writer.write(WHOLE)
        got = await asyncio.wait_for(reader.read(1000), 10)
        for _, each in [*held, (reader, writer)]:
            each.close()
        return most, got


@pytest.mark.parametrize(
    "first",
    [b"", b"GET / HT", b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n1", WHOLE],
    ids=["nothing", "head", "body", "kept"],
)
def test_20_attack_the_one_that_waits_longest_makes_room(
    monkeypatch: pytest.MonkeyPatch, first: bytes
) -> None:
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 5)
    most, got = asyncio.run(crowded(20, first))
    assert most <= 5
    assert b"200 OK" in got


def test_20_attack_the_rest_of_the_last_answer_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is less than the mark at which a server waits for its client was kept for ever after a close."""
    monkeypatch.setattr(connections, "TAKE_S", 0.3)
    monkeypatch.setattr(connections, "HEAD_S", 0.3)

    async def deaf() -> int:
        async def large(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            (connection,) = server.server_state.connections
            transport = connection.transport
            while transport.get_write_buffer_size() < 9000:
                await send({"type": "http.response.body", "body": b"a" * 10_000, "more_body": True})
                await asyncio.sleep(0)
            assert transport.get_write_buffer_size() < 60_000
            await send({"type": "http.response.body", "body": b""})

        async with served(large) as (server, address):
            client = socket.create_connection(address)
            client.sendall(WHOLE.replace(b"Host", b"Connection: close\r\nHost"))
            end = asyncio.get_running_loop().time() + 5
            await asyncio.sleep(0.2)
            while server.server_state.connections and asyncio.get_running_loop().time() < end:
                await asyncio.sleep(0.05)
            left = len(server.server_state.connections)
            client.close()
            return left

    assert asyncio.run(deaf()) == 0
