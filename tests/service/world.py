"""A service for tests: in this process over a history of its own, or as a real process on a port."""

import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
from fastapi import FastAPI
from starlette.testclient import TestClient

from tests.tuning.studies import SPACE, TRACE, WATCHDOG_S, command, environment
from tuner.engine.http import fresh_port
from tuner.history.store import Store
from tuner.service.app import create
from tuner.service.runner import Controllers
from tuner.settings import Settings

NODE = """\
engine: {kind: simulated, args: {max-model-len: 16384}, env: {UPSTREAM_TOKEN: canary-8d1f}}
models: [Qwen/Qwen2.5-7B-Instruct]
"""
STUDY: Mapping[str, object] = {
    "name": "tiny",
    "model": "Qwen/Qwen2.5-7B-Instruct",
    "workload": "chat",
    "node": "local",
    "baseline": {"max_num_seqs": 4},
    "slices": [{"start_s": 20, "duration_s": 1.0}],
    "plan": {"base": "quick"},
    "slo": {"ttft_ms": 500, "tpot_ms": 50},
    "budget": {"trials": 3},
    "space": {
        "about": "Two knobs for tests.",
        "knobs": {"max_num_seqs": [4, 16, 64], "max_num_batched_tokens": [512, 2048, 8192]},
    },
}
"""A study as a request; the trace is the test's to add."""


@dataclass
class Clock:
    """A clock that stands still until it is moved."""

    at: datetime = datetime(2026, 3, 10, 12, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.at

    def forward(self, **span: float) -> None:
        self.at += timedelta(**span)


@dataclass
class Shifted(Clock):
    """A clock that goes on from its moment at the speed of this host's, once it was started."""

    offset: timedelta | None = None

    def start(self) -> None:
        self.offset = self.at - datetime.now(UTC)

    def __call__(self) -> datetime:
        return self.at if self.offset is None else datetime.now(UTC) + self.offset


@dataclass
class World:
    """The service in this process."""

    home: Path
    loopback: bool = True
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.settings = Settings(home=self.home, database_url="")
        self.store = Store(self.settings.url)
        self.runner = Controllers(self.store, self.settings, self.clock)
        self.app: FastAPI = create(
            self.store, self.settings, clock=self.clock, runner=self.runner, loopback=self.loopback
        )

    def token(self, *scopes: str, name: str = "ci", days: float | None = None) -> str:
        until = self.clock() + timedelta(days=days) if days is not None else None
        return self.store.create_token(name, scopes, now=self.clock(), expires_at=until)[1]

    def client(self, *scopes: str, host: str = "localhost") -> TestClient:
        """A client whose token has the scopes; without scopes, one without a token."""
        client = TestClient(self.app, base_url=f"http://{host}", raise_server_exceptions=False)
        if scopes:
            client.headers["Authorization"] = f"Bearer {self.token(*scopes)}"
        return client


def prepare(home: Path) -> str:
    """Registers node, engine and trace as an administrator would; returns the trace's digest."""
    (home / "nodes").mkdir(parents=True, exist_ok=True)
    (home / "nodes" / "local.yaml").write_text(NODE)
    (home / "space.yaml").write_text(SPACE)
    from tests.tuning.studies import answer

    digest = answer(home, "trace", "import", TRACE, "--name", "chat", "--json")["digest"]
    return str(digest)


@dataclass
class Server:
    """`tuner serve` as a process."""

    home: Path
    port: int
    process: "subprocess.Popen[bytes]"
    log: Path
    scheme: str = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    def client(self, token: str | None = None) -> httpx.Client:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=600.0)

    def ready(self) -> "Server":
        """Waits until it answers."""
        end = time.monotonic() + WATCHDOG_S
        while True:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            try:
                if httpx.get(f"{self.url}/readyz", timeout=60.0, verify=False).status_code == 200:
                    return self
            except httpx.TransportError:
                time.sleep(0.05)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def start(home: Path, *words: str, port: int | None = None) -> Server:
    """Starts `tuner serve`; whoever asks for it ends it."""
    port = port or fresh_port()
    path = home / "serve.log"
    with path.open("ab") as log:
        process = subprocess.Popen(
            command("serve", "--port", port, *words), env=environment(home), stdout=log, stderr=log
        )
    scheme = "https" if "--tls-cert" in words else "http"
    return Server(home=home, port=port, process=process, log=path, scheme=scheme)


@contextmanager
def serving(home: Path, *words: str) -> Iterator[Server]:
    server = start(home, *words)
    try:
        yield server.ready()
    finally:
        server.process.terminate()
        server.process.wait(timeout=WATCHDOG_S)
