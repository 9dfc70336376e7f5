"""A malformed file gets one sentence, exit code 2, and nothing is written."""

from pathlib import Path
from typing import Any

import pytest

from tests.tuning.studies import SPACE, STUDY, TRACE, answer, tuner, write
from tuner.records import Slice
from tuner.replay.plan import slice_rows
from tuner.report.words import seconds
from tuner.traffic.trace import read

CASES: dict[str, tuple[dict[str, str], str]] = {
    "unknown key": ({"study": STUDY + "sead: 1\n"}, "unknown key 'sead' (did you mean 'seed'?)"),
    "no yaml": ({"study": "name: ["}, "not YAML"),
    "no trace": (
        {"study": STUDY.replace(str(TRACE), "nowhere.csv")},
        "trace: 'nowhere.csv' is not a file",
    ),
    "no capture": (
        {"study": STUDY.replace(str(TRACE), "latest:caht")},
        "trace: 'latest:caht' finds no capture and no known trace of the name 'caht'",
    ),
    "broken trace": ({"study": STUDY.replace(str(TRACE), "bad.csv")}, "bad.csv"),
    "no space": (
        {"study": STUDY.replace("space.yaml", "bursty-mixt")},
        "no shipped space 'bursty-mixt' (did you mean 'bursty-mixed'?)",
    ),
    "unknown knob": ({"space": SPACE.replace("max_num_seqs", "max_num_seq")}, "max_num_seqs"),
    "empty space": ({"space": ""}, "space.yaml"),
    "unknown fixed argument": (
        {"study": STUDY.replace("max-model-len", "max-modle-len")},
        "'max-modle-len' (did you mean '--max-model-len'?)",
    ),
    "an argument that is ours": (
        {"study": STUDY.replace("max-model-len: 16384", "port: 1")},
        "the tuner sets --port itself",
    ),
    "a fixed argument that the space turns": (
        {"study": STUDY.replace("max-model-len: 16384", "max-num-seqs: 4")},
        "the space changes this knob",
    ),
    "a baseline that the engine lacks": (
        {"study": STUDY.replace("baseline: {max_num_seqs: 4}", "baseline: {max_num_sex: 4}")},
        "max_num_seqs",
    ),
    "a slice outside the trace": ({"study": STUDY.replace("start_s: 20", "start_s: 9000")}, "9000"),
    "a request longer than the engine takes": (
        {"study": STUDY.replace("16384", "256")},
        "the engine takes only 256",
    ),
    "no interpreter": (
        {"study": STUDY.replace("kind: simulated", "kind: vllm\n  python: nowhere/python")},
        "there is no interpreter at",
    ),
    "an interpreter without vllm": (
        {"study": STUDY.replace("kind: simulated", "kind: vllm\n  python: /usr/bin/env")},
        "/usr/bin/env",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused_before_anything_is_written(case: str, tmp_path: Path) -> None:
    files, sentence = CASES[case]
    study = write(tmp_path, files.get("study", STUDY), files.get("space", SPACE))
    (tmp_path / "bad.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n")
    home = tmp_path / "home"
    done = tuner(home, "tune", study)
    assert done.returncode == 2, done.stderr
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert not (home / "tuner.db").exists()
    assert not (home / "trials").exists()


def test_a_model_that_does_not_exist_is_found_before_the_first_launch(tmp_path: Path) -> None:
    study = write(tmp_path, STUDY.replace("Qwen2.5-7B-Instruct", "Qwen2.5-8B-Instruct"))
    done = tuner(tmp_path / "home", "tune", study)
    assert done.returncode == 4
    assert "did you mean 'Qwen/Qwen2.5-7B-Instruct'?" in done.stderr
    assert not (tmp_path / "home" / "trials").exists()


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["front", "nothing"], 4, "there is no database"),
        (["tune", "nowhere.yaml"], 2, "nowhere.yaml"),
        (["tune", "STUDY", "--until", "half past"], 2, "--until half past"),
        (["tune", "STUDY", "--hours", "0"], 2, "--hours 0: give more than 0"),
        (["tune", "STUDY", "--hours", "-1"], 2, "--hours -1: give more than 0"),
        (["trace", "show", "nowhere"], 4, "there is no file nowhere"),
        (["trace", "import", "nowhere.csv"], 2, "nowhere.csv"),
        (["knobs", "--python", "nowhere"], 2, "there is no such interpreter"),
        (["knobs", "--space", "demmo"], 4, "demo"),
        (["history", "--metric", "ttft"], 2, "no such measurement"),
        (["nonsense"], 2, "nonsense"),
    ],
)
def test_a_wrong_request_names_what_is_wrong(
    words: list[str], code: int, sentence: str, tmp_path: Path
) -> None:
    study = write(tmp_path)
    done = tuner(tmp_path / "home", *(str(study) if w == "STUDY" else w for w in words), cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert sentence in done.stderr


@pytest.mark.slow
def test_a_database_that_is_locked_leaves_a_clear_error(tmp_path: Path) -> None:
    import sqlite3

    home = tmp_path / "home"
    assert tuner(home, "db", "upgrade").returncode == 0
    with sqlite3.connect(home / "tuner.db") as holder:
        holder.execute("BEGIN EXCLUSIVE")
        done = tuner(home, "trace", "import", TRACE)
    assert done.returncode == 6, done.stderr
    assert "locked" in done.stderr or "busy" in done.stderr


def test_dry_run_prints_the_command_line_and_writes_nothing(tmp_path: Path) -> None:
    study = write(tmp_path)
    done = tuner(tmp_path / "home", "tune", study, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "--max-model-len 16384 --max-num-seqs 4" in done.stdout
    assert not (tmp_path / "home" / "tuner.db").exists()


def test_dry_run_shows_the_slices_and_how_long_a_trial_takes(tmp_path: Path) -> None:
    study = write(tmp_path)
    done = tuner(tmp_path / "home", "tune", study, "--dry-run", "--trials", 400)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = answer(tmp_path / "home", "tune", study, "--dry-run", "--json")
    (window,) = told["slices"]
    rows = slice_rows(read(TRACE), Slice(name="s", start_s=20.0, duration_s=1.0))
    assert (window["start_s"], window["duration_s"], window["requests"]) == (20.0, 1.0, len(rows))
    (line,) = [line.split() for line in done.stdout.splitlines() if line.startswith(window["name"])]
    assert line == [window["name"], "20", "1", str(len(rows)), "False"]
    times = told["seconds"]
    # A window of 1 s after 0.5 s of load.
    assert 1.5 <= times["replay"] < 60
    each = times["replay"] + times["launch"]
    assert f"takes about {each:.0f} s. The replay takes {times['replay']:.0f} s of this" in done.stdout
    assert "Trials: at most 400" in done.stdout
    assert f"about {seconds(400 * each)}, or less if trials are screened" in " ".join(done.stdout.split())


def test_an_unknown_command_of_any_group_is_answered_with_those_that_there_are(tmp_path: Path) -> None:
    from tests.commands.test_care import call
    from tuner.cli import PLACES, command

    groups = [name for name in PLACES if hasattr(command(name), "commands")]
    assert "run" in groups
    for name in groups:
        done = call(tmp_path, name, "zzz")
        assert done.exit_code == 2, name
        assert f"There are: {', '.join(command(name).commands)}." in " ".join(done.output.split()), name
