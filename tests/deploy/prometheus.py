"""A real Prometheus that scrapes one server, with the configuration and the rules of ``deploy/``."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.deploy.files import ALERTS, PROMETHEUS, program, read_yaml
from tests.doubles.shared_stores import free_port

PACKAGE = "apt-get install --no-install-recommends prometheus"
WAIT_SECONDS = 60.0


class Prometheus:
    """Asks a running Prometheus over its HTTP API."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=60)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an instant query now."""
        answer = self._client.post("/api/v1/query", data={"query": expression}).json()
        assert answer["status"] == "success", f"{expression}: {answer}"
        return answer["data"]["result"]

    def rules(self) -> list[dict[str, Any]]:
        groups = self._client.get("/api/v1/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def ready(self) -> bool:
        try:
            return self._client.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False


def wait_for(condition: Callable[[], Any], what: str, seconds: float = WAIT_SECONDS) -> None:
    """Return when ``condition`` holds."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"waited {seconds:g} s for {what}"
        time.sleep(0.2)


@contextmanager
def scraping(address: str) -> Iterator[Prometheus]:
    """Prometheus scraping ``host:port`` once a second, with the shipped configuration and alert rules."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = read_yaml(PROMETHEUS)
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(ALERTS)]
        config["scrape_configs"][0]["static_configs"] = [{"targets": [address]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        port = free_port()
        command = [program("prometheus", PACKAGE), f"--config.file={folder / 'prometheus.yml'}"]
        command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            running = Prometheus(f"http://127.0.0.1:{port}")

            def up() -> bool:
                assert process.poll() is None, (folder / "log").read_text()
                return running.ready()

            wait_for(up, "Prometheus to start")
            yield running
        finally:
            process.kill()
            process.wait()
