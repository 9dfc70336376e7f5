"""Notifications by the webhooks and commands of TUNER_HOME/notify.yaml: failure, regression, promotion.

The addresses are in a file and not in the database, because a webhook's address is often a secret. A notice
that cannot be delivered is reported and dropped; it never changes how a run ends.
"""

import hashlib
import hmac
import http.client
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import field_validator, model_validator

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
LONGEST = 3000
"""The most characters of a line for a chat; Slack cuts a longer one into pieces."""
LOOK_BACK = timedelta(days=60)
"""How far back a regression is searched for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """One event as a sentence. `facts` are names and numbers, never values of a configuration."""

    kind: Kind
    subject: str
    sentence: str
    at: str
    facts: Mapping[str, JSON] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """One line for a chat: Slack and Teams show the `text` of a body. Their three signs are escaped."""
        line = f"vLLM tuner, {self.kind} of {self.subject}: {self.sentence}"
        for sign, word in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
            line = line.replace(sign, word)
        return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"

    def body(self) -> str:
        """The JSON body for a webhook, and the standard input of a command."""
        told = {"program": "vllm-tuner", "text": self.text, **asdict(self), "facts": dict(self.facts)}
        return canonical_json(masking.tree(told))


class Target(yamltext.Section):
    """Where notices of some kinds go: a webhook (http or https) or a command (a list of words, no shell).

    `secret_env` names the environment variable whose value signs the body (X-Tuner-Signature: sha256=HMAC).
    """

    on: tuple[Kind, ...] = KINDS
    webhook: str = ""
    command: tuple[str, ...] = ()
    secret_env: str = ""

    @field_validator("on", mode="before")
    @classmethod
    def _known(cls, value: object) -> object:
        if not isinstance(value, list):
            raise ValueError(f"give a list with some of these words: {', '.join(KINDS)}")
        for kind in value:
            if kind not in KINDS:
                raise ValueError(f"'{kind}' is not one of {', '.join(KINDS)}{nearest(str(kind), KINDS)}")
        return value

    @field_validator("webhook")
    @classmethod
    def _address(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("give an address such as https://host/path")
        return value

    @field_validator("command", mode="before")
    @classmethod
    def _words(cls, value: object) -> tuple[str, ...]:
        return command(value)

    @model_validator(mode="after")
    def _one_way(self) -> "Target":
        if bool(self.webhook) == bool(self.command):
            raise ValueError("give one of the keys webhook and command, not both")
        return self

    @property
    def name(self) -> str:
        """The target in messages, without the address, which may hold a secret."""
        if self.command:
            return f"command {Path(self.command[0]).name}"
        return f"webhook at {urlsplit(self.webhook).hostname}"


def targets(home: Path) -> tuple[Target, ...]:
    """The targets of notify.yaml; none if there is no file. BadInput names the entry and the key."""
    path = home / "notify.yaml"
    if not path.is_file():
        return ()
    found = yamltext.load(yamltext.read(path), str(path)).value
    if not isinstance(found, list):
        raise BadInput(f"{path}: expected a list of targets, each with 'on', and 'webhook' or 'command'")
    return tuple(yamltext.validated(Target, item, f"{path}: [{n}]") for n, item in enumerate(found))


def send(home: Path, notice: Notice, *, say: Say, pause: Callable[[float], object] = time.sleep) -> int:
    """Deliver a notice to every target of its kind. Returns how many accepted it. Never raises."""
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
    """Why a notice was not delivered; None when it was."""
    if not target.command:
        return _post(target, notice)
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
        with closing(made(str(parts.hostname), parts.port, timeout=TIMEOUT_S)) as connection:
            connection.request("POST", path, body=body, headers=headers)
            status = connection.getresponse().status
    except (OSError, http.client.HTTPException, ValueError) as error:
        return type(error).__name__
    return None if 200 <= status < 300 else f"it answered {status}"


@contextmanager
def failures(home: Path, study: Study, *, clock: Clock, say: Say) -> Iterator[None]:
    """Send a notice for an error that ends a run or keeps it from starting; the error is raised again."""
    try:
        yield
    except TunerError as error:
        send(home, failure(study, str(error), clock()), say=say)
        raise


def failure(study: Study, sentence: str, at: datetime) -> Notice:
    """The notice that a run of a study failed."""
    return Notice(
        kind="failure", subject=study.name, sentence=sentence, at=at.isoformat(), facts=_facts(study)
    )


def happening(found: Happening) -> Notice | None:
    """The notice for a scheduled run that failed or did not start; None if nothing went wrong."""
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
    """The notice that an alias was moved to another version."""
    subject = f"{key.get('model')} on {key.get('target')}"
    sentence = f"{alias} of {subject} is version {version} now, moved by {actor}: {reason}"
    facts = {**key, "alias": alias, "version": version, "actor": actor}
    return Notice(kind="promotion", subject=subject, sentence=sentence, at=at.isoformat(), facts=facts)


def moved(event: AliasEvent) -> Notice:
    """The notice for a stored move of an alias."""
    key: dict[str, JSON] = {
        "model": event.key.model,
        "target": event.key.target,
        "workload": event.key.workload,
    }
    return promotion(key, event.alias, event.to_version, actor=event.actor, reason=event.reason, at=event.at)


def in_background(home: Path, notice: Notice | None, say: Say) -> None:
    """Send a notice from its own thread, for callers that must not wait."""
    if notice is not None and targets_exist(home):
        threading.Thread(target=send, args=(home, notice), kwargs={"say": say}, daemon=True).start()


def concluded(home: Path, store: Store, study: Study, run: Run, *, clock: Clock, say: Say) -> None:
    """Send the notices of a run that ended: failure, regression, a new challenger."""
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
    """Whether there is a notify.yaml."""
    return (home / "notify.yaml").is_file()


def regressions(store: Store, study: Study, run: Run, at: datetime) -> Sequence[Notice]:
    """A notice per objective that is worse than the night before, with engine, traffic and GPU unchanged."""
    found = []
    for metric in study.objectives:
        bests = store.bests(
            model=study.model,
            node=study.node,
            workload=study.workload,
            metric=metric,
            since=at - LOOK_BACK,
            absent=True,
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
