"""Every page: nothing serious by axe-core (phone, and dark), no overlap at either width, no console error."""

import pytest

from tests.browser.chromium import DESKTOP, PHONE, overlaps, resize, serious
from tests.browser.screenshots import paths, report_of, running
from tests.browser.site import Site

pytestmark = pytest.mark.browser


def looks(site: Site, axe: str, name: str, url: str) -> list[str]:
    """What is wrong with a page."""
    resize(site.driver, PHONE)
    site.driver.get(url)
    found = [*overlaps(site.driver), *serious(site.driver, axe)]
    resize(site.driver, DESKTOP, dark=True)
    site.driver.get(url)
    found += [*overlaps(site.driver), *serious(site.driver, axe)]
    return [f"{name}: {each}" for each in (*found, *(site.errors() if name != "error" else ()))]


def test_pages(site: Site, axe: str) -> None:
    running(site.world)
    pages = paths(site.world).items()
    found = [each for name, path in pages for each in looks(site, axe, name, site.address + path)]
    assert found == []


def test_report(site: Site, axe: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = report_of(site.world, tmp_path_factory.mktemp("report"))
    assert looks(site, axe, "report", path.as_uri()) == []


def test_the_check_sees_what_overlaps_and_what_axe_finds(site: Site, axe: str) -> None:
    site.get("/login")
    site.driver.execute_script(
        "const h = document.querySelector('h1'); h.style.position = 'absolute'; h.style.top = '140px';"
        "document.querySelector('main p').style.color = '#eee';"
    )
    assert any("Log in" in each for each in overlaps(site.driver))
    assert any(each.startswith("color-contrast") for each in serious(site.driver, axe))
