"""Comparisons and upgrade checks over HTTP and by schedule, carried out by real controllers."""

import json
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.history.records import a_study
from tests.service.world import STUDY, World, prepare
from tests.tuning.studies import STUDY as STUDY_FILE
from tests.tuning.studies import tuner, wait_for, write
from tuner.conclusions import UpgradeFinding
from tuner.history.store import Store
from tuner.records import Run, RunState
from tuner.service.study_requests import ComparisonRequest, UpgradeRequest
from tuner.tuning.upgrade import NothingNew, unchecked

HERE = socket.gethostname()
NODE = """\
engine: {kind: simulated, clock: virtual, args: {max-model-len: 16384}}
engines:
  slow: {kind: simulated, clock: virtual, args: {max-model-len: 16384}, env: {TUNER_SIM_RELEASE: SLOW}}
  own: {kind: simulated, clock: virtual, args: {max-model-len: 16384}}
models: [Qwen/Qwen2.5-7B-Instruct]
""".replace("SLOW", "'" + json.dumps({"version": "0.33.0", "slower": 1.25}) + "'")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A service with two registered engines, and a study."""
    home = tmp_path_factory.mktemp("home")
    digest = prepare(home)
    (home / "nodes" / "local.yaml").write_text(NODE)
    found = World(home)
    longer = {"baseline": {}, "plan": "brief", "slices": [{"start_s": 20, "duration_s": 8}]}
    made = found.client().post("/v1/studies", json={**STUDY, **longer, "trace": digest})
    assert made.status_code == 201, made.text
    yield found
    found.store.close()


def ended(world: World, run_id: str) -> Run:
    """The run, once its controller has ended it and itself."""
    wait_for(lambda: world.store.run(run_id).state is not RunState.RUNNING)
    run = world.store.run(run_id)
    wait_for(lambda: not world.runner.alive(run))
    return run


def posted(client: TestClient, path: str, **body: object) -> str:
    answer = client.post(path, json={"study": "tiny", **body})
    assert answer.status_code == 202, answer.text
    assert answer.headers["location"] == f"/v1/runs/{answer.json()['id']}"
    return str(answer.json()["id"])


@pytest.mark.slow
def test_25_1_registered_engines_are_compared_over_http(world: World) -> None:
    client = world.client()
    asked = {"arms": ["today", "new=today@slow"], "rounds": 2, "margin": 0.2}
    run_id = posted(client, "/v1/comparisons", **asked)
    run = ended(world, run_id)
    assert run.state is RunState.FINISHED, run.reason
    said = client.get(f"/v1/runs/{run_id}").json()["conclusion"]
    (arm,) = said["finalists"]
    assert (said["baseline"]["name"], arm["name"], arm["engine"]) == ("today", "new", "0.33.0")
    assert "worse" in {change["word"] for change in arm["changes"]}
    assert run.summary["margin"] == 0.2
    page = client.get(f"/studies/{run.study_id[:16]}").text
    for part in ("new is worse than today", "today → new", "0.32.0 → <strong>0.33.0", "side by side"):
        assert part in page, "I27: a comparison has its page, with a card for each arm"
    assert 'class="answer' not in client.get("/").text, "I27: it is no answer for its node"
    nights = client.get("/v1/history", params={"model": "Qwen/Qwen2.5-7B-Instruct", "metric": "ttft_p95_ms"})
    assert nights.json()["places"] == [], "I27: and no night"
    told = client.get("/metrics").text
    assert "# TYPE tuner_confirmed_value" in told
    assert "tuner_confirmed_value{" not in told, "I27: nor a gain of its node"
    assert run_id in {row.target for row in world.store.audit() if row.action == "run"}
    shown = client.get(f"/v1/studies/{run.study_id}").json()["spec"]
    assert {arm["engine"]["version"] for arm in shown["arms"]} == {"0.32.0", "0.33.0"}
    told = client.get(f"/v1/runs/{run_id}").json()["summary"]["compared"]
    assert [arm["engine"]["version"] for arm in told] == ["0.32.0", "0.33.0"], "each arm's own"
    for engine in (shown["engine"], *(arm["engine"] for arm in (*shown["arms"], *told))):
        assert not engine.keys() & {"env", "python", "command", "stop_command"}, "20_attack: this host's"


def test_25_3_an_upgrade_is_checked_over_http(world: World) -> None:
    asked = {"to": "slow", "from": "own", "alias": "today", "rounds": 2}
    run = ended(world, posted(world.client(), "/v1/upgrade-checks", **asked))
    found = UpgradeFinding.from_json(run.summary["upgrade"])
    assert (found.old, found.new, found.advice, found.fault) == ("0.32.0", "0.33.0", "stay", "code")
    listed = world.client().get("/studies").text
    assert "FINISHED: advice: stay" in listed, "as `tuner run list` says"
    page = world.client().get(f"/studies/{run.study_id[:16]}").text
    assert page.index("Advice: stay.") < page.index("new version is worse than old version"), "I27"

    def again(configuration: str) -> None:
        """What a schedule asks of the same versions."""
        asked = partial(unchecked, new="slow", old="own", configuration=configuration, files=False)
        world.app.state.service.studies.compared("tiny", asked)

    with pytest.raises(NothingNew, match=r"0\.33\.0 was checked on .* already: stay"):
        again("today")
    opened = {**found.to_json(), "fault": "open"}
    world.store.save_run(replace(run, summary={**run.summary, "upgrade": opened}))
    again("today")


@pytest.mark.parametrize(
    ("path", "body", "status", "part"),
    [
        ("/v1/comparisons", {"arms": ["today", "today@/opt/vllm/bin/python"]}, 422, "arms"),
        ("/v1/comparisons", {"arms": ["today", "--max-num-seqs 4"]}, 422, "arms"),
        ("/v1/comparisons", {"arms": ["today", "vllm serve x"]}, 422, "arms"),
        ("/v1/comparisons", {"arms": ["today", "space.yaml"]}, 404, "not an alias"),
        ("/v1/comparisons", {"arms": ["today", "today@slwo"]}, 404, "did you mean 'slow'"),
        ("/v1/comparisons", {"arms": ["today"]}, 422, "arms"),
        ("/v1/comparisons", {"arms": ["today", "today"]}, 400, "two arms have the name"),
        ("/v1/comparisons", {"arms": ["today", "chmpion"]}, 404, "an arm is a profile's id"),
        ("/v1/comparisons", {"study": "none", "arms": ["today", "defaults"]}, 404, "none"),
        ("/v1/upgrade-checks", {"to": "/opt/vllm/bin/python"}, 422, "to"),
        ("/v1/upgrade-checks", {"to": "vllm:v1", "alias": "today"}, 422, "to"),
        ("/v1/upgrade-checks", {"to": "python3", "alias": "today"}, 404, "no engine 'python3'"),
        ("/v1/upgrade-checks", {"to": "own", "alias": "today"}, 400, "same engine"),
        ("/v1/upgrade-checks", {"to": "slow", "alias": "study.yaml"}, 404, "not an alias"),
    ],
)
def test_25_1_neither_a_path_nor_a_command_is_taken_over_http(
    world: World, path: str, body: dict[str, object], status: int, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(world.home)  # space.yaml is a file here
    before = len(world.store.studies()), len(world.store.runs())
    refused = world.client().post(path, json={"study": "tiny", **body})
    assert refused.status_code == status, refused.text
    assert part in refused.text
    assert (len(world.store.studies()), len(world.store.runs())) == before


def test_25_1_the_controller_of_a_request_takes_no_file_either(world: World) -> None:
    """Between the check and the controller's start somebody may write a file of the alias's name."""
    for asked in (
        ComparisonRequest(study="tiny", arms=["today", "champion"]),
        UpgradeRequest(study="tiny", to="slow", alias="champion"),
    ):
        words = asked.words(next((world.home / "studies").glob("*.yaml")))
        assert "--registered" in words
        (world.home / "champion").write_text("vllm serve Qwen/Qwen2.5-7B-Instruct --max-num-seqs 4\n")
        done = tuner(world.home, *words, "--dry-run", cwd=world.home)
        assert done.returncode == 4, (done.returncode, done.stdout, done.stderr)
        assert "'champion' is not an alias" in done.stderr


def test_25_3_a_schedule_over_http_watches_registered_engines_only(world: World) -> None:
    client = world.client()
    body = {"node": "local", "cron": "0 22 * * *", "spec": {"study": "tiny", "hours": 1}}
    body["spec"]["upgrade"] = {"to": "/opt/vllm/bin/python"}  # type: ignore[index]
    refused = client.put("/v1/schedules/guard", json=body)
    assert refused.status_code == 404
    assert "no engine '/opt/vllm/bin/python' is registered" in refused.json()["detail"]
    body["spec"]["upgrade"] = {"to": "slow", "alais": "today"}  # type: ignore[index]
    refused = client.put("/v1/schedules/guard", json=body)
    assert "did you mean 'alias'" in refused.json()["detail"]
    body["spec"]["upgrade"] = {"to": "slow", "alias": "today"}  # type: ignore[index]
    assert client.put("/v1/schedules/guard", json=body).status_code == 200


GUARDED = (
    STUDY_FILE.replace("  kind: simulated\n", "  kind: simulated\n  clock: virtual\n")
    .replace("plan: quick", "plan: brief")
    .replace("[{start_s: 20, duration_s: 1.0}]", "[{start_s: 20, duration_s: 4.0}]")
)


def test_25_3_a_nightly_schedule_checks_each_new_version_once(tmp_path: Path) -> None:
    home, study = tmp_path / "home", write(tmp_path, GUARDED)
    (tmp_path / "release-1.yaml").write_text("version: 0.33.0\nslower: 1.3\n")
    words = ("add", "guard", "--study", study, "--cron", "0 1 * * *", "--hours", 4, "--alias", "today")
    done = tuner(home, "schedule", *words, "--upgrade-to", "release-*.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    store = Store(f"sqlite:///{home / 'tuner.db'}", create=False)
    assert store.schedule("guard").spec["upgrade"]["to"] == str(tmp_path / "release-*.yaml")  # type: ignore[call-overload,index]

    def night() -> str:
        """The words of the night; a due time has passed since the schedule's last one."""
        row = store.schedule("guard")
        before = row.created_at - timedelta(days=2)
        store.put_schedule(replace(row, created_at=before, last_due=None))
        told = tuner(home, "schedule", "run", "guard", "--now", cwd=tmp_path / "home")
        assert told.returncode == 0, told.stderr
        return told.stderr

    assert "FINISHED" in night()
    (first,) = store.runs()
    assert UpgradeFinding.from_json(first.summary["upgrade"]).new == "0.33.0"
    assert "0.33.0 was checked on" in night()
    assert [each.id for each in store.runs()] == [first.id], "it was not checked again"
    assert store.schedule("guard").last_run_id == first.id
    (tmp_path / "release-2.yaml").write_text("version: 0.34.0\n")
    assert "FINISHED" in night()
    newest = store.runs(limit=1)[0]
    assert UpgradeFinding.from_json(newest.summary["upgrade"]).new == "0.34.0"
    store.close()


@pytest.mark.parametrize("asked", [
    ("/v1/comparisons", {"study": "tiny", "arms": ["today", "defaults"], "rounds": 3}),
    ("/v1/upgrade-checks", {"study": "tiny", "to": "slow", "alias": "today", "rounds": 3}),
    ("/v1/runs", {"study": "placed"}),
])  # fmt: skip
def test_8_what_is_refused_because_its_node_is_busy_leaves_no_study(
    world: World, asked: tuple[str, dict[str, object]]
) -> None:
    store, client = world.store, world.client()
    tiny = json.loads((world.home / "studies" / f"{store.study('tiny').id}.yaml").read_text())
    placed = {**tiny, "name": "placed", "seed": 99}
    (world.home / "studies" / "placed.yaml").write_text(json.dumps(placed))
    other = store.add_study(replace(a_study("other"), node="local"))
    run = store.open_run(
        other.id, trials_limit=3, deadline=None, now=world.clock(), pid=os.getpid(), host=HERE
    )
    before = [study.id for study in store.studies()]
    path, body = asked
    refused = client.post(path, json=body)
    assert refused.status_code == 409, refused.text
    assert f"node 'local' is busy with run '{run.id}'" in refused.text
    assert [study.id for study in store.studies()] == before
    store.save_run(replace(run, state=RunState.FINISHED, ended_at=world.clock()))


def test_8_a_comparison_by_command_on_a_leased_node_leaves_no_study(tmp_path: Path) -> None:
    study = write(tmp_path, STUDY_FILE)
    store = Store(f"sqlite:///{tmp_path / 'home' / 'tuner.db'}")
    store.acquire_lease("local", "someone", now=datetime.now(UTC), ttl_s=3600)
    done = tuner(tmp_path / "home", "compare", "today", "defaults", "--study", study)
    assert done.returncode == 5, done.stderr
    assert "is leased to 'someone'" in done.stderr
    assert (list(store.studies()), list(store.runs())) == ([], [])
    store.close()
