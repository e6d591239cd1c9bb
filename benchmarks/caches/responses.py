"""Latency of cached responses over HTTP, overhead of a miss, and many identical requests at once.

Each case has its own server process on loopback. The client writes bytes to a socket, so that its own time is small.
The cases ``no cache`` and ``miss`` alternate by round; their difference is the overhead of a lookup that finds nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from rich.table import Table

from benchmarks.stage import Server, arguments, publish, say, server
from headrace.lab.bench.stats import percentile

PROMPT = "Tell me in one or two sentences what a cache is good for, and when it is better to have none."

SETTLE_SECONDS = 10.0


class Connection:
    """One keep-alive connection without the overhead of a client library."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._host = host

    def post(self, body: bytes) -> tuple[float, bytes]:
        """Seconds from sending the request to holding the answer, and the answer with its headers."""
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        request = head.encode() + body
        began = time.perf_counter()
        self._socket.sendall(request)
        got = self._socket.recv(65536)
        headers, _, rest = got.partition(b"\r\n\r\n")
        length = int(headers.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        while len(rest) < length:
            more = self._socket.recv(65536)
            rest += more
            got += more
        return time.perf_counter() - began, got

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def body(prompt: str, tokens: int, **more: Any) -> bytes:
    """A request for ``tokens`` tokens, always the same ones."""
    messages = [{"role": "user", "content": prompt}]
    request = {"messages": messages, "temperature": 0, "max_tokens": tokens, "min_tokens": tokens} | more
    return json.dumps(request).encode()


def sequence(running: Server, bodies: Iterator[bytes], count: int, wanted: bytes) -> list[float]:
    """Seconds of ``count`` calls, one after the other."""
    connection = Connection(running.url)
    seconds = []
    for _ in range(count):
        took, got = connection.post(next(bodies))
        assert wanted in got, got[:400]
        seconds.append(took)
    connection.close()
    return seconds


def wait_until_cached(running: Server, request: bytes) -> None:
    """Wait until the response is served from the cache, so that it was written and invalidations were synchronized."""
    connection = Connection(running.url)
    until = time.monotonic() + SETTLE_SECONDS
    while b"hit; layer=exact" not in connection.post(request)[1]:
        assert time.monotonic() < until, "the response is not cached"
        time.sleep(0.1)
    connection.close()


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile, and calls per second of one connection."""
    return {
        "p50_seconds": percentile(seconds, 50),
        "p99_seconds": percentile(seconds, 99),
        "calls_per_second": len(seconds) / sum(seconds),
    }


async def exchange(url: str, request: bytes, count: int) -> list[bytes]:
    """``count`` answers over one connection, without their headers."""
    host, port = url.removeprefix("http://").split(":")
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(request)}\r\n\r\n".encode()
    reader, writer = await asyncio.open_connection(host, int(port))
    answers = []
    for _ in range(count):
        writer.write(head + request)
        headers = await reader.readuntil(b"\r\n\r\n")
        assert b"200 OK" in headers, headers
        length = int(headers.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        answers.append(await reader.readexactly(length))
    writer.close()
    return answers


async def saturate(running: Server, request: bytes, count: int, connections: int) -> float:
    """Calls per second when ``connections`` ask as fast as they are answered."""
    began = time.perf_counter()
    await asyncio.gather(*(exchange(running.url, request, count // connections) for _ in range(connections)))
    return count / (time.perf_counter() - began)


async def crowd(running: Server, size: int, tokens: int) -> dict[str, float]:
    """``size`` clients ask the same at once; how often it was computed, and how long the last one waited."""
    before = running.metrics().get("generation_tokens_total", 0.0)
    request = body("What do a thousand people ask at once?", tokens)
    began = time.perf_counter()
    answers = await asyncio.gather(*(exchange(running.url, request, 1) for _ in range(size)))
    seconds = time.perf_counter() - began
    texts = {json.loads(answer)["choices"][0]["message"]["content"] for (answer,) in answers}
    assert len(texts) == 1, texts
    computed = running.metrics()["generation_tokens_total"] - before
    return {"clients": size, "computed": computed / tokens, "seconds": seconds}


@contextmanager
def store(name: str) -> Iterator[str | None]:
    """A store of its own for the measurement, as ``--response-cache`` wants it; None where it is not installed."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        if name == "sqlite":
            yield f"sqlite:{folder}/answers.db"
            return
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        program = {"redis": "redis-server", "memcached": "memcached"}[name]
        flags = {
            "redis": ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder],
            "memcached": ["-p", str(port), "-l", "127.0.0.1", "-U", "0", "-u", "nobody"],
        }
        if shutil.which(program) is None:
            yield None
            return
        process = subprocess.Popen([program, *flags[name]], stdout=subprocess.DEVNULL)
        time.sleep(1.0)
        yield f"{name}://127.0.0.1:{port}"
        process.kill()
        process.wait()


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = arguments(__doc__ or "", rounds=5)
    parser.add_argument("--calls", type=int, default=1000, help="per round")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--connections", type=int, default=8, help="of the test of throughput")
    parser.add_argument("--crowd", type=int, default=1000)
    parser.add_argument("--stores", nargs="*", default=["sqlite", "redis", "memcached"], help="beside memory")
    return parser


def measured(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure, print, write; the figures of each case."""
    rows: dict[str, dict[str, float]] = {}
    repeated = body(PROMPT, args.tokens)

    def hits(name: str, *flags: str) -> None:
        with server(args, *flags) as running:
            wait_until_cached(running, repeated)
            if name == "hit, memory":
                rows["computed"] = percentiles(
                    [s for _ in range(args.rounds) for s in sequence(running, fresh(args.tokens), 5, b"miss")]
                )
            rounds = [
                sequence(running, iter([repeated] * args.calls), args.calls, b"hit; layer=exact")
                for _ in range(args.rounds)
            ]
            rows[name] = percentiles([s for seconds in rounds for s in seconds])
            rates = [
                asyncio.run(saturate(running, repeated, args.calls * 2, args.connections))
                for _ in range(args.rounds)
            ]
            rows[name]["saturated_per_second"] = statistics.median(rates)
            if name == "hit, memory":
                rows["crowd"] = asyncio.run(crowd(running, args.crowd, args.tokens))

    hits("hit, memory", "--response-cache", "memory")
    for name in args.stores:
        with store(name) as spec:
            if spec is None:
                say(f"{name} is not installed: it is left out")
            else:
                hits(f"hit, {name}", "--response-cache", spec, "--response-cache-secret", "of the benchmark")
    with ExitStack() as stack:
        pair = {
            "no cache": stack.enter_context(server(args)),
            "miss": stack.enter_context(server(args, "--response-cache", "memory")),
        }
        measured: dict[str, list[list[float]]] = {name: [] for name in pair}
        for number in range(args.rounds * 40):
            for name, running in pair.items():
                bodies = fresh(2, number)
                measured[name].append(sequence(running, bodies, max(1, args.calls // 100), b"200 OK"))
        rows |= {name: percentiles([s for each in rounds for s in each]) for name, rounds in measured.items()}
        pairs = zip(measured["miss"], measured["no cache"], strict=True)
        added = statistics.median(statistics.median(miss) - statistics.median(none) for miss, none in pairs)
        rows["miss"]["added_seconds"] = added
    show(rows)
    publish("caches-responses", args, [], [], rows=rows)
    return rows


def fresh(tokens: int, number: int = 0) -> Iterator[bytes]:
    """Requests that nobody has made before."""
    while True:
        yield body(f"{time.time_ns()} {number}: {PROMPT}", tokens)


def show(rows: dict[str, dict[str, float]]) -> None:
    """The table, and what issues from it."""
    table = Table("case", "p50 ms", "p99 ms", "calls/s, one connection", "calls/s, saturated")
    for name, row in rows.items():
        if "p50_seconds" in row:
            table.add_row(
                name,
                f"{1e3 * row['p50_seconds']:.2f}",
                f"{1e3 * row['p99_seconds']:.2f}",
                f"{row['calls_per_second']:.0f}",
                f"{row['saturated_per_second']:.0f}" if "saturated_per_second" in row else "",
            )
    say(table)
    faster = rows["computed"]["p50_seconds"] / rows["hit, memory"]["p50_seconds"]
    added = rows["miss"]["added_seconds"]
    say(
        f"a hit is {faster:.0f} times as fast as computing; a miss costs {1e3 * added:+.2f} ms more than no cache"
    )
    crowded = rows["crowd"]
    say(
        f"{crowded['clients']:.0f} clients sent the same request at once: computed {crowded['computed']:.2f} times, "
        f"all served after {crowded['seconds']:.2f} s"
    )


def main() -> None:
    """Measure with the options of the command line."""
    measured(parser().parse_args())
