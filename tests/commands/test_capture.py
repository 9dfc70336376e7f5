"""`tuner capture` as a process, and a nightly study on what it recorded."""

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.traffic.upstream import Upstream, post, served
from tests.tuning.studies import STUDY, TRACE, answer, command, environment, tuner, write
from tuner.traffic.capture.files import closed_files
from tuner.traffic.importers import importers, read_any

WATCHDOG_S = 600.0


@asynccontextmanager
async def capturing(
    home: Path, *words: str, how: signal.Signals = signal.SIGINT, code: int = 0
) -> AsyncIterator[int]:
    """`tuner capture` before an upstream; gives the port it listens on, and stops it by a signal."""
    async with asyncio.timeout(WATCHDOG_S), served(Upstream()) as behind:
        asked = command("capture", "--upstream", f"http://127.0.0.1:{behind}", "--port", 0, *words)
        running = await asyncio.create_subprocess_exec(
            *asked, env=environment(home), cwd=home, stderr=asyncio.subprocess.PIPE
        )
        assert running.stderr is not None
        first = (await running.stderr.readline()).decode()
        found = re.match(r"http://127.0.0.1:(\d+) forwards to http://127.0.0.1:\d+ and records to ", first)
        assert found, first
        try:
            yield int(found[1])
        finally:
            running.send_signal(how)
            said = (await running.stderr.read()).decode()
            assert await running.wait() == code
        assert "0 dropped, 0 not understood, 0 not written" in said


def record(home: Path, sizes: Sequence[int], *words: str, how: signal.Signals = signal.SIGINT) -> None:
    """A capture of requests with prompts of these sizes."""

    async def go() -> None:
        async with capturing(home, *words, how=how) as port:
            for size in sizes:
                status, _ = await post(port, json.dumps({"prompt": [5] * size, "max_tokens": 3}).encode())
                assert status == 200

    asyncio.run(go())


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_capture_in_one_file_ends_cleanly(tmp_path: Path, how: signal.Signals) -> None:
    record(tmp_path, [3, 20], "--out", "one.jsonl", how=how)
    trace = read_any(tmp_path / "one.jsonl")
    assert (trace.input_len.tolist(), trace.output_len.tolist()) == ([3, 20], [3, 3])
    assert trace.meta["quality"] == {"rows_read": 2}
    shown = tuner(tmp_path, "trace", "show", "one.jsonl", cwd=tmp_path)
    assert "2" in shown.stdout


@pytest.mark.slow
def test_a_study_on_latest_means_the_last_capture(tmp_path: Path) -> None:
    """Two nights under one name: the study's trace is the second night's, and it is what gets replayed."""
    for night in ([40, 41, 42], [50, 51, 52, 53]):
        record(tmp_path, night, "--name", "chat", "--every", "day", "--keep", "2")
    captures = closed_files(tmp_path / "captures", "chat")
    assert len(captures) == 2
    study = STUDY.replace(str(TRACE), "latest:chat").replace(
        "start_s: 20, duration_s: 1.0", "start_s: 0, duration_s: 1"
    )
    path = write(tmp_path, study.replace("trials: 3", "trials: 1"))
    done = tuner(tmp_path, "tune", path)
    assert done.returncode == 0, done.stderr
    last = read_any(captures[-1])
    named = answer(tmp_path, "trace", "show", "latest:chat", "--json")
    assert (named["digest"], named["requests"]) == (last.digest, 4)
    assert last.input_len.tolist() == [50, 51, 52, 53]
    shown = answer(tmp_path, "study", "show", "tiny", "--json")
    assert last.digest in json.dumps(shown)
    for file in captures:  # the study's trace outlives the captures
        file.unlink()
    kept = answer(tmp_path, "trace", "show", last.digest, "--json")
    assert kept["requests"] == 4


def test_without_a_place_captures_go_home(tmp_path: Path) -> None:
    record(tmp_path, [3])
    (file,) = closed_files(tmp_path / "captures", "capture")
    assert len(read_any(file)) == 1


WRONG = {
    "no URL": (("--upstream", "ftp://x"), 2, "expected a URL such as http://"),
    "no port": (("--upstream", "http://x:99999"), 2, "upstream 'http://x:99999': Port out of range"),
    "a port of letters": (("--upstream", "http://x:abc"), 2, "upstream 'http://x:abc': Port could not"),
    "rotation without a name": (("--out", "x.jsonl", "--every", "day"), 2, "need --name"),
    "no size": (("--max-size", "many"), 2, "write a size such as 500MB"),
    "no name": (("--name", "../x"), 2, "expected a plain word"),
    "no tokenizer": (("--tokenizer", "nowhere"), 2, "no such tokenizer file"),
    "a file that is there": (("--out", "there"), 2, "exists already"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_options_are_one_sentence(tmp_path: Path, case: str) -> None:
    words, code, sentence = WRONG[case]
    (tmp_path / "there").write_text("")
    upstream = () if "--upstream" in words else ("--upstream", "http://127.0.0.1:9")
    done = tuner(tmp_path, "capture", "--port", "0", *upstream, *words, cwd=tmp_path)
    assert done.returncode == code
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1
    assert {path.name for path in tmp_path.rglob("*")} <= {"there", "captures"}


def test_a_taken_port_is_told_and_nothing_is_written(tmp_path: Path) -> None:
    async def go() -> None:
        async with served(Upstream()) as port:
            asked = command("capture", "--upstream", "http://127.0.0.1:9", "--port", port, "--out", "x.jsonl")
            running = await asyncio.create_subprocess_exec(
                *asked, env=environment(tmp_path), cwd=tmp_path, stderr=asyncio.subprocess.PIPE
            )
            _, said = await running.communicate()
            assert running.returncode
            assert f"cannot listen on 127.0.0.1:{port}" in said.decode()

    asyncio.run(go())
    assert not (tmp_path / "x.jsonl").exists()


def test_every_format_is_named_in_help_and_a_page_is_written(tmp_path: Path) -> None:
    said = " ".join(tuner(tmp_path, "trace", "import", "--help").stdout.split())
    assert all(name in said for name in importers())
    done = tuner(tmp_path, "trace", "show", TRACE, "--html", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    assert "max_num_seqs above" in done.stdout
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") >= 3
    assert "max_num_seqs above" in page
    assert "://" not in page  # it needs no network


def test_a_log_without_usage_is_counted_by_a_tokenizer_and_over_length_is_told(tmp_path: Path) -> None:
    rows = [{"arrival_s": k, "input_len": 10 * k + 1, "output_len": 1} for k in range(5)]
    (tmp_path / "g.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    done = tuner(tmp_path, "trace", "import", tmp_path / "g.jsonl", "--max-len", "25")
    assert done.returncode == 0, done.stderr
    assert "dropped_over_length 2" in done.stdout
    refused = tuner(tmp_path, "trace", "import", tmp_path / "g.jsonl", "--tokenizer", tmp_path)
    assert refused.returncode == 2
    assert "a tokenizer works only with format 'openai'" in refused.stderr
