"""Take the screenshots of the step-by-step pages and the chat: ``python scripts/step_screenshots.py``.

It starts a server with the built-in model and moves headless Chromium through its pages with selenium (extra ``test``;
Debian's ``chromium`` and ``chromium-driver``). Run it when one of these pages changes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images" / "screenshots"
SERVE = [
    sys.executable,
    "-m",
    "headrace",
    "serve",
    "--port",
    "0",
    "--max-num-seqs",
    "3",
    "--device-price",
    "2.5/h",
]
MOVE = """
const slider = document.querySelector(".controls input[type=range]");
Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value").set.call(slider, arguments[0]);
slider.dispatchEvent(new Event("input", { bubbles: true }));
"""


class Camera:
    """A browser that looks at one server."""

    def __init__(self, url: str) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium") or ""
        for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
            options.add_argument(flag)
        self.url = url
        self.driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))

    def open(self, path: str, width: int, height: int) -> None:
        """Open a page in a window of this size."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.get("about:blank")
        self.driver.get(self.url + path)

    def wait(self, selector: str, least: int = 1) -> list[Any]:
        """The elements of a selector, once there are that many."""
        return WebDriverWait(self.driver, 60).until(
            lambda driver: (
                found if len(found := driver.find_elements("css selector", selector)) >= least else None
            )
        )

    def take(self, name: str, after: float = 0.5) -> None:
        """Write the picture of the window, after so many seconds."""
        time.sleep(after)
        self.driver.save_screenshot(str(FOLDER / f"{name}.png"))


def tour(camera: Camera) -> None:
    """Static and continuous batching side by side, in the middle of the run."""
    camera.open("/dashboard#/tour/continuous-batching", 1200, 960)
    camera.wait(".grid", 2)
    camera.driver.execute_script(MOVE, 26)
    camera.take("tour")


def blocks(camera: Camera) -> None:
    """Shared and copied blocks, with the table of a request."""
    camera.open("/dashboard#/tour/prefix-sharing", 1200, 960)
    camera.wait(".grid", 2)
    camera.driver.execute_script(MOVE, 18)
    camera.wait(".lanes button", 8)[6].click()
    camera.take("prefix-sharing")


def generate(url: str, number: int) -> None:
    """Let the server generate a long text."""
    body = {"prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True, "request_id": f"r{number}"}
    httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()


def live(camera: Camera) -> None:
    """Steps of the server, which is followed, with the block table of a request."""
    camera.open("/dashboard#/steps", 1200, 1000)
    camera.wait(".filters")
    time.sleep(2)
    with ThreadPoolExecutor(7) as clients:  # the browser's own six connections are the page's
        for number in range(7):
            clients.submit(generate, camera.url, number)
        camera.wait("rect.waits")
        camera.wait(".lanes button", 7)[-1].click()  # it runs last, so its table is there for a while
        camera.wait(".table-of")
        camera.take("steps", 0.0)


def request(camera: Camera) -> None:
    """The timeline of one of its requests."""
    camera.open("/dashboard#/request/cmpl-r6", 1200, 640)
    camera.wait(".timeline rect.token", 40)
    camera.take("request")


def chat(camera: Camera) -> None:
    """An answer with the probabilities of its tokens."""
    camera.open("/chat", 1200, 820)
    camera.wait("option")
    camera.wait("input[type=checkbox]")[0].click()
    camera.wait("#message")[0].send_keys("Tell me a story about a fox.\n")
    camera.wait(".numbers")
    camera.wait(".tokens .unlikely")
    camera.wait(".tokens")[0].send_keys("\ue014" * 3)
    camera.take("chat")


PICTURES: tuple[Callable[[Camera], None], ...] = (tour, blocks, live, request, chat)


def main() -> None:
    """Take every picture."""
    server = subprocess.Popen(SERVE, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = ""
        while not url:
            line = server.stdout.readline()
            if not line:
                sys.exit("the server did not start")
            url = next((word for word in line.split() if word.startswith("http") and "ready" in line), "")
        camera = Camera(url)
        try:
            for picture in PICTURES:
                picture(camera)
        finally:
            camera.driver.quit()
    finally:
        server.terminate()
        server.wait(timeout=60)


if __name__ == "__main__":
    main()
