"""`tuner capture`: the proxy with its recorder, served until somebody says stop."""

import asyncio
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import uvloop

from tuner.errors import Unavailable
from tuner.traffic.capture.files import Rotation, Sink
from tuner.traffic.capture.proxy import Proxy
from tuner.traffic.capture.recorder import Recorder
from tuner.traffic.capture.writer import Counts

PATIENCE_S = 10.0
"""How long answers under way may still take after the signal."""


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
    ready: Callable[[int], None] = lambda _: None,
) -> Counts:
    """Serve until SIGINT or SIGTERM; what was recorded. `out` is a directory when named.

    `ready` is told the port. A second signal cuts what is under way.
    """
    recorder = Recorder(Sink(out, name, rotation), tokenizer=tokenizer, raw=raw)
    proxy = Proxy(upstream, recorder)
    sys.setswitchinterval(0.0005)  # the recorder's thread must not hold up a chunk for longer
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(proxy, host, port, ready))
    finally:
        recorder.stop()
    return recorder.counts


async def _serve(proxy: Proxy, host: str, port: int, ready: Callable[[int], None]) -> None:
    stop, now = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: now.set() if stop.is_set() else stop.set())
    try:
        server = await proxy.listen(host, port)
    except OSError as error:
        raise Unavailable(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    if proxy.recorder is not None:
        proxy.recorder.start()
    await server.start_serving()
    ready(server.sockets[0].getsockname()[1])
    await stop.wait()
    server.close()
    closing = asyncio.create_task(proxy.close(PATIENCE_S))
    hurry = asyncio.create_task(now.wait())
    await asyncio.wait((closing, hurry), return_when=asyncio.FIRST_COMPLETED)
    if not closing.done():
        closing.cancel()
        await proxy.close()
    hurry.cancel()
