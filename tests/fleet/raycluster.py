"""A Ray cluster of several raylets on this host, by the lines of docs/how-to/many-nodes.md."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil

from tests.tuning.studies import environment
from tuner.errors import NotFound
from tuner.history.store import Store
from tuner.records import Study, Trial, TrialState
from tuner.tuning.now import read

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
WATCHDOG_S = 600.0
"""No test asserts a time; this only ends what hangs."""
NAME = re.compile(r"node=([\w-]+)")
BLOCK = re.compile(r"<!-- run: cluster -->\s*```sh\n(.*?)```", re.DOTALL)


def page_lines() -> list[str]:
    """What the page on many nodes types."""
    page = ROOT / "docs" / "how-to" / "many-nodes.md"
    return [line for text in BLOCK.findall(page.read_text()) for line in text.splitlines()]


def wait_for(what: Callable[[], T | None], *, alive: "subprocess.Popen[str] | None" = None) -> T:
    """Wait until something is true, and return it. Fails after WATCHDOG_S, and if `alive` has ended."""
    end = time.monotonic() + WATCHDOG_S
    while True:
        if found := what():
            return found
        assert time.monotonic() < end, "never happened"
        assert alive is None or alive.poll() is None, "the command ended before"
        time.sleep(0.1)


@dataclass(frozen=True)
class Cluster:
    """Nodes on this host, and one TUNER_HOME for the controller and all of them: they share one machine."""

    folder: Path
    home: Path
    more: Mapping[str, str] = field(default_factory=dict)
    """Further variables of every process."""

    @property
    def env(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        ray = {"PATH": path, "RAY_TMPDIR": str(self.folder), "RAY_USAGE_STATS_ENABLED": "0"}
        return environment(self.home, {**ray, **self.more})

    def type(self, line: str) -> str:
        """Type a line as a user in the checkout would; what it printed."""
        done = subprocess.run(
            ["/bin/sh", "-c", line], env=self.env, cwd=ROOT, capture_output=True, text=True,
            timeout=WATCHDOG_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done.stdout

    def join(self, line: str, name: str) -> None:
        """Start a node. `ray start` gives up after 30 s, which a busy host may need: it is typed again."""
        for again in (True, True, True, False):
            try:
                self.type(line)
                return
            except AssertionError:
                if not again:
                    raise
                for raylet in self.raylets(name):
                    self.end_with(raylet)
                if "--head" in line:
                    self.end()

    @contextmanager
    def started(self, line: str, log: Path) -> "Iterator[subprocess.Popen[str]]":
        """A command at work; killed if it still is when the block ends."""
        with log.open("w") as out:
            process = subprocess.Popen(
                shlex.split(line), env=self.env, cwd=ROOT, stdout=out, stderr=out, text=True
            )
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.kill()
                process.wait()

    def store(self) -> Store:
        return Store(f"sqlite:///{self.home / 'tuner.db'}", create=False)

    def processes(self) -> list[psutil.Process]:
        """Everything of Ray's that was started for this cluster."""
        found = []
        for process in psutil.process_iter():
            try:
                ours = process.environ().get("RAY_TMPDIR") == str(self.folder)
                if ours and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def kill_node(self, name: str) -> None:
        """The power goes out on one node: its raylet and whatever that had started."""
        raylets = self.raylets(name)
        assert len(raylets) == 1, raylets
        self.end_with(raylets[0])

    def end_with(self, raylet: psutil.Process) -> None:
        """Kill a raylet, what it started, and the log monitor that was started with it."""
        monitors = [p for p in self.processes() if "log_monitor.py" in " ".join(_words(p))]
        begun = raylet.create_time()
        monitors.sort(key=lambda p: abs(p.create_time() - begun))
        _kill([raylet, *raylet.children(recursive=True), *monitors[:1]])

    def raylets(self, name: str) -> list[psutil.Process]:
        """The raylets of a node: one, unless it is dead or a start of it has failed."""
        found = []
        for process in self.processes():
            words = _words(process)
            if words and "raylet/raylet" in words[0] and name in " ".join(words):
                found.append(process)
        return found

    def end(self) -> None:
        while left := self.processes():
            _kill(left)
            psutil.wait_procs(left, timeout=10)


def _words(process: psutil.Process) -> list[str]:
    """The command line of a process; none where it has ended."""
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue


@contextmanager
def running(lines: Sequence[str], more: Mapping[str, str] | None = None) -> Iterator[Cluster]:
    """A cluster for as long as the block lasts, `more` in its environment. Its folder's path is short, as
    socket paths are limited.
    """
    folder = Path(tempfile.mkdtemp(prefix="tr", dir="/tmp"))
    cluster = Cluster(folder=folder, home=folder / "home", more=more or {})
    try:
        for line in lines:
            cluster.join(line, NAME.findall(line)[-1] if NAME.findall(line) else "--head")
        yield cluster
    finally:
        cluster.end()
        shutil.rmtree(folder, ignore_errors=True)


def study_of(cluster: Cluster, node: str, name: str = "fleet") -> Study:
    (found,) = [s for s in cluster.store().studies() if s.node == node and s.name == name]
    return found


def trials_of(cluster: Cluster, node: str, name: str = "fleet") -> tuple[Trial, ...]:
    """No trial where there is no study yet."""
    try:
        store = cluster.store()
    except NotFound:
        return ()
    found = [s for s in store.studies() if s.node == node and s.name == name]
    return store.trials(found[0].id) if found else ()


def serving(cluster: Cluster, node: str, number: int, name: str = "fleet") -> str | None:
    """The launch of a running trial once its engine is sent the requests of its window. (An engine that
    screens was sent those of earlier trials before.)
    """
    trials = trials_of(cluster, node, name)
    if not trials or trials[-1].number < number or trials[-1].state is not TrialState.RUNNING:
        return None
    now = read(cluster.home, trials[-1].run_id)
    if now is None or (now.trial, now.phase) != (trials[-1].number, "window"):
        return None
    for launch in cluster.store().launches(trials[-1].study_id):
        log = cluster.home / "work" / launch.id / "engine.log"
        if launch.ended_at is None and log.exists() and b"/v1/completions" in log.read_bytes():
            return launch.id
    return None


def another(tmp_path: Path, name: str, *, startup_s: float | None = None) -> Path:
    """The page's study under another name, and another study: its seed is made of the name. With `startup_s`
    seconds for a launch, candidates are screened if a replay takes less.
    """
    folder = ROOT / "docs" / "examples"
    text = (folder / "fleet.yaml").read_text().replace("name: fleet\n", f"name: {name}\n")
    for file in ("fleet.csv", "fleet-space.yaml"):
        text = text.replace(f" {file}\n", f" {folder / file}\n")
    if startup_s is not None:
        text = text.replace("cards: 2,", f'cards: 2, env: {{TUNER_SIM_STARTUP_S: "{startup_s}"}},')
    path = tmp_path / f"{name}.yaml"
    path.write_text(text.replace("seed: 7", f"seed: {sum(name.encode())}"))
    return path
