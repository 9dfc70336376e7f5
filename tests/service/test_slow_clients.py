"""Clients that never finish the head of a request: anyone on the network can be one."""

import asyncio
import socket
from typing import Any

import pytest
import uvicorn

from tuner.service import connections

WHOLE = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def fine(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def talked(first: bytes, more: bytes) -> bytes:
    """What a client gets that sends `first`, waits for an answer to it, and then sends `more` and no end."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(fine, http=connections.TimedHead, lifespan="off", log_config=None)
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
        got += await asyncio.wait_for(reader.read(), 30)
        writer.close()
        server.should_exit = True
        await task
        return got


@pytest.mark.parametrize("more", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\nX-a: "])
@pytest.mark.parametrize("first", [b"", WHOLE])
def test_20_attack_a_head_that_never_ends_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, first: bytes, more: bytes
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.2)
    got = asyncio.run(talked(first, more))
    assert got.count(b"200 OK") == (1 if first else 0)
