"""A real run, on an engine in real time, watched in the browser from its first launch until it is stopped."""

import time
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By

from tests.browser.chromium import DESKTOP, resize
from tests.browser.site import PATIENCE_S, complaints, patient
from tests.service.world import STUDY, prepare, serving

pytestmark = [pytest.mark.browser, pytest.mark.slow]
SLICE = {"start_s": 20, "duration_s": 6.0}
NOW = """
const now = document.querySelector('section.now');
const word = now && now.querySelector('[aria-live] strong');
return now ? [word ? word.textContent : '', now.innerText, now.querySelectorAll('figure svg').length,
  now.querySelector('pre') ? now.querySelector('pre').textContent : ''] : null;
"""
"""What the page says of now: phase, whole text, drawings, the end of the log."""


def test_I27_7_a_real_run_is_watched_and_stopped(browser: webdriver.Chrome, tmp_path: Path) -> None:
    digest = prepare(tmp_path)
    with serving(tmp_path) as server, server.client() as client:
        asked = {**STUDY, "trace": digest, "slices": [SLICE], "budget": {"trials": 20}}
        study = client.post("/v1/studies", json=asked).json()["id"]
        assert client.post("/v1/runs", json={"study": study}).status_code == 202
        resize(browser, DESKTOP)
        browser.get(f"{server.url}/studies/{study[:16]}")
        browser.delete_all_cookies()
        browser.get(f"{server.url}/studies/{study[:16]}")
        complaints(browser)
        browser.execute_script("window.kept = true")
        phases, ahead, drawn, log = watch(browser)
        assert any(each.startswith("Replaying ") and " of 6 s" in each for each in phases), phases
        assert len({each.split()[0] for each in phases}) >= 2, f"more than one phase is shown: {phases}"
        assert ahead, "when the whole run will end"
        assert drawn, "the engine's curves"
        assert log, "the end of the engine's log"
        the_log_stays_open(browser)
        assert browser.execute_script("return window.kept") is True, "the page was not loaded again"
        stop(browser)
        assert "CANCELLED" in browser.find_element(By.TAG_NAME, "main").text
        assert [c["message"] for c in complaints(browser)] == []


def watch(browser: webdriver.Chrome) -> tuple[set[str], bool, bool, bool]:
    """(phases that were shown, whether the end, curves and a log were), until all were or patience ends."""
    phases, ahead, drawn, log = set[str](), False, False, False
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end and not (
        ahead
        and drawn
        and log
        and any(p.startswith("Replaying") for p in phases)
        and len({p.split()[0] for p in phases}) > 1
    ):
        if (now := browser.execute_script(NOW)) is not None:
            phases |= {now[0]} - {""}
            ahead = ahead or "The whole run ends in about" in now[1]
            drawn, log = drawn or now[2] > 0, log or bool(now[3].strip())
        time.sleep(0.1)
    return phases, ahead, drawn, log


def the_log_stays_open(browser: webdriver.Chrome) -> None:
    """A log that a reader has opened is still open after the page has followed the run."""
    found = "document.querySelector('section.now details')"
    opened = (
        f"const d = {found}; if (!d) return false; const fold = d.querySelector('summary');"
        "if (d.open) fold.click(); fold.click(); return Boolean(d.dataset.before = '1')"
    )
    anew = f"const d = {found}; return Boolean(d) && !d.dataset.before"
    wait = patient(browser)
    wait.until(lambda _: browser.execute_script(opened))  # between two launches there is no log for a moment
    wait.until(lambda _: browser.execute_script(anew))
    assert browser.execute_script(f"return {found}.open") is True


def stop(browser: webdriver.Chrome) -> None:
    """Stops the run with a reason, and waits until the page says that it has ended."""
    form = browser.find_element(By.CSS_SELECTOR, "form[action$=cancel]")
    browser.execute_script("arguments[0].closest('details').open = true", form)
    form.find_element(By.NAME, "reason").send_keys("seen enough")
    form.find_element(By.TAG_NAME, "button").click()
    ended = "return /The run has ended\\.|CANCELLED/.test(document.querySelector('main').innerText)"
    patient(browser).until(lambda _: browser.execute_script(ended))
