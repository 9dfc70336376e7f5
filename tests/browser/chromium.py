"""A headless Chromium (Debian's), and axe-core's findings in it."""

import json
import os
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

AXE_VERSION = "4.14.1"
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--force-device-scale-factor=1", "--hide-scrollbars",
)  # fmt: skip
WIDE, DESKTOP, PHONE, PAPER = (1440, 900), (1280, 900), (390, 844), (718, 1031)


@contextmanager
def chromium(profile: Path, *, dark: bool = False) -> Iterator[webdriver.Chrome]:
    """A browser with an empty profile, whose console is kept."""
    options = webdriver.ChromeOptions()
    for flag in (*FLAGS, f"--user-data-dir={profile}", *(["--force-dark-mode"] if dark else [])):
        options.add_argument(flag)
    options.binary_location = os.environ.get("TUNER_TEST_CHROMIUM", "/usr/bin/chromium")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = Service(os.environ.get("TUNER_TEST_CHROMEDRIVER", "/usr/bin/chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    try:
        yield driver
    finally:
        driver.quit()


def resize(
    driver: webdriver.Chrome,
    size: tuple[int, int],
    *,
    dark: bool = False,
    script: bool = True,
    paper: bool = False,
) -> None:
    """Another screen, colour scheme, whether scripts run, and whether the page looks as if it was printed."""
    width, height = size
    screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    media = {"media": "print" if paper else "", "features": [scheme]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": not script})


def axe_source() -> str:
    """axe-core's script, from the package that `make test-browser` put beside the engines' caches."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vllm-tuner" / "axe"
    with tarfile.open(cache / f"axe-core-{AXE_VERSION}.tgz") as packed:
        member = packed.extractfile("package/axe.min.js")
        if member is None:
            raise FileNotFoundError("package/axe.min.js")
        return member.read().decode()


def serious(driver: webdriver.Chrome, axe: str) -> list[str]:
    """axe-core's violations of impact serious or critical on the page that is shown, each in one line."""
    driver.execute_cdp_cmd("Runtime.evaluate", {"expression": axe})
    found = driver.execute_async_script(
        "const done = arguments[0];"
        "axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa']})"
        ".then(r => done(JSON.stringify(r.violations)), e => done(JSON.stringify([{id: String(e), "
        "impact: 'critical', nodes: []}])));"
    )
    return [
        f"{each['id']}: {node['target']} {node.get('failureSummary', '')}"
        for each in json.loads(found)
        if each["impact"] in ("serious", "critical")
        for node in [*each["nodes"], *([{"target": "page"}] if not each["nodes"] else [])]
    ]


OVERLAPS = """
for (const folded of document.querySelectorAll('details')) folded.open = true;
const boxes = [];
const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  const node = walk.currentNode;
  if (!node.textContent.trim()) continue;
  const held = node.parentElement;
  const style = getComputedStyle(held);
  const unseen = '.skip, .unseen, title, option, select, script, style, noscript';
  if (style.visibility === 'hidden' || held.closest(unseen)) continue;
  const range = document.createRange();
  range.selectNodeContents(node);
  for (const box of range.getClientRects()) {
    if (box.width > 1 && box.height > 1) boxes.push({held, text: node.textContent.trim().slice(0, 40),
      left: box.left, right: box.right, top: box.top, bottom: box.bottom});
  }
}
const found = [];
boxes.sort((a, b) => a.top - b.top);
for (let i = 0; i < boxes.length; i++) {
  for (let j = i + 1; j < boxes.length && boxes[j].top < boxes[i].bottom; j++) {
    const a = boxes[i], b = boxes[j];
    const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (wide > 2 && high > 4) {
      const clipped = (e) => { const w = e.held.closest('.wide, pre'); if (!w) return false;
        const r = w.getBoundingClientRect(); return e.left >= r.right - 1 || e.right <= r.left + 1
          || e.top >= r.bottom - 1 || e.bottom <= r.top + 1
          || e.held.closest('.pin') !== null || e.held.closest('.bench thead') !== null; };
      if (!clipped(a) && !clipped(b)) found.push(`«${a.text}» over «${b.text}»`);
    }
  }
}
if (document.documentElement.scrollWidth > document.documentElement.clientWidth + 1)
  found.push(`the page is ${document.documentElement.scrollWidth} px wide on a screen of `
    + `${document.documentElement.clientWidth}`);
return found;
"""


def overlaps(driver: webdriver.Chrome) -> list[str]:
    """Pieces of text that lie upon each other, and a page wider than its screen."""
    found: list[str] = driver.execute_script(OVERLAPS)
    return found
