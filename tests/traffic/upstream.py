"""An engine with a known truth: as many tokens as asked for, prompts counted by ids or words."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

from tuner.traffic.capture.proxy import Proxy
from tuner.traffic.capture.recorder import Recorder

Message = MutableMapping[str, Any]


class Upstream:
    """ASGI app. `bodies` are the requests as they came, `cut` how many clients went away in the middle.

    Bodies may ask for `hold` (wait after the first chunk), `fail` (status 500) and `usage` (false: none).
    """

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.heads: list[list[tuple[bytes, bytes]]] = []
        self.cut = 0
        self.peers: set[object] = set()
        self.hold = asyncio.Event()
        self.arrived = asyncio.Event()

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.bodies.append(body)
        self.peers.add(tuple(scope["client"]))
        self.heads.append(list(scope["headers"]))
        asked = json.loads(body) if body[:1] == b"{" else {}
        if asked.get("fail"):
            await _whole(send, 500, b'{"error": {"message": "no"}}')
        elif asked.get("stream"):
            await self._stream(asked, receive, send)
        else:
            usage = _usage(asked)
            text = json.dumps({"choices": [{"text": "b " * usage["completion_tokens"]}], "usage": usage})
            await _whole(send, 200, text.encode())

    async def _stream(self, asked: dict[str, Any], receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        gone = asyncio.create_task(_gone(receive))
        for number in range(asked.get("max_tokens", 4)):
            event = {"choices": [{"text": f"b{number} "}]}
            await send(_chunk(f"data: {json.dumps(event)}\n\n".encode()))
            self.arrived.set()
            if asked.get("hold"):
                await asyncio.wait(
                    [gone, asyncio.create_task(self.hold.wait())], return_when=asyncio.FIRST_COMPLETED
                )
            if gone.done():
                self.cut += 1
                return
        if asked.get("usage", True):
            await send(_chunk(f"data: {json.dumps({'choices': [], 'usage': _usage(asked)})}\n\n".encode()))
        await send(_chunk(b"data: [DONE]\n\n"))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        gone.cancel()


def _usage(asked: dict[str, Any]) -> dict[str, Any]:
    prompt = asked.get("prompt", "")
    size = len(prompt) if isinstance(prompt, list) else len(str(prompt or asked.get("messages")).split())
    out = asked.get("max_tokens", 4) * asked.get("n", 1)
    return {
        "prompt_tokens": size,
        "completion_tokens": out,
        "total_tokens": size + out,
        "prompt_tokens_details": {"cached_tokens": asked.get("cached", 0)},
    }


def _chunk(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}


async def _whole(send: Any, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _gone(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[int]:
    """The app behind a real socket; gives the port."""
    config = uvicorn.Config(app, port=0, lifespan="off", log_level="warning", access_log=False, loop="none")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await serving


@asynccontextmanager
async def proxied(upstream: str, recorder: Recorder) -> AsyncIterator[int]:
    """A recording proxy in front of an upstream; gives its port."""
    proxy = Proxy(upstream, recorder)
    server = await proxy.listen("127.0.0.1", 0)
    recorder.start()
    await server.start_serving()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await proxy.close(5.0)
        recorder.stop()


async def post(
    port: int, body: bytes, *, path: str = "/v1/completions", headers: str = ""
) -> tuple[int, bytes]:
    """One request over a connection of its own: (status, everything after the head, as it came)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}"
    head += "content-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    data = await reader.read()
    writer.close()
    await writer.wait_closed()
    top, _, rest = data.partition(b"\r\n\r\n")
    return int(top.split()[1]), rest
