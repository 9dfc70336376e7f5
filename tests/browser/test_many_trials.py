"""A study of ten thousand trials: sorted, filtered and brushed in the browser, and how long that takes."""

import time

import pytest
from selenium.webdriver.common.action_chains import ActionChains

from tests.browser import world
from tests.browser.many import TRIALS, add_trials
from tests.browser.site import Site

pytestmark = pytest.mark.browser
PAINTED = """
const done = arguments[0];
requestAnimationFrame(() => requestAnimationFrame(() => {
  const page = performance.getEntriesByType('navigation')[0];
  done([page.responseEnd - page.requestStart, performance.now() - page.responseEnd, page.decodedBodySize]);
}));
"""
CLICKED = """
const [selector, done] = arguments, began = performance.now();
const part = document.querySelector('[data-bench]');
new MutationObserver((_, watch) => { if (!part.hasAttribute('aria-busy')) { watch.disconnect();
  requestAnimationFrame(() => done(performance.now() - began)); } })
  .observe(part, {attributes: true, attributeFilter: ['aria-busy']});
document.querySelector(selector).click();
"""


def test_ten_thousand_trials(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    store, made = site.world.store, world.study("many", node="gpu-02")
    store.add_study(made)
    run = store.open_run(made.id, trials_limit=None, deadline=None, now=world.NOW, pid=None, host="gpu-02")
    add_trials(store, run)
    ref = f"/studies/{made.id[:16]}"
    site.get("/")
    told = []
    for path in (ref, f"{ref}/trials", f"{ref}/trials?page=2"):
        began = time.perf_counter()
        site.get(path)
        whole = (time.perf_counter() - began) * 1000
        server, paint, size = site.driver.execute_async_script(PAINTED)
        told.append(
            f"{path.removeprefix(ref) or 'study'}: {whole:.0f} ms, answer {server:.0f},"
            f" drawn {paint:.0f} later, {size / 1e3:.0f} kB"
        )
    assert "Page 2 of 100" in site.text()
    sort = "thead th:nth-child(4) a"
    told += [f"sort {site.driver.execute_async_script(CLICKED, sort):.0f} ms" for _ in range(3)]
    assert "sort=" in site.path
    site.get(f"{ref}/trials")
    chart = site.one("svg[data-brush]")
    box = chart.size
    drag = ActionChains(site.driver, duration=10).move_to_element_with_offset(chart, -box["width"] // 4, -40)
    drag.click_and_hold().move_by_offset(box["width"] // 3, 90).release().perform()
    site.wait_for("show all")
    assert "ttft_p95_ms%3E%3D" in site.path
    assert f"of {TRIALS:,} trials" in site.text()
    assert not site.text().startswith(f"{TRIALS:,} of")
    with capsys.disabled():
        print("\n" + "\n".join(told))
    assert site.errors() == []
