"""Webhooks and commands hear of failures, regressions and promotions; no secret is told."""

import hashlib
import hmac
import json
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from tests.history import records
from tuner.conclusions import PublishedProfile
from tuner.errors import BadInput, StudyFailed
from tuner.fleet import notify
from tuner.fleet.notify import Notice, send
from tuner.fleet.schedule import Happening
from tuner.history.store import Store
from tuner.records import Candidate, Measurement, Run, RunState, TrialState

AT = datetime(2026, 11, 28, 4, tzinfo=UTC)
NOTICE = Notice(kind="failure", subject="chat", sentence="the model is missing", at=AT.isoformat())
WHOLE = ("ttft_p95_ms", "goodput_rps")


@dataclass
class Hook:
    """A webhook on loopback: what it was sent, and what it answers next."""

    url: str = ""
    answers: list[int] = field(default_factory=list)
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)


@pytest.fixture
def hook() -> Iterator[Hook]:
    found = Hook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.got.append((dict(self.headers), body))
            self.send_response(found.answers.pop(0) if found.answers else 204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Not on the test's screen."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_port}/hook/SECRETPATH?key=SECRETKEY"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield found
    server.shutdown()
    thread.join()
    server.server_close()


def register(home: Path, *targets: dict[str, object]) -> None:
    (home / "notify.yaml").write_text(yaml.safe_dump(list(targets)))


def no_pause(seconds: float) -> None:
    """Tests do not wait."""


def test_a_webhook_is_sent_the_notice(tmp_path: Path, hook: Hook) -> None:
    register(tmp_path, {"webhook": hook.url})
    assert send(tmp_path, NOTICE, say=print) == 1
    ((headers, body),) = hook.got
    assert headers["Content-Type"] == "application/json"
    assert json.loads(body) == {
        "program": "vllm-tuner", "kind": "failure", "subject": "chat", "sentence": "the model is missing",
        "at": "2026-11-28T04:00:00+00:00", "facts": {},
        "text": "vLLM tuner, failure of chat: the model is missing",
    }  # fmt: skip


def test_the_file_of_the_docs_is_taken_as_it_is_printed(tmp_path: Path) -> None:
    text = (Path(notify.__file__).parents[2] / "docs" / "schedules.md").read_text()
    (block,) = [each for each in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "webhook:" in each]
    (tmp_path / "notify.yaml").write_text(block)
    assert [target.on for target in notify.targets(tmp_path)] == [("failure", "regression"), ("promotion",)]


def test_I27_6_slack_and_teams_get_one_line_that_holds_no_markup_of_theirs() -> None:
    notice = replace(NOTICE, sentence="max_num_seqs < 4 & <!channel> " + "x" * 5000)
    assert "max_num_seqs &lt; 4 &amp; &lt;!channel&gt;" in notice.text
    assert "<" not in notice.text
    assert len(notice.text) == 3000
    body = json.loads(notice.body())
    assert body["text"] == notice.text
    assert body["sentence"] == notice.sentence, "the whole sentence is beside it"


def test_a_body_is_signed_where_a_secret_is_set(
    tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK_SECRET", "abc")
    register(tmp_path, {"webhook": hook.url, "secret_env": "HOOK_SECRET"})
    send(tmp_path, NOTICE, say=print)
    ((headers, body),) = hook.got
    expected = hmac.new(b"abc", body, hashlib.sha256).hexdigest()
    assert headers["X-Tuner-Signature"] == f"sha256={expected}"


def test_a_webhook_that_fails_is_tried_again(tmp_path: Path, hook: Hook) -> None:
    hook.answers = [500, 503]
    register(tmp_path, {"webhook": hook.url})
    assert send(tmp_path, NOTICE, say=print, pause=no_pause) == 1
    assert len(hook.got) == 3


def test_what_cannot_be_delivered_is_said_without_its_address(tmp_path: Path, hook: Hook) -> None:
    hook.answers = [302, 302, 302]  # a redirect is not followed
    said: list[str] = []
    register(tmp_path, {"webhook": hook.url}, {"webhook": "http://127.0.0.1:1/SECRETPATH"})
    assert send(tmp_path, NOTICE, say=said.append, pause=no_pause) == 0
    assert said == [
        "webhook at 127.0.0.1 was not notified of a failure: it answered 302",
        "webhook at 127.0.0.1 was not notified of a failure: ConnectionRefusedError",
    ]
    assert "SECRET" not in "".join(said)


def test_a_command_reads_the_notice_from_its_input(tmp_path: Path) -> None:
    script = f"import sys; open({str(tmp_path / 'got')!r}, 'w').write(sys.stdin.read())"
    register(tmp_path, {"on": ["failure"], "command": [sys.executable, "-c", script]})
    assert send(tmp_path, NOTICE, say=print) == 1
    assert json.loads((tmp_path / "got").read_text())["sentence"] == "the model is missing"


def test_only_what_was_asked_for_is_told(tmp_path: Path, hook: Hook) -> None:
    register(tmp_path, {"on": ["promotion"], "webhook": hook.url})
    assert send(tmp_path, NOTICE, say=print) == 0
    assert hook.got == []


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ({"on": ["failure"]}, "one of the keys webhook and command, not both"),
        ({"webhook": "http://x", "command": ["y"]}, "one of the keys webhook and command, not both"),
        ({"webhok": "http://x", "command": ["y"]}, "unknown key 'webhok' (did you mean 'webhook'?)"),
        ({"on": ["failures"], "command": ["y"]}, "'failures' is not one of failure, regression, promotion"),
        ({"webhook": "ftp://x"}, "an address such as https://host/path"),
        ({"command": "echo"}, "a list of words"),
    ],
)
def test_a_wrong_target_names_what_is_wrong(tmp_path: Path, target: dict[str, object], sentence: str) -> None:
    register(tmp_path, target)
    with pytest.raises(BadInput) as refused:
        notify.targets(tmp_path)
    assert sentence in str(refused.value)
    said: list[str] = []
    assert send(tmp_path, NOTICE, say=said.append) == 0
    assert sentence in said[0]


def test_an_error_that_ends_a_run_is_told_and_passed_on(tmp_path: Path, hook: Hook) -> None:
    register(tmp_path, {"webhook": hook.url})
    with (
        pytest.raises(StudyFailed, match="no model"),
        notify.failures(tmp_path, records.a_study(), clock=lambda: AT, say=print),
    ):
        raise StudyFailed("no model", cause="model")
    told = json.loads(hook.got[0][1])
    assert (told["kind"], told["sentence"], told["facts"]["node"]) == ("failure", "no model", "n1")


@pytest.mark.parametrize(
    ("kind", "told"),
    [("start", False), ("ended", False), ("blackout", False), ("missed", True), ("too short", True)],
)
def test_a_night_that_did_not_happen_is_a_failure(kind: str, told: bool) -> None:
    found = Happening(kind=kind, schedule="nightly", node="gpu-1", sentence="why", at=AT)  # type: ignore[arg-type]
    notice = notify.happening(found)
    assert (notice is not None) == told
    if notice:
        assert notice.sentence == f"schedule nightly: {kind}: why"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(f"sqlite:///{tmp_path / 'tuner.db'}")
    yield made
    made.close()


def night(store: Store, number: int, ttft: float, engine: str = "0.32.0") -> Run:
    """One finished run with one trial."""
    study, begun = records.a_study(engine=engine), AT + timedelta(days=number)
    run = records.a_run(store, study, now=begun)
    trial = store.start_trial(
        study_id=study.id, run_id=run.id, candidate=Candidate({"max_num_seqs": 64}), number=number,
        attempt=0, seed=1, origin="search", now=begun, directory=None,
    )  # fmt: skip
    measured = Measurement(values={"ttft_p95_ms": ttft, "goodput_rps": 3.0})
    store.finish_trial(replace(trial, state=TrialState.COMPLETE, ended_at=begun, measurements=(measured,)))
    return store.save_run(replace(run, state=RunState.FINISHED, ended_at=begun))


def test_a_night_that_got_worse_is_told_once_per_objective(store: Store, tmp_path: Path, hook: Hook) -> None:
    register(tmp_path, {"on": ["regression"], "webhook": hook.url})
    study = records.a_study()
    for number, ttft in enumerate((100.0, 101.0, 150.0)):
        run = night(store, number, ttft)
        notify.concluded(tmp_path, store, study, run, clock=lambda: run.started_at, say=print)  # noqa: B023
    (told,) = [json.loads(body) for _, body in hook.got]
    assert told["facts"]["metric"] == "ttft_p95_ms"
    assert told["sentence"] == (
        "ttft_p95_ms of chat changed by +49 % (worse) since the night before,"
        " with the same engine, traffic and GPU"
    )


def test_another_engine_is_no_regression(store: Store, tmp_path: Path) -> None:
    night(store, 0, 100.0)
    run = night(store, 1, 150.0, engine="0.33.0")
    assert notify.regressions(store, records.a_study(engine="0.33.0"), run, run.started_at) == []


def test_a_run_that_found_a_challenger_tells_of_the_promotion(
    store: Store, tmp_path: Path, hook: Hook
) -> None:
    register(tmp_path, {"webhook": hook.url})
    run = records.a_run(store, records.a_study(), now=AT)
    said = records.a_conclusion(run, profiles={"challenger": PublishedProfile(id=7, version=3)})
    run = store.save_run(replace(run, state=RunState.FINISHED, ended_at=AT), said)
    notify.concluded(tmp_path, store, records.a_study(), run, clock=lambda: AT, say=print)
    (told,) = [json.loads(body) for _, body in hook.got]
    assert told["kind"] == "promotion"
    assert told["sentence"] == (
        "challenger of Qwen/Qwen2.5-7B-Instruct on n1 is version 3 now, moved by run:"
        " trade-off: Trial 2 is a trade-off."
    )
    assert told["facts"]["conclusion"] == said.to_json()
