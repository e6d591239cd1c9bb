"""Latency of cached responses over HTTP, overhead of a miss, and many identical requests at once.

Each case has its own server process on loopback. The client writes bytes to a socket, so that its own time is small.
The cases ``no cache`` and ``miss`` alternate by round; their difference is the overhead of a lookup that finds nothing.
``similar`` is a question in other words, served by the semantic cache among ``--entries`` entries.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager

from rich.table import Table

from benchmarks.stage import Server, arguments, free_port, publish, say, server
from headrace.lab.bench.client import Connections
from headrace.lab.bench.stats import percentile

PATH = "/v1/chat/completions"
PROMPT = "Tell me in one or two sentences what a cache is good for, and when it is better to have none."
HIT = b"hit; layer=exact"
SETTLE_SECONDS = 10.0

SIMILAR = ("--response-cache", "memory", "--semantic-cache", "serve", "--semantic-threshold", "0.9")
NO_LIMIT = ("--semantic-audit", "0", "--semantic-deadline", "1s")
PLACES = ("Paris", "Rome", "Oslo", "Lima", "Cairo", "Delhi", "Quito", "Sofia", "Tunis", "Accra", "Dakar")
QUESTION = "What is the best way to reach the old town of {}?"
REWORDED = (
    "What would be the best way to reach the old town of {}?",
    "Which is the best way to reach the old town of {}?",
)
FILLER = "What does the number {} mean to you, and what do you think of {}?"


class Connection:
    """One keep-alive connection without the overhead of a client library; answers come with their headers."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._host = host

    def post(self, body: bytes) -> tuple[float, bytes]:
        """Seconds from sending the request to holding the answer, and the answer with its headers."""
        head = f"POST {PATH} HTTP/1.1\r\nHost: {self._host}\r\nContent-Length: {len(body)}\r\n\r\n"
        began = time.perf_counter()
        self._socket.sendall(head.encode() + body)
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


def body(prompt: str, tokens: int) -> bytes:
    """A request for ``tokens`` tokens, always the same ones."""
    messages = [{"role": "user", "content": prompt}]
    return json.dumps(
        {"messages": messages, "temperature": 0, "max_tokens": tokens, "min_tokens": tokens}
    ).encode()


def complete(prompt: str) -> bytes:
    """A request whose first token ends the answer: similar requests are served complete answers only."""
    messages = [{"role": "user", "content": prompt}]
    return json.dumps({"messages": messages, "temperature": 0, "stop_token_ids": list(range(200))}).encode()


def fresh(tokens: int, number: int = 0) -> Iterator[bytes]:
    """Requests that no client has sent before."""
    while True:
        yield body(f"{time.time_ns()} {number}: {PROMPT}", tokens)


def sequence(running: Server, bodies: Iterable[bytes], wanted: bytes) -> list[float]:
    """Seconds of calls, one after the other; each answer has ``wanted``."""
    seconds = []
    with closing(Connection(running.url)) as connection:
        for each in bodies:
            took, got = connection.post(each)
            assert wanted in got, got[:400]
            seconds.append(took)
    return seconds


def wait_until_cached(running: Server, request: bytes) -> None:
    """Wait until the response is served from the cache, so that it was written and invalidations were synchronized."""
    with closing(Connection(running.url)) as connection:
        until = time.monotonic() + SETTLE_SECONDS
        while HIT not in connection.post(request)[1]:
            assert time.monotonic() < until, "the response is not cached"
            time.sleep(0.1)


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile, and calls per second of one connection."""
    return {
        "p50_seconds": percentile(seconds, 50),
        "p99_seconds": percentile(seconds, 99),
        "calls_per_second": len(seconds) / sum(seconds),
    }


async def together(running: Server, request: bytes, clients: int, count: int = 1) -> tuple[float, set[str]]:
    """Seconds until ``clients`` clients have each sent the request ``count`` times, and the different texts."""
    pool, texts = Connections(running.url), set[str]()

    async def one() -> None:
        pieces: list[bytes] = []
        status = await pool.post(PATH, {}, request, lambda _, data: pieces.append(data))
        assert status == 200, pieces
        texts.add(json.loads(b"".join(pieces))["choices"][0]["message"]["content"])

    async def client() -> None:
        for _ in range(count):
            await one()

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    seconds = time.perf_counter() - began
    pool.close()
    return seconds, texts


def crowd(running: Server, size: int, tokens: int) -> dict[str, float]:
    """``size`` clients ask the same at once; how often it was computed, and how long the last one waited."""
    before = running.metrics().get("generation_tokens_total", 0.0)
    request = body("What do a thousand people ask at once?", tokens)
    seconds, texts = asyncio.run(together(running, request, size))
    assert len(texts) == 1, texts
    computed = running.metrics()["generation_tokens_total"] - before
    return {"clients": size, "computed": computed / tokens, "seconds": seconds}


@contextmanager
def store(name: str) -> Iterator[str | None]:
    """A store of its own for the measurement, as ``--response-cache`` wants it; None where it is not installed."""
    with tempfile.TemporaryDirectory() as folder:
        if name == "sqlite":
            yield f"sqlite:{folder}/answers.db"
            return
        port = free_port()
        program, *flags = {
            "redis": (
                "redis-server",
                "--port",
                str(port),
                "--bind",
                "127.0.0.1",
                "--save",
                "",
                "--dir",
                folder,
            ),
            "memcached": ("memcached", "-p", str(port), "-l", "127.0.0.1", "-U", "0", "-u", "nobody"),
        }[name]
        if shutil.which(program) is None:
            yield None
            return
        process = subprocess.Popen([program, *flags], stdout=subprocess.DEVNULL)
        time.sleep(1.0)
        yield f"{name}://127.0.0.1:{port}"
        process.kill()
        process.wait()


def hits(args: argparse.Namespace, *flags: str, more: bool = False) -> dict[str, dict[str, float]]:
    """The case of a store; with ``more`` also that of computing, and the crowd."""
    repeated, found = body(PROMPT, args.tokens), {}
    with server(args, *flags) as running:
        wait_until_cached(running, repeated)
        if more:
            new = itertools.islice(fresh(args.tokens), 5 * args.rounds)
            found["computed"] = percentiles(sequence(running, new, b"miss"))
        found["hit"] = percentiles(sequence(running, [repeated] * args.calls * args.rounds, HIT))
        each = 2 * args.calls // args.connections
        rates = [
            args.connections * each / asyncio.run(together(running, repeated, args.connections, each))[0]
            for _ in range(args.rounds)
        ]
        found["hit"]["saturated_per_second"] = statistics.median(rates)
        if more:
            found["crowd"] = crowd(running, args.crowd, args.tokens)
    return found


def similar(args: argparse.Namespace) -> dict[str, float]:
    """Questions in other words, served by the semantic cache."""
    with server(args, *SIMILAR, *NO_LIMIT) as running:
        asked = [QUESTION.format(place) for place in PLACES]
        asked += [FILLER.format(number, number * 7919) for number in range(args.entries - len(asked))]
        sequence(running, map(complete, asked), b"200 OK")
        time.sleep(1.0)  # responses are embedded in the background
        while running.metrics()["response_cache_entries"] < 2 * args.entries:
            time.sleep(0.2)
        reworded = [complete(form.format(place)) for form in REWORDED for place in PLACES]
        return percentiles(sequence(running, reworded, b"layer=semantic"))


def misses(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Two servers in turn, without a cache and with one that finds nothing."""
    with ExitStack() as stack:
        pair = {
            "no cache": stack.enter_context(server(args)),
            "miss": stack.enter_context(server(args, "--response-cache", "memory")),
        }
        found: dict[str, list[list[float]]] = {name: [] for name in pair}
        for number in range(args.rounds * 40):
            for name, running in pair.items():
                bodies = itertools.islice(fresh(2, number), max(1, args.calls // 100))
                found[name].append(sequence(running, bodies, b"200 OK"))
    rows = {name: percentiles([s for each in rounds for s in each]) for name, rounds in found.items()}
    pairs = zip(found["miss"], found["no cache"], strict=True)
    rows["miss"]["added_seconds"] = statistics.median(
        statistics.median(miss) - statistics.median(none) for miss, none in pairs
    )
    return rows


def show(rows: dict[str, dict[str, float]]) -> None:
    """The table, and what follows from it."""
    table = Table("case", "p50 ms", "p99 ms", "calls/s, one connection", "calls/s, saturated")
    for name, row in rows.items():
        if "p50_seconds" in row:
            saturated = f"{row['saturated_per_second']:.0f}" if "saturated_per_second" in row else ""
            times = (f"{1e3 * row[key]:.2f}" for key in ("p50_seconds", "p99_seconds"))
            table.add_row(name, *times, f"{row['calls_per_second']:.0f}", saturated)
    say(table)
    faster = rows["computed"]["p50_seconds"] / rows["hit, memory"]["p50_seconds"]
    added, crowded = 1e3 * rows["miss"]["added_seconds"], rows["crowd"]
    say(f"a hit is {faster:.0f} times as fast as computing; a miss costs {added:+.2f} ms more than no cache")
    say(
        f"{crowded['clients']:.0f} clients sent the same request at once: computed {crowded['computed']:.2f} times, "
        f"all served after {crowded['seconds']:.2f} s"
    )


def main() -> None:
    """Measure, print, write."""
    parser = arguments(__doc__ or "", rounds=5)
    parser.add_argument("--calls", type=int, default=1000, help="per round")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--connections", type=int, default=8, help="of the test of throughput")
    parser.add_argument("--crowd", type=int, default=1000)
    parser.add_argument("--stores", nargs="*", default=["sqlite", "redis", "memcached"], help="beside memory")
    parser.add_argument("--entries", type=int, default=5000, help="of the semantic cache")
    args = parser.parse_args()
    rows = hits(args, "--response-cache", "memory", more=True)
    rows["hit, memory"] = rows.pop("hit")
    for name in args.stores:
        with store(name) as spec:
            if spec is None:
                say(f"{name} is not installed: it is left out")
                continue
            secret = ("--response-cache-secret", "of the benchmark")
            rows[f"hit, {name}"] = hits(args, "--response-cache", spec, *secret)["hit"]
    rows["similar"] = similar(args)
    rows |= misses(args)
    show(rows)
    publish("caches-responses", args, [], [], rows=rows)
