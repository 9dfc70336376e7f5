"""An ASGI middleware that records, for vLLM itself (`--middleware`) or any ASGI app. It changes nothing that
passes.
"""

import atexit
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from tuner.traffic.capture.files import Rotation, Sink
from tuner.traffic.capture.recorder import RECORDED, RecordedExchange, Recorder

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class Capture:
    """Records the requests that generate text. Every request passes unchanged and without delay."""

    def __init__(self, app: App, recorder: Recorder) -> None:
        self._app, self.recorder = app, recorder

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in RECORDED or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        peer = scope.get("client")
        exchange = RecordedExchange.begun(str(peer[0]) if peer else None, scope["headers"])

        async def receiving() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                exchange.body.append(message.get("body", b""))
                if not message.get("more_body", False):
                    self.recorder.begin(exchange)
            elif not exchange.whole:
                exchange.cut = True
            return message

        async def sending(message: Message) -> None:
            await send(message)
            _passed(exchange, message)

        try:
            await self._app(scope, receiving, sending)
        finally:
            exchange.end_ns = time.monotonic_ns()
            self.recorder.end(exchange)


class VllmCapture(Capture):
    """The middleware for vLLM: `--middleware tuner.traffic.capture.middleware.VllmCapture`.

    Environment variables configure it. TUNER_CAPTURE_OUT names the file. With TUNER_CAPTURE_NAME, it names
    the directory of several files (TUNER_CAPTURE_EVERY hour|day, TUNER_CAPTURE_KEEP). TUNER_CAPTURE_TOKENIZER
    is the model's tokenizer.json.
    """

    def __init__(self, app: App) -> None:
        env = os.environ
        name, every, keep = (env.get(f"TUNER_CAPTURE_{key}") for key in ("NAME", "EVERY", "KEEP"))
        rotation = Rotation(
            every="hour" if every == "hour" else "day" if every == "day" else None,
            keep=int(keep) if keep else None,
        )
        sink = Sink(Path(env["TUNER_CAPTURE_OUT"]), name, rotation)
        recorder = Recorder(sink, tokenizer=env.get("TUNER_CAPTURE_TOKENIZER"))
        recorder.start()
        atexit.register(recorder.stop)
        super().__init__(app, recorder)


def _passed(exchange: RecordedExchange, message: Message) -> None:
    """Records what was just sent: its time, the status, and a reference to the bytes."""
    if message["type"] == "http.response.start":
        exchange.answering(message["status"], message.get("headers", ()))
    elif message["type"] == "http.response.body":
        if body := message.get("body", b""):
            exchange.passed(bytes(body))
        if not message.get("more_body", False):
            exchange.whole = True
