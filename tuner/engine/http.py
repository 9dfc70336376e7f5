"""A port for each launch, and single HTTP requests to the engine there; replay sends the load."""

import asyncio
import json
import random
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import psutil

from tuner.records import JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A complete HTTP answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")

    def json(self) -> JSON:
        """The decoded body; None when it is not JSON."""
        try:
            decoded: JSON = json.loads(self.body)
        except ValueError:
            return None
        return decoded


async def ask(
    host: str, port: int, method: str, path: str, *, body: JSON = None, timeout_s: float = 10.0
) -> Reply:
    """One request on a new connection. OSError (TimeoutError included) when no answer came."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _ask(host, port, method, path, body)
    except (asyncio.IncompleteReadError, ValueError, IndexError) as error:
        raise ConnectionError(f"{path}: broken answer") from error


async def _ask(host: str, port: int, method: str, path: str, body: JSON) -> Reply:
    payload = b"" if body is None else json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(
            f"{method} {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n".encode()
            + payload
        )
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        lines = head.split("\r\n")
        pairs = [line.split(":", 1) for line in lines[1:] if ":" in line]
        headers = {name.strip().lower(): value.strip() for name, value in pairs}
        return Reply(status=int(lines[0].split(" ")[1]), headers=headers, body=await _body(reader, headers))
    finally:
        writer.close()


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    if "content-length" in headers:
        return await reader.readexactly(int(headers["content-length"]))
    if headers.get("transfer-encoding", "").lower() != "chunked":
        return await reader.read()
    parts = []
    while size := int((await reader.readline()).split(b";")[0], 16):
        parts.append(await reader.readexactly(size))
        await reader.readline()
    return b"".join(parts)


def stream_has_token(reply: Reply) -> bool:
    """Whether a streamed completion brought at least one token and came to its end."""
    events = [line[5:].strip() for line in reply.text.splitlines() if line.startswith("data:")]
    return (
        reply.status == 200
        and "[DONE]" in events
        and any('"choices": [{' in e or '"choices":[{' in e for e in events)
    )


def fresh_port(host: str = "127.0.0.1") -> int:
    """A port that no process listens on, not even with SO_REUSEPORT.

    It is below the ports that Linux gives to outgoing connections (from 32768 on): an engine binds its port
    many seconds after it was chosen.
    """
    while True:
        port = random.randrange(20_000, 30_000)
        if is_free(port, host) and not strangers(port, ()):
            return port


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether the port can be bound exclusively (connections in TIME_WAIT do not count)."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def strangers(port: int, ours: Iterable[int]) -> list[int]:
    """Processes outside `ours` that listen on the port; 0 means a process that we may not see."""
    own = set(ours)
    listeners = {
        connection.pid or 0
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
    }
    return sorted(listeners - own)
