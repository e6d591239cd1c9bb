"""Cost of the front end: CPU time per streamed token of each process, and output tokens per second over HTTP beside the
engine alone.

The model is a runner that sleeps as long as a step of a GPU takes (`benchmarks.sleeping_engine`), so this needs no GPU:
what is measured is what a server does beside computing. The load comes from processes that only read bytes and count
them, and their CPU time is shown apart. With fewer cores than processes the rate over HTTP says little, but the
CPU time per token stays true: it is the difference of a run with long streams and one with short ones, so that requests
are counted apart. ``calculated`` is the share of the offline rate that cores for each process would allow.
A form is ``1`` (HTTP and engine in one process), ``engine`` (``--engine-process``), a number of front ends
(``--api-server-count``), or both (``2+engine``).
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from multiprocessing import get_context
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.sleeping_engine import H200_MS, STEP_MS
from benchmarks.stage import Server, say, serving
from headrace.lab.bench.stats import percentile

READ_BYTES = 1 << 16
FRONT_END = "headrace.wiring.front_ends"
WARMING_STREAMS = 16
LOW_LOAD_TOKENS = 4


class Load(NamedTuple):
    """What one process of the load has seen: times to the first byte of a stream, chunks, and its CPU seconds."""

    first_seconds: list[float]
    chunks: int
    cpu_seconds: float


def requested(tokens: int) -> bytes:
    """One streamed request, as bytes."""
    body = json.dumps(
        {
            "model": "builtin",
            "messages": [{"role": "user", "content": "Tell me about the sea."}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Content-Type: application/json\r\n\r\n".encode() + body


def load(port: int, streams: int, tokens: int) -> Load:
    """Open so many streams at once, and read each to its end."""
    selector, sent, firsts, chunks = selectors.DefaultSelector(), requested(tokens), list[float](), 0
    began, spent = dict[socket.socket, float](), time.process_time()
    for _ in range(streams):
        opened = socket.create_connection(("127.0.0.1", port))
        began[opened] = time.perf_counter()
        opened.sendall(sent)
        selector.register(opened, selectors.EVENT_READ)
    while selector.get_map():
        for key, _ in selector.select(60.0):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            received = connection.recv(READ_BYTES)
            if b"HTTP/1.1" in received and not received.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"the server answered {received[:500]!r}")
            chunks += received.count(b"data: ")
            if connection in began and b"data: " in received:
                firsts.append(time.perf_counter() - began.pop(connection))
            if not received or b"[DONE]" in received:
                selector.unregister(connection)
                connection.close()
    return Load(firsts, chunks, time.process_time() - spent)


def cpu_seconds(pid: int) -> float:
    """CPU time of the threads of a process so far."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((each / "schedstat").read_text().split()[0]) for each in tasks) / 1e9


def processes_of(pid: int) -> dict[int, str]:
    """The processes of a server, each with its part: ``server``, ``engine`` or ``front_end``."""
    found = {pid: "server"}
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            command = Path(f"/proc/{child}/cmdline").read_text()
            found[int(child)] = "front_end" if FRONT_END in command else "engine"
    return found


def flags_of(form: str) -> list[str]:
    """The flags of ``headrace serve`` for a form of the server."""
    count, _, engine = form.rpartition("+") if "+" in form or form == "engine" else (form, "", "")
    return [*(["--api-server-count", count] if count else []), *(["--engine-process"] if engine else [])]


def served(args: argparse.Namespace, streams: int, flags: Sequence[str]) -> AbstractContextManager[Server]:
    """A server with the sleeping runner."""
    words = [
        "builtin",
        "--device",
        "cpu",
        "--max-num-seqs",
        str(streams),
        "--overlap",
        "1",
        "--no-access-log",
    ]
    return serving("benchmarks.sleeping_engine", *words, *flags, **{STEP_MS: str(args.step_ms)})


def one_at_a_time(port: int, requests: int) -> list[float]:
    """TTFT of requests that come one after the other, in seconds."""
    return [load(port, 1, LOW_LOAD_TOKENS).first_seconds[0] for _ in range(requests)]


def percentiles(seconds: Sequence[float]) -> list[float]:
    """Median and 99th percentile, in milliseconds."""
    return [1e3 * percentile(seconds, percent) for percent in (50, 99)]


def measured(args: argparse.Namespace, streams: int, form: str) -> dict[str, Any]:
    """One run over HTTP."""
    with served(args, streams, [*flags_of(form), *args.flags]) as running:
        port, processes = running.port, processes_of(running.pid)
        parts = min(args.processes, streams)
        sizes = [streams // parts + (number < streams % parts) for number in range(parts)]
        with get_context("spawn").Pool(parts) as pool:
            pool.starmap(load, [(port, WARMING_STREAMS, 8)] * parts)  # imports, and the first request of each
            low = pool.apply(one_at_a_time, (port, args.low_load)) if args.low_load else []
            short, _, _ = round_of(pool, port, sizes, args.short_tokens, processes)
            spent, loads, seconds = round_of(pool, port, sizes, args.tokens, processes)
    made, more = streams * args.tokens, streams * (args.tokens - args.short_tokens)
    firsts = [first for each in loads for first in each.first_seconds]
    used, opening = dict[str, list[float]](), dict[str, list[float]]()
    for each, part in processes.items():
        token = (spent[each] - short[each]) / more
        used.setdefault(part, []).append(1e6 * token)
        opening.setdefault(part, []).append(1e3 * (short[each] / streams - token * args.short_tokens))
    return {
        "tokens_per_second": made / seconds,
        "chunks_per_token": sum(each.chunks for each in loads) / made,
        "microseconds": used,
        "request_milliseconds": opening,
        "load_microseconds": sum(each.cpu_seconds for each in loads) / made * 1e6,
        "ttft_ms": percentiles(firsts),
        "low_load_ttft_ms": percentiles(low) if low else None,
    }


def round_of(
    pool: Pool, port: int, sizes: Sequence[int], tokens: int, processes: Iterable[int]
) -> tuple[dict[int, float], list[Load], float]:
    """Streams of so many tokens: CPU seconds of each process of the server, the loads, and the duration."""
    before = {each: cpu_seconds(each) for each in processes}
    began = time.perf_counter()
    loads = pool.starmap(load, [(port, size, tokens) for size in sizes])
    seconds = time.perf_counter() - began
    return {each: cpu_seconds(each) - start for each, start in before.items()}, loads, seconds


def calculated(step: float, streams: int, form: str, used: dict[str, list[float]], cores: int) -> float:
    """The share of the offline rate that ``cores`` would allow, if each process had one of its own.

    HTTP and the engine of one process take turns on its interpreter.
    """
    each = [streams * value / 1e6 for values in used.values() for value in values]
    longest = max(max(each), sum(each) / cores)
    return step / (step + longest) if form == "1" else min(1.0, step / longest)


def alone(args: argparse.Namespace, streams: int) -> dict[str, float]:
    """The engine without a server, in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.sleeping_engine",
        "offline",
        str(streams),
        str(args.tokens),
        "builtin",
    ]
    environment = os.environ | {STEP_MS: str(args.step_ms)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def summary(http: dict[str, Any]) -> str:
    """The result of a run in one line."""
    used = ", ".join(
        f"{part} {' + '.join(f'{each:.1f}' for each in values)}"
        for part, values in http["microseconds"].items()
    )
    requests = sum(each for values in http["request_milliseconds"].values() for each in values)
    first, low = http["ttft_ms"], http["low_load_ttft_ms"]
    idle = "" if low is None else f", one at a time {low[0]:.1f}/{low[1]:.1f}"
    return (
        f"{http['tokens_per_second']:,.0f} tokens/s, µs per token: {used}, load {http['load_microseconds']:.1f}, "
        f"ms per request: {requests:.2f}; "
        f"TTFT {first[0]:.0f}/{first[1]:.0f}{idle} ms, chunks per token {http['chunks_per_token']:.2f}"
    )


def main() -> None:
    """Measure each number of streams, and print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--tokens", type=int, default=256, help="output tokens of a stream")
    parser.add_argument(
        "--short-tokens", type=int, default=32, help="output tokens of a stream in the first run"
    )
    parser.add_argument("--step-ms", type=float, default=H200_MS)
    parser.add_argument("--forms", nargs="+", default=["1", "engine", "2", "4"], help="forms of the server")
    parser.add_argument("--cores", type=int, default=16, help="cores of the calculated share")
    parser.add_argument(
        "--low-load", type=int, default=0, help="requests one after the other, for their TTFT"
    )
    parser.add_argument("--processes", type=int, default=2, help="processes of the load")
    parser.add_argument("--output", type=Path, default=Path("bench-results/front_end.json"))
    parser.add_argument("flags", nargs="*", help="flags of headrace serve, after --")
    args = parser.parse_args()
    results = []
    for streams in args.streams:
        offline, step = alone(args, streams), args.step_ms / 1000
        rate = offline["tokens_per_second"]
        say(f"{streams} streams: offline {rate:,.0f} tokens/s, {offline['microseconds']:.1f} µs per token")
        for form in args.forms:
            http = measured(args, streams, form)
            share = http["tokens_per_second"] / rate
            possible = calculated(step, streams, form, http["microseconds"], args.cores)
            say(f"  {form:9} {100 * share:.0f} %, calculated {100 * possible:.0f} %; {summary(http)}")
            result = {"streams": streams, "form": form, "offline": offline, "http": http}
            results.append(result | {"share": share, "calculated": possible})
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps({"arguments": vars(args), "results": results}, default=str, indent=1))


if __name__ == "__main__":
    main()
