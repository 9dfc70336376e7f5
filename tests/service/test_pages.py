"""The pages without a browser: who may see and do what, and how long lists are told in parts."""

import json
import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.commands.test_care import call
from tests.history.records import NOW, a_conclusion, a_launch, a_measurement, a_run, a_study, finished, start
from tests.service.world import World
from tuner.conclusions import Judgement, Saving
from tuner.history.entities import SCOPES
from tuner.records import Candidate, RunState, TrialState
from tuner.report import words
from tuner.report.board import baselines
from tuner.service.auth import INCLUDES
from tuner.service.pages.profiles import SHOWN
from tuner.service.pages.session import COOKIE, csrf_of
from tuner.service.pages.studies import LISTED

SEEN = (
    "/", "/studies", "/studies/chat", "/studies/chat/live", "/studies/chat/trials",
    "/studies/chat/trials.csv",
    "/studies/chat/trials/2", "/compare?study=chat&trial=1&trial=2", "/history", "/profiles",
    "/profiles/1", "/profiles/1/file", "/profiles/1/diff/2", "/schedules",
)  # fmt: skip
DONE = {
    "/profiles/1/promote": "promote",
    "/profiles/2/rollback": "promote",
    "/studies/chat/cancel": "run",
}


def visitor(world: World, *scopes: str) -> tuple[TestClient, str]:
    """A browser with a session, and the word of its forms."""
    token = world.token(*scopes)
    client = world.client()
    client.follow_redirects = False
    assert client.post("/login", data={"token": token}).status_code == 303
    return client, csrf_of(client.cookies[COOKIE])


def test_every_page_of_the_app_is_in_this_test(world: World) -> None:
    from tests.service.test_auth import every_route

    pages = {(r.method, r.path) for r in every_route(world) if not r.in_schema}
    assert len(pages) == len(SEEN) + len(DONE) + 4, "login (get and post), logout and static files are public"


@pytest.mark.parametrize("held", [*SCOPES, "none", "revoked"])
def test_matrix(filled: World, held: str) -> None:
    client, word = visitor(filled, held if held in SCOPES else "admin")
    if held == "none":
        client.cookies.clear()
    elif held == "revoked":
        filled.store.revoke_token(filled.store.tokens()[-1].id, now=filled.clock())
    for path in SEEN:
        answer = client.get(path)
        assert answer.status_code == (200 if held in SCOPES else 303), f"{path} with {held}"
        if held not in SCOPES:
            assert answer.headers["location"].startswith("/login?next=")
    for path, scope in DONE.items():
        moved = client.post(path, data={"csrf": word, "generation": "0"})
        if held not in SCOPES:
            assert moved.status_code == 303
        else:
            # With the scope a form gets as far as its reason, which is missing here.
            assert moved.status_code == (400 if scope in INCLUDES[held] else 403), f"{path} with {held}"
        assert client.post(path, data={"csrf": "0" * 40}).status_code in (303, 403)
    assert [entry.action for entry in filled.store.audit()][:-1] == ["login"]


def test_a_run_is_stopped_with_a_reason(filled: World) -> None:
    client, word = visitor(filled, "run")
    assert "Stop this run" not in client.get("/studies/chat").text, "its controller is gone"
    filled.store.acquire_lease("n1", "its controller", now=filled.clock(), ttl_s=60)
    shown = client.get("/studies/chat").text
    run_id = re.search(r'name="run" value="([0-9a-z]+)"', shown)
    assert run_id is not None
    fields = {"csrf": word, "run": run_id[1], "reason": "the trace is a bad one"}
    assert client.post("/studies/chat/cancel", data=fields).status_code == 303
    assert filled.store.run(run_id[1]).cancel_requested
    entry = filled.store.audit()[0]
    assert (entry.actor, entry.action, entry.reason) == ("token:ci", "cancel", "the trace is a bad one")
    shown = client.get("/studies/chat").text
    assert "Asked to stop." in shown
    assert "Stop this run" not in shown
    other = filled.store.add_study(replace(a_study("another"), id="f" * 64))
    assert client.post(f"/studies/{other.id}/cancel", data=fields).status_code == 400


def test_long_lists_are_told_in_parts(filled: World) -> None:
    client, _ = visitor(filled, "read")
    store, study = filled.store, filled.store.study("chat")
    for n in range(LISTED):
        at = study.created_at + timedelta(days=1 + n)
        store.add_study(replace(study, id=f"{n:064d}", node=f"m{n:02d}", created_at=at))
    first = client.get("/studies").text
    assert "Older" in first
    older = client.get(re.findall(r'href="(\?after=[^"]+)"', first)[0].join(["/studies", ""])).text
    assert (older.count("<tbody>"), older.count('<th scope="row"')) == (1, 1)
    profile = store.profile(1)
    for n in range(SHOWN + 1):
        store.add_profile(
            key=profile.key, candidate=Candidate({"max_num_seqs": n}), engine_version="0.32.0",
            gpu_class="h100-80x1", study_id=study.id, trial_id=None, argv=(), env={}, evidence={}, now=NOW,
        )  # fmt: skip
    short = client.get("/profiles").text
    assert (short.count('scope="row"'), "All versions" in short) == (SHOWN + 1, True), "and the champion's"
    whole = client.get(
        re.findall(r'href="(\?model=[^"]+)"', short)[0].replace("&amp;", "&").join(["/profiles", ""])
    )
    assert whole.text.count('scope="row"') == SHOWN + 3
    assert "More nodes" in client.get("/history?metric=ttft_p95_ms").text


def test_the_study_and_the_history_show_what_the_run_concluded(filled: World) -> None:
    """The same words on both; `fill` has a trade-off: better in one objective and worse in the other."""
    client, _ = visitor(filled, "read")
    shown = client.get("/studies/chat").text
    assert "trade-off: Trial 2 is a trade-off." in shown
    assert "Finalists against the baseline, measured again" in shown
    assert "Trial 2 is the published winner." in shown
    assert "1 GPU-hours of search, 0.25 GPU-hours of confirmation" in shown
    night = client.get("/history?metric=ttft_p95_ms&since=2026-03-01").text
    for said in ("−55 % (−60 … −50, better)", "<td"):
        assert said in shown
        assert said in night
    assert "trade-off" in night
    assert "workload" in night
    assert client.get("/history?metric=ttft_p95_ms&workload=other").text.count("<tbody>") == 0


def test_the_numbers_of_a_night_that_is_not_to_be_trusted_are_the_same_everywhere(world: World) -> None:
    """History and comparison show what its repeats measured, with the outcome's word; the night has one
    date.
    """
    client, store = visitor(world, "read")[0], world.store
    run = a_run(store, a_study(), now=NOW + timedelta(hours=3))
    finished(store, start(store, run, 0, origin="baseline"), a_measurement(3135.0))
    finished(store, start(store, run, 2), a_measurement(88.0))
    ended = replace(run, state=RunState.FINISHED, ended_at=NOW + timedelta(hours=5))
    store.save_run(ended, a_conclusion(ended, outcome=Judgement.NOT_TRUSTED, winner=None, profiles={}))
    night = re.sub(r"<[^>]*>", "", client.get("/history?metric=ttft_p95_ms").text)
    assert "-01not to be trusted 1 repeat, 200 to 200" in night
    assert f"The newest night, {NOW:%Y-%m-%d} (its run ended {ended.at:%Y-%m-%d %H:%M} UTC)" in night
    for path in ("/compare?study=chat&trial=0&trial=2", f"/compare?run={run.id}&run={run.id}"):
        shown = client.get(path).text.partition("Confirmed numbers</h2>")[2].partition("</table>")[0]
        assert shown.count("not to be trusted") == 2, path
        assert "<td>200</td>" in shown, path


def test_every_printed_command_names_the_home(filled: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNER_HOME", str(filled.home))
    client, _ = visitor(filled, "read")
    for path in ("/", *(path for path in SEEN if "." not in path and "file" not in path)):
        shown = client.get(path).text
        assert not re.findall(r"(?:>|^)tuner [a-z].*", shown, re.MULTILINE), path
    assert f"TUNER_HOME={filled.home} tuner front" in client.get("/studies/chat").text


def test_M23_what_the_winner_saves_is_in_the_conclusion_on_the_page_and_on_the_command_line(
    filled: World,
) -> None:
    saved = Saving(
        metric="goodput_rps", price_per_gpu_hour=2.5, fraction=0.2, monthly=2920.0, tuning=15.0,
        nights_to_repay=0.16,
    )  # fmt: skip
    run = a_run(filled.store, filled.store.study("chat"), now=NOW + timedelta(days=2))
    ended = replace(run, state=RunState.FINISHED, ended_at=NOW + timedelta(days=2, hours=2))
    filled.store.save_run(ended, a_conclusion(ended, saving=saved))
    kept = filled.store.conclusion(run.id)
    assert kept is not None
    assert kept.saving == saved
    said = words.saving(saved)
    assert "saves 2,920 a month" in said
    assert "repaid within one night" in said
    client, _ = visitor(filled, "read")
    assert said in client.get("/studies/chat/live").text
    told = call(filled.home, "run", "status", run.id)
    assert said in " ".join(told.stdout.split())


def test_M27_the_history_can_be_asked_by_workload_and_shows_it(filled: World) -> None:
    told = call(filled.home, "history", "--metric", "ttft_p95_ms", "--workload", "chat", "--json")
    assert [row["workload"] for row in json.loads(told.stdout)] == ["chat"]
    assert "workload" in call(filled.home, "history", "--metric", "ttft_p95_ms").stdout
    other = call(filled.home, "history", "--metric", "ttft_p95_ms", "--workload", "chatt")
    assert "did you mean 'chat'?" in str(other.exception)
    client, _ = visitor(filled, "read")
    answer = client.get("/history?metric=ttft_p95_ms&workload=chat").text
    assert "<th" in answer
    assert "workload" in answer


def test_I27_1_overview_study_and_profile_show_the_answer_card(filled: World) -> None:
    client, _ = visitor(filled, "read")
    for path in ("/", "/studies/chat", "/studies/chat/live"):
        shown = client.get(path).text
        assert 'class="answer ' in shown, path
        assert "Confidence" in shown, path
        assert "time to the first token" in shown, path


def test_what_a_virtual_clock_ends_in_the_future_is_not_told_as_past(filled: World) -> None:
    client, _ = visitor(filled, "read")
    assert " ago, in <a" in client.get("/").text
    filled.clock.at = NOW - timedelta(days=900)
    shown = client.get("/").text
    assert "Found " in shown
    assert " ago, in <a" not in shown


def test_I27_1_the_overview_says_why_the_newest_run_failed(tmp_path: Path) -> None:
    world = World(tmp_path)
    made = world.store.add_study(a_study())
    run = world.store.open_run(made.id, trials_limit=3, deadline=None, now=NOW, pid=None, host="gpu-09")
    ended = replace(run, state=RunState.FAILED, ended_at=NOW, reason="vllm: command not found")
    world.store.save_run(ended)
    shown = world.client().get("/").text
    on_study = world.client().get(f"/studies/{made.id[:16]}").text
    for text in (shown, on_study):
        assert "The run ended without a result" in text
        assert "No candidate completed: vllm: command not found." in text
    assert "<details open>" in shown.partition("vllm: command not found")[0]
    world.store.close()


def test_B12_a_profile_s_page_shows_its_environment(filled: World) -> None:
    """Beside the arguments; a profile without any says that it needs none."""
    client, _ = visitor(filled, "read")
    store = filled.store
    one = store.profile(1)
    made = store.add_profile(
        key=one.key, candidate=one.candidate, engine_version=one.engine_version, gpu_class=one.gpu_class,
        study_id=one.study_id, trial_id=one.trial_id, argv=one.argv,
        env={"VLLM_CPU_KVCACHE_SPACE": "1", "HF_TOKEN": "<b>"}, evidence={}, now=NOW,
    )  # fmt: skip
    shown = client.get(f"/profiles/{made.id}").text
    assert "HF_TOKEN=&lt;b&gt;\nVLLM_CPU_KVCACHE_SPACE=1\n</pre>" in shown
    assert "the other formats set them" in shown
    assert "It needs no environment variable." in client.get("/profiles/1").text


def test_I27_1_a_profile_is_downloaded_in_any_format(filled: World) -> None:
    client, _ = visitor(filled, "read")
    got = client.get("/profiles/1/file?format=json")
    assert got.headers["content-disposition"].startswith("attachment; filename=")
    assert got.json()["version"] == 1
    assert "max" in client.get("/profiles/1/file").text
    wrong = client.get("/profiles/1/file?format=helm")
    assert wrong.status_code == 400
    assert "did you mean" in wrong.text


@pytest.mark.parametrize(
    "path", ["/nope", "/profiles/abc", "/profiles/99", "/studies/nope", "/history?metric=x"]
)
def test_I27_5_errors_are_pages_with_navigation_for_people_and_json_for_programs(
    filled: World, path: str
) -> None:
    client, _ = visitor(filled, "read")
    shown = client.get(path, headers={"Accept": "text/html,*/*"})
    assert shown.status_code in (400, 404, 422)
    for part in (
        '<nav aria-label="Pages">',
        'aria-current="page"' if path[1:5] != "nope" else "Overview",
        "<h1>",
    ):
        assert part in shown.text, path
    assert shown.headers["content-security-policy"].startswith("default-src 'none'")
    plain = client.get("/v1/nope", headers={"Accept": "text/html"})
    assert plain.headers["content-type"] == "application/problem+json"
    assert client.get("/nope").headers["content-type"] == "application/problem+json"
    client.cookies.clear()
    assert "Log in" not in client.get("/nope", headers={"Accept": "text/html"}).text


def test_I27_5_the_product_its_version_and_what_to_do_next(world: World) -> None:
    from tuner import __version__

    client, _ = visitor(world, "read")
    shown = client.get("/").text
    assert f"vLLM tuner <small>{__version__}</small>" in shown
    for path, next_step in {
        "/": "tuner demo", "/studies": "tuner tune", "/schedules": "tuner schedule add",
        "/profiles": "tuner tune", "/history": "tuner tune",
    }.items():  # fmt: skip
        assert next_step in client.get(path).text, path


def test_I27_6_gains_and_latencies_of_each_node_are_exported(filled: World) -> None:
    told = filled.client("read").get("/metrics").text
    assert 'tuner_gain_ratio{measurement="ttft_p95_ms",node="n1",workload="chat"} -0.55' in told
    assert 'configuration="today",measurement="ttft_p95_ms",node="n1",workload="chat"} 200.0' in told
    assert 'configuration="best",measurement="ttft_p95_ms",node="n1",workload="chat"}' in told


def test_a_trial_s_page_dates_the_baseline_s_repeats_of_several_nights(world: World) -> None:
    """Issue 29, 28: a trial of one night beside a baseline of two had two columns of one name."""
    store = world.store
    run = a_run(store, a_study())
    base = finished(store, start(store, run, 0, origin="baseline"), a_measurement(210.0))
    trial = finished(store, start(store, run, 1), a_measurement(90.0))
    for night in (0, 1):
        launch = replace(a_launch(a_study(), f"L{night}"), started_at=NOW + timedelta(days=night))
        store.add_launch(launch)
        again = replace(a_measurement(200.0), purpose="confirm", repeat=1, launch_id=launch.id)
        for each in (base, trial) if night else (base,):
            store.add_measurement(each.id, again)
    client, _ = visitor(world, "read")
    heads = re.findall(r"<th[^>]*>(.*?)</th>", client.get("/studies/chat/trials/1").text)
    (shown,) = (re.sub(r"<[^>]+>", "", head) for head in heads if "baseline: confirmation 1" in head)
    assert shown == f"baseline: confirmation 1, {NOW + timedelta(days=1):%Y-%m-%d %H:%M} UTC"


def test_the_baseline_beside_an_attribution_is_of_the_same_run(world: World) -> None:
    """User 13, 15: the baseline of the next night began nearer in time."""
    begun = {"one-1": ("0000-confirm-aaaaaaaa-1-0", 0), "last": ("0008-confirm-aaaaaaaa.3-1-0", 60)}
    begun |= {"two-1": ("0000-confirm-bbbbbbbb-1-0", 70), "two-8": ("0008-confirm-bbbbbbbb-1-0", 400)}
    launches = [
        replace(
            a_launch(a_study(), name), directory=f"/x/{folder}", started_at=NOW + timedelta(seconds=after)
        )
        for name, (folder, after) in begun.items()
    ]
    again = replace(a_measurement(90.0), purpose="confirm", repeat=1)
    run = a_run(world.store, a_study())
    base, trial = start(world.store, run, 0, origin="baseline"), start(world.store, run, 8, origin="reduced")
    base = replace(base, measurements=tuple(replace(again, launch_id=name) for name in ("one-1", "two-1")))
    trial = replace(trial, measurements=tuple(replace(again, launch_id=name) for name in ("last", "two-8")))
    beside = baselines(base, trial, launches)
    assert [each.launch_id for each in beside if each is not None] == ["one-1", "two-1"]


def test_a_trial_without_an_engine_has_no_configuration_in_effect(world: World) -> None:
    store = world.store
    run = a_run(store, a_study())
    finished(store, start(store, run, 1), state=TrialState.ABORTED)
    client, _ = visitor(world, "read")
    shown = client.get("/studies/chat/trials/1").text
    assert "No engine reported what was in effect." in shown
    assert "not reported by the engine" not in shown
