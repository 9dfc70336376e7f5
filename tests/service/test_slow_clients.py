"""Clients that never finish a request, or send more than they take: anyone on the network can be one."""

import asyncio
import socket
from contextlib import suppress
from typing import Any

import pytest
import uvicorn

from tuner.service import connections

WHOLE = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def fine(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def talked(first: bytes, more: bytes, app: Any = fine) -> bytes:
    """What a client gets that sends `first`, waits for an answer to it, and then sends `more` and no end."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, http=connections.TimedHead, lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        task = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        got = b""
        if first:
            writer.write(first)
            got = await reader.readuntil(b"ok")
        writer.write(more)
        with suppress(ConnectionError):
            got += await asyncio.wait_for(reader.read(), 30)
        writer.close()
        server.should_exit = True
        await task
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
        with socket.create_server(("127.0.0.1", 0)) as listener:
            config = uvicorn.Config(large, http=connections.TimedHead, lifespan="off", log_config=None)
            server = uvicorn.Server(config)
            task = asyncio.ensure_future(server.serve(sockets=[listener]))
            while not server.started:
                await asyncio.sleep(0.01)
            client = socket.create_connection(listener.getsockname())
            client.sendall(WHOLE)
            await asyncio.wait_for(ended.wait(), 20)
            client.close()
            server.should_exit = True
            await task
        return len(server.server_state.connections)

    assert asyncio.run(deaf()) == 0
