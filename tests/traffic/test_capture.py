"""The recording proxy: nothing changed, everything counted, no word on disk, readable after kill −9."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.traffic.conftest import make
from tests.traffic.upstream import Upstream, post, proxied, served
from tuner.engine.http import fresh_port
from tuner.errors import BadInput, NotFound
from tuner.replay.feeder import Prompts
from tuner.traffic.capture.files import Rotation, Sink, closed_files, latest
from tuner.traffic.capture.proxy import Proxy
from tuner.traffic.capture.recorder import RecordedExchange, Recorder
from tuner.traffic.importers import detect, read_any
from tuner.traffic.trace import STATUSES, Trace

CANARY = "xylophone-zanzibar-4711"


@dataclass
class Bench:
    """A proxy in front of an upstream, and what it recorded."""

    upstream: Upstream
    port: int
    upstream_port: int
    recorder: Recorder
    file: Path

    def trace(self) -> Trace:
        """What was recorded, read by the importer."""
        self.recorder.stop()
        return read_any(self.file)


@asynccontextmanager
async def bench(directory: Path, **options: Any) -> AsyncIterator[Bench]:
    upstream, file = Upstream(), directory / "capture.jsonl"
    recorder = Recorder(Sink(file), **options)
    async with (
        served(upstream) as behind,
        proxied(f"http://127.0.0.1:{behind}", recorder) as port,
    ):
        yield Bench(upstream, port, behind, recorder, file)


def body(**parts: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": [1, 2, 3], "max_tokens": 4} | parts).encode()


def test_everything_passes_untouched(tmp_path: Path) -> None:
    async def go() -> None:
        async with bench(tmp_path) as b:
            for asked in (body(), body(stream=True, prompt="ä " * 500), body(fail=True), b"not json"):
                through = await post(b.port, asked, headers="x-test: 1\r\n")
                direct = await post(b.upstream_port, asked, headers="x-test: 1\r\n")
                assert through == direct
                assert b.upstream.bodies[-1] == b.upstream.bodies[-2] == asked
            assert (b"x-test", b"1") in b.upstream.heads[-2]
            assert await post(b.port, b"x", path="/v1/embeddings") == await post(b.upstream_port, b"x")

    asyncio.run(go())


def test_what_was_asked_and_answered_is_recorded(tmp_path: Path) -> None:
    async def go() -> Trace:
        async with bench(tmp_path) as b:
            ids = list(range(40))
            await post(b.port, body(prompt=ids, stream=True, priority=2), headers="x-session-id: s1\r\n")
            await post(
                b.port, body(prompt=ids + ids, cached=32, n=3, user="u"), headers="x-session-id: s1\r\n"
            )
            await post(b.port, body(prompt=[9] * 33, model="adapter", max_tokens=7))
            await post(b.port, body(fail=True))
            return b.trace()

    trace = asyncio.run(go())
    assert detect(tmp_path / "capture.jsonl") == "capture"
    assert trace.input_len.tolist() == [40, 80, 33, 3]
    assert trace.output_len.tolist() == [4, 4, 7, 0]
    assert trace.max_tokens.tolist() == [4, 4, 7, 4]
    assert trace.priority.tolist() == [2, 0, 0, 0]
    assert trace.n.tolist() == [1, 3, 1, 1]
    assert trace.session.tolist() == [0, 0, -1, -1]
    assert trace.client.tolist() == [0, 1, 0, 0]
    assert trace.lora.tolist() == [-1, -1, 0, -1]  # what most requests name is the base model
    assert trace.obs_cached.tolist()[1] == 32
    assert [STATUSES[code] for code in trace.status] == ["ok", "ok", "ok", "error"]
    assert (trace.obs_ttft_s <= trace.obs_e2e_s).all()
    assert [len(trace.row_blocks(row)) for row in range(4)] == [2, 5, 2, 0]
    assert trace.row_blocks(0).tolist() == trace.row_blocks(1)[:2].tolist()


def test_a_replayed_capture_has_the_structure_of_what_was_captured(tmp_path: Path) -> None:
    """Capture of a trace's own prompts: the same lengths, and the same sharing, block by block."""
    source = make([64, 64, 40, 80], ids=[[1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 3], [7, 8, 9, 1, 2]])
    prompts = Prompts(source, 32_000, b"salt")

    async def go() -> Trace:
        async with bench(tmp_path) as b:
            for row in range(4):
                await post(b.port, body(prompt=prompts.tokens(row).tolist()))
            return b.trace()

    trace = asyncio.run(go())
    assert trace.input_len.tolist() == source.input_len.tolist()
    found = [trace.row_blocks(row).tolist() for row in range(4)]
    assert found[0] == [0, 1, 2, 3]
    assert found[1] == [0, 1, 4, 5]
    assert found[2] == [0, 1]  # the third block is partial: a tail is not hashed
    assert found[3] == [6, 7, 8, 9, 10]  # chained: the same tokens elsewhere are another prefix


def test_a_client_that_goes_away_is_seen_by_both_sides(tmp_path: Path) -> None:
    async def go() -> Trace:
        async with bench(tmp_path) as b:
            reader, writer = await asyncio.open_connection("127.0.0.1", b.port)
            asked = body(stream=True, hold=True, max_tokens=50)
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(asked)
            )
            writer.write(asked)
            await b.upstream.arrived.wait()
            await reader.readuntil(b"b0")
            writer.close()
            await writer.wait_closed()
            async with asyncio.timeout(20):
                while not b.upstream.cut:
                    await asyncio.sleep(0.01)
            return b.trace()

    trace = asyncio.run(go())
    assert [STATUSES[code] for code in trace.status] == ["cancelled"]
    assert trace.input_len.tolist() == [3]
    assert trace.output_len.tolist() == [1]


def test_connections_to_the_upstream_are_kept(tmp_path: Path) -> None:
    async def go() -> None:
        async with bench(tmp_path) as b:
            for _ in range(5):
                await post(b.port, body(stream=True))
                await post(b.port, body())
            assert len(b.upstream.peers) == 1

    asyncio.run(go())


def test_without_an_upstream_the_client_is_told(tmp_path: Path) -> None:
    async def go() -> None:
        async with proxied("http://127.0.0.1:9", Recorder(Sink(tmp_path / "c.jsonl"))) as port:
            status, answer = await post(port, body())
        assert status == 502
        assert "cannot be reached" in json.loads(answer)["error"]["message"]

    asyncio.run(go())
    with pytest.raises(BadInput, match="upstream"):
        Proxy("ftp://host")


@pytest.mark.parametrize("shape", ["text", "chat"])
def test_no_word_reaches_the_disk(tmp_path: Path, shape: str) -> None:
    """A canary in prompt, answer, client and session, 1,000 times: found in no file."""
    text = f"please tell {CANARY} again and again what {CANARY} is, and do it well. " * 4
    chat = {"messages": [{"role": "user", "content": text}], "prompt": None}
    asked = body(user=CANARY, session_id=CANARY, **({"prompt": text} if shape == "text" else chat))

    async def go() -> None:
        async with bench(tmp_path) as b:
            headers = f"x-session-id: {CANARY}\r\nauthorization: Bearer {CANARY}\r\n"
            path = "/v1/completions" if shape == "text" else "/v1/chat/completions"
            for _ in range(50):
                await asyncio.gather(*(post(b.port, asked, headers=headers, path=path) for _ in range(10)))
            assert len(b.trace()) == 500

    asyncio.run(go())
    for file in tmp_path.rglob("*"):
        data = file.read_bytes()
        assert CANARY.encode() not in data
        assert b"xylophone" not in data
        assert file.stat().st_mode & 0o077 == 0


def test_raw_is_asked_for_and_says_what_it_stores(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> None:
        async with bench(tmp_path, raw=True) as b:
            await post(b.port, body(prompt=CANARY))
            assert len(b.trace()) == 1

    asyncio.run(go())
    assert "personal data included" in caplog.text
    assert CANARY in (tmp_path / "capture.jsonl.raw").read_text()
    assert CANARY not in (tmp_path / "capture.jsonl").read_text()
    assert (tmp_path / "capture.jsonl.raw").stat().st_mode & 0o077 == 0


def test_a_full_queue_drops_and_counts(tmp_path: Path) -> None:
    recorder = Recorder(Sink(tmp_path / "c.jsonl"), most=3)
    exchanges = [RecordedExchange(at_ns=row, body=[body()], code=200, whole=True) for row in range(10)]
    for exchange in exchanges:  # nothing takes from the queue yet
        recorder.begin(exchange)
    for exchange in exchanges:
        recorder.end(exchange)
    assert (recorder.counts.taken, recorder.counts.dropped) == (3, 7)
    recorder.start()
    recorder.stop()
    trace = read_any(tmp_path / "c.jsonl")
    assert len(trace) == 3
    assert trace.meta["quality"]["lost_in_capture"] == 7  # type: ignore[index,call-overload]


def test_lengths_without_usage_are_estimated_and_counted(tmp_path: Path) -> None:
    async def go() -> Trace:
        async with bench(tmp_path) as b:
            await post(b.port, body(prompt="word " * 100))
            await post(b.port, body(prompt="word " * 200, stream=True, usage=False))
            return b.trace()

    trace = asyncio.run(go())
    assert trace.input_len.tolist() == [100, 200]
    assert trace.output_len.tolist() == [4, 4]
    quality = trace.meta["quality"]
    assert isinstance(quality, dict)
    assert quality["input_len_estimated"] == quality["output_len_from_chunks"] == 1


KILLED = """
import sys, time
from pathlib import Path
from tuner.traffic.capture.files import Sink
from tuner.traffic.capture.recorder import RecordedExchange, Recorder
recorder = Recorder(Sink(Path(sys.argv[1])))
recorder.start()
number = 0
while True:
    body = b'{"model": "m", "prompt": [1, 2, 3]}'
    e = RecordedExchange(at_ns=time.monotonic_ns(), body=[body], code=200, whole=True)
    e.answer = [b'{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}']
    e.end_ns = time.monotonic_ns()
    recorder.begin(e)
    recorder.end(e)
    number += 1
    if number % 100 == 0:
        print(number, flush=True)
        time.sleep(0.02)
"""


def killed(code: str, place: Path, *, with_writer: bool) -> None:
    """A recorder killed in the middle of its work, together with its writer or alone."""
    command = [sys.executable, "-c", code, str(place)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert running.stdout is not None
    for line in running.stdout:
        if int(line) >= 2000:
            break
    (os.killpg if with_writer else os.kill)(running.pid, signal.SIGKILL)
    running.wait()
    running.stdout.close()


def test_a_killed_capture_is_readable_up_to_the_last_second(tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl"
    killed(KILLED, file, with_writer=True)
    whole = len(read_any(file))
    assert whole > 0
    with file.open("rb+") as cut:  # and cut anywhere in its last line
        cut.truncate(os.path.getsize(file) - 7)
    trace = read_any(file)
    assert whole - 1 <= len(trace) <= whole
    assert trace.meta["quality"]["cut_last_line"] == 1  # type: ignore[index,call-overload]


def test_the_writer_finishes_what_a_killed_proxy_left(tmp_path: Path) -> None:
    """It lives on until it has written all that it was given, and renames the file as closed."""
    code = KILLED.replace("Sink(Path(sys.argv[1]))", "Sink(Path(sys.argv[1]), 'chat')")
    assert code != KILLED
    killed(code, tmp_path, with_writer=False)
    deadline = time.monotonic() + 600
    while not closed_files(tmp_path, "chat") and time.monotonic() < deadline:
        time.sleep(0.02)
    (file,) = tmp_path.iterdir()
    assert file.suffix == ".jsonl"
    assert len(read_any(file)) >= 1900


SERVED = """
import sys
from pathlib import Path
from tuner.traffic.capture.proxy import run
print(run(sys.argv[1], Path(sys.argv[2]), name="chat", port=int(sys.argv[3])), flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_capture_closes_its_file(tmp_path: Path, how: signal.Signals) -> None:
    port = fresh_port()

    async def go() -> str:
        async with served(Upstream()) as behind:
            command = (sys.executable, "-c", SERVED, f"127.0.0.1:{behind}", str(tmp_path), str(port))
            running = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            async with asyncio.timeout(60):
                while await answers(port) is None:
                    await asyncio.sleep(0.05)
            running.send_signal(how)
            out, _ = await running.communicate()
            return out.decode()

    assert "taken=1" in asyncio.run(go())
    assert read_any(latest(tmp_path, "chat")).input_len.tolist() == [3]
    assert [path.suffix for path in tmp_path.iterdir()] == [".jsonl"]


async def answers(port: int) -> int | None:
    try:
        return (await post(port, body()))[0]
    except OSError:
        return None


def test_captures_rotate_under_a_name(tmp_path: Path) -> None:
    start = datetime(2026, 11, 27, 22, 30, tzinfo=UTC)
    sink = Sink(tmp_path, "chat", Rotation(every="hour", keep=2))
    for hour in range(4):
        now = start + timedelta(hours=hour)
        if hour:
            assert sink.due(now)
            assert not sink.due(now - timedelta(hours=1) + timedelta(minutes=29))
            sink.close()
        sink.open(now)
        sink.write(b"{}\n")
    assert latest(tmp_path, "chat").name == "chat-20261128T003000Z.jsonl"
    assert len(closed_files(tmp_path, "chat")) == 2
    assert sink.path.name.endswith(".part")
    sink.close()
    assert latest(tmp_path, "chat").name == "chat-20261128T013000Z.jsonl"


def test_rotation_by_size_and_what_a_kill_left_open(tmp_path: Path) -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    (tmp_path / "chat-20251231T000000Z.jsonl.part").write_text("{}\n")
    sink = Sink(tmp_path, "chat", Rotation(max_bytes=10))
    sink.open(now)
    assert latest(tmp_path, "chat").name == "chat-20251231T000000Z.jsonl"
    assert not sink.due(now + timedelta(days=9))
    sink.write(b"x" * 10)
    assert sink.due(now)
    sink.close()
    sink.open(now)
    sink.close()
    assert [path.name for path in closed_files(tmp_path, "chat")] == [
        "chat-20251231T000000Z.jsonl",
        "chat-20260101T000000Z.jsonl",
        "chat-20260101T000000Z.0001.jsonl",
    ]


def test_names_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "chat-eu-20260101T000000Z.jsonl").write_text("{}\n")
    with pytest.raises(NotFound, match="did you mean 'chat-eu'"):
        latest(tmp_path, "chat")
    with pytest.raises(BadInput, match="plain word"):
        Sink(tmp_path, "../chat")
    (tmp_path / "one.jsonl").write_text("")
    with pytest.raises(BadInput, match="exists already"):
        Sink(tmp_path / "one.jsonl").open(datetime.now(UTC))
