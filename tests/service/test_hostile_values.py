"""What HTTP takes of free-form values: words by type; no path, repository, code, flag or foreign model."""

import json
from pathlib import Path
from typing import Any

import pytest
from fastapi import Request

from tests.service.test_stories import prepare_once
from tests.service.world import STUDY, World
from tuner.errors import BadInput, nearest
from tuner.service.problems import LONGEST_DETAIL, problem
from tuner.service.study_requests import check

MODEL = "Qwen/Qwen2.5-7B-Instruct"
TEXTS = ("../../etc/passwd", "/models/x", "evil/repo", "--trust-remote-code", "a b", "os.system", "http://h/x",
         "x;y",
         "$(id)", "`id`", "a\nb", "", "x" * 65, "~root", "file:x", "fp8 --middleware x")  # fmt: skip
OBJECTS: tuple[dict[str, Any], ...] = (
    {"method": "eagle", "model": "evil/repo", "num_speculative_tokens": 3},
    {"model": "/etc/passwd"},
    {"draft_model": "evil/repo"},
    {"method": "../x"},
    {"method": "ngram", "num_speculative_tokens": "3"},
    {"method": "ngram", "num_speculative_tokens": True},
    {"method": "ngram", "code_revision": "main"},
    {"method": "custom_class", "model": "os.system"},
    {"method": "ngram", "kv_connector_module_path": "evil"},
    {"method": ["ngram"]},
    {"method": {"a": "b"}},
    {"quantization": "evil/repo"},
)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("knob", ["quantization", "attention_backend", "moe_backend"])
def test_a_text_is_one_word(knob: str, text: str) -> None:
    with pytest.raises(BadInput, match="must be one word"):
        check(knob, [text], [MODEL], "baseline")


@pytest.mark.parametrize("given", OBJECTS, ids=str)
def test_an_object_has_known_keys_of_known_types_and_models_of_the_node(given: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        check("speculative_config", [json.dumps(given)], [MODEL], "baseline")


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 2**63])
def test_20_attack_a_number_is_one_that_an_engine_takes(value: float) -> None:
    with pytest.raises(BadInput, match="a number below"):
        check("max_num_seqs", [value], [MODEL], "baseline")


def test_20_attack_a_name_of_a_megabyte_is_not_compared_with_others() -> None:
    assert nearest("a" * 10**6, ["a" * 10**6]) == ""
    assert nearest("max_num_seq", ["max_num_seqs"]) == " (did you mean 'max_num_seqs'?)"


def test_what_means_no_harm_is_taken() -> None:
    own = {"method": "eagle3", "model": MODEL, "num_speculative_tokens": 3}
    check(
        "speculative_config", [json.dumps(own), '{"method": "ngram", "prompt_lookup_max": 4}'], [MODEL], "x"
    )
    check("quantization", ["fp8", "compressed-tensors", None], [MODEL], "x")
    check("max_num_seqs", [4, 8], [MODEL], "x")
    check("preemption", ["offload:8", "recompute"], [MODEL], "x")
    check("cudagraph_capture_sizes", ["[1,2,4]"], [MODEL], "x")
    check("kv_cache_dtype", ["fp8_e4m3"], [MODEL], "x")


@pytest.mark.parametrize(
    "change",
    [
        {"baseline": {"speculative_config": json.dumps(OBJECTS[0])}},
        {"baseline": {"quantization": "evil/repo"}},
        {"space": {"knobs": {"speculative_config": [OBJECTS[0], "default"]}}},
        {"space": {"knobs": {"quantization": ["fp8", "/tmp/x"]}}},
        {"space": {"name": "../x", "knobs": {"max_num_seqs": [4, 8]}}},
        {"slices": [{"start_s": 20, "duration_s": 1.0, "name": "../../x"}]},
        {"slices": [{"start_s": 20, "duration_s": 1.0, "name": "a b"}]},
        {"baseline": {"max_num_seqs": 10**400}},
        {"baseline": {"max_num_seqs": -(10**400)}},
        {"space": {"knobs": {"max_num_seqs": [4, 10**400]}}},
        {"baseline": {"cudagraph_capture_sizes": "[" + "1," * 100_000 + "1]"}},
        {"name": "../x"},
        {"workload": "a/b"},
        {"node": "../local"},
    ],
    ids=str,
)
def test_a_study_over_http_has_no_such_value(tmp_path: Path, change: dict[str, Any]) -> None:
    world = World(tmp_path)
    digest = prepare_once(tmp_path)
    refused = world.client("run").post("/v1/studies", json={**STUDY, "trace": digest, **change})
    assert refused.status_code in (400, 422), refused.text
    assert "trace" not in refused.json()["detail"]
    assert not world.store.studies()
    assert not list(tmp_path.glob("studies/*"))
    world.store.close()


def test_a_key_of_a_nodes_file_that_is_misspelt_is_named(tmp_path: Path) -> None:
    world = World(tmp_path)
    digest = prepare_once(tmp_path)
    path = tmp_path / "nodes" / "local.yaml"
    path.write_text(path.read_text().replace("models:", "modles:"))
    refused = world.client("run").post("/v1/studies", json={**STUDY, "trace": digest})
    assert refused.status_code == 400
    assert "unknown key 'modles' (did you mean 'models'?)" in refused.json()["detail"]
    path.write_text("engine: {kind: simulated, crad: h100-80}\nmodels: [x]\n")
    refused = world.client("run").post("/v1/studies", json={**STUDY, "trace": digest})
    assert "crad" in refused.json()["detail"]
    world.store.close()


def test_a_pull_that_names_no_place_is_a_bad_request(tmp_path: Path) -> None:
    world = World(tmp_path)
    answer = world.client("read").get(f"/v1/profiles/resolve?model={MODEL}&workload=chat")
    assert answer.status_code == 400
    assert "give a node or a GPU class" in answer.json()["detail"]
    assert (
        world.client("read").get(f"/v1/profiles/resolve?model={MODEL}&workload=chat&node=n").status_code
        == 404
    )
    world.store.close()


def test_readyz_tells_no_password(tmp_path: Path) -> None:
    from tuner.settings import Settings

    world = World(tmp_path)
    for url in (
        "postgresql://tuner:hunter2@127.0.0.1:1/t",
        "postgresql://127.0.0.1:1/t?user=u&password=hunter2",
    ):
        world.store.database.name = url
        settings = Settings(home=tmp_path, database_url=url)
        from tuner.history.database import Database
        from tuner.masking import MASK

        database = Database(settings.url, patience_s=0.1)
        assert "hunter2" not in database.name
        assert MASK in database.name
        world.store.database.check = database.check  # type: ignore[method-assign]
        answer = world.client().get("/readyz")
        assert answer.status_code == 503
        assert "hunter2" not in answer.text
    world.store.close()


HALF = "\ud800"
SCHEDULE: dict[str, Any] = {
    "node": "local",
    "cron": "0 22 * * *",
    "spec": {"study": "tiny", "hours": 1, "upgrade": {"to": "x"}},
}


@pytest.mark.parametrize(
    ("way", "path", "body"),
    [
        ("PUT", "/v1/schedules/s", {**SCHEDULE, "spec": {**SCHEDULE["spec"], "upgrade": {"alias": HALF}}}),
        ("PUT", "/v1/schedules/s", {**SCHEDULE, "spec": {**SCHEDULE["spec"], "study": HALF}}),
        ("PUT", "/v1/schedules/s", {**SCHEDULE, "spec": {**SCHEDULE["spec"], "blackout": [HALF]}}),
        ("PUT", "/v1/schedules/s", {**SCHEDULE, "timezone": HALF}),
        ("POST", "/v1/studies", {**STUDY, "baseline": {HALF: 1}}),
        ("POST", "/v1/studies", {**STUDY, "baseline": {"quantization": HALF}}),
        ("POST", "/v1/studies", {**STUDY, "objectives": [HALF]}),
        ("POST", "/v1/studies", {**STUDY, "space": {"about": HALF, "knobs": {"max_num_seqs": [4]}}}),
        ("POST", "/v1/runs", {"study": HALF}),
        ("POST", "/v1/comparisons", {"study": "tiny", "arms": ["today", HALF]}),
        ("POST", "/v1/upgrade-checks", {"study": "tiny", "to": "x", "alias": HALF}),
        ("POST", "/v1/traces/uploads", {"name": HALF, "size": 1, "sha256": "0" * 64}),
    ],
    ids=lambda each: str(sorted(each) if isinstance(each, dict) else each),
)
def test_20_attack_a_text_that_no_answer_can_show_is_refused(
    tmp_path: Path, way: str, path: str, body: dict[str, Any]
) -> None:
    world = World(tmp_path)
    given = {"trace": "0", **body} if path == "/v1/studies" else body
    for media in ("application/json", "text/plain"):
        headers = {"Content-Type": media}
        refused = world.client("run").request(way, path, content=json.dumps(given), headers=headers)
        assert refused.status_code == 422, refused.text
    world.store.close()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"blackout": ["2026-01-01"] * 1001}, "at most 1000 dates"),
        ({"upgrade": {"to": "x", "alias": "a" * 4097}}, "at most 4096 characters"),
        ({"upgrade": {"to": "x" * 4097}}, "at most 4096 characters"),
        ({"upgrade": {"to": "x", "from": "x" * 4097}}, "at most 4096 characters"),
    ],
    ids=lambda each: str(each)[:30],
)
def test_20_attack_a_schedule_that_takes_long_to_read_is_refused(
    tmp_path: Path, spec: dict[str, Any], said: str
) -> None:
    world = World(tmp_path)
    body = {**SCHEDULE, "spec": {"study": "tiny", "hours": 1, **spec}}
    refused = world.client("run").put("/v1/schedules/s", json=body)
    assert (refused.status_code, said in refused.text) == (400, True), refused.text
    world.store.close()


@pytest.mark.parametrize("change", [{"slo": {"classes": {f"tenant{n}": {} for n in range(101)}}},
                                    {"winner": {"weights": {f"x{n}": 1 for n in range(101)}}}],
                         ids=["classes", "weights"])  # fmt: skip
def test_20_attack_a_study_that_takes_long_to_read_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    world = World(tmp_path)
    refused = world.client("run").post("/v1/studies", json={**STUDY, "trace": "0", **change})
    assert "at most 100 items" in refused.text
    world.store.close()


def test_20_attack_a_moment_before_the_calendar_is_a_bad_request(tmp_path: Path) -> None:
    world = World(tmp_path)
    for asked in ("until=0001-01-01T00:00:00Z", "since=0001-01-01T00:00:00%2B14:00"):
        assert world.client("read").get(f"/v1/history?model=x&{asked}").status_code in (200, 400), asked
    world.store.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/studies", {**STUDY, "trace": "0", "baseline": {str(n): [1] for n in range(40_000)}}),
        ("/v1/studies", {**STUDY, "trace": "0", "slo": {"classes": {"a" * 900_000: {}}}}),
        ("/v1/studies", {**STUDY, "trace": "0", "not_worse": {"ttft_p95_ms": "9" * 900_000}}),
        ("/v1/studies", {**STUDY, "trace": "0", "space": {"vllm": ">=1" * 5000, "knobs": {}}}),
        ("/v1/runs", {"study": "tiny", "x" * 900_000: 1}),
        ("/v1/runs", {"study": "tiny", **{str(n): 1 for n in range(40_000)}}),
    ],
    ids=["many wrong values", "long key", "long text", "long range", "long field", "many fields"],
)  # fmt: skip
def test_20_attack_what_is_said_of_a_wrong_request_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """60,000 wrong values were answered with 20 MB, after 112 s of a search for secrets in the loop."""
    from tuner import masking

    searched = 0
    text = masking.text

    def counted(words: str) -> str:
        nonlocal searched
        searched += len(words)
        return text(words)

    world = World(tmp_path)
    prepare_once(tmp_path)
    client = world.client("run")
    monkeypatch.setattr(masking, "text", counted)
    refused = client.post(path, json=body)
    assert refused.status_code in (400, 422), refused.text[:500]
    assert len(refused.content) < 250_000
    assert len(refused.json().get("errors", ())) <= 1
    assert searched < 500_000
    world.store.close()


def test_20_attack_a_secret_that_is_cut_off_is_masked_first(tmp_path: Path) -> None:
    world = World(tmp_path)
    request, secret = Request({"type": "http", "app": world.app}), "hunter2" * 5
    for before in range(LONGEST_DETAIL - 60, LONGEST_DETAIL):
        body = bytes(problem(request, 400, f"{'x ' * (before // 2)}https://u:{secret}@host/").body).decode()
        assert "hunter2" not in body
    world.store.close()


GRID = {"from": 1, "to": 100}


@pytest.mark.parametrize(
    "space",
    [
        {"knobs": {"max_num_seqs": {"from": 1, "to": 10**400, "step": 1}}},
        {"knobs": {"max_num_seqs": {**GRID, "per_octave": 10**400}}},
        {"knobs": {"max_num_seqs": {**GRID, "step": 1, "multiple": 10**400}}},
        {"knobs": {"max_num_seqs": {**GRID, "step": 1.5e-300}}},
        {"knobs": {"gpu_memory_utilization": {"from": 1.5e-300, "to": 1.5e18, "per_octave": 1e18}}},
        {"knobs": {"max_num_seqs": {"from": 1, "to": 1.5e300, "step": 1}}},
        {"vllm": ">=" + "1" * 10_000, "knobs": {"max_num_seqs": [4]}},
        {"vllm": ">=0.10," * 2000, "knobs": {"max_num_seqs": [4]}},
        {"knobs": {"speculative_config": ["[" * 3000]}},
        {"knobs": {"speculative_config": ['{"num_speculative_tokens":' + "9" * 3900 + "}"]}},
        {"knobs": {"cudagraph_capture_sizes": ["[" * 3000]}},
    ],
    ids=lambda each: str(each)[:70],
)
def test_20_attack_a_space_that_cannot_be_computed_with_is_a_wrong_request(
    tmp_path: Path, space: dict[str, Any]
) -> None:
    """Numbers that no float holds, and texts nested too deeply, were internal errors."""
    world = World(tmp_path)
    digest = prepare_once(tmp_path)
    refused = world.client("run").post("/v1/studies", json={**STUDY, "trace": digest, "space": space})
    assert refused.status_code in (400, 422), refused.text[:500]
    assert not list(tmp_path.glob("studies/*"))
    world.store.close()


def test_20_attack_an_answer_names_no_path_of_the_host(tmp_path: Path) -> None:
    world = World(tmp_path)
    prepare_once(tmp_path)
    (tmp_path / "studies").mkdir(exist_ok=True)
    (tmp_path / "studies" / "broken.yaml").write_text("name: broken\nmodle: x\n")
    refused = world.client("run").post("/v1/runs", json={"study": "broken"})
    assert refused.status_code == 400
    assert "broken.yaml line 2: unknown key 'modle'" in refused.text
    assert str(tmp_path) not in refused.text
    world.store.close()
