"""A headless Chromium that looks at the pages of a server: what they show, what they log, and what axe finds."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

AXE = Path(__file__).resolve().parents[2] / "tools" / "web" / "node_modules" / "axe-core" / "axe.min.js"
WAIT_SECONDS = 60.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--window-size=1280,900",
)

ValueT = TypeVar("ValueT")


class Browser:
    """One browser session; ``driver`` is selenium's."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.refusals: tuple[str, ...] = ()
        """Statuses of refusals that a test provokes: the browser reports them, some after the test has ended."""

    def open(self, url: str) -> None:
        """Load a document, with nothing of an earlier one in it."""
        self.driver.get("about:blank")
        self.driver.get(url)

    def run(self, script: str, *values: Any) -> Any:
        """What a script returns."""
        return self.driver.execute_script(script, *values)

    def all(self, selector: str) -> list[Any]:
        """The elements of a selector."""
        return list(self.driver.find_elements("css selector", selector))

    def one(self, selector: str) -> Any:
        """The only element of a selector, once it is there."""
        (found,) = self.eventually(lambda: self.all(selector))
        return found

    def text(self, selector: str) -> str:
        """The text of the elements of a selector, read at once, as they are replaced while pages live."""
        script = "return [...document.querySelectorAll(arguments[0])].map(e => e.innerText).join('\\n')"
        return str(self.run(script, selector))

    def eventually(self, ask: Callable[[], ValueT]) -> ValueT:
        """The answer, once it is true."""
        until = time.monotonic() + WAIT_SECONDS
        while not (answer := ask()):
            assert time.monotonic() < until, f"{self.driver.current_url}:\n{self.text('body')[:2000]}"
            time.sleep(0.05)
        return answer

    def shows(self, words: str, selector: str = "body") -> None:
        """Wait for words on the page."""
        self.eventually(lambda: words in self.text(selector))

    def emulate(self, scheme: str, width: int, height: int) -> None:
        """Another colour scheme and another size of the window."""
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def fits(self, width: int) -> None:
        """Wait until the page is as wide as the window: charts follow a new size a frame later."""
        script = "return innerWidth == arguments[0] && document.documentElement.scrollWidth <= innerWidth"
        self.eventually(lambda: self.run(script, width))

    def complaints(self) -> list[str]:
        """What the pages have written to the console since the last call, and what the browser refused to load."""
        reported = [entry["message"] for entry in self.driver.get_log("browser")]
        return [
            each for each in reported if not any(f"status of {status}" in each for status in self.refusals)
        ]

    def barriers(self) -> list[str]:
        """What axe finds on the page; no answer without node, which installs it."""
        if not AXE.exists():
            pytest.skip("axe-core is not installed: run `npm ci` in tools/web")
        if not self.run("return Boolean(window.axe)"):
            self.run(AXE.read_text(encoding="utf-8"))
        found = self.driver.execute_async_script(
            "const done = arguments[0]; axe.run(document).then(r => done(r.violations), e => done([{id: String(e)}]))"
        )
        return [
            f"{each['id']}: {node['html'][:200]}"
            for each in found
            for node in each.get("nodes", [{"html": ""}])
        ]


@contextmanager
def browsing(*flags: str) -> Iterator[Browser]:
    """A browser, with ``flags`` of its own; without Debian's chromium and chromium-driver the test is skipped."""
    browser, program = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or program is None:
        pytest.skip("chromium and chromedriver are not installed")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (*FLAGS, *flags):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(program))
    try:
        driver.set_script_timeout(WAIT_SECONDS)
        yield Browser(driver)
    finally:
        driver.quit()
