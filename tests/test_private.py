"""Homes, databases, logs and traces belong to their user alone, also what an earlier release left open."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

from tests.tuning.studies import TRACE, command, environment, tuner
from tuner import masking
from tuner.history.store import Store

ROOT = Path(__file__).parents[1]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def opened(home: Path) -> list[Path]:
    """What others than the user may read or write."""
    return [path for path in (home, *home.rglob("*")) if mode(path) & masking.OTHERS]


def with_open_umask(home: Path, *words: object) -> None:
    done = subprocess.run(
        command(*words), env=environment(home), umask=0o002, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_new_home_is_its_users_alone(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with_open_umask(home, "trace", "import", TRACE, "--name", "chat")
    assert {path.name for path in home.iterdir()} >= {"tuner.db", "traces"}
    assert mode(home) == 0o700
    assert opened(home) == []


def test_a_home_of_an_earlier_release_is_closed_at_start(tmp_path: Path) -> None:
    home = tmp_path / "home"
    before = os.umask(0o022)
    try:
        for name in ("logs", "traces", "trials/1"):
            (home / name).mkdir(parents=True)
            (home / name / "file").touch()
        Store(f"sqlite:///{home / 'tuner.db'}").close()
    finally:
        os.umask(before)
    assert len(opened(home)) >= 8
    assert tuner(home, "token", "list").returncode == 0
    assert opened(home) == []
    (home / "logs" / "later").touch(mode=0o644)
    (home / "logs" / "later").chmod(0o644)
    assert tuner(home, "token", "list").returncode == 0
    assert opened(home) == []


def test_a_database_elsewhere_is_closed_too(tmp_path: Path) -> None:
    place = tmp_path / "elsewhere.db"
    Store(f"sqlite:///{place}").close()
    place.chmod(0o644)
    done = tuner(tmp_path / "home", "token", "list", more={"TUNER_DATABASE_URL": f"sqlite:///{place}"})
    assert done.returncode == 0, done.stderr
    assert mode(place) == 0o600


def test_neither_the_users_own_home_nor_a_shared_folder_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    masking.tighten(shared)
    assert mode(shared) == 0o1777
    monkeypatch.setenv("HOME", str(tmp_path))
    tmp_path.chmod(0o755)
    masking.tighten(tmp_path)
    assert mode(tmp_path) == 0o755


def test_what_a_person_asks_for_keeps_the_persons_umask(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("vllm serve some/model --max-num-seqs 8\n")
    output = tmp_path / "study.yaml"
    with_open_umask(tmp_path / "home", "baseline", "import", tmp_path / "run.sh", "--output", output)
    assert mode(output) == 0o664


def test_programs_that_the_tuner_starts_keep_the_persons_umask(tmp_path: Path) -> None:
    code = (
        "from tuner import masking, processes; masking.mask_files();"
        "print(processes.run(['sh', '-c', 'umask'], timeout_s=60).out)"
    )
    done = subprocess.run(
        [command()[0], "-c", code],
        umask=0o002,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "0002"


def test_the_image_is_built_from_what_the_dockerfile_copies_alone() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    copied = {
        word
        for line in (ROOT / "deploy" / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for word in line.split()[1:-1]
    }
    assert copied <= {line[1:] for line in ignored if line.startswith("!")}
