"""Traces in S3: several homes share them through a real server of its API (moto; `make test-cluster`)."""

import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyarrow import fs

from tests.commands.test_backup import imported, shown
from tests.tuning.studies import STUDY, TRACE, tuner, write
from tuner.engine.http import fresh_port
from tuner.errors import BadInput, Unavailable

pytestmark = pytest.mark.cluster

MOTO = os.environ.get("TUNER_TEST_MOTO", "moto_server")
KEYS = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "tests", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of an S3 server with one bucket, `bucket`."""
    port = fresh_port()
    with subprocess.Popen([MOTO, "-H", "127.0.0.1", "-p", str(port)], stderr=subprocess.DEVNULL) as process:
        address = f"http://127.0.0.1:{port}"
        while True:
            assert process.poll() is None
            try:
                made = urllib.request.Request(f"{address}/bucket", method="PUT")
                urllib.request.urlopen(made).close()
                break
            except urllib.error.URLError:
                time.sleep(0.2)
        yield address
        process.kill()


@pytest.fixture
def more(server: str, tmp_path: Path) -> dict[str, str]:
    """The environment of homes that share a database and a folder of the bucket."""
    return {
        **KEYS, "AWS_ENDPOINT_URL": server, "TUNER_ARTIFACTS": f"s3://bucket/{tmp_path.name}",
        "TUNER_DATABASE_URL": f"sqlite:///{tmp_path}/shared.db",
    }  # fmt: skip


def test_20_5_another_controller_finds_a_trace_in_s3(more: dict[str, str], tmp_path: Path) -> None:
    digest = imported(tmp_path / "one", more=more)
    shutil.rmtree(tmp_path / "one")
    assert shown(tmp_path / "two", more=more) == digest
    study = write(tmp_path, STUDY.replace(f"trace: {TRACE}", "trace: latest:chat"))
    done = tuner(tmp_path / "three", "tune", study, "--dry-run", more=more)
    assert done.returncode == 0, done.stderr


def test_20_5_a_full_backup_of_a_home_that_shares_s3_is_restored_without_it(
    more: dict[str, str], tmp_path: Path
) -> None:
    digest = imported(tmp_path / "one", more=more)
    shutil.rmtree(tmp_path / "one")
    archive = tmp_path / "all.tar.gz"
    done = tuner(tmp_path / "two", "db", "backup", "--full", archive, more=more)
    assert done.returncode == 0, done.stderr
    done = tuner(tmp_path / "restored", "db", "restore", archive)
    assert done.returncode == 0, done.stderr
    assert shown(tmp_path / "restored") == digest


def test_20_5_other_content_in_s3_is_not_taken_for_the_trace(
    more: dict[str, str], server: str, tmp_path: Path
) -> None:
    digest = imported(tmp_path / "one", more=more)
    store = fs.S3FileSystem(access_key="tests", secret_key="tests", endpoint_override=server)
    with store.open_output_stream(f"bucket/{tmp_path.name}/traces/{digest}.parquet") as out:
        out.write(b"something else")
    done = tuner(tmp_path / "two", "trace", "show", "latest:chat", more=more)
    assert (done.returncode, "is not the trace" in done.stderr) == (BadInput.exit_code, True), done.stderr


def test_20_5_a_store_that_cannot_be_written_is_said(more: dict[str, str], tmp_path: Path) -> None:
    source = tmp_path / "chat.csv"
    source.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:01.0,100,20\n")
    nowhere = more | {"TUNER_ARTIFACTS": "s3://no-such-bucket/chat"}
    done = tuner(tmp_path / "one", "trace", "import", source, "--name", "chat", more=nowhere)
    assert (done.returncode, "Traceback" in done.stderr) == (Unavailable.exit_code, False), done.stderr
    assert "TUNER_ARTIFACTS" in done.stderr
