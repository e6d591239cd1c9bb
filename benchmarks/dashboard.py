"""Throughput of a server with the dashboard open and closed, under closed-loop load.

One server runs. In every second round the dashboard's live stream has listeners, in the rounds between it has none. The
ratios of neighbouring rounds without listeners are the control. A listener reads the stream as the page does. It does
not draw: a browser usually runs on another machine. With ``--part requests`` each snapshot lists up to 2,000 requests.
With ``--steps`` a listener also follows the steps, as the page "Step by step" does. The server records them for a while
after that, so such a round is followed by a pause.

    python -m benchmarks.dashboard --listeners 1 --part requests --minutes 10
    python -m benchmarks.dashboard --listeners 1 --steps --minutes 10
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from benchmarks.access_log import Round, load_round, report, serving
from headrace.wiring.pages import LEASE_SECONDS

POLL_SECONDS = 0.5
"""How often the page reads new steps."""


async def _listen(url: str, part: str) -> int:
    """Read the stream until it is cancelled; the bytes of its snapshots."""
    parts, received = urlsplit(url), 0
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    query = f"?part={part}" if part else ""
    writer.write(f"GET /v1/dashboard/stream{query} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n", 1)[0]:
        raise RuntimeError(head.decode())
    with suppress(asyncio.CancelledError):
        while data := await reader.read(1 << 16):
            received += len(data)
    writer.close()
    return received


async def _follow(url: str) -> int:
    """Read the steps twice a second until it is cancelled; the bytes of the responses."""
    after, received = -1, 0
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
        with suppress(asyncio.CancelledError):
            while True:
                answer = await client.get(f"/v1/steps?after={after}")
                answer.raise_for_status()
                received += len(answer.content)
                if steps := answer.json()["steps"]:
                    after = steps[-1]["step"]
                await asyncio.sleep(POLL_SECONDS)
    return received


async def _round(url: str, args: argparse.Namespace, listeners: int) -> tuple[Round, float]:
    """One round, and the kilobytes in a second that each listener received."""
    began = time.monotonic()
    tasks = [asyncio.create_task(_listen(url, args.part)) for _ in range(listeners)]
    tasks += [asyncio.create_task(_follow(url)) for _ in range(listeners if args.steps else 0)]
    result = await load_round(url, args.clients, args.round_seconds, args.max_tokens)
    for task in tasks:
        task.cancel()
    received = sum(await asyncio.gather(*tasks))
    return result, received / max(1, listeners) / (time.monotonic() - began) / 1e3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--listeners", type=int, default=1)
    parser.add_argument("--part", choices=["", "requests", "caches", "tenants"], default="")
    parser.add_argument("--steps", action="store_true", help="follow the steps too")
    parser.add_argument("--minutes", type=float, default=10.0, help="of load")
    parser.add_argument("--round-seconds", type=float, default=4.0)
    parser.add_argument("--max-tokens", type=int, default=32)
    args = parser.parse_args()
    pairs = max(2, round(args.minutes * 60 / args.round_seconds / 2))
    opened: list[Round] = []
    closed: list[Round] = []
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), "text") as server:

        def measure(listeners: int) -> Round:
            result, kilobytes = asyncio.run(_round(server.url, args, listeners))
            print(
                f"{listeners} listeners {result.requests_per_second:8.1f} requests/s "
                f"{result.tokens_per_second:9.0f} tokens/s {result.cpu_milliseconds:7.3f} CPU ms/request "
                f"{kilobytes:7.1f} kB/s to each listener",
                flush=True,
            )
            return result

        measure(0)  # the first round warms up
        closed.append(measure(0))
        for _ in range(pairs):
            opened.append(measure(args.listeners))
            if args.steps:
                time.sleep(LEASE_SECONDS + 1)
            closed.append(measure(0))
    what = "dashboard open"
    report("tokens/s", what, [r.tokens_per_second for r in opened], [r.tokens_per_second for r in closed])
    report("CPU ms/request", what, [r.cpu_milliseconds for r in opened], [r.cpu_milliseconds for r in closed])


if __name__ == "__main__":
    main()
