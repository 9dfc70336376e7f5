"""Traces and files of trials are found by what they are, not by where they once lay."""

import json
import os
import shutil
import stat
from pathlib import Path

import pytest

from tests.tuning.studies import STUDY, TRACE, tuner, write
from tuner.errors import BadInput, Conflict, NotFound
from tuner.history.store import Store
from tuner.traffic import trace as traces

HOOKS = "engine: {kind: simulated}\nmodels: [m]\n"
NOTICES = "targets: []\n"


def imported(home: Path, *, more: dict[str, str] | None = None, name: str = "chat") -> str:
    """A known trace whose first file is gone; its digest."""
    source = home.parent / f"{name}.csv"
    source.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(f"2023-11-16 18:17:{s:02d}.0,{100 + s},{20 + s}\n" for s in range(30))
    )
    out = home.parent / "elsewhere" / f"{name}.parquet"
    done = tuner(home, "trace", "import", source, "--name", name, "--output", out, "--json", more=more)
    assert done.returncode == 0, done.stderr
    out.unlink()
    return str(json.loads(done.stdout)["digest"])


def shown(home: Path, *, more: dict[str, str] | None = None) -> str:
    done = tuner(home, "trace", "show", "latest:chat", "--json", more=more)
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["digest"])


def test_a_home_on_another_mount_finds_its_trace(tmp_path: Path) -> None:
    digest = imported(tmp_path / "one")
    (tmp_path / "one").rename(tmp_path / "other")
    assert shown(tmp_path / "other") == digest
    study = write(tmp_path, STUDY.replace(f"trace: {TRACE}", "trace: latest:chat"))
    done = tuner(tmp_path / "other", "tune", study, "--dry-run")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_second_host_finds_a_trace_in_the_artifact_store(tmp_path: Path, scheme: str) -> None:
    more = {
        "TUNER_DATABASE_URL": f"sqlite:///{tmp_path}/shared.db",
        "TUNER_ARTIFACTS": f"{scheme}{tmp_path}/store",
    }
    digest = imported(tmp_path / "one", more=more)
    shutil.rmtree(tmp_path / "one")
    assert shown(tmp_path / "two", more=more) == digest
    assert [p.name for p in (tmp_path / "two" / "traces").iterdir()] == [f"trace-{digest[:12]}.parquet"]
    shutil.rmtree(tmp_path / "store")
    assert shown(tmp_path / "two", more=more) == digest


def test_a_file_of_other_content_is_not_taken_for_the_trace(tmp_path: Path) -> None:
    """Neither where the history says that it lies, nor under its name in the home or the store."""
    store = f"{tmp_path}/store"
    digest = imported(tmp_path / "home", more={"TUNER_ARTIFACTS": store})
    other = traces.bundled()
    assert other.digest != digest
    for place in (tmp_path / "elsewhere" / "chat.parquet", *(tmp_path / "home" / "traces").iterdir()):
        traces.write(other, place)
    done = tuner(tmp_path / "home", "trace", "show", "latest:chat")
    assert (done.returncode, digest[:12] in done.stderr) == (NotFound.exit_code, True), done.stderr
    assert "TUNER_ARTIFACTS" in done.stderr
    traces.write(other, f"{store}/traces/{digest}.parquet")
    done = tuner(tmp_path / "home", "trace", "show", "latest:chat", more={"TUNER_ARTIFACTS": store})
    assert (done.returncode, "is not the trace" in done.stderr) == (BadInput.exit_code, True), done.stderr


@pytest.mark.slow
def test_a_full_backup_is_restored_into_a_second_home(tmp_path: Path) -> None:
    """With its traces, nodes, notifications and studies; trials' files are found once they are copied."""
    one, two = tmp_path / "one", tmp_path / "two"
    digest = imported(one)
    study = write(tmp_path, STUDY.replace(f"trace: {TRACE}", "trace: latest:chat").replace("20, d", "5, d"))
    done = tuner(one, "tune", study, "--trials", "1")
    assert done.returncode == 0, done.stderr
    (one / "nodes").mkdir(exist_ok=True)
    (one / "nodes" / "n1.yaml").write_text(HOOKS)
    (one / "notify.yaml").write_text(NOTICES)
    archive = tmp_path / "all.tar.gz"
    done = tuner(one, "db", "backup", "--full", archive)
    assert done.returncode == 0, done.stderr
    assert stat.S_IMODE(archive.stat().st_mode) == 0o600
    one.rename(tmp_path / "gone")
    done = tuner(two, "db", "restore", archive)
    assert done.returncode == 0, done.stderr
    assert (two / "nodes" / "n1.yaml").read_text() == HOOKS
    assert (two / "notify.yaml").read_text() == NOTICES
    assert shown(two) == digest
    before, after = (Store(f"sqlite:///{home}/tuner.db") for home in (tmp_path / "gone", two))
    (found,) = after.studies()
    assert after.trials(found.id) == before.trials(found.id)
    assert tuner(two, "trial", "log", "tiny", "0").returncode == NotFound.exit_code
    shutil.copytree(tmp_path / "gone" / "trials", two / "trials", dirs_exist_ok=True)
    done = tuner(two, "trial", "log", "tiny", "0")
    assert done.returncode == 0, done.stderr
    (trial,) = after.trials(found.id)
    assert trial.measurement is not None
    assert not os.path.exists(trial.measurement.slices[0].outcomes_file or "/")
    done = tuner(two, "report", "tiny", "-o", two / "report.html")
    assert done.returncode == 0, done.stderr
    again = tuner(two, "db", "restore", archive)
    assert again.returncode == Conflict.exit_code, again.stderr


@pytest.mark.parametrize("content", [b"no archive", b"", b"\x1f\x8b\x08"])
def test_what_is_no_backup_is_not_restored(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "some.tar.gz").write_bytes(content)
    done = tuner(tmp_path / "home", "db", "restore", tmp_path / "some.tar.gz")
    assert (done.returncode, "Traceback" in done.stderr) == (BadInput.exit_code, False), done.stderr
    done = tuner(tmp_path / "home", "db", "restore", tmp_path / "none.tar.gz")
    assert done.returncode == NotFound.exit_code, done.stderr
