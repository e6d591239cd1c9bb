"""Throughput of a server with and without its access log, under closed-loop load.

One server runs. Its log level changes between ``info``, which has the access log, and ``warning``, which has not, from
one short round to the next. Two equal servers would not do: at equal settings they differed by 3 % in CPU time per
request, and by 20 % in throughput from one minute to the next on a shared machine. The ratios of neighbouring rounds
without the log are the control. The log is written to a file.

    python -m benchmarks.access_log --clients 24 --minutes 10
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, stdev
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import urlopen

START_SECONDS = 60.0
RELOAD_SECONDS = 0.2


class Round(NamedTuple):
    """What one round measured."""

    requests_per_second: float
    tokens_per_second: float
    cpu_milliseconds: float  # of the server process, per request


class Server(NamedTuple):
    """A server process, its URL, and its files."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    settings: Path

    def set_access_log(self, on: bool) -> None:
        """Change the log level, as an operator does: the settings file and SIGHUP."""
        self.settings.write_text(f"log_level: {'info' if on else 'warning'}\n")
        self.process.send_signal(signal.SIGHUP)
        time.sleep(RELOAD_SECONDS)


@contextmanager
def serving(folder: Path, log_format: str) -> Iterator[Server]:
    """A server with an access log."""
    log, settings = folder / "server.log", folder / "settings.yml"
    settings.write_text("log_level: info\n")
    command = [sys.executable, "-m", "headrace", "serve", "--port", "0", "--config", str(settings)]
    with log.open("wb") as out:
        server = subprocess.Popen(
            [*command, "--log-format", log_format], stdout=out, stderr=subprocess.STDOUT
        )
        try:
            yield Server(server, _url(log, server), log, settings)
        finally:
            server.terminate()
            server.wait()


def _url(log: Path, server: subprocess.Popen[bytes]) -> str:
    until = time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < until:
        found = re.search(r" ready +(http://\S+)", log.read_text())
        if found:
            return found[1]
        time.sleep(0.1)
    raise RuntimeError(f"the server did not start:\n{log.read_text()}")


async def _client(url: str, number: int, until: float, max_tokens: int) -> tuple[int, int]:
    """One client that sends its next request as soon as it has a response; requests and tokens."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    requests = tokens = 0
    while time.monotonic() < until:
        prompt = f"Story {number}.{requests}.{os.urandom(4).hex()}: once upon a time there was"
        body = {"model": "builtin", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        raw = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: bench-{number}-{requests}\r\n"
        )
        writer.write(
            f"{head}Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw
        )
        headers = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", headers.lower())
        if length is None or b" 200 " not in headers.split(b"\r\n", 1)[0]:
            raise RuntimeError(headers.decode())
        answer = json.loads(await reader.readexactly(int(length[1])))
        requests += 1
        tokens += answer["usage"]["completion_tokens"]
    writer.close()
    return requests, tokens


def _cpu_seconds(url: str) -> float:
    """CPU time that the server process has used."""
    with urlopen(f"{url}/metrics") as page:
        found = re.search(rb"^process_cpu_seconds_total (\S+)", page.read(), re.MULTILINE)
    assert found
    return float(found[1])


async def load_round(url: str, clients: int, seconds: float, max_tokens: int) -> Round:
    """One round of load."""
    cpu = _cpu_seconds(url)
    began = time.monotonic()
    done = await asyncio.gather(*(_client(url, each, began + seconds, max_tokens) for each in range(clients)))
    spent = time.monotonic() - began
    requests, tokens = (sum(counts) for counts in zip(*done, strict=True))
    return Round(requests / spent, tokens / spent, (_cpu_seconds(url) - cpu) / requests * 1e3)


def report(unit: str, what: str, on: list[float], off: list[float]) -> None:
    """Ratios of the rounds with ``what`` to the mean of the two rounds without it around them, and the control's."""
    around = [(one + other) / 2 for one, other in pairwise(off)]
    ratios = [mine / other for mine, other in zip(on, around, strict=True)]
    control = [one / other for one, other in pairwise(off)]
    for name, values in ((what, ratios), ("control", control)):
        low, high = _interval(values)
        print(
            f"{unit}: {name} {median(values):.4f} in the median, mean {mean(values):.4f} ({low:.4f} to {high:.4f})"
        )


def _interval(values: list[float]) -> tuple[float, float]:
    """The 95 % interval of the mean."""
    error = 1.96 * stdev(values) / len(values) ** 0.5
    return mean(values) - error, mean(values) + error


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--minutes", type=float, default=10.0, help="of load")
    parser.add_argument("--round-seconds", type=float, default=2.0)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--log-format", choices=["text", "json"], default="text")
    args = parser.parse_args()
    pairs = max(2, round(args.minutes * 60 / args.round_seconds / 2))
    on: list[Round] = []
    off: list[Round] = []
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), args.log_format) as server:

        def measure(logged: bool) -> Round:
            server.set_access_log(logged)
            result = asyncio.run(load_round(server.url, args.clients, args.round_seconds, args.max_tokens))
            print(
                f"access log {'on ' if logged else 'off'} {result.requests_per_second:8.1f} requests/s "
                f"{result.tokens_per_second:9.0f} tokens/s {result.cpu_milliseconds:7.3f} CPU ms/request",
                flush=True,
            )
            return result

        measure(False)  # the first round warms up
        off.append(measure(False))
        for _ in range(pairs):
            on.append(measure(True))
            off.append(measure(False))
        lines = sum(" access " in line for line in server.log.read_text().splitlines())
    what = "with the log"
    report(
        "tokens/s", what, [each.tokens_per_second for each in on], [each.tokens_per_second for each in off]
    )
    report("CPU ms/request", what, [r.cpu_milliseconds for r in on], [r.cpu_milliseconds for r in off])
    print(f"access lines written: {lines}")


if __name__ == "__main__":
    main()
