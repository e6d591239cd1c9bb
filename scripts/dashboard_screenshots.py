"""Take the screenshots of the dashboard: ``python scripts/dashboard_screenshots.py``.

It starts a server with the built-in model, loads it with requests of three tenants, runs an experiment and a trial of
the tuner, and pictures every page with headless Chromium through selenium and Pillow (extra
``dev``). Run it when a page changes.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
from PIL import Image
from selenium import webdriver

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images" / "screenshots"
PORT = 8017
URL = f"http://127.0.0.1:{PORT}"
TENANTS = """
default: {weight: 1}
tenants:
  acme: {weight: 2}
  globex: {weight: 1, tokens_per_day: 20000000, requests_per_minute: 60000}
"""
CLIENTS = {"acme": 8, "globex": 5, "initech": 4}
SERVE = (
    "serve --max-num-seqs 12 --max-model-len 2048 --kv-cache-memory-bytes 8MiB --device-price 2.5/h --currency EUR "
    "--response-cache memory --tuner-window 1"
)
EXPERIMENT = {
    "setting": "max_running",
    "treatment": 6,
    "metric": "e2e_mean_seconds",
    "guards": {"ttft_p99_seconds": 9.0},
    "window_seconds": 1.5,
    "burn_in_seconds": 0.3,
    "max_seconds": 600.0,
    "alpha": 0.001,
    "name": "half of the slots",
}
PAGES = ("overview", "requests", "caches", "tenants", "experiments", "tuner")
HEIGHTS = {"overview": 1640, "experiments": 1700}
SECONDS_OF_LOAD = 45
MOST_SECONDS_OF_TRIAL = 120
COLOURS = 256
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")


def load(stop: threading.Event) -> None:
    """Requests of all tenants until ``stop``; one in five repeats a request that is cacheable."""

    def send(tenant: str, number: int) -> None:
        with httpx.Client(base_url=URL, timeout=60, headers={"X-Tenant-Id": tenant}) as client:
            sent = 0
            while not stop.is_set():
                sent += 1
                story = sent % 7 if sent % 5 == 0 else f"{number}.{sent}"
                body = {
                    "prompt": f"Story {story} of {tenant}: once upon a time there was a fox, and",
                    "max_tokens": 40 + 17 * (sent % 9),
                    "temperature": 0,
                    "ignore_eos": True,
                    "service_tier": "flex" if sent % 4 == 0 else "default",
                }
                client.post("/v1/completions", json=body)

    for tenant, clients in CLIENTS.items():
        for number in range(clients):
            threading.Thread(target=send, args=(tenant, number), daemon=True).start()


def wait_until_ready(server: subprocess.Popen[bytes]) -> None:
    """Wait for the server."""
    while True:
        try:
            httpx.get(f"{URL}/health/ready").raise_for_status()
            return
        except httpx.HTTPError:
            if server.poll() is not None:
                sys.exit("the server did not start")
            time.sleep(0.2)


def picture(driver: webdriver.Chrome, name: str, page: str, width: int, height: int, scheme: str) -> None:
    """Picture a page of the dashboard in a colour scheme."""
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.execute_script("location.hash = arguments[0]", f"#/{page}")
    time.sleep(4)
    shot = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
    shot.quantize(COLOURS, dither=Image.Dither.NONE).save(FOLDER / f"dashboard-{name}.png", optimize=True)


def pictures() -> None:
    """Picture every page, and the overview on a phone in the dark."""
    options = webdriver.ChromeOptions()
    for flag in FLAGS:
        options.add_argument(flag)
    options.binary_location = shutil.which("chromium") or ""
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        driver.get(f"{URL}/dashboard")
        httpx.post(f"{URL}/v1/experiments", json=EXPERIMENT).raise_for_status()
        time.sleep(SECONDS_OF_LOAD)
        for page in PAGES[:-1]:
            picture(driver, page, page, 1200, HEIGHTS.get(page, 820), "light")
        picture(driver, "load", "overview", 1200, 672, "light")
        picture(driver, "phone", "overview", 390, 844, "dark")
        for each in httpx.get(f"{URL}/v1/experiments").json()["data"]:
            httpx.delete(f"{URL}/v1/experiments/{each['id']}")
        httpx.post(f"{URL}/v1/tuner", json={"mode": "advise"}).raise_for_status()
        until = time.monotonic() + MOST_SECONDS_OF_TRIAL
        while not httpx.get(f"{URL}/v1/tuner").json()["log"] and time.monotonic() < until:
            time.sleep(1)
        picture(driver, "tuner", "tuner", 1200, 640, "light")
    finally:
        driver.quit()


def main() -> None:
    """Take every picture."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        tenants = Path(folder) / "tenants.yaml"
        tenants.write_text(TENANTS, encoding="utf-8")
        command = [sys.executable, "-m", "headrace", *SERVE.split(), "--port", str(PORT)]
        server = subprocess.Popen([*command, "--tenants", str(tenants)], stdout=subprocess.DEVNULL)
        stop = threading.Event()
        try:
            wait_until_ready(server)
            load(stop)
            pictures()
        finally:
            stop.set()
            server.terminate()
            server.wait(timeout=60)


if __name__ == "__main__":
    main()
