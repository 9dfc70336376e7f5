"""Kills controllers, workers, raylets and PostgreSQL at random moments, spread over hours; checks what must
hold after each.

    python -m benchmarks.soak OUT [--kills 50] [--hours 2] [--seed 1]

A real Ray cluster of three nodes on this host, a real PostgreSQL (`make test-postgres` installs it), the
simulated engine. One study after the other is tuned on all nodes by `tuner tune --on`; a controller that
ended is started again, as a service manager would. OUT gets a line per kill as it happens, so a soak that is
cut short tells what it saw.

What must hold (a line that begins with VIOLATION says what did not; the exit code is then 1):

* no lost trial: one that had ended stays as it was, no number is left out, in the end none is RUNNING;
* no orphan: ORPHAN_S after a kill no process of an engine is left whose launch has ended or whose worker is
  gone;
* no lease outlives its holder by more than its term.
"""

import argparse
import random
import shlex
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import psutil

from tests.fleet.raycluster import ROOT, Cluster, running
from tests.history import postgres
from tuner.errors import TunerError
from tuner.fleet import nodes
from tuner.history.store import Store
from tuner.leftovers import TAG, tagged
from tuner.records import RunState, Trial, TrialState

PORT = 6399
NODES = {"small-1": "a4500", "small-2": "a4500", "large": "a100-80"}
HEAD = f"ray start --head --port {PORT} --num-gpus 0 --include-dashboard false --ray-client-server-port 9801"
JOIN = f"ray start --address 127.0.0.1:{PORT} --num-gpus 2 --min-worker-port 21000 --max-worker-port 29999"
"""Ports of its own: another cluster may be at work on this host."""
KINDS = ("controller", "worker", "raylet", "postgres")
ORPHAN_S = 30.0
RETURN_S = 3.0
"""How long a raylet or PostgreSQL stays away."""
STUDY = """name: {name}
model: Qwen/Qwen2.5-1.5B-Instruct
workload: extraction
trace: traffic.csv
space: space.yaml
engine: {{kind: simulated, args: {{max-model-len: 8192}}}}
baseline: {{}}
slices: [{{start_s: 2, duration_s: 1.6, name: steady}}]
plan: brief
slo: {{ttft_ms: 4000, tpot_ms: 20, attainment: 0.95}}
objectives: [e2e_p95_ms, tpot_p95_ms]
budget: {{trials: 5}}
seed: {seed}
"""
SPACE = """about: Scheduler limits, and a knob that needs a relaunch.
vllm: ">=0.10"
knobs:
  max_num_batched_tokens: [256, 512, 1024]
  max_num_seqs: [32, 64, 128]
  enable_prefix_caching: [true, false]
"""
Row = tuple[str, int, int]
"""A trial's study, number and attempt."""


@dataclass
class Soak:
    """The cluster, the database, the controller of the moment, and what was seen."""

    cluster: Cluster
    server: postgres.Server
    store: Store
    folder: Path
    out: Path
    draw: random.Random
    begun: float = field(default_factory=time.monotonic)
    studies: int = 0
    controller: "subprocess.Popen[str] | None" = None
    starts: int = 0
    tries: int = 0
    violations: int = 0
    deaths: dict[int, float] = field(default_factory=dict)
    ended: dict[Row, Trial] = field(default_factory=dict)

    def write(self, text: str) -> None:
        """Append a line with the time since the start."""
        passed = int(time.monotonic() - self.begun)
        line = f"{passed // 3600}:{passed // 60 % 60:02d}:{passed % 60:02d} {text}"
        with self.out.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def violated(self, text: str) -> None:
        self.violations += 1
        self.write(f"VIOLATION {text}")

    def trials(self) -> list[Trial]:
        store = self.store
        return [trial for study in store.studies() for trial in store.trials(study.id)]

    def keep_tuning(self) -> None:
        """Start the controller again where it has ended: the same study until it ends well, then the next."""
        if self.controller is not None:
            code = self.controller.poll()
            if code is None:
                return
            self.deaths.setdefault(self.controller.pid, time.time())
            self.tries = 0 if code == 0 else self.tries + 1
            if code not in (0, -9):
                self.write(f"the controller ended with {code}: {self.last_words()}")
            if code == 0 or self.tries >= 8:
                self.studies += 1
                self.tries = 0
        self.starts += 1
        study = self.folder / f"soak-{self.studies}.yaml"
        study.write_text(STUDY.format(name=study.stem, seed=self.studies + 1))
        line = f"tuner tune {study} --on 127.0.0.1:{PORT}"
        with (self.folder / "controller.log").open("w") as log:
            self.controller = subprocess.Popen(
                shlex.split(line), env=self.cluster.env, cwd=ROOT, stdout=log, stderr=log, text=True
            )

    def last_words(self) -> str:
        lines = (self.folder / "controller.log").read_text().strip().splitlines() or ["nothing"]
        return lines[-1][:200]

    def workers(self) -> list[psutil.Process]:
        """The workers on the nodes."""
        return [p for p in self.cluster.processes() if _title(p).startswith("ray::NodeWorker")]

    def spend(self, seconds: float) -> None:
        """Let time pass while the studies go on; leases are looked at meanwhile."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.keep_tuning()
            self.check_leases()
            time.sleep(1.0)

    def check_leases(self) -> None:
        """No lease of a dead holder is valid for longer than its term after the death."""
        with suppress(TunerError):
            for lease in self.store.leases(now=datetime.now(UTC)):
                pid = int(lease.holder.partition(" pid ")[2].partition(" ")[0])
                if not nodes.is_dead(lease.holder):
                    continue
                over = lease.expires_at.timestamp() - self.deaths.setdefault(pid, time.time())
                if over > nodes.LEASE_S:
                    self.violated(f"the lease of {lease.node} outlives {lease.holder} by {over:.0f} s")

    def check_trials(self) -> str:
        """What had ended is unchanged, and numbers have no gaps."""
        found = {(t.study_id, t.number, t.attempt): t for t in self.trials()}
        for key, before in self.ended.items():
            after = found.get(key)
            if after is None or (after.state, after.candidate) != (before.state, before.candidate):
                self.violated(f"trial {key} was {before.state}, is {after and after.state}")
            elif len(after.measurements) < len(before.measurements):
                self.violated(f"trial {key} had {len(before.measurements)} measurements")
        for study in {key[0] for key in found}:
            numbers = sorted({number for s, number, _ in found if s == study})
            if numbers != list(range(len(numbers))):
                self.violated(f"study {study[:12]} has numbers {numbers}")
            open_now = [key for key, t in found.items() if key[0] == study and t.state is TrialState.RUNNING]
            if len(open_now) > 1:
                self.violated(f"{len(open_now)} trials of study {study[:12]} run at once")
        self.ended = {key: t for key, t in found.items() if t.state is not TrialState.RUNNING}
        return f"{len(self.ended)} ended trials"

    def orphans(self, gone: Sequence[str]) -> list[str]:
        """Tags of processes whose launch has ended or whose worker was killed (`gone`)."""
        found = []
        store = self.store
        open_now = {each.id for node in NODES for each in store.open_launches(node=node)}
        for process in tagged():
            with suppress(psutil.Error):
                environ = process.environ()
                tag = environ.get(TAG, "")
                ours = environ.get("TUNER_HOME") == str(self.cluster.home)
                if ours and (tag in gone or tag not in open_now):
                    found.append(tag[:12])
        return found

    def check_orphans(self, gone: Sequence[str]) -> str:
        """Wait until no orphan is left; after ORPHAN_S that is a violation."""
        begun = time.monotonic()
        while (left := self.orphans(gone)) and time.monotonic() - begun < ORPHAN_S:
            self.keep_tuning()
            time.sleep(0.2)
        if left:
            self.violated(f"orphans of launches {sorted(set(left))}")
        return f"{len(gone)} engines gone after {time.monotonic() - begun:.1f} s"

    def kill(self, number: int) -> None:
        """One kill, what comes back, and the checks."""
        kind = self.draw.choice(KINDS)
        node = self.draw.choice(sorted(NODES))
        before = self.running_now()
        gone = getattr(self, f"kill_{kind}")(node)
        if gone is None:
            gone, kind = self.kill_controller(node), "controller"
        where = f" on {node}" if kind in ("worker", "raylet") else ""
        said = self.check_orphans(gone)
        self.write(f"kill {number}: {kind}{where} ({before}); {said}; {self.check_trials()}")

    def running_now(self) -> str:
        found = [t.number for t in self.trials() if t.state is TrialState.RUNNING]
        return f"soak-{self.studies}, {len(found)} trials ran"

    def kill_controller(self, node: str) -> list[str]:
        """SIGKILL to the controller: its workers go with it."""
        tags = [tag for worker in self.workers() for tag in _tags(worker)]
        if self.controller is not None:
            self.deaths[self.controller.pid] = time.time()
            self.controller.kill()
            self.controller.wait()
        return tags

    def kill_worker(self, node: str) -> list[str] | None:
        """SIGKILL to the worker of a node; None where it has none now."""
        raylet = self.raylet(node)
        if raylet is None:
            return None
        mine = [p for p in raylet.children(recursive=True) if _title(p).startswith("ray::NodeWorker")]
        if not mine:
            return None
        tags = _tags(mine[0])
        with suppress(psutil.NoSuchProcess):
            mine[0].kill()
        return tags

    def kill_raylet(self, node: str) -> list[str]:
        """The power goes out on a node and comes back."""
        raylet = self.raylet(node)
        if raylet is None:
            self.join(node)
            return []
        tags = _tags(raylet)
        self.cluster.kill_node(node)
        self.spend(RETURN_S)
        self.join(node)
        return tags

    def join(self, node: str) -> None:
        """Start a node's raylet."""
        try:
            self.cluster.join(f"{JOIN} --labels gpu={NODES[node]},node={node}", node)
        except AssertionError:
            self.write(f"ray start of {node} gave up: the host is too busy; the node stays away for now")

    def kill_postgres(self, node: str) -> list[str]:
        """PostgreSQL crashes and comes back."""
        self.server.stop()
        time.sleep(RETURN_S)
        self.server.start()
        return []

    def raylet(self, node: str) -> psutil.Process | None:
        """The raylet of a node, None where it died by itself."""
        return next(iter(self.cluster.raylets(node)), None)

    def finish(self, limit_s: float) -> None:
        """Let the study in hand end, then look at everything again."""
        end, study = time.monotonic() + limit_s, self.studies
        while self.studies == study and time.monotonic() < end:
            self.keep_tuning()
            self.check_leases()
            time.sleep(1.0)
        if self.controller is not None and self.controller.poll() is None:
            self.controller.terminate()
            self.controller.wait(120)
        self.check_orphans([])
        said = self.check_trials()
        store, runs = self.store, self.store.runs()
        if any(t.state is TrialState.RUNNING for t in self.trials()):
            self.violated("a trial is RUNNING after the end")
        if left := store.leases(now=datetime.now(UTC)):
            self.violated(f"leases after the end: {[lease.node for lease in left]}")
        for run in runs:
            last = {t.number: t for t in store.trials(run.study_id) if t.run_id == run.id}
            if run.state is RunState.FINISHED:
                for trial in last.values():
                    if trial.state is TrialState.ABORTED and trial.cause not in ("stopped", "budget"):
                        self.violated(f"run {run.id} has lost trial {trial.number} ({trial.cause})")
        states = [run.state for run in runs]
        counts = ", ".join(f"{states.count(state)} {state.value}" for state in RunState if state in states)
        self.write(f"runs: {counts}; {said}; the controller was started {self.starts} times")


def _title(process: psutil.Process) -> str:
    with suppress(psutil.Error, IndexError):
        return str(process.cmdline()[0])
    return ""


def _tags(process: psutil.Process) -> list[str]:
    """The launches that have processes below this one."""
    found: set[str] = set()
    with suppress(psutil.Error):
        for child in process.children(recursive=True):
            with suppress(psutil.Error):
                found.add(child.environ().get(TAG, ""))
    return sorted(found - {""})


@contextmanager
def world(out: Path, seed: int) -> Iterator[Soak]:
    """Cluster and database for as long as the block lasts; no controller is left."""
    lines = [HEAD, *(f"{JOIN} --labels gpu={card},node={name}" for name, card in NODES.items())]
    with ExitStack() as stack:
        server = stack.enter_context(postgres.serving())
        url = server.url()
        store = Store(url, create=True, patience_s=60.0)
        cluster = stack.enter_context(running(lines, {"TUNER_DATABASE_URL": url}))
        folder = cluster.folder / "studies"
        folder.mkdir()
        (folder / "space.yaml").write_text(SPACE)
        draw = random.Random(seed)
        (folder / "traffic.csv").write_text(traffic(draw))
        soak = Soak(cluster, server, store, folder, out, draw)
        try:
            yield soak
        finally:
            if soak.controller is not None and soak.controller.poll() is None:
                soak.controller.kill()
                soak.controller.wait()


def traffic(draw: random.Random) -> str:
    """Light traffic: the host has other work than the load."""
    at, lines = 0.0, ["arrival_s,input_len,output_len"]
    while at < 12.0:
        at += draw.expovariate(5.0)
        lines.append(f"{at:.3f},{draw.randint(100, 2500)},{draw.randint(4, 24)}")
    return "\n".join(lines) + "\n"


def main() -> int:
    """0 where everything held."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    line = f"--kills {asked.kills} --hours {asked.hours:g} --seed {asked.seed}"
    asked.out.write_text(f"$ python -m benchmarks.soak OUT {line}\n")
    with world(asked.out, asked.seed) as soak:
        share_s = asked.hours * 3600 / asked.kills
        for number in range(1, asked.kills + 1):
            due = soak.begun + (number - 1 + soak.draw.random()) * share_s
            soak.spend(max(0.0, due - time.monotonic()))
            soak.kill(number)
        soak.finish(600.0)
        soak.write(f"{asked.kills} kills, {soak.violations} violations")
        return 1 if soak.violations else 0


if __name__ == "__main__":
    raise SystemExit(main())
