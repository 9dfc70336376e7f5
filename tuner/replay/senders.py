"""The controller's side of sender processes: start, feed ahead of time, gather, end."""

import asyncio
import json
import marshal
import pickle
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tuner import processes
from tuner.errors import Aborted, BadInput
from tuner.leftovers import scratch_prefix
from tuner.replay.feeder import Source, Stretch
from tuner.replay.jobs import Sent, frame, read_frame
from tuner.replay.worker import TOLD

START_S = 60.0  # generous, since a loaded host starts processes slowly


class Senders:
    """Sender processes for one engine, and the feeder that builds what they send. A job goes to the sender of
    its group, so a session has one sender. `heard` counts reports of new tokens; every result that ended
    before `told_ns` has arrived.
    """

    def __init__(self, host: str, port: int, source: Source, cores: Sequence[int] | None) -> None:
        self.host = host
        self.port = port
        self.source = source
        self.count = source.senders
        self.cores = cores
        self.broken: str | None = None
        self.heard = 0
        self.reports: list[Mapping[str, float]] = []
        self._on_sent: Callable[[Sent], None] = lambda sent: None
        self._tag = f"sender-{uuid.uuid4().hex[:12]}"
        self._directory = Path(tempfile.mkdtemp(prefix=scratch_prefix()))
        self._links: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._feeder: asyncio.StreamWriter | None = None
        self._processes: list[processes.Process] = []
        self._readers: list[asyncio.Task[None]] = []
        self._finished = asyncio.Semaphore(0)
        self._prepared = asyncio.Semaphore(0)
        self._told = [0] * self.count
        self._servers: list[asyncio.Server] = []

    @property
    def told_ns(self) -> int:
        return min(self._told)

    async def start(self) -> None:
        """Start the processes and wait for them. Aborted when they do not come."""
        came = asyncio.Semaphore(0)

        async def sender(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._links.append((reader, writer))
            came.release()

        async def feeder(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._feeder = writer
            self._readers.append(asyncio.create_task(self._watch_feeder(reader)))
            came.release()

        for name, accept in (("socket", sender), ("feeder", feeder)):
            self._servers.append(await asyncio.start_unix_server(accept, str(self._directory / name)))
        self._spawn("feeder", [str(self._directory)], self.cores)
        for number in range(self.count):
            realtime = ["--realtime"] if self.source.load.realtime else []
            words = [str(self._directory), str(number), self.host, str(self.port), *realtime]
            self._spawn("worker", words, self.cores and [self.cores[number % len(self.cores)]])
        try:
            async with asyncio.timeout(START_S):
                for _ in range(self.count + 1):
                    await came.acquire()
        except TimeoutError as error:
            raise Aborted(
                f"the sender processes did not start within {START_S:.0f} s: {self._log()}", cause="sender"
            ) from error
        self._readers += [asyncio.create_task(self._read(number)) for number in range(self.count)]
        self._tell_feeder(b"B", await asyncio.to_thread(pickle.dumps, self.source))

    def _spawn(self, what: str, words: Sequence[str], cores: Sequence[int] | None) -> None:
        name = f"{what}-{len(self._processes)}"
        try:
            process = processes.spawn(
                [sys.executable, "-m", f"tuner.replay.{what}", *words],
                env={}, directory=self._directory, log=self._directory / f"{name}.log", tag=self._tag,
                cores=cores,
            )  # fmt: skip
        except (BadInput, OSError) as error:
            raise Aborted(f"cannot start a sender process: {error}", cause="sender") from error
        self._processes.append(process)

    def _log(self) -> str:
        """The ends of the processes' logs."""
        texts = (path.read_text(errors="replace").strip() for path in sorted(self._directory.glob("*.log")))
        return "; ".join(text[-200:] for text in texts if text)

    async def _read(self, number: int) -> None:
        reader = self._links[number][0]
        try:
            while True:
                kind, payload = await read_frame(reader)
                if kind == b"R":
                    for raw in marshal.loads(payload):
                        self._on_sent(Sent.unpack(raw))
                elif kind == b"T":
                    self._told[number], heard = TOLD.unpack(payload)
                    self.heard += heard
                elif kind == b"P":
                    self._prepared.release()
                else:
                    self.reports.append(json.loads(payload))
                    self._finished.release()
        except (asyncio.IncompleteReadError, ConnectionError):
            self._broke("a sender process ended in the middle of a replay")

    async def _watch_feeder(self, reader: asyncio.StreamReader) -> None:
        with suppress(ConnectionError):
            await reader.read()
        self._broke(f"the feeder process ended in the middle of a replay: {self._log()}")

    def _broke(self, reason: str) -> None:
        self.broken = self.broken or reason
        for _ in range(self.count):
            self._prepared.release()
            self._finished.release()

    def _tell(self, number: int, kind: bytes, payload: bytes = b"") -> None:
        self._links[number][1].write(frame(kind, payload))

    def _tell_feeder(self, kind: bytes, payload: bytes = b"") -> None:
        if self._feeder is not None:
            self._feeder.write(frame(kind, payload))

    async def begin(self, on_sent: Callable[[Sent], None], connections: int, stretch: Stretch) -> None:
        """Begin a new play: `on_sent` takes its results, `connections` are opened ahead, `stretch` is sent.
        Returns when every sender has its connections and enough jobs to start. Aborted when a process ended.
        """
        self._on_sent = on_sent
        self.reports = []
        self._told = [0] * self.count
        self._tell_feeder(b"S", pickle.dumps(stretch))
        for number in range(self.count):
            self._tell(number, b"O", str(connections // self.count).encode())
        for _ in range(self.count):
            await self._prepared.acquire()
        if self.broken is not None:
            raise Aborted(self.broken, cause="sender")

    def go(self, zero_ns: int) -> None:
        """Start the clock: `zero_ns` is a perf_counter_ns, which all processes of a Linux host share."""
        self._tell_feeder(b"Z", str(zero_ns).encode())
        for number in range(self.count):
            self._tell(number, b"Z", str(zero_ns).encode())

    async def cut(self, reason: str) -> None:
        """End the play: everything still in flight is given up, and every job is accounted for."""
        self._tell_feeder(b"C")
        for number in range(self.count):
            self._tell(number, b"X", reason.encode())
        for _ in range(self.count):
            await self._finished.acquire()

    async def close(self) -> None:
        """End the processes and remove what they left."""
        for writer in [*(link for _, link in self._links), *([self._feeder] if self._feeder else [])]:
            writer.close()
        for task in self._readers:
            task.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        for process in self._processes:
            await processes.stop(process, timeout_s=5.0)
        for server in self._servers:
            server.close()
            with suppress(asyncio.CancelledError):
                await server.wait_closed()
        shutil.rmtree(self._directory, ignore_errors=True)
