"""A served history and the browser that looks at it."""

from dataclasses import dataclass

from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from tests.browser.screenshots import login
from tests.browser.world import Clock, World

PATIENCE_S = 600.0
"""A watchdog, not a measure."""


def complaints(driver: webdriver.Chrome) -> list[dict[str, object]]:
    """The console since it was last read."""
    found: list[dict[str, object]] = driver.get_log("browser")  # type: ignore[no-untyped-call]
    return found


def patient(driver: webdriver.Chrome) -> WebDriverWait[webdriver.Chrome]:
    """A wait that asks again when a page goes away as it is read: between two pages none answers."""
    return WebDriverWait(driver, PATIENCE_S, ignored_exceptions=[WebDriverException])


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    driver: webdriver.Chrome
    address: str
    world: World
    clock: Clock

    def get(self, path: str) -> None:
        self.driver.get(self.address + path)

    @property
    def path(self) -> str:
        return self.driver.current_url.removeprefix(self.address)

    def use(self, token: str) -> None:
        """Another token's session."""
        self.driver.delete_all_cookies()
        login(self.driver, self.address, token)

    def text(self) -> str:
        return self.one("main").text

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def press(self, selector: str) -> None:
        """Press what leads to another page, until that page is there."""
        self.driver.execute_script("window.before = true")
        self.one(selector).click()
        there = "return !window.before && document.readyState === 'complete'"
        patient(self.driver).until(lambda driver: driver.execute_script(there))

    def wait_for(self, text: str) -> None:
        """Until the page says it."""
        patient(self.driver).until(lambda _: text in self.text())

    def errors(self) -> list[str]:
        """What the browser's console complains of: refused scripts and styles, failed requests."""
        return [str(each["message"]) for each in complaints(self.driver)]

    @property
    def study(self) -> str:
        return f"/studies/{self.world.study.id[:16]}"
