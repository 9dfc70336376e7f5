"""Words to the outside: webhooks and commands of TUNER_HOME/notify.yaml, on failure, regression, promotion.

The file, not the database, holds them: a webhook's address is often a secret. What cannot be delivered is
said and forgotten; it never changes how a run ends.
"""

import hashlib
import hmac
import http.client
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from tuner import masking, processes, yamltext
from tuner.errors import BadInput, TunerError, nearest
from tuner.fleet.hooks import command
from tuner.fleet.schedule import Happening
from tuner.history.best_per_night import nights
from tuner.history.store import Store
from tuner.records import JSON, AliasEvent, Run, RunState, Study, canonical_json
from tuner.report import words

Clock = Callable[[], datetime]
Say = Callable[[str], object]
Kind = Literal["failure", "regression", "promotion"]
KINDS: tuple[Kind, ...] = ("failure", "regression", "promotion")
TRIES = 3
TIMEOUT_S = 10.0
KEYS = ("on", "webhook", "command", "secret_env")
LOOK_BACK = timedelta(days=60)
"""How far back a regression is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """What happened to what, in one sentence; `facts` are names and numbers, never configuration values."""

    kind: Kind
    subject: str
    sentence: str
    at: str
    facts: Mapping[str, JSON] = field(default_factory=dict)

    def body(self) -> str:
        """The JSON that a webhook is sent and a command reads from its standard input."""
        return canonical_json(
            masking.tree({"program": "vllm-tuner", **asdict(self), "facts": dict(self.facts)})
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where notices of some kinds go: a webhook (http or https) or a command (a list of words, no shell).

    `secret_env` names the environment variable whose value signs the body (X-Tuner-Signature: sha256=HMAC).
    """

    on: tuple[Kind, ...] = KINDS
    webhook: str = ""
    command: tuple[str, ...] = ()
    secret_env: str = ""

    @property
    def name(self) -> str:
        """For people: never the address itself."""
        if self.command:
            return f"command {Path(self.command[0]).name}"
        return f"webhook at {urlsplit(self.webhook).hostname}"


def targets(home: Path) -> tuple[Target, ...]:
    """What the file asks for; nothing where there is none. BadInput names entry and key."""
    path = home / "notify.yaml"
    if not path.is_file():
        return ()
    found = yamltext.load(yamltext.read(path), str(path)).value
    if not isinstance(found, list):
        raise BadInput(f"{path}: a list of targets, each with on, and webhook or command, is expected")
    return tuple(_target(item, f"{path}: [{n}]") for n, item in enumerate(found))


def _target(item: object, where: str) -> Target:
    if not isinstance(item, dict) or ("webhook" in item) == ("command" in item):
        raise BadInput(f"{where}: give exactly one of webhook and command")
    for key in item:
        if key not in KEYS:
            raise BadInput(f"{where}: unknown key '{key}'{nearest(str(key), KEYS)}")
    asked = item.get("on", list(KINDS))
    if not isinstance(asked, list):
        raise BadInput(f"{where}: on: a list of {', '.join(KINDS)} is expected")
    for kind in asked:
        if kind not in KINDS:
            raise BadInput(f"{where}: on: '{kind}' is none of {', '.join(KINDS)}{nearest(str(kind), KINDS)}")
    on = tuple(kind for kind in KINDS if kind in asked)
    secret = str(item.get("secret_env", ""))
    if "command" in item:
        return Target(on=on, command=command(item["command"], f"{where}: command"), secret_env=secret)
    parts = urlsplit(str(item["webhook"]))
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadInput(f"{where}: webhook: an address such as https://host/path is expected")
    return Target(on=on, webhook=str(item["webhook"]), secret_env=secret)


def send(home: Path, notice: Notice, *, say: Say, pause: Callable[[float], object] = time.sleep) -> int:
    """Deliver a notice to every target that asks for its kind; returns how many took it. Never raises."""
    try:
        wanted = [target for target in targets(home) if notice.kind in target.on]
    except BadInput as error:
        say(f"no notification: {error}")
        return 0
    delivered = 0
    for target in wanted:
        problem = None
        for attempt in range(TRIES):
            if attempt:
                pause(2.0**attempt)
            if (problem := _deliver(target, notice)) is None:
                delivered += 1
                break
        if problem is not None:
            say(f"{target.name} was not notified of a {notice.kind}: {problem}")
    return delivered


def _deliver(target: Target, notice: Notice) -> str | None:
    """What went wrong; None when it arrived."""
    return _execute(target, notice) if target.command else _post(target, notice)


def _execute(target: Target, notice: Notice) -> str | None:
    try:
        done = processes.run(target.command, timeout_s=TIMEOUT_S * 3, stdin=notice.body())
    except TunerError as error:
        return str(error)
    return None if done.code == 0 else f"it ended with {done.code}"


def _post(target: Target, notice: Notice) -> str | None:
    parts, body = urlsplit(target.webhook), notice.body().encode()
    made = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    headers = {"Content-Type": "application/json", "User-Agent": "vllm-tuner"}
    if (secret := os.environ.get(target.secret_env, "")) and target.secret_env:
        signature = hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()
        headers["X-Tuner-Signature"] = f"sha256={signature}"
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        connection = made(str(parts.hostname), parts.port, timeout=TIMEOUT_S)
        try:
            connection.request("POST", path, body=body, headers=headers)
            status = connection.getresponse().status
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        return type(error).__name__
    return None if 200 <= status < 300 else f"it answered {status}"


@contextmanager
def failures(home: Path, study: Study, *, clock: Clock, say: Say) -> Iterator[None]:
    """An error that ends a run, or keeps it from beginning, is told before it is passed on."""
    try:
        yield
    except TunerError as error:
        send(home, failure(study, str(error), clock()), say=say)
        raise


def failure(study: Study, sentence: str, at: datetime) -> Notice:
    """A run of a study failed."""
    return Notice(
        kind="failure", subject=study.name, sentence=sentence, at=at.isoformat(), facts=_facts(study)
    )


def happening(found: Happening) -> Notice | None:
    """A due time that did not become a run, or whose run failed; None for what went as it should."""
    if found.kind in ("start", "resume", "ended", "blackout"):
        return None
    sentence = f"schedule {found.schedule}: {found.kind}: {found.sentence}"
    facts: dict[str, JSON] = {"schedule": found.schedule, "node": found.node, "what": found.kind}
    return Notice(
        kind="failure", subject=found.schedule, sentence=sentence, at=found.at.isoformat(), facts=facts
    )


def promotion(
    key: Mapping[str, JSON], alias: str, version: int | None, *, actor: str, reason: str, at: datetime
) -> Notice:
    """An alias was moved to another version."""
    subject = f"{key.get('model')} on {key.get('target')}"
    sentence = f"{alias} of {subject} is version {version} now, moved by {actor}: {reason}"
    facts = {**key, "alias": alias, "version": version, "actor": actor}
    return Notice(kind="promotion", subject=subject, sentence=sentence, at=at.isoformat(), facts=facts)


def moved(event: AliasEvent) -> Notice:
    """Somebody moved an alias."""
    key: dict[str, JSON] = {
        "model": event.key.model,
        "target": event.key.target,
        "workload": event.key.workload,
    }
    return promotion(key, event.alias, event.to_version, actor=event.actor, reason=event.reason, at=event.at)


def in_background(home: Path, notice: Notice | None, say: Say) -> None:
    """The same for callers that must not wait: sent from a thread of its own."""
    if notice is not None and targets_exist(home):
        threading.Thread(target=send, args=(home, notice), kwargs={"say": say}, daemon=True).start()


def concluded(home: Path, store: Store, study: Study, run: Run, *, clock: Clock, say: Say) -> None:
    """What a run's end gives reason to tell: that it failed, or that a night got worse."""
    if not targets_exist(home):
        return
    if run.state is RunState.FAILED:
        send(home, failure(study, run.reason or "no reason given", clock()), say=say)
    for notice in regressions(store, study, run, clock()):
        send(home, notice, say=say)
    said = store.conclusion(run.id)
    if said is not None and (made := said.profiles.get("challenger")) is not None:
        key: dict[str, JSON] = {"model": study.model, "target": study.node, "workload": study.workload}
        reason = words.headline(said)
        found = promotion(key, "challenger", made.version, actor="run", reason=reason, at=clock())
        send(home, replace(found, facts={**found.facts, "conclusion": said.to_json()}), say=say)


def targets_exist(home: Path) -> bool:
    """Whether anybody wants to be told anything."""
    return (home / "notify.yaml").is_file()


def regressions(store: Store, study: Study, run: Run, at: datetime) -> Sequence[Notice]:
    """Objectives whose night of this run is worse than the one before, with everything else the same."""
    found = []
    for metric in study.objectives:
        bests = store.bests(
            model=study.model,
            node=study.node,
            workload=study.workload,
            metric=metric,
            since=at - LOOK_BACK,
        )
        for night in nights(bests)[-1:]:
            if night.compared != "worse" or night.best.run_id != run.id or night.step is None:
                continue
            sentence = (
                f"{metric} of {study.name} changed by {words.step(metric, night.step)} since the night"
                " before, with the same engine, traffic and GPU"
            )
            facts = {**_facts(study), "run": run.id, "metric": metric, "value": night.best.value,
                     "change": night.step}  # fmt: skip
            found.append(
                Notice(
                    kind="regression", subject=study.name, sentence=sentence, at=at.isoformat(), facts=facts
                )
            )
    return found


def _facts(study: Study) -> dict[str, JSON]:
    return {"study": study.name, "model": study.model, "node": study.node, "workload": study.workload}
