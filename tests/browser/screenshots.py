"""Renews the pictures of the pages: `python -m tests.browser.screenshots [--all] [FOLDER]`."""

import base64
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import httpx
from selenium import webdriver

from tests.browser import world
from tests.browser.chromium import DESKTOP, PAPER, PHONE, WIDE, chromium, overlaps, resize
from tuner.records import Candidate, Launch
from tuner.report.document import ReportData, render
from tuner.service.pages.session import COOKIE
from tuner.tuning.now import RunNow, path_of, write

KEPT = {
    "desktop": ("overview", "study", "trial", "history", "profile", "report"),
    "phone": ("overview", "study"),
}
"""What docs/pages.md shows; `--all` takes every page at three widths, light and dark, and as printed."""


def paths(there: world.World) -> dict[str, str]:
    """Every page by a short name."""
    ref, profiles = there.study.id[:16], there.profiles
    return {
        "login": "/login",
        "overview": "/",
        "studies": "/studies",
        "study": f"/studies/{ref}",
        "study-axes": f"/studies/{ref}?x=tpot_p95_ms&y=goodput_rps",
        "trials": f"/studies/{ref}/trials",
        "trials-chosen": f"/studies/{ref}/trials?where=state%3DCOMPLETE&sort=ttft_p95_ms&pick=3&pick=5",
        "compare": f"/compare?study={ref}&trial=0&trial=3&trial=5",
        "trial": f"/studies/{ref}/trials/3",
        "trial-infeasible": f"/studies/{ref}/trials/8",
        "history": "/history?metric=goodput_rps",
        "nights": "/compare?" + "&".join(f"run={p.evidence['run']}" for p in profiles[:2]),
        "upgrade": f"/studies/{world.upgrade_study().id[:16]}",
        "profiles": "/profiles",
        "profile": f"/profiles/{profiles[1].id}",
        "champion": f"/profiles/{profiles[0].id}",
        "diff": f"/profiles/{profiles[0].id}/diff/{profiles[1].id}",
        "schedules": "/schedules",
        "error": "/profiles/999",
    }


def running(there: world.World) -> None:
    """An upgrade check that has ended, and a run in the middle of its night, for the pictures."""
    store, made = there.store, there.study
    world.an_upgrade_check(store, there.home / "trials" / "upgrade")
    run = world.living_run(store, made, 12, world.NOW + timedelta(hours=2))
    first = len(store.trials(made.id))
    for number in range(first, first + 5):
        world.complete(store, run, number, there.home / "trials" / "live")
    world.begin(store, run, first + 5, Candidate({"max_num_seqs": 48, "max_num_batched_tokens": 4096}))
    seconds = list(range(0, 35, 2))
    curves: dict[str, list[float | None]] = {
        "at_s": [*map(float, seconds)], "running": [min(48.0, 2 * s) for s in seconds],
        "waiting": [max(0.0, s - 20) for s in seconds], "kv_usage": [0.02 * s for s in seconds],
        "preemptions": [float(s > 28) for s in seconds],
    }  # fmt: skip
    live = RunNow(
        run=run.id, at=world.NOW, phase="window", slice="peak", trial=first + 5, done_s=34.0, total_s=60.0,
        to_confirm=6, engine=curves,
    )  # fmt: skip
    write(path_of(there.home, run.id), live)
    log = there.home / "trials" / "now"
    log.mkdir(parents=True)
    (log / "engine.log").write_text("INFO Starting vLLM\nINFO Avg prompt throughput: 812.3 tokens/s\n" * 6)
    store.add_launch(
        Launch(id="now", study_id=made.id, argv=(), started_at=run.started_at, directory=str(log))
    )


def report_of(there: world.World, folder: Path) -> Path:
    """The study's report as a file."""
    store, made = there.store, there.study
    data = ReportData(
        study=made, trials=store.trials(made.id), conclusions=store.conclusions(made.id),
        launches=store.launches(made.id),
        commands=[f"tuner report {made.id[:12]} -o report.html"], generated_at=world.NOW,
    )  # fmt: skip
    path = folder / "report.html"
    path.write_text(render(data), encoding="utf-8")
    return path


def login(driver: webdriver.Chrome, address: str, token: str) -> None:
    """A session by cookie, as the login form makes it."""
    word = httpx.post(f"{address}/login", data={"token": token}).cookies[COOKIE]
    driver.get(f"{address}/login")
    driver.add_cookie({"name": COOKIE, "value": word, "httpOnly": True, "sameSite": "Strict"})


def shoot(driver: webdriver.Chrome, path: Path, width: int, most: int = 2200) -> None:
    """The whole page, up to a height."""
    height = driver.execute_script("return document.documentElement.scrollHeight")
    clip = {"x": 0, "y": 0, "width": width, "height": min(int(height), most), "scale": 1}
    shot = driver.execute_cdp_cmd(
        "Page.captureScreenshot", {"format": "png", "clip": clip, "captureBeyondViewport": True}
    )
    path.write_bytes(base64.b64decode(shot["data"]))


def main() -> None:
    """Takes the pictures and says what overlaps."""
    every = "--all" in sys.argv
    folder = Path(next((a for a in sys.argv[1:] if not a.startswith("--")), "docs/screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        there = world.fill(home)
        running(there)
        with world.serve(there.store, home, world.Clock()) as address, chromium(home / "browser") as driver:
            pages = {name: address + path for name, path in paths(there).items()}
            pages["report"] = report_of(there, home).as_uri()
            login(driver, address, there.tokens["admin"])
            for label, size in (("desktop", DESKTOP), ("phone", PHONE), *([("wide", WIDE)] if every else [])):
                for name, url in pages.items():
                    if not every and name not in KEPT[label]:
                        continue
                    for dark in (False, True) if every else (False,):
                        resize(driver, size, dark=dark)
                        driver.get(url)
                        shoot(driver, folder / f"{name}-{label}{'-dark' if dark else ''}.png", size[0])
                    for each in overlaps(driver):
                        print(f"{name} {label}: {each}")
            for name in ("overview", "study", "history", "nights", "report") if every else ():
                resize(driver, PAPER, paper=True)
                driver.get(pages[name])
                shoot(driver, folder / f"{name}-print.png", PAPER[0], 3 * PAPER[1])


if __name__ == "__main__":
    main()
