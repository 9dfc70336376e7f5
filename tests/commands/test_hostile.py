"""Whatever a person writes or a host lacks: one sentence on standard error and a documented exit code."""

import os
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tests.tuning.studies import SPACE, STUDY, TRACE, WATCHDOG_S, command, environment, tuner, write
from tuner.cli import app
from tuner.errors import BadInput, NotFound
from tuner.knobs import space as spaces
from tuner.traffic import importers
from tuner.tuning.study import parse

WHOLE = f"""{STUDY.replace("slices: [{start_s: 20, duration_s: 1.0}]", "")}
node: local
history: synthetic
slices: [{{start_s: 20, duration_s: 1.0, name: a, held_out: false}}]
speed: 1.0
plan: {{base: quick, repeats: 2, load_warmup_s: 1}}
objectives: [ttft_p95_ms, goodput_rps]
winner: {{weights: {{ttft_p95_ms: 1}}}}
live_limits: auto
quality: {{min_token_agreement: 0.9}}
price_per_gpu_hour: 2
""".replace("\nplan: quick\n", "\n")
HOSTILE = (
    "null", "true", "[]", "{}", "''", '"\\0"', '"\\ud800"', "ü💥", "-1", "0", "1e308", "1e400", ".nan",
    "-.inf",
    "1" + "0" * 30, "9" * 5000, "2026-01-01", "2026-99-99", "!!binary aGVsbG8=", "!!set {a}", "[1, [2, [3]]]",
    "{a: {b: c}}", "x" * 10_000, "..", "/dev/zero", "{.nan: 1}", "{1: 2}", "[null]", "[.nan]", "{null: 1}",
    '"a\\nb"', "'{x}'", "*a", "&a [*a]", "!!python/name:os.system x",
)  # fmt: skip
MARK = "a-value-to-be-replaced"


def places(value: object, at: tuple[object, ...] = ()) -> Iterator[tuple[object, ...]]:
    """The path of everything in a document."""
    yield at
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*at, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from places(item, (*at, index))


def put(value: object, at: tuple[object, ...]) -> object:
    """The document with the mark at that path."""
    if not at:
        return MARK
    if isinstance(value, dict):
        return {key: put(item, at[1:]) if key == at[0] else item for key, item in value.items()}
    assert isinstance(value, list)
    return [put(item, at[1:]) if index == at[0] else item for index, item in enumerate(value)]


def is_a_sentence(error: Exception, given: str) -> None:
    assert "\n" not in str(error)
    assert 10 < len(str(error)) < 500 + len(given)


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda text: ascii(text)[:20])
def test_a_study_file_is_read_or_refused_in_one_sentence(hostile: str) -> None:
    document = yaml.safe_load(WHOLE)
    for at in places(document):
        text = yaml.safe_dump(put(document, at), sort_keys=False).replace(MARK, hostile)
        try:
            parse(text, name="study.yaml")
        except BadInput as error:
            is_a_sentence(error, hostile)


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda text: ascii(text)[:20])
@pytest.mark.parametrize("pace", ["step: 512", "per_octave: 1"])
def test_a_space_is_read_or_refused_in_one_sentence(hostile: str, pace: str) -> None:
    ranges = f"{{from: 512, to: 8192, {pace}, multiple: 2, default: 512, when: {{max_num_seqs: [4]}}}}"
    document = yaml.safe_load(SPACE.replace("[512, 2048, 8192]", ranges) + "name: a\naccept: []\n")
    for at in places(document):
        text = yaml.safe_dump(put(document, at), sort_keys=False).replace(MARK, hostile)
        try:
            spaces.parse(text, where="space.yaml")
        except (BadInput, NotFound) as error:
            is_a_sentence(error, hostile)


@pytest.mark.parametrize(
    "hostile",
    [
        "null",
        '"x"',
        "-1",
        "1e308",
        "NaN",
        "Infinity",
        "9" * 5000,
        "[]",
        "{}",
        "[[1]]",
        "[-1]",
        "true",
        "[1.5]",
    ],
    ids=lambda text: text[:10],
)
@pytest.mark.parametrize("key", ["timestamp", "input_length", "output_length", "hash_ids"])
def test_a_trace_is_read_or_refused_in_one_sentence(key: str, hostile: str, tmp_path: Path) -> None:
    row = {"timestamp": "0", "input_length": "10", "output_length": "5", "hash_ids": "[1]"}
    lines = [row, {**row, key: hostile}]
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "".join("{" + ", ".join(f'"{k}": {v}' for k, v in line.items()) + "}\n" for line in lines)
    )
    try:
        importers.read_any(path)
    except BadInput as error:
        is_a_sentence(error, hostile + str(path))


def told(home: Path, *words: object) -> tuple[int, str]:
    """The exit code and the one line of what a command says that fails."""
    done = tuner(home, *words)
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("tuner: "), done.stderr
    return done.returncode, done.stderr


@pytest.mark.parametrize("hours", ["nan", "inf", "1e308"])
def test_hours_that_no_clock_can_count(hours: str, tmp_path: Path) -> None:
    code, said = told(tmp_path / "home", "tune", write(tmp_path), "--hours", hours)
    assert (code, "at most 8784" in said) == (2, True)


@pytest.mark.parametrize(
    "words",
    [
        ("trace", "show", TRACE, "--speed", "nan"),
        ("trace", "slice", TRACE, "--start", "inf", "--duration", "1"),
        ("trace", "slice", TRACE, "--start", "0", "--duration", "nan"),
        ("schedule", "add", "n", "--study", "STUDY", "--cron", "0 1 * * *", "--hours", "nan"),
        ("schedule", "add", "n", "--study", "STUDY", "--cron", "0 1 * * *", "--hours", "2", "--grace", "inf"),
        ("schedule", "add", "n", "--study", "STUDY", "--cron", "0 ² * * *", "--hours", "2"),
        ("schedule", "add", "n", "--study", "STUDY", "--cron", f"{'9' * 500} 1 * * *", "--hours", "2"),
        ("schedule", "add", "n", "--study", "STUDY", "--cron", "0 1 * * *", "--hours", "2", "--zone", "../x"),
        ("node", "add", "n", "--card", "h100-80", "--drain", "a", "--restore", "b", "--timeout", "inf"),
        ("gc", "--days", "999999999999"),
        ("knobs", "check", "SPACE", "--max-model-len", "9" * 5000),
        ("profile", "export", "9" * 400),
    ],
    ids=lambda words: " ".join(map(str, words))[-40:],
)
def test_numbers_that_no_option_takes(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNER_HOME", str(tmp_path / "home"))
    study = write(tmp_path)
    given = {"STUDY": str(study), "SPACE": str(tmp_path / "space.yaml")}
    done = CliRunner().invoke(app, [given.get(str(word), str(word)) for word in words])
    assert isinstance(done.exception, SystemExit | BadInput | NotFound), done.exception
    assert done.exit_code in (1, 2, 4)


@pytest.mark.parametrize("home", ["file", "file/below", "/proc/tuner"])
def test_a_home_that_cannot_be_written(home: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for words in (("tune", write(tmp_path)), ("trace", "import", TRACE)):
        code, said = told(tmp_path / home, *words)
        assert code == 6
        assert home in said


@pytest.mark.slow
def test_a_database_that_is_none_or_is_locked(tmp_path: Path) -> None:
    broken, locked = tmp_path / "broken", tmp_path / "locked"
    broken.mkdir()
    (broken / "tuner.db").write_bytes(b"SQLite format 3\0" + b"x" * 5000)
    assert told(broken, "tune", write(tmp_path))[0] in (2, 6)
    assert tuner(locked, "db", "upgrade").returncode == 0
    with sqlite3.connect(locked / "tuner.db") as holder:
        holder.execute("BEGIN EXCLUSIVE")
        code, said = told(locked, "tune", write(tmp_path))
    assert (code, "locked" in said) == (6, True)


@pytest.mark.slow
@pytest.mark.parametrize("before", ["", "db upgrade"])
def test_a_full_disk_ends_a_run_that_can_go_on(before: str, tmp_path: Path) -> None:
    """Full before the database is there, or after."""
    home = tmp_path / "home"
    home.mkdir()
    mount, fill = f"mount -t tmpfs -o size=2m none {home}", f"cat /dev/zero 2>&- >{home}/fill"
    first = [" ".join(command(*before.split()))] if before else []
    last = " ".join(command("tune", write(tmp_path), "--trials", 1))
    alone = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    if subprocess.run([*alone, mount], capture_output=True, check=False).returncode:
        pytest.skip("this host lets us mount nothing")
    done = subprocess.run(
        [*alone, f"{' && '.join([mount, *first])}; {fill}; {last}"], env=environment(home),
        capture_output=True, text=True, timeout=WATCHDOG_S, check=False,
    )  # fmt: skip
    assert done.returncode == 6, done.stderr
    assert "Traceback" not in done.stderr
    assert any(word in done.stderr.splitlines()[-1] for word in ("full", "No space left")), done.stderr


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_home_that_may_only_be_read(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o555)
    assert told(home, "tune", write(tmp_path))[0] == 6


@pytest.mark.parametrize("name", ["../../x", "/tmp/x", "a/b", "a\nb", "latest:a", "..", "-x", "", "y" * 99])
def test_a_trace_is_kept_in_the_home_whatever_it_is_called(tmp_path: Path, name: str) -> None:
    home = tmp_path / "deep" / "home"
    done = tuner(home, "trace", "import", TRACE, f"--name={name}")
    if name:
        assert done.returncode == 2
        assert "cannot be the name of a trace" in done.stderr
    assert [path for path in tmp_path.rglob("*.parquet") if home not in path.parents] == []


def test_a_trace_under_a_second_name_says_that_the_first_is_gone(tmp_path: Path) -> None:
    assert tuner(tmp_path, "trace", "import", TRACE, "--name", "chat").returncode == 0
    done = tuner(tmp_path, "trace", "import", TRACE, "--name", "other")
    assert done.returncode == 0
    assert "this trace was named 'chat'; its name is 'other' now" in done.stderr


def test_more_traffic_than_can_be_replayed_is_refused(tmp_path: Path) -> None:
    study = write(
        tmp_path, STUDY.replace("plan: quick", "speed: 1000\nplan: {base: quick, tail_limit_s: 90000}")
    )
    done = tuner(tmp_path, "tune", study, "--dry-run")
    assert done.returncode == 2
    assert "requests, but at most 1,000,000 can be replayed" in done.stderr
    done = tuner(tmp_path, "trace", "reshape", TRACE, "--copies", 999_999_999, "-o", tmp_path / "r.parquet")
    assert done.returncode == 2
    assert "at most 50,000,000 requests" in done.stderr


def test_a_configuration_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bin.dat").write_bytes(b"\xff\xfe")
    done = tuner(tmp_path, "baseline", "import", tmp_path / "bin.dat")
    assert done.returncode == 2
    assert "is not a UTF-8 text file" in done.stderr
