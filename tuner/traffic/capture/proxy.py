"""The proxy: an ASGI app that passes requests to one upstream and streams the answers back as they come."""

import asyncio
import json
import signal
import ssl
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httptools
import uvicorn

from tuner.errors import BadInput
from tuner.traffic.capture.files import Rotation, Sink
from tuner.traffic.capture.middleware import Capture, Receive, Send
from tuner.traffic.capture.recorder import Counts, Recorder
from tuner.traffic.tokenizer import Tokenizer

HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer"}
    | {b"transfer-encoding", b"upgrade", b"host", b"content-length", b"expect", b"proxy-connection"}
)
FRAMED = frozenset({b"content-length", b"transfer-encoding"})
_READ = 1 << 16


class _Reading:
    """httptools' callbacks of one response."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.parts: list[bytes] = []
        self.started = self.done = self.keep = False
        self.parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.started = True
        self.keep = self.parser.should_keep_alive()  # told by the head alone; asked later it is False

    def on_body(self, body: bytes) -> None:
        self.parts.append(body)

    def on_message_complete(self) -> None:
        self.done = True


@dataclass(slots=True)
class _Link:
    """One connection to the upstream."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    used: bool = False


class Proxy:
    """ASGI app in front of `upstream` (http or https URL). Connections are kept and reused."""

    def __init__(self, upstream: str) -> None:
        parts = urlsplit(upstream if "://" in upstream else f"http://{upstream}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadInput(f"upstream '{upstream}': expected a URL such as http://127.0.0.1:8000")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/").encode()
        self._authority = parts.netloc.rpartition("@")[2].encode()
        self._free: list[_Link] = []

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            raise BadInput(f"{scope['type']}: the proxy passes HTTP only")
        body = await _body(receive)
        request = self._head(scope, len(body)) + body
        for fresh in (False, True):
            link = await self._link(fresh, send)
            if link is None or await self._pass(link, request, scope["method"], (receive, send)):
                return

    def close(self) -> None:
        """Close the connections that are kept."""
        while self._free:
            self._free.pop().writer.close()

    async def _link(self, fresh: bool, send: Send) -> _Link | None:
        """A kept connection, or a new one; None when the upstream is not there (502 was sent)."""
        while self._free and not fresh:
            link = self._free.pop()
            if not link.writer.is_closing() and not link.reader.at_eof():
                return link
        try:
            reader, writer = await asyncio.open_connection(
                self._host, self._port, ssl=self._tls, limit=1 << 20
            )
        except OSError as error:
            await _refuse(send, 502, f"the upstream cannot be reached: {error.strerror or error}")
            return None
        return _Link(reader, writer)

    async def _pass(self, link: _Link, request: bytes, method: str, client: tuple[Receive, Send]) -> bool:
        """Send the request on and the answer back; False when a kept connection was stale: try a new one."""
        receive, send = client
        reading = _Reading()
        watch = asyncio.create_task(_watch(receive, link))
        sent = False
        try:
            link.writer.write(request)
            await link.writer.drain()
            while not reading.done:
                data = await link.reader.read(_READ)
                if not data:
                    break
                reading.parser.feed_data(data)
                if reading.started and method == "HEAD":
                    reading.done = True
                sent = await _forward(reading, send, sent)
            if not sent and not reading.started and link.used and not watch.done():
                return False
            await _finish(reading, send, sent, watch.done())
        except (ConnectionError, httptools.HttpParserError) as error:
            if not sent and link.used and not watch.done():
                return False
            if not sent and not watch.done():
                await _refuse(send, 502, f"the upstream broke off: {type(error).__name__}")
        finally:
            self._put_back(link, reading, watch)
        return True

    def _put_back(self, link: _Link, reading: _Reading, watch: "asyncio.Task[None]") -> None:
        if not watch.done():
            watch.cancel()
        if reading.done and reading.keep and not link.writer.is_closing() and not watch.done():
            link.used = True
            self._free.append(link)
        else:
            link.writer.close()

    def _head(self, scope: MutableMapping[str, Any], length: int) -> bytes:
        path = self._prefix + (scope.get("raw_path") or scope["path"].encode())
        query = b"?" + scope["query_string"] if scope.get("query_string") else b""
        lines = [scope["method"].encode() + b" " + path + query + b" HTTP/1.1", b"host: " + self._authority]
        lines += [name + b": " + value for name, value in scope["headers"] if name not in HOP]
        if length or scope["method"] in ("POST", "PUT", "PATCH"):
            lines.append(b"content-length: %d" % length)
        return b"\r\n".join(lines) + b"\r\n\r\n"


async def _forward(reading: _Reading, send: Send, sent: bool) -> bool:
    """Pass on what has been parsed; whether the head has been sent."""
    if reading.started and not sent:
        headers = [(name, value) for name, value in reading.headers if name not in HOP - {b"content-length"}]
        await send(
            {"type": "http.response.start", "status": reading.parser.get_status_code(), "headers": headers}
        )
        sent = True
    if reading.parts and sent:
        parts, reading.parts = reading.parts, []
        for body in parts:  # one by one: the engine's own chunks stay chunks
            await send({"type": "http.response.body", "body": body, "more_body": True})
    return sent


async def _finish(reading: _Reading, send: Send, sent: bool, gone: bool) -> None:
    """End the answer; an upstream that broke off in the middle breaks the client's connection off too."""
    if gone:
        return
    if not sent:
        await _refuse(send, 502, "the upstream closed the connection without an answer")
    elif reading.done or not {name for name, _ in reading.headers} & FRAMED:
        await send({"type": "http.response.body", "body": b"", "more_body": False})
    else:
        raise ConnectionResetError("the upstream broke off in the middle of its answer")


async def _watch(receive: Receive, link: _Link) -> None:
    """Wait for the client to go away, then break off the upstream, so that the engine sees it too."""
    while (await receive())["type"] != "http.disconnect":
        pass
    link.writer.transport.abort()


async def _body(receive: Receive) -> bytes:
    parts, more = [], True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            break
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


async def _refuse(send: Send, status: int, sentence: str) -> None:
    body = json.dumps({"error": {"message": sentence, "type": "proxy", "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def run(
    upstream: str,
    out: Path,
    *,
    name: str | None = None,
    rotation: Rotation | None = None,
    host: str = "127.0.0.1",
    port: int = 8900,
    tokenizer: str | Path | None = None,
    raw: bool = False,
) -> Counts:
    """`tuner capture`: serve until interrupted; what was recorded. `out` is a directory when named."""
    recorder = Recorder(
        Sink(out, name, rotation), tokenizer=Tokenizer(tokenizer) if tokenizer else None, raw=raw
    )
    proxy = Proxy(upstream)
    recorder.start()
    sys.setswitchinterval(0.0005)  # the recording thread must not hold up a chunk for longer
    signal.signal(
        signal.SIGTERM, _interrupt
    )  # uvicorn raises it again at its end: go on to stop the recorder
    try:
        uvicorn.run(
            Capture(proxy, recorder),
            host=host,
            port=port,
            http="httptools",
            loop="uvloop",
            lifespan="off",
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=10,
            server_header=False,
            date_header=False,
        )
    finally:
        recorder.stop()
    return recorder.counts
