"""Throughput of the server with and without its access log, in alternating rounds under closed-loop load.

Three servers run: one with ``--access-log``, and two without it, of which the second is the control. Rounds
rotate between them, so that all see the same machine; the idle ones sleep. The ratio of the control to its equal is
the noise of the measurement. The log is written to a file. The result is the ratio of the medians. The CPU
time per request of the server process is printed too: on a busy machine it varies less than the throughput.

    python -m benchmarks.access_log --clients 24 --minutes 10
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import urlopen

START_SECONDS = 60.0


class Round(NamedTuple):
    """What one round measured."""

    requests_per_second: float
    tokens_per_second: float
    cpu_milliseconds: float  # of the server process, per request


@contextmanager
def serving(folder: Path, name: str, *flags: str) -> Iterator[tuple[str, Path]]:
    """A server process, its URL, and the file of its log."""
    log = folder / f"{name}.log"
    command = [sys.executable, "-m", "headrace", "serve", "--port", "0", *flags]
    with log.open("wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            yield _url(log, server), log
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
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: bench-{number}-{requests}\r\n"
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


async def _load(url: str, clients: int, seconds: float, max_tokens: int) -> Round:
    cpu = _cpu_seconds(url)
    began = time.monotonic()
    until = began + seconds
    done = await asyncio.gather(*(_client(url, number, until, max_tokens) for number in range(clients)))
    spent = time.monotonic() - began
    requests, tokens = (sum(counts) for counts in zip(*done, strict=True))
    return Round(requests / spent, tokens / spent, (_cpu_seconds(url) - cpu) / requests * 1e3)


def _report(unit: str, values: dict[str, list[float]]) -> None:
    """Medians, and the ratios to the server without access log: of medians, and the median of the rounds' ratios."""
    off = median(values["off"])
    print(f"{unit}: median off {off:.3f}")
    for name in ("on", "control"):
        pairs = median(mine / other for mine, other in zip(values[name], values["off"], strict=True))
        mine = median(values[name])
        print(
            f"{unit}: median {name} {mine:.3f}, {mine / off:.4f} of off; median ratio of rounds {pairs:.4f}"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--minutes", type=float, default=10.0, help="of load, for all servers together")
    parser.add_argument("--round-seconds", type=float, default=10.0)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--log-format", choices=["text", "json"], default="text")
    args = parser.parse_args()
    rounds = max(1, round(args.minutes * 60 / args.round_seconds / 3))
    without = ["--no-access-log"]
    flags = {"on": ["--access-log", "--log-format", args.log_format], "off": without, "control": without}
    measured: dict[str, list[Round]] = {name: [] for name in flags}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {name: stack.enter_context(serving(folder, name, *flags[name])) for name in flags}
        for name in servers:
            asyncio.run(_load(servers[name][0], args.clients, min(5.0, args.round_seconds), args.max_tokens))
        for number in range(rounds):
            names = list(flags)
            for name in names[number % 3 :] + names[: number % 3]:
                url = servers[name][0]
                result = asyncio.run(_load(url, args.clients, args.round_seconds, args.max_tokens))
                measured[name].append(result)
                print(
                    f"round {number + 1:3} access log {name:7} {result.requests_per_second:8.1f} requests/s "
                    f"{result.tokens_per_second:9.0f} tokens/s {result.cpu_milliseconds:7.3f} CPU ms/request",
                    flush=True,
                )
        lines = sum(" access " in line for line in servers["on"][1].read_text().splitlines())
    _report("tokens/s", {name: [each.tokens_per_second for each in measured[name]] for name in measured})
    _report("CPU ms/request", {name: [each.cpu_milliseconds for each in measured[name]] for name in measured})
    print(f"access lines written: {lines}")


if __name__ == "__main__":
    main()
