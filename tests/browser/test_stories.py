"""The stories that the pages are for, each told in a real browser."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys

from tests.browser import world
from tests.browser.chromium import DESKTOP, resize
from tests.browser.screenshots import report_of
from tests.browser.site import Site, patient
from tuner.history.store import Store
from tuner.profiles import registry
from tuner.records import Candidate, RunState

pytestmark = pytest.mark.browser


def test_a_live_run_moves_without_a_reload(site: Site) -> None:
    store, made = site.world.store, site.world.study
    run = world.living_run(store, made, 3)
    first = len(store.trials(made.id))
    site.get(site.study)
    site.driver.execute_script("window.kept = true")
    assert "0 of 3 trials" in site.text()
    before = len(site.all("figure.front-picture circle"))

    world.complete(store, run, first)
    measuring = world.begin(store, run, first + 1, Candidate({"max_num_seqs": 48}))
    site.wait_for("1 of 3 trials")
    assert f"Measuring: trial {first + 1} (tpe), max_num_seqs=48. Running since" in site.text()
    assert "Starting" not in site.text()
    assert len(site.all("figure.front-picture circle")) > before

    world.end(store, measuring, world.measured(world.numbers(48, 2048)))
    store.save_run(replace(run, state=RunState.FINISHED, ended_at=world.NOW, reason="enough"))
    site.wait_for("The run has ended.")
    assert "FINISHED" in site.text()
    assert site.driver.execute_script("return window.kept") is True
    assert site.errors() == []


def test_a_reviewer_promotes_with_a_reason_and_rolls_back(site: Site) -> None:
    site.use(site.world.tokens["promote"])
    store, profile = site.world.store, site.world.profiles[1]
    site.get(f"/profiles/{profile.id}")
    assert "champion, version 1" in site.text()
    site.one("form[action$=promote] input[name=reason]").send_keys("confirmed twice, ticket 12")
    site.press("form[action$=promote] button")
    assert "The champion is version 2 now." in site.text()
    event = store.alias(profile.key, registry.CHAMPION)
    assert event is not None
    assert (event.to_version, event.actor, event.reason) == (2, "token:promote", "confirmed twice, ticket 12")

    site.one("form[action$=rollback] input[name=reason]").send_keys("errors in production")
    site.press("form[action$=rollback] button")
    assert "The champion is version 1 now." in site.text()
    assert [e.action for e in store.audit(limit=2)] == ["rollback", "promote"]


def test_a_version_that_fails_its_gates_says_so_and_only_an_administrator_forces_it(site: Site) -> None:
    profile = site.world.profiles[2]
    site.use(site.world.tokens["promote"])
    site.get(f"/profiles/{profile.id}")
    assert "its gain over the baseline was not confirmed" in site.text()
    assert site.all("input[name=force]") == []
    site.one("form[action$=promote] input[name=reason]").send_keys("in a hurry")
    site.press("form[action$=promote] button")
    assert "cannot become 'champion'" in site.text()
    site.use(site.world.tokens["admin"])
    site.get(f"/profiles/{profile.id}")
    site.one("input[name=force]").click()
    site.one("form[action$=promote] input[name=reason]").send_keys("known good")
    site.press("form[action$=promote] button")
    assert "The champion is version 3 now." in site.text()


POST = """
const [path, body, done] = arguments;
fetch(path, {method: 'POST', body, headers: {'Content-Type': 'application/x-www-form-urlencoded'}})
  .then(answer => done(answer.status));
"""


def test_nobody_promotes_without_scope_or_without_the_word_of_the_form(site: Site) -> None:
    profile = site.world.profiles[1]
    site.use(site.world.tokens["read"])
    site.get(f"/profiles/{profile.id}")
    assert "Moving an alias needs a token with scope 'promote'." in site.text()
    assert site.all("main form") == []
    word = site.one("form.who input[name=csrf]").get_attribute("value")
    path = f"/profiles/{profile.id}/promote"
    told = f"reason=mine&generation=1&csrf={word}"
    assert site.driver.execute_async_script(POST, path, told) == 403
    site.use(site.world.tokens["promote"])
    site.get(f"/profiles/{profile.id}")
    assert site.driver.execute_async_script(POST, path, "reason=mine&generation=1") == 403
    assert site.driver.execute_async_script(POST, path, told) == 403
    champion = site.world.store.alias(profile.key, registry.CHAMPION)
    assert champion is not None
    assert champion.to_version == 1


def test_who_was_overtaken_is_told_and_nothing_moves(site: Site) -> None:
    store, profiles = site.world.store, site.world.profiles
    site.get(f"/profiles/{profiles[1].id}")
    gates = registry.NO_GATES
    registry.promote(store, profiles[2], gates=gates, actor="bo", reason="first", now=world.NOW)
    site.one("form[action$=promote] input[name=reason]").send_keys("second")
    site.press("form[action$=promote] button")
    assert "somebody has moved it" in site.text()


def test_an_expired_token_leads_to_the_login_and_back(site: Site) -> None:
    store, made = site.world.store, site.world.study
    world.living_run(store, made, 3)
    site.use(site.world.tokens["soon"])
    site.get(site.study)
    assert "Running since" in site.text()
    site.clock.now += timedelta(hours=2)
    site.wait_for("Your token is no longer valid")
    site.get("/history?metric=ttft_p95_ms")
    assert site.path.startswith("/login?next=")
    assert "expired" in site.text()
    site.one("input[name=token]").send_keys("tuner_nobody_knows")
    site.press("main button")
    assert "This token is not valid" in site.text()
    site.one("input[name=token]").send_keys(site.world.tokens["read"])
    site.press("main button")
    assert site.path == "/history?metric=ttft_p95_ms"
    cookie = site.driver.get_cookie("tuner_session")
    assert cookie is not None
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert site.driver.execute_script("return document.cookie") == ""
    site.press("form.who button")
    site.get("/")
    assert site.path.startswith("/login")


@pytest.mark.parametrize("target", ["//evil.example/", "https://evil.example/", "/\\evil.example"])
def test_a_login_never_leads_to_another_site(site: Site, target: str) -> None:
    site.driver.delete_all_cookies()
    site.get(f"/login?next={target}")
    site.one("input[name=token]").send_keys(site.world.tokens["read"])
    site.press("main button")
    assert site.path == "/"


HOSTILE = """<script>window.owned=1</script>"'><img src=x onerror=window.owned=1>{{ 7 * 7 }}]]>"""


def test_a_hostile_name_runs_no_script(site: Site, tmp_path: Path) -> None:
    store = site.world.store
    made = replace(world.study(HOSTILE), workload=HOSTILE, model=HOSTILE, node=HOSTILE)
    profile = world.a_night(store, made, tmp_path, 2)
    world.living_run(store, made, 3)
    ref = made.id[:16]
    paths = ["/", "/studies", f"/studies/{ref}", f"/studies/{ref}/trials/3", f"/profiles/{profile.id}"]
    paths += ["/history", "/profiles", "/history?model=" + "%3Cscript%3Ewindow.owned%3D1%3C/script%3E"]
    for path in paths:
        site.get(path)
        assert site.driver.execute_script("return window.owned || 0") == 0, path
        assert site.all("main img, main script") == [], path
    site.get(f"/studies/{ref}")
    assert HOSTILE in site.one("h1").text
    assert site.errors() == []
    there = replace(site.world, study=made)
    site.driver.get(report_of(there, tmp_path).as_uri())
    assert site.driver.execute_script("return window.owned || 0") == 0
    assert HOSTILE in site.one("h1").text


def test_the_policy_lets_no_inline_script_run(site: Site) -> None:
    site.get("/")
    site.driver.execute_script(
        "const s = document.createElement('script'); s.textContent = 'window.owned = 1';"
        "document.body.append(s);"
    )
    assert site.driver.execute_script("return window.owned || 0") == 0
    assert any("Content Security Policy" in each for each in site.errors())


def test_an_empty_history_says_what_to_do(site: Site) -> None:
    site.driver.get("about:blank")
    home = site.world.home / "empty"
    home.mkdir()
    store = Store(f"sqlite:///{home / 'tuner.db'}")
    with world.serve(store, home, site.clock) as address:
        site.driver.get(f"{address}/login")
        site.driver.delete_all_cookies()
        for path, said in {
            "/": "Nothing has been tuned here yet",
            "/studies": "There is no study yet",
            "/history": "No run has measured this yet",
            "/profiles": "There is no profile yet",
            "/schedules": "There is no schedule yet",
        }.items():
            site.driver.get(address + path)
            assert said in site.text(), path
            assert "on this host, no token needed" in site.one("header").text
    assert site.errors() == []
    store.close()


def test_pages_are_readable_without_script_and_times_are_utc(site: Site) -> None:
    resize(site.driver, DESKTOP, script=False)
    try:
        site.get(site.study)
        assert len(site.all("figure.front-picture svg circle.front")) > 3
        assert "FINISHED 2026-03-04 00:00 UTC" in site.text()
        site.get("/profiles")
        assert "2026-03-02 00:00 UTC" in site.text()
    finally:
        resize(site.driver, DESKTOP)


def test_times_are_in_the_viewers_zone_with_utc_on_hover(site: Site) -> None:
    site.driver.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": "Asia/Tokyo"})
    try:
        site.get("/profiles")
        moment = site.one("time")
        assert moment.get_attribute("title") == "2026-03-04 00:00 UTC"
        assert "9:00" in moment.text
    finally:
        site.driver.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": "UTC"})


def test_a_keyboard_is_enough(site: Site) -> None:
    site.get(site.study)
    site.one("body").send_keys(Keys.TAB)
    assert site.driver.switch_to.active_element.text == "Skip to the content"
    site.driver.switch_to.active_element.send_keys(Keys.ENTER)
    stops = 0
    for _ in range(40):
        site.driver.switch_to.active_element.send_keys(Keys.TAB)
        held = site.driver.switch_to.active_element
        if held.tag_name == "svg":
            break
    while held.tag_name == "svg":
        stops += 1
        held.send_keys(Keys.TAB)
        held = site.driver.switch_to.active_element
    assert stops == 3, "each of the three drawings is one stop"
    chart = site.one("svg[data-marks]")
    site.driver.execute_script("arguments[0].focus()", chart)
    chart.send_keys(Keys.ARROW_RIGHT)
    first = site.driver.switch_to.active_element
    assert (first.get_attribute("aria-label") or "").startswith("trial ")
    first.send_keys(Keys.ARROW_RIGHT)
    held = site.driver.switch_to.active_element
    assert held.get_attribute("aria-label") != first.get_attribute("aria-label")
    held.send_keys(Keys.ENTER)
    patient(site.driver).until(lambda _: "/trials/" in site.path)
    assert site.one("h1").text.startswith("Trial ")


def test_axes_are_deep_links(site: Site) -> None:
    site.get(site.study + "?x=ready_s&y=goodput_rps")
    assert "goodput_rps over ready_s" in (site.one("figure svg").get_attribute("aria-label") or "")
    site.get(site.study + "?x=redy_s&y=goodput_rps")
    assert "'redy_s' is not a measurement (did you mean 'ready_s'?)" in site.text()


def test_the_report_needs_no_network_and_its_marks_lead_to_trials(site: Site, tmp_path: Path) -> None:
    path = report_of(site.world, tmp_path)
    site.driver.get(path.as_uri())
    names = site.driver.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert names == []
    mark = site.one("figure svg a")
    site.driver.execute_script("arguments[0].focus()", mark)
    assert site.one(".card").text.startswith("trial ")
    assert "ttft_p95_ms" in site.one(".card").text
    mark.send_keys(Keys.ENTER)
    number = (mark.get_attribute("aria-label") or "").split()[1].rstrip(":")
    assert site.driver.current_url.endswith(f"#trial-{number}")
    assert site.one(f"#trial-{number} td").text.startswith(number)
    assert site.errors() == []
