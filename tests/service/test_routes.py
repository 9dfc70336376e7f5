"""What the routes answer, over a history with a row in every table."""

import gzip
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from tests.history.records import NOW
from tests.service.world import World
from tests.tuning.studies import TRACE
from tuner.commands import profile as cli_profile
from tuner.history.store import Store
from tuner.profiles import export, registry
from tuner.records import JSON, ProfileKey
from tuner.service.schemas import pack

MODEL = "Qwen/Qwen2.5-7B-Instruct"
KEY = ProfileKey(model=MODEL, target="n1", workload="chat")
PULL = f"/v1/profiles/resolve?model={MODEL}&node=n1&workload=chat"
CHAMPION = f"/v1/aliases/champion?model={MODEL}&target=n1&workload=chat"


@pytest.fixture
def admin(filled: World) -> TestClient:
    return filled.client("admin")


def detail(response: object) -> str:
    body = response.json()  # type: ignore[attr-defined]
    assert response.headers["content-type"] == "application/problem+json"  # type: ignore[attr-defined]
    assert body["status"] == response.status_code  # type: ignore[attr-defined]
    assert body["request_id"] == response.headers["x-request-id"]  # type: ignore[attr-defined]
    return str(body["detail"])


def test_refusals_are_problems_with_one_sentence(admin: TestClient) -> None:
    assert "did you mean 'chat'" in detail(admin.get("/v1/studies/chet"))
    assert "path.trial_id" in detail(admin.get("/v1/trials/x"))
    assert "first page" in detail(admin.get("/v1/runs?cursor=%21"))
    assert detail(admin.get("/nowhere")) == "Not Found"
    assert detail(admin.put("/v1/runs")) == "Method Not Allowed"
    assert "token" in detail(admin.get("/v1/runs", headers={"Authorization": "Bearer no"}))


def test_a_request_id_of_the_caller_is_kept_when_it_is_a_plain_word(admin: TestClient) -> None:
    given = admin.get("/healthz", headers={"X-Request-Id": "deploy-17.abc"})
    assert given.headers["x-request-id"] == "deploy-17.abc"
    assert admin.get("/healthz", headers={"X-Request-Id": "a b"}).headers["x-request-id"] != "a b"


@pytest.mark.parametrize(
    "path", ["/v1/runs", "/v1/studies", "/v1/studies/chat/trials", "/v1/profiles", "/v1/audit"]
)
def test_pages_hold_everything_once(filled: World, admin: TestClient, path: str) -> None:
    for n in range(3):
        filled.store.add_audit(actor="me", action="x", target=str(n), reason="", now=NOW)
    whole = admin.get(path).json()["items"]
    found, cursor = [], None
    while True:
        page = admin.get(path, params={"limit": 1, **({"cursor": cursor} if cursor else {})}).json()
        assert len(page["items"]) <= 1
        found += page["items"]
        if (cursor := page["next"]) is None:
            break
    assert found == whole
    assert len(whole) >= 1


def test_a_cursor_of_another_kind_is_refused(admin: TestClient) -> None:
    for path, cursor in (
        ("/v1/profiles", pack("x")),
        ("/v1/studies/chat/trials", pack(1)),
        ("/v1/audit", pack(2**40)),
        ("/v1/runs", pack(3)),
    ):
        assert admin.get(path, params={"cursor": cursor}).status_code == 400


def test_infinity_is_null(admin: TestClient) -> None:
    trial = next(
        t for t in admin.get("/v1/studies/chat/trials").json()["items"] if t["state"] == "INFEASIBLE"
    )
    assert trial["measurements"][0]["values"]["ttft_p95_ms"] is None


def test_trials_by_state(admin: TestClient) -> None:
    """The run of the trial without an end has lost its process."""
    for asked, states in (
        (("interrupted", "INFEASIBLE"), {"interrupted", "INFEASIBLE"}),
        (("RUNNING", "INFEASIBLE"), {"INFEASIBLE"}),
        (("RUNNING", "interrupted"), {"interrupted"}),
        (("interrupted",), {"interrupted"}),
        (("RUNNING",), set()),
    ):
        found = admin.get("/v1/studies/chat/trials", params={"state": asked}).json()["items"]
        assert {trial["state"] for trial in found} == states, asked


def test_the_front_stands_beside_the_baseline(admin: TestClient) -> None:
    found = admin.get("/v1/studies/chat/front").json()
    assert found["baseline"]["number"] == 0
    assert [trial["number"] for trial in found["front"]] == [2]


def test_large_answers_are_compressed(filled: World, admin: TestClient) -> None:
    answer = admin.get("/v1/openapi.json", headers={"Accept-Encoding": "gzip"})
    assert answer.headers["content-encoding"] == "gzip"
    small = admin.get("/healthz", headers={"Accept-Encoding": "gzip"})
    assert "content-encoding" not in small.headers
    assert gzip  # the client has unpacked it
    assert answer.json()["openapi"].startswith("3.")


def test_a_pull_again_is_304_until_something_moves(filled: World, admin: TestClient) -> None:
    first = admin.get(PULL)
    assert first.status_code == 200
    assert first.json()["version"] == 2
    for _ in range(3):
        again = admin.get(PULL, headers={"If-None-Match": f'"other", {first.headers["etag"]}'})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == first.headers["etag"]
    elsewhere = Store(filled.settings.url)
    registry.rollback(elsewhere, KEY, actor="cli", reason="bad", now=NOW)
    elsewhere.close()
    after = admin.get(PULL, headers={"If-None-Match": first.headers["etag"]})
    assert (after.status_code, after.json()["version"]) == (200, 1)


def test_kept_answers_are_the_tokens_own(filled: World, admin: TestClient) -> None:
    assert admin.get(PULL).status_code == 200
    assert filled.client().get(PULL).status_code == 401
    assert filled.client().get(PULL, headers={"Authorization": "Bearer tuner_x_y"}).status_code == 401


def test_a_kept_answer_ends_with_its_token(filled: World) -> None:
    token = filled.token("read", days=0.0003)
    client = filled.client()
    client.headers["Authorization"] = f"Bearer {token}"
    assert client.get(PULL).status_code == 200
    filled.clock.forward(days=1)
    assert client.get(PULL).status_code == 401


def test_a_pull_tells_nothing_there_from_not_for_this_engine(admin: TestClient) -> None:
    assert admin.get(PULL + "&alias=challenger").status_code == 404
    assert "engine 0.32.0, not 0.31.0" in detail(admin.get(PULL + "&engine_version=0.31.0"))
    assert admin.get(PULL + "&engine_version=0.31.0").status_code == 409
    assert admin.get(PULL + "&engine_version=0.32.0%2Bcpu").status_code == 200
    other = f"/v1/profiles/resolve?model={MODEL}&gpu_class=a100-80x1&workload=chat"
    assert admin.get(other).status_code == 404


def test_the_only_workload_may_be_left_out_and_several_are_named(filled: World, admin: TestClient) -> None:
    pull, alias = (path.replace("&workload=chat", "") for path in (PULL, CHAMPION))
    assert admin.get(pull).content == admin.get(PULL).content
    assert admin.get(alias).json() == admin.get(CHAMPION).json()
    assert "did you mean" in detail(admin.get(pull.replace("Qwen2.5", "Qwen2")))
    key = ProfileKey(model=MODEL, target="n1", workload="code")
    (latest, *_) = filled.store.profiles()
    names = ("candidate", "engine_version", "gpu_class", "study_id", "trial_id", "argv", "env", "evidence")
    filled.store.add_profile(key=key, now=NOW, **{name: getattr(latest, name) for name in names})
    for path in (pull, alias):
        refused = admin.get(path)
        assert (refused.status_code, "profiles for chat, code" in detail(refused)) == (400, True)
        assert filled.client().get(path).status_code == 401
    assert admin.get(PULL).status_code == 200


@pytest.mark.parametrize("format", ["vllm-yaml", "args", "env", "json", "helm-production-stack", "systemd"])
def test_formats_have_their_own_tags(admin: TestClient, format: str) -> None:
    found = admin.get(f"{PULL}&format={format}")
    assert "96" in found.text
    assert format in found.headers["etag"]
    profile = admin.get(f"/v1/profiles/2/export?format={format}")
    assert profile.content == found.content


def test_promotion_needs_the_generation_that_was_seen(filled: World, admin: TestClient) -> None:
    seen = admin.get(CHAMPION)
    assert seen.headers["etag"] == '"2"'
    body = {"version": 1, "reason": "older is better"}
    assert admin.put(CHAMPION, json=body).status_code == 428
    assert admin.put(CHAMPION, json=body, headers={"If-Match": "2"}).status_code == 400
    assert admin.put(CHAMPION, json=body, headers={"If-Match": '"1"'}).status_code == 412
    refused = admin.put(CHAMPION, json=body, headers={"If-Match": '"2"'})
    assert refused.status_code == 409
    assert "did not meet the SLO" in detail(refused)
    forced = admin.put(CHAMPION, json={**body, "force": True}, headers={"If-Match": '"2"'})
    assert (forced.status_code, forced.headers["etag"]) == (200, '"3"')
    again = admin.put(CHAMPION, json={**body, "force": True}, headers={"If-Match": '"3"'})
    assert again.headers["etag"] == '"3"'
    entry = filled.store.audit()[0]
    assert (entry.actor, entry.action, entry.reason) == ("token:ci", "promote", "older is better")


def test_rollback_freeze_and_the_events_of_an_alias(admin: TestClient) -> None:
    back = admin.post(CHAMPION.replace("?", "/rollback?"), json={"reason": "errors"})
    assert back.json()["to_version"] == 1
    further = admin.post(CHAMPION.replace("?", "/rollback?"), json={"reason": "errors"})
    assert further.status_code == 409
    assert admin.post(CHAMPION.replace("?", "/freeze?"), json={"reason": "holiday"}).status_code == 200
    move = {"version": 2, "reason": "x", "force": True}
    assert admin.put(CHAMPION, json=move, headers={"If-Match": '"4"'}).status_code == 409
    events = admin.get(CHAMPION.replace("?", "/events?")).json()
    assert [event["to_version"] for event in events] == [1, 2, 1, 1]


def test_history_says_what_was_best_and_how_sure(admin: TestClient) -> None:
    asked = {"model": MODEL, "metric": "ttft_p95_ms", "since": (NOW - timedelta(days=1)).isoformat()}
    found = admin.get("/v1/history", params=asked).json()
    (place,) = found["places"]
    (night,) = place["nights"]
    assert (place["node"], night["date"], night["number"]) == ("n1", "2026-03-01", 2)
    assert night["sure"].startswith("confirmed")
    made = night["from_baseline"]
    assert (made["before"], made["after"], made["change"], made["word"]) == (200.0, 90.0, -0.55, "better")
    assert (night["value"], night["baseline"], night["outcome"]) == (90.0, 200.0, "trade-off")
    front = admin.get("/v1/studies/chat/front").json()
    assert (
        front["confirmation"]
        == front["conclusion"]
        == admin.get(f"/v1/runs/{night['run_id']}").json()["conclusion"]
    )
    assert front["winner"] == night["number"]
    unknown = admin.get("/v1/history", params={**asked, "metric": "ttft_p59_ms"})
    assert "did you mean" in detail(unknown)


def test_history_of_many_nodes_comes_in_pages(filled: World, admin: TestClient) -> None:
    study = filled.store.study("chat")
    for node in ("n2", "n3"):
        filled.store.add_study(replace(study, id=node * 32, node=node))
    asked = {"model": MODEL, "metric": "ttft_p95_ms", "since": NOW.isoformat(), "limit": "1"}
    seen, cursor = [], None
    for _ in range(3):
        page = admin.get("/v1/history", params={**asked, **({"cursor": cursor} if cursor else {})}).json()
        seen.append([place["node"] for place in page["places"]])
        cursor = page["next"]
    assert (seen, cursor) == ([["n1"], [], []], None)
    assert admin.get("/v1/history", params={**asked, "cursor": pack(3)}).status_code == 400


def test_a_run_of_an_unknown_study_is_not_found(admin: TestClient) -> None:
    unknown = admin.post("/v1/runs", json={"study": "chet"})
    assert (unknown.status_code, "did you mean 'chat'" in detail(unknown)) == (404, True)
    elsewhere = admin.post("/v1/runs", json={"study": "chat"})
    assert (elsewhere.status_code, "was not made here" in detail(elsewhere)) == (409, True)


def test_a_trace_arrives_in_pieces_and_its_digest_is_checked(filled: World, admin: TestClient) -> None:
    content = TRACE.read_bytes()
    half = len(content) // 2
    begin = {"name": "sent", "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    upload = admin.post("/v1/traces/uploads", json=begin).json()
    where = f"/v1/traces/uploads/{upload['id']}"
    assert admin.post(where + "/finish").status_code == 409
    assert admin.patch(where, content=content[:half], headers={"Upload-Offset": "0"}).json()["offset"] == half
    wrong = admin.patch(where, content=content[half:], headers={"Upload-Offset": "0"})
    assert f"begins at {half}" in detail(wrong)
    too_long = admin.patch(where, content=content[half:] + b"x", headers={"Upload-Offset": str(half)})
    assert too_long.status_code == 400
    assert admin.patch(where, content=content[half:], headers={"Upload-Offset": str(half)}).status_code == 200
    assert admin.get(where).json()["offset"] == len(content)
    done = admin.post(where + "/finish")
    assert done.status_code == 201, done.text
    assert filled.store.trace("sent").digest == done.json()["digest"]
    assert "path" not in done.json()
    assert admin.get(where).status_code == 404


def test_a_trace_whose_bytes_are_others_is_refused(filled: World, admin: TestClient) -> None:
    begin = {"name": "sent", "size": 4, "sha256": "0" * 64}
    where = f"/v1/traces/uploads/{admin.post('/v1/traces/uploads', json=begin).json()['id']}"
    admin.patch(where, content=b"abcd", headers={"Upload-Offset": "0"})
    assert "SHA-256" in detail(admin.post(where + "/finish"))
    begin["sha256"] = hashlib.sha256(b"abcd").hexdigest()
    where = f"/v1/traces/uploads/{admin.post('/v1/traces/uploads', json=begin).json()['id']}"
    admin.patch(where, content=b"abcd", headers={"Upload-Offset": "0"})
    refused = detail(admin.post(where + "/finish"))
    assert str(filled.home) not in refused
    piece = admin.patch(where, content=b"x" * (8 * 1024**2 + 1), headers={"Upload-Offset": "0"})
    assert piece.status_code == 413
    endless = admin.post("/v1/studies", content=b" " * (17 * 1024**2))
    assert endless.status_code == 413


def test_metrics_count_trials_by_state_and_reason_once(filled: World, admin: TestClient) -> None:
    for _ in range(2):
        told = admin.get("/metrics").text
        assert 'tuner_trials_total{reason="",state="COMPLETE"} 2.0' in told
        assert 'tuner_trials_total{reason="",state="interrupted"} 1.0' in told
        assert 'tuner_runs{state="FINISHED"} 1.0' in told
        assert "tuner_orphan_trials 1.0" in told
        assert 'tuner_hypervolume{node="n1",study="chat"}' in told
        assert 'tuner_last_success_timestamp_seconds{node="n1"}' in told
    assert 'tuner_http_requests_total{method="GET",route="/metrics",status="200"} 1.0' in told


def test_the_schema_has_an_example_for_every_request_body(world: World) -> None:
    schema = world.app.openapi()
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json")
            if content is None or not operation["requestBody"].get("required", False):
                continue
            name = content["schema"]["$ref"].rpartition("/")[2]
            assert schema["components"]["schemas"][name].get("examples"), f"{method} {path}: {name}"


def test_nodes_are_put_back_to_work_by_an_administrator(filled: World, admin: TestClient) -> None:
    done = admin.put("/v1/nodes/n1/state", json={"state": "fault", "reason": "fan"})
    assert done.json()["state"] == "fault"
    assert filled.store.node("n1").state == "fault"
    assert json.loads(admin.get("/v1/nodes/n1").text)["state"] == "fault"


def test_nothing_of_this_hosts_paths_is_told(filled: World, admin: TestClient, tmp_path: Path) -> None:
    for path in ("/v1/studies", "/v1/traces", "/v1/runs", "/v1/nodes"):
        assert str(tmp_path) not in admin.get(path).text


def test_M20_what_was_not_judged_is_not_promoted_over_http_either(filled: World, admin: TestClient) -> None:
    store, profile = filled.store, filled.store.profile(2)
    evidence: dict[str, JSON] = {
        **profile.evidence,
        "confirmed": True,
        "slo_met": True,
        "unjudged": ["kv_cache_dtype"],
    }
    body = {"reason": "won"}
    for quality, status in (("on", 409), ("off", 200)):
        made = store.add_profile(
            key=profile.key, candidate=profile.candidate, engine_version=profile.engine_version,
            gpu_class=profile.gpu_class, study_id=profile.study_id, trial_id=profile.trial_id,
            argv=profile.argv, env={}, evidence={**evidence, "quality": quality}, now=filled.clock(),
        )  # fmt: skip
        answer = admin.put(CHAMPION, json={**body, "version": made.version}, headers={"If-Match": '"2"'})
        assert answer.status_code == status
        assert "answers were not judged" in answer.text


@pytest.fixture
def made_up() -> Iterator[str]:
    """The export format of docs/extending.md, registered as it stands there."""
    section = (
        (Path(__file__).parents[2] / "docs" / "extending.md").read_text().partition("## An export format")[2]
    )
    block = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert block is not None
    exec(block[1], {})
    yield "dockerfile"
    del export.FORMATS["dockerfile"]


def test_22_4_an_export_format_is_added_in_one_place(
    made_up: str, filled: World, admin: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line, the API, its OpenAPI and completion know it, from its one entry."""
    (profile, *_) = filled.store.profiles()
    answered = admin.get(f"/v1/profiles/{profile.id}/export?format={made_up}")
    assert answered.status_code == 200
    assert answered.headers["content-type"] == "text/plain; charset=utf-8"
    assert 'ENTRYPOINT ["vllm", "serve", "Qwen/Qwen2.5-7B-Instruct"' in answered.text
    parameters = filled.app.openapi()["paths"]["/v1/profiles/{profile_id}/export"]["get"]["parameters"]
    (shown,) = [each["schema"] for each in parameters if each["name"] == "format"]
    assert shown["enum"] == list(export.FORMATS)
    assert made_up in shown["enum"]
    monkeypatch.setenv("TUNER_HOME", str(filled.home))
    monkeypatch.setenv("TUNER_DATABASE_URL", str(filled.store.database.url))
    printed = CliRunner().invoke(cli_profile.app, ["export", str(profile.id), "--format", made_up])
    assert printed.exit_code == 0, printed.output
    assert printed.stdout == answered.text
    assert cli_profile._formats("dock") == [made_up]


def test_an_unknown_export_format_is_refused_with_the_nearest(filled: World, admin: TestClient) -> None:
    (profile, *_) = filled.store.profiles()
    refused = admin.get(f"/v1/profiles/{profile.id}/export?format=kserv")
    assert refused.status_code == 422
    assert "did you mean 'kserve'" in detail(refused)


def test_20_attack_uploads_under_way_and_the_history_keep_their_room(
    filled: World, admin: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    mib, free = 1024**2, 3 * 1024**3
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    begin = {"name": "sent", "size": 600 * mib, "sha256": "0" * 64}
    first = admin.post("/v1/traces/uploads", json=begin)
    assert first.status_code == 201
    assert "too little room" in detail(admin.post("/v1/traces/uploads", json=begin))
    assert admin.delete(f"/v1/traces/uploads/{first.json()['id']}").status_code == 204
    free = 1024**3
    assert "too little room" in detail(admin.post("/v1/traces/uploads", json={**begin, "size": 1}))
