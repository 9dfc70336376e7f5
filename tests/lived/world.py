"""A fleet with a hidden truth, on the virtual clock, lived through the public surfaces: commands in this
process, the service over HTTP, files.
"""

import contextlib
import importlib
import io
import json
import os
import pkgutil
import random
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
from starlette.testclient import TestClient

from tests.service.world import World as Service
from tuner import cli, commands
from tuner.fleet import handover
from tuner.history.database import Database
from tuner.history.store import Store
from tuner.records import digest_of
from tuner.simulator.predict import Predictor
from tuner.tuning.virtual import HIDDEN

MODEL = "Qwen/Qwen2.5-7B-Instruct"
SECRET = "canary-8d1f42"
BASELINE = {"max_num_seqs": 4, "block_size": 32, "enable_prefix_caching": False}
"""What runs on most nodes. The space turns the first knob; the others must stay."""
SPACE = """\
about: What the fleet may turn.
vllm: ">=0.10"
knobs:
  max_num_seqs: [4, 16, 64, 128]
  max_num_batched_tokens: [512, 2048, 8192]
  gpu_memory_utilization: [0.3, 0.9]
"""
STUDY = """\
name: chat-{node}
model: {model}
workload: chat
node: {node}
trace: latest:chat
space: space.yaml
engine:
  kind: simulated
  clock: virtual
  card: {card}
  args: {{max-model-len: 4096}}
  env: {{UPSTREAM_TOKEN: {secret}{release}}}
baseline: {baseline}
slices: [{{start_s: 4, duration_s: 5}}, {{start_s: 14, duration_s: 4, held_out: true}}]
plan: {{base: brief, repeats: 2, most_repeats: 3, finalists: 1, tail_limit_s: 20}}
slo: {{ttft_ms: 1500, tpot_ms: 100}}
not_worse: {{tpot_p95_ms: 60%}}
budget: {{trials: {trials}, hours: 3}}
seed: {seed}
"""
KILLED = -signal.SIGKILL
MONTH = datetime(2026, 3, 2, 12, tzinfo=UTC)
HOURS = 3.0


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What a node hides: its card, and how much slower than the data sheet it is. `today` is what runs there:
    on some nodes little is left to gain, and there a gain by chance would be a regression.
    """

    name: str
    card: str
    slower: float
    today: Mapping[str, Any] = field(default_factory=lambda: BASELINE)


FLEET = (
    Truth(name="n1", card="h100-80", slower=1.0),
    Truth(name="n2", card="h100-80", slower=1.15, today={**BASELINE, "max_num_seqs": 64}),
    Truth(name="n3", card="a100-80", slower=1.0),
    Truth(name="n4", card="a100-80", slower=1.3),
    Truth(name="n5", card="l40s", slower=1.0),
    Truth(name="n6", card="l40s", slower=0.9, today={**BASELINE, "max_num_seqs": 128}),
)


@dataclass(frozen=True, kw_only=True)
class Said:
    """What one command answered; `code` as the shell sees it, KILLED where it was killed."""

    words: tuple[str, ...]
    code: int
    out: str
    err: str


@dataclass(frozen=True, kw_only=True)
class Night:
    """One scheduled night of one node: when, its fault, what the command said."""

    node: str
    at: datetime
    fault: str | None
    said: Said


@dataclass
class World:
    """The fleet. `now` is the time of day for every command; `story` names each step that was taken."""

    home: Path
    seed: int = 0
    nodes: Sequence[Truth] = FLEET
    trials: int = 4
    now: datetime = MONTH
    story: list[str] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)
    nights: list[Night] = field(default_factory=list)
    champions: dict[str, int] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    stretches: list[dict[str, Any]] = field(default_factory=list)
    rate: float = 9.0
    inputs: int = 220
    outputs: int = 60
    captured: datetime = MONTH
    release: str = ""
    trails: dict[str, list[int]] = field(default_factory=dict)
    tags: dict[tuple[str, str], tuple[str, str, int]] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> "World":
        """Patch the time of day into every command, and make the fleet as its operators would."""
        enter = self._stack.enter_context
        plain = {name: value for name, value in os.environ.items() if not name.startswith("TUNER_")}
        enter(patch.dict(os.environ, {**plain, "TUNER_HOME": str(self.home)}, clear=True))
        for found in pkgutil.iter_modules(commands.__path__, "tuner.commands."):
            if hasattr(module := importlib.import_module(found.name), "now"):
                enter(patch.object(module, "now", lambda: self.now))
        # The watcher follows the real clock; the stories on the real clock kill controllers beside it.
        enter(patch.object(handover, "_watch", lambda *_: SimpleNamespace(kill=int, wait=int)))
        enter(patch.object(Predictor, "values", remembered(Predictor.values)))
        self._others = frozenset(each.pid for each in psutil.Process().children())
        self._nursery = Nursery(self)
        self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        if hasattr(self, "_service"):
            self._service.store.close()
        self._nursery.close()
        self._stack.close()

    def _begin(self) -> None:
        (self.home / "space.yaml").write_text(SPACE)
        self.capture()
        for truth in self.nodes:
            self.write_study(truth)
            hook = [
                "--drain",
                self._production(truth.name, "down"),
                "--restore",
                self._production(truth.name, "up"),
                "--timeout",
                "20",
            ]
            self.say(
                "node", "add", truth.name, "--card", truth.card, *(hook if truth == self.nodes[0] else [])
            )
            self.schedule(truth.name, HOURS)

    def schedule(self, node: str, hours: float) -> None:
        """Its nights from 01:00 on, for so many hours."""
        self.say(
            "schedule", "add", f"night-{node}", "--study", self.study_file(node), "--cron", "0 1 * * *",
            "--hours", hours, "--min-trials", 0, "--reserve", 1,
        )  # fmt: skip

    def _production(self, node: str, state: str) -> str:
        return f"sh -c 'echo {state} > {self.home}/production-{node}'"

    def study_file(self, node: str) -> Path:
        return self.home / f"{node}.yaml"

    def write_study(self, truth: Truth) -> None:
        text = STUDY.format(
            node=truth.name, model=MODEL, card=truth.card, secret=SECRET, baseline=json.dumps(truth.today),
            trials=self.trials, seed=self.seed, release=self.release,
        )  # fmt: skip
        self.study_file(truth.name).write_text(text)

    # ---- what actors do

    def say(self, *words: object, expect: Sequence[int] = (0,), fault: str | None = None) -> Said:
        """Type a command; its exit code must be one that the README gives for this situation."""
        given = tuple(str(word) for word in words)
        done = self._nursery.run(given, fault) if fault in FAULTS else in_this_process(given)
        self.said.append(done)
        assert done.code in expect, f"exit code {done.code}, not one of {expect}: {given}\n{done.err[-2000:]}"
        return done

    def capture(self, *, rate: float = 1.0, inputs: float = 1.0) -> None:
        """New traffic comes in: `rate` and `inputs` are how it has moved since the last capture."""
        self.rate, self.inputs = self.rate * rate, int(self.inputs * inputs)
        draw = random.Random(f"{self.seed} {len(self.story)} traffic")
        rows, at = ["arrival_s,input_len,output_len"], 0.0
        while at < 24.0:
            at += draw.expovariate(self.rate)
            tokens = (draw.gauss(1, 0.3) * self.inputs, draw.gauss(1, 0.3) * self.outputs)
            rows.append(f"{at:.3f},{max(8, int(tokens[0]))},{max(4, int(tokens[1]))}")
        path = self.home / "gateway.csv"
        path.write_text("\n".join(rows) + "\n")
        self.step(f"capture rate {self.rate:.3g} inputs {self.inputs}")
        self.captured = self.now
        self.say("trace", "import", path, "--name", "chat")

    def upgrade(self) -> None:
        """The engine's next release: a default has moved, and every step takes longer."""
        self.step("upgrade")
        release = {"version": "0.33.0", "slower": 1.2, "defaults": {"max-num-batched-tokens": 4096}}
        self.release = f", TUNER_SIM_RELEASE: '{json.dumps(release)}'"
        for truth in self.nodes:
            self.write_study(truth)

    def night(self, name: str, fault: str | None = None) -> Night:
        """The scheduled night of a node, which comes at 01:00 of the next day or is due now."""
        truth = next(each for each in self.nodes if each.name == name)
        begun = self.now
        self.step(f"night {name}" + (f" with {fault}" if fault else ""))
        hidden = [
            {"slower": truth.slower, "launch_noise": 0.01},
            *self.stretches,
            *({**each, **self._from(each)} for each in NIGHTS.get(fault or "", [])),
        ]
        with patch.dict(os.environ, {HIDDEN: json.dumps(hidden)}), ExitStack() as around:
            if fault == "two controllers":
                around.enter_context(self._held_elsewhere(name))
            if fault == "no database":
                around.enter_context(self._database_away())
            if fault in WINDOWS:
                self.now -= timedelta(minutes=1)  # a schedule knows no due time before it was added
                self.schedule(name, WINDOWS[fault])
                self.now = begun
                around.callback(self.schedule, name, HOURS)
            said = self.say("schedule", "run", f"night-{name}", expect=EXPECTED.get(fault, (0,)), fault=fault)
        if fault == "a window of one trial":  # where production has hooks, giving it back needs longer
            assert (said.code == 5) == (truth == self.nodes[0]), said
        night = Night(node=name, at=begun, fault=fault, said=said)
        self.nights.append(night)
        return night

    def _from(self, stretch: Mapping[str, Any]) -> dict[str, float]:
        """When a stretch begins that begins so many seconds into its night."""
        after = stretch.get("after_s")
        return {} if after is None else {"from_s": self.now.timestamp() + after}

    def today(self, node: str) -> Mapping[str, Any]:
        """What runs on a node."""
        return next(each.today for each in self.nodes if each.name == node)

    def window(self, node: str, at: datetime) -> tuple[datetime, datetime]:
        """(when it began, when it ends) of the window of a node's night in which a moment lies."""
        due = at.replace(hour=1, minute=0, second=0, microsecond=0)
        faults = {each.fault for each in self.nights if each.node == node and each.at.date() == due.date()}
        hours = min((WINDOWS.get(each, HOURS) for each in faults), default=HOURS)
        return due, due + timedelta(hours=hours)

    def next_night(self) -> None:
        """01:00 of the next day."""
        self.now = (self.now + timedelta(hours=12)).replace(hour=1, minute=0, second=5, microsecond=0)
        if self.now <= self.last_end():
            self.now += timedelta(days=1)

    def morning(self) -> None:
        """Nine o'clock, when people come."""
        self.now = self.now.replace(hour=9)

    def later(self, **span: float) -> None:
        """Let time pass; a negative span is a clock that was set back."""
        self.now += timedelta(**span)
        self.step(f"clock {span}")

    def last_end(self) -> datetime:
        return max([n.at for n in self.nights], default=MONTH) + timedelta(hours=HOURS)

    @contextlib.contextmanager
    def _held_elsewhere(self, node: str) -> Iterator[None]:
        store = self.store()
        lease = store.acquire_lease(node, "elsewhere/1", now=self.now, ttl_s=7200)
        yield
        store.release_lease(lease)
        store.close()

    @contextlib.contextmanager
    def _database_away(self) -> Iterator[None]:
        """A server that nobody listens at."""
        away = "postgresql://tuner:" + SECRET + "@127.0.0.1:9/tuner"
        quick = {"url": away, "patience_s": 0.2}
        whole = Database.__init__

        def begin(self: Database, url: str, *, patience_s: float = 15.0, **more: Any) -> None:
            whole(self, url, patience_s=quick["patience_s"], **more)  # type: ignore[arg-type]

        with patch.dict(os.environ, {"TUNER_DATABASE_URL": away}), patch.object(Database, "__init__", begin):
            yield

    def promote(self, node: str) -> Said:
        """A person promotes the challenger; the tuner may refuse it."""
        self.step(f"promote {node}")
        words = ("profile", "promote", "--model", MODEL, "--node", node, "--workload", "chat")
        said = self.say(*words, expect=(0, 4, 5))
        if said.code == 0:
            self.champions[node] = self.version_of(node, "challenger")
            trail = self.trails.setdefault(node, [])
            if not trail or trail[-1] != self.champions[node]:
                trail.append(self.champions[node])
        else:
            self.refused.append(node)
        return said

    def promote_unproved(self, node: str) -> Said:
        """A person tries to promote the version that holds today's configuration: no gain of it is proved."""
        self.step(f"promote today's configuration of {node}")
        rows = json.loads(self.say("profile", "list", "--json").out)
        versions = [
            row["profile"]["version"]
            for row in rows
            if row["profile"]["key"]["target"] == node and row["profile"]["evidence"]["verdict"] == "baseline"
        ]
        words = ("profile", "promote", "--model", MODEL, "--node", node, "--workload", "chat")
        return self.say(*words, "--version", max(versions, default=1), expect=(5,) if versions else (4, 5))

    def rollback(self, node: str) -> Said:
        """Or goes back."""
        self.step(f"rollback {node}")
        words = ("profile", "rollback", "--model", MODEL, "--node", node, "--workload", "chat")
        said = self.say(*words, expect=(0, 4, 5))
        trail = self.trails.get(node, [])
        assert (said.code == 0) == (len(trail) > 1), (said, trail)
        if said.code == 0:
            trail.pop()
            self.champions[node] = trail[-1]
            assert self.version_of(node, "champion") == trail[-1]
        return said

    def version_of(self, node: str, alias: str) -> int:
        rows = json.loads(self.say("profile", "list", "--json").out)
        (found,) = (
            r["profile"]["version"]
            for r in rows
            if r["profile"]["key"]["target"] == node and alias in r["aliases"]
        )
        return int(found)

    def pull(self, node: str, alias: str) -> tuple[int, str]:
        """What a pipeline gets, over HTTP and from the command line: (status, text)."""
        asked = {"model": MODEL, "node": node, "workload": "chat", "alias": alias, "format": "vllm-yaml"}
        answer = self.client().get("/v1/profiles/resolve", params=asked)
        out = self.home / f"{node}-{alias}.yaml"
        said = self.say(
            "profile", "resolve", "--model", MODEL, "--node", node, "--workload", "chat", "--alias", alias,
            "--format", "vllm-yaml", "-o", out, "--exit-code", expect=(0, 3, 4),
        )  # fmt: skip
        assert (said.code == 4) == (answer.status_code == 404), (said, answer.text)
        if said.code != 4:
            assert out.read_text().strip() == answer.text.strip(), "HTTP and command line differ"
        if answer.status_code == 200:
            self._check_tag(asked, answer.headers["ETag"], answer.text)
        return answer.status_code, answer.text

    def _check_tag(self, asked: Mapping[str, str], tag: str, text: str) -> None:
        """A pipeline that gives its last tag gets 304 exactly while nothing has moved: a version that is
        champion again after another one has a tag of its own.
        """
        place = (asked["node"], asked["alias"])
        before, known, moved = self.tags.get(place, ("", "", 0))
        store = self.store()
        moves = sum(
            len(store.alias_events(key, alias=place[1]))
            for key in store.profile_keys()
            if key.target == place[0]
        )
        store.close()
        assert (before == tag) == (moved == moves), "a pull's tag stays exactly while its alias does"
        assert before != tag or known == text, "a pull's tag stayed and its content has changed"
        again = self.client().get("/v1/profiles/resolve", params=asked, headers={"If-None-Match": tag})
        assert again.status_code == 304, again.status_code
        self.tags[place] = (tag, text, moves)

    # ---- reading

    def step(self, words: str) -> None:
        self.story.append(words)

    def store(self) -> Store:
        """The history, to read."""
        return Store(f"sqlite:///{self.home / 'tuner.db'}", create=False)

    @property
    def known(self) -> frozenset[int]:
        """The processes that are no leftover of a command: our helper, and what was there before."""
        return self._others | {self._nursery.pid}

    def client(self) -> TestClient:
        """The service over the same history, as somebody on this host sees it."""
        if not hasattr(self, "_service"):
            self._service = Service(self.home)
        self._service.clock.at = self.now
        return TestClient(self._service.app, base_url="http://localhost")


NIGHTS: Mapping[str, list[dict[str, Any]]] = {
    "slow": [{"slower": 1.6}],
    "slow from the middle on": [{"slower": 1.8, "after_s": 12.0}],
    "crashes": [{"crashes": 0.4}],
    "every launch crashes": [{"crashes": 1.0}],
    "a slow path": [{"knobs": {"max_num_batched_tokens": 8192}, "slower": 1.5}],
}
WINDOWS: Mapping[str | None, float] = {"a short window": 0.05, "a window of one trial": 0.003}
"""The hours of nights that are short: three minutes hold a search; 11 seconds end within its first trial."""
EXPECTED: Mapping[str | None, Sequence[int]] = {
    "two controllers": (9,),
    "no database": (6,),
    "disk full": (6,),
    "killed": (KILLED,),
    "killed early": (KILLED,),
    "every launch crashes": (0, 7),
    "a window of one trial": (0, 5),
}
"""What `schedule run` ends with, by the README's table; 0 where nothing is said."""


PREDICTED: dict[str, dict[str, float]] = {}


def remembered(whole: Callable[..., dict[str, float]]) -> Callable[..., dict[str, float]]:
    """Predictions depend on nothing but what is asked, and nights of one study ask the same: half of the
    time of a month would go into them.
    """

    def values(self: Predictor, options: object, slower: float = 1.0) -> dict[str, float]:
        scene = self.scene
        fixed = (scene.trace.digest, scene.slices, scene.card, scene.plan, scene.args, scene.env, scene.slo)
        asked = digest_of([repr(fixed), repr(options), repr(self.coefficients), slower])
        if asked not in PREDICTED:
            PREDICTED[asked] = whole(self, options, slower)
        return dict(PREDICTED[asked])

    return values


def killed_after(writes: int) -> Callable[[], None]:
    """A controller that dies for good when it has written so often."""

    def begin() -> None:
        whole, left = Database.write, [writes]

        def write(self: Database, work: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return whole(self, work)

        Database.write = write  # type: ignore[method-assign]

    return begin


def disk_full() -> None:
    """No file may grow: the kernel refuses every write that would."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))


FAULTS: Mapping[str | None, Callable[[], None]] = {
    "killed": killed_after(14),
    "killed early": killed_after(4),
    "disk full": disk_full,
}


def in_this_process(words: Sequence[str]) -> Said:
    """Run a command line as the shell would, in this process."""
    out, err = io.StringIO(), io.StringIO()
    argv = ["tuner", *words]
    with patch.object(sys, "argv", argv), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return Said(words=tuple(words), code=code, out=out.getvalue(), err=err.getvalue())


class Nursery:
    """A process that opened no database, and forks one for each command that a fault befalls: SQLite's
    connections must not be taken across a fork.
    """

    def __init__(self, world: World) -> None:
        self._line, there = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._line.close()
                _serve(world, there)
            finally:
                os._exit(0)
        there.close()
        self._world = world

    def run(self, words: Sequence[str], fault: str | None) -> Said:
        """What the command answered before the fault, as far as it could."""
        asked = [list(words), fault, self._world.now.timestamp(), dict(os.environ)]
        _send(self._line, asked)
        code, out, err = _receive(self._line)
        return Said(words=tuple(words), code=code, out=out, err=err)

    def close(self) -> None:
        self._line.close()
        os.waitpid(self.pid, 0)


def _send(line: socket.socket, value: object) -> None:
    text = json.dumps(value).encode()
    line.sendall(len(text).to_bytes(8, "big") + text)


def _receive(line: socket.socket) -> Any:
    head = line.recv(8, socket.MSG_WAITALL)
    return json.loads(line.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL)) if head else None


def _serve(world: World, line: socket.socket) -> None:
    """Do one command after another, each in a process of its own, until the line is closed."""
    while (asked := _receive(line)) is not None:
        words, fault, now, env = asked
        world.now = datetime.fromtimestamp(now, UTC)
        os.environ.clear()
        os.environ.update(env)
        _send(line, _in_a_fork(words, FAULTS[fault]))


def _in_a_fork(words: Sequence[str], fault: Callable[[], None]) -> list[object]:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(read)
            fault()
            done = in_this_process(words)
            os.write(write, json.dumps([done.out[-20000:], done.err[-20000:]]).encode())
            code = done.code
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read, "rb") as told:
        text = told.read()
    _, status = os.waitpid(child, 0)
    out, err = json.loads(text) if text else ("", "")
    return [os.waitstatus_to_exitcode(status), out, err]
