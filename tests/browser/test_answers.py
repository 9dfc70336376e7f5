"""A newcomer finds: better or not, how much, how sure, how pulled; nights, failures, a live run, rows."""

import base64
import re
from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys

from tests.browser import world
from tests.browser.chromium import DESKTOP, PAPER, PHONE, WIDE, overlaps, resize, serious
from tests.browser.screenshots import paths, report_of, running
from tests.browser.site import Site

pytestmark = pytest.mark.browser


def test_I27_7_the_overview_answers_for_each_node(site: Site) -> None:
    site.get("/")
    card = site.one(".answer")
    for said in ("better in some objectives", "−80 %", "Confidence", "medium", "max_num_seqs"):
        assert said in card.text
    assert "tuner profile export" in card.find_element("css selector", "code.copy").text
    assert [a.text for a in site.all(".answer a[download]")] == ["download"]
    assert "Copy" in [b.text for b in site.all(".answer button")]
    assert "Nothing was tuned on this node yet." in site.text(), "a node without a run says what to do"
    site.press(".answer .links a")
    assert "version 3" in site.one("h1").text
    assert site.errors() == []


def test_I27_7_two_nights_are_compared(site: Site) -> None:
    site.get("/history?metric=ttft_p95_ms")
    boxes = site.all("input[name=run]")
    assert len(boxes) >= 2
    for box in boxes[:2]:
        box.click()
    site.press("#nights button")
    assert site.path.startswith("/compare?run=")
    assert "time to the first token" in site.text()
    assert len(site.all("figure svg")) >= 4
    assert site.errors() == []


@pytest.mark.parametrize("what", ["profile", "node"])
def test_I27_2_profiles_and_nodes_are_ticked_and_compared(site: Site, what: str) -> None:
    world.a_night(site.world.store, world.study(node="gpu-02"), site.world.home / "other", 1)
    site.get({"profile": "/profiles", "node": "/"}[what])
    for box in site.all(f"input[name={what}]")[:2]:
        box.click()
    site.press("#picks button")
    assert site.path.startswith(f"/compare?{what}=")
    names = {"profile": ("version 3, gpu-01", "version 2, gpu-01"), "node": ("gpu-01", "gpu-02")}[what]
    assert [a.text for a in site.all(".compared thead a")][:2] == list(names)
    assert "time to the first token" in site.text()
    assert len(site.all("figure svg")) >= 4, "latencies and timelines on the same axes"
    site.get({"profile": "/profiles", "node": "/"}[what])
    site.press("#picks button")
    assert "2 to 5 trials, profiles, nights or nodes can be compared, not 0" in site.text()


def test_I27_3_a_comparison_is_found_from_the_history_and_is_no_night(site: Site) -> None:
    site.get("/history?metric=ttft_p95_ms")
    nights, card = len(site.all("#main table.nights tbody tr")), site.one(".answer h3").text
    world.an_upgrade_check(site.world.store, site.world.home / "upgrade")
    site.get("/history?metric=ttft_p95_ms")
    assert (len(site.all("#main table.nights tbody tr")), site.one(".answer h3").text) == (nights, card)
    site.press("section.nights > p a")
    shown = site.text()
    assert shown.index("Advice: stay.") < shown.index("new version is worse than old version")
    assert "engine 0.32.0 → 0.33.0" in shown
    assert "The front" not in shown, "arms were chosen by hand: there is no front"
    site.press("p a[href^='/compare?study=']")
    assert [a.text for a in site.all(".compared thead a")][:2] == ["old version", "new version"]
    assert "0.33.0" in site.text()
    site.get("/")
    assert "version is worse" not in site.text(), "an upgrade check is no answer for its node"
    assert site.errors() == []


def test_I27_7_why_a_trial_failed_is_on_its_page(site: Site) -> None:
    site.get(site.study)
    assert "out of memory" in site.text()
    site.press("table a[href$='/trials/28'], table a[href*='/trials/']:last-of-type")
    assert site.one("h1").text.startswith("Trial ")
    site.get(f"{site.study}/trials/8")
    assert "1.2 GiB were asked for" in site.text()
    assert "Tried to allocate 1.20 GiB" in site.one("pre[aria-label='Engine log']").text, "the log is open"
    assert "Root cause" in site.text()
    assert "Latencies beside the baseline" not in site.text(), "no curves of another trial"
    assert site.errors() == []


def test_I27_7_a_run_is_watched(site: Site) -> None:
    running(site.world)
    site.get(site.study)
    shown = site.text()
    for said in ("Replaying peak, 34 of 60 s", "The whole run ends in about", "5 of 12 trials"):
        assert said in shown
    assert shown.index("Running now") < shown.index("What the last run found")
    curves = site.one("section.now svg")
    assert "the engine now" in (curves.get_attribute("aria-label") or "")
    assert site.one("section.now [aria-live]").text.startswith("Replaying")
    assert "Avg prompt throughput" in (site.one("section.now pre").get_attribute("textContent") or "")
    assert site.one("summary").is_displayed()
    assert site.errors() == []


def test_I27_7_rows_are_filtered_sorted_and_exported(site: Site) -> None:
    site.get(f"{site.study}/trials")
    box = site.one("input[name=where]")
    box.send_keys("state=COMPLETE max_num_seqs>=64", Keys.ENTER)
    site.wait_for("show all")
    assert "where=state%3DCOMPLETE" in site.path
    rows = len(site.all(".bench tbody tr"))
    csv = site.one("a[href*='trials.csv']").get_attribute("href") or ""
    told = site.driver.execute_async_script(
        "const [url, done] = arguments; fetch(url).then(a => a.text()).then(done);", csv
    )
    assert len(told.strip().splitlines()) == rows + 1
    site.driver.back()
    site.wait_for("36 of 36" if "36 of 36" in site.text() else "trials. Download")
    for box in site.all("input[form=picks]")[2:4]:
        box.click()
    assert site.path.count("pick=") == 2
    site.press("[data-compare]")
    assert site.path.startswith("/compare?")
    assert site.errors() == []


@pytest.mark.parametrize("size", [WIDE, DESKTOP, PHONE], ids=["1440", "1280", "390"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_I27_5_answers_fit_their_screen(site: Site, axe: str, size: tuple[int, int], dark: bool) -> None:
    running(site.world)
    resize(site.driver, size, dark=dark)
    found = []
    for name in (
        "overview",
        "study",
        "trials",
        "compare",
        "history",
        "trial-infeasible",
        "nights",
        "upgrade",
    ):
        site.get(paths(site.world)[name])
        found += [f"{name}: {each}" for each in (*overlaps(site.driver), *serious(site.driver, axe))]
    assert found == []


CUT = """
return [...document.querySelectorAll('.compared')].filter(e => e.scrollWidth > e.clientWidth + 1)
  .map(e => e.getAttribute('aria-label'));
"""


@pytest.mark.parametrize("name", ["profile", "diff", "nights", "trial-infeasible"])
def test_I27_5_both_sides_of_a_comparison_are_seen_on_a_phone(site: Site, name: str) -> None:
    resize(site.driver, PHONE)
    site.get(paths(site.world)[name])
    assert site.all(".compared") != []
    assert site.driver.execute_script(CUT) == []


ON_PAPER = """
const rows = [...document.querySelectorAll('tr')].map(r => [r.getBoundingClientRect().height, r.innerText]);
const forms = [...document.querySelectorAll('form, button, nav')].filter(e => e.getClientRects().length);
return [...rows.filter(r => r[0] > 140), ...forms.map(e => ['shown', e.tagName]),
  ...[...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1)
    .map(e => ['too wide', e.tagName, e.innerText])];
"""
"""Rows in which a column is so narrow that words break, controls that paper has no use for, cut columns."""


@pytest.mark.parametrize(("name", "most"), [("report", 8), ("study", 5), ("history", 3), ("compare", 5)])
def test_I27_8_pages_and_report_print_well(site: Site, tmp_path: Path, name: str, most: int) -> None:
    running(site.world)
    if name == "report":
        site.driver.get(report_of(site.world, tmp_path).as_uri())
        resize(site.driver, DESKTOP)
        top = site.driver.execute_script("return document.querySelector('#details').offsetTop")
        assert top < 3 * DESKTOP[1], "more than three screens before the details"
    else:
        site.get(paths(site.world)[name])
    resize(site.driver, PAPER, paper=True)
    assert site.driver.execute_script(ON_PAPER) == []
    printed = site.driver.execute_cdp_cmd("Page.printToPDF", {"paperWidth": 8.27, "paperHeight": 11.69})
    pages = len(re.findall(rb"/Type\s*/Page\b", base64.b64decode(printed["data"])))
    assert 0 < pages <= most
    assert overlaps(site.driver) == []
