"""One browser for all tests, and a served history for each module."""

from collections.abc import Iterator

import pytest
from selenium import webdriver

from tests.browser import world
from tests.browser.chromium import DESKTOP, axe_source, chromium, resize
from tests.browser.screenshots import login
from tests.browser.site import Site, complaints


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture(scope="session")
def axe() -> str:
    return axe_source()


@pytest.fixture
def site(browser: webdriver.Chrome, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A fresh history of three nights, and a browser that is logged in with scope admin."""
    home = tmp_path_factory.mktemp("home")
    there, clock = world.fill(home), world.Clock()
    with world.serve(there.store, home, clock) as address:
        found = Site(driver=browser, address=address, world=there, clock=clock)
        resize(browser, DESKTOP)
        login(browser, address, there.tokens["admin"])
        complaints(browser)
        yield found
        browser.get("about:blank")
    there.store.close()
