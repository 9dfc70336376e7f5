"""A PostgreSQL server of the tests' own: in a folder of its own, on a Unix socket, never as root."""

import os
import pwd
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg

USERS = ("postgres", "nobody")
OPTIONS = "-c listen_addresses= -c fsync=off -c max_connections=200 -c shared_buffers=64MB"


def binaries() -> Path | None:
    """The folder of the newest `initdb`: Debian's, or that of the one on PATH."""

    def version(path: Path) -> float:
        return float(path.parts[-3]) if path.parts[-3].replace(".", "", 1).isdigit() else 0.0

    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=version)
    on_path = shutil.which("initdb")
    found = debian[-1] if debian else Path(on_path).resolve() if on_path else None
    return found.parent if found else None


def _user() -> str | None:
    """Whom the server runs as: None for ourselves; the server refuses root."""
    if os.getuid() != 0:
        return None
    known = {each.pw_name for each in pwd.getpwall()}
    return next(name for name in USERS if name in known)


@dataclass(frozen=True)
class Server:
    """A running server. `url()` makes a new empty database in it."""

    folder: Path
    bin: Path
    user: str | None

    def connect(self, name: str = "postgres") -> "psycopg.Connection[tuple[object, ...]]":
        return psycopg.connect(f"host={self.folder} user=tests dbname={name}", autocommit=True)

    def url(self) -> str:
        name = f"t{uuid.uuid4().hex[:12]}"
        with self.connect() as connection:
            connection.execute(f'CREATE DATABASE "{name}"'.encode())
        return f"postgresql://tests@/{name}?host={self.folder}"

    def cut(self, name: str, *, at_most: int = 1000) -> int:
        """Ends up to so many connections to a database; returns how many."""
        with self.connect() as connection:
            query = (
                "SELECT count(pg_terminate_backend(pid)) FROM (SELECT pid FROM pg_stat_activity"
                " WHERE datname = %s ORDER BY random() LIMIT %s) AS chosen"
            )
            row = connection.execute(query, (name, at_most)).fetchone()
            return int(str(row[0])) if row else 0

    def run(self, *command: str) -> None:
        told = subprocess.run(
            command, user=self.user, cwd="/", capture_output=True, text=True, timeout=600, check=False
        )
        if told.returncode != 0:
            log = self.folder / "log"
            raise RuntimeError(f"{command}: {told.stderr}\n{log.read_text()[-2000:] if log.exists() else ''}")

    def start(self) -> None:
        options = f"{OPTIONS} -c unix_socket_directories={self.folder}"
        data, log = str(self.folder / "data"), str(self.folder / "log")
        self.run(str(self.bin / "pg_ctl"), "-D", data, "-l", log, "-o", options, "-w", "-t", "60", "start")

    def stop(self) -> None:
        """Stops at once, as a crash would."""
        self.run(str(self.bin / "pg_ctl"), "-D", str(self.folder / "data"), "-m", "immediate", "-w", "stop")


@contextmanager
def serving() -> Iterator[Server]:
    """A server for as long as the block lasts."""
    found = binaries()
    if found is None:
        raise RuntimeError("no PostgreSQL server is installed: make test-postgres installs Debian's")
    folder = Path(tempfile.mkdtemp(prefix="tuner-pg-", dir="/tmp"))
    user = _user()
    if user is not None:
        shutil.chown(folder, user)
    server = Server(folder=folder, bin=found, user=user)
    try:
        server.run(
            str(found / "initdb"),
            "-D",
            str(folder / "data"),
            "-U",
            "tests",
            "-A",
            "trust",
            "-E",
            "UTF8",
            "-N",
        )
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder)
