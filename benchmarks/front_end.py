"""Cost of the front end: CPU time per streamed token of each process, and output tokens per second over HTTP beside the
engine alone.

The model is a runner that sleeps as long as a step of a GPU takes (`benchmarks.sleeping_engine`), so this needs no GPU:
what is measured is what a server does beside computing. The load comes from processes that only read bytes and count
them, and their CPU time is shown apart. With fewer cores than processes the rate over HTTP says little, but the
CPU time per token stays true: ``calculated`` is the share of the offline rate that cores for each process would allow.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.sleeping_engine import H200_MS, STEP_MS
from benchmarks.stage import say

TICK = os.sysconf("SC_CLK_TCK")
READY_SECONDS = 120.0
READ_BYTES = 1 << 16


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
    began = dict[socket.socket, float]()
    for _ in range(streams):
        connection = socket.create_connection(("127.0.0.1", port))
        began[connection] = time.perf_counter()
        connection.sendall(sent)
        selector.register(connection, selectors.EVENT_READ)
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
    used = resource.getrusage(resource.RUSAGE_SELF)
    return Load(firsts, chunks, used.ru_utime + used.ru_stime)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def children(pid: int) -> list[int]:
    """The engine's process of a server, if it has one."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(each) for each in found]


@contextmanager
def served(args: argparse.Namespace, streams: int, flags: Sequence[str]) -> Iterator[tuple[int, int]]:
    """A server with the sleeping runner: its port and its process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.sleeping_engine", "serve", "builtin", "--device", "cpu"]
    command += [
        "--port",
        str(port),
        "--max-num-seqs",
        str(streams),
        "--overlap",
        "1",
        "--no-access-log",
        *flags,
    ]
    environment = os.environ | {STEP_MS: str(args.step_ms)}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            until = time.monotonic() + READY_SECONDS
            while time.monotonic() < until:
                try:
                    httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).raise_for_status()
                    break
                except httpx.HTTPError:
                    if process.poll() is not None:
                        raise RuntimeError("the server has ended") from None
                    time.sleep(0.1)
            yield port, process.pid
        except BaseException:
            log.seek(0)
            say(log.read()[-3000:])
            raise
        finally:
            process.terminate()
            process.wait(30.0)


def measured(args: argparse.Namespace, streams: int, flags: Sequence[str]) -> dict[str, Any]:
    """One run over HTTP."""
    with served(args, streams, flags) as (port, pid):
        processes = [pid, *children(pid)]
        parts = min(args.processes, streams)
        sizes = [streams // parts + (number < streams % parts) for number in range(parts)]
        with get_context("spawn").Pool(parts) as pool:
            pool.starmap(load, [(port, 1, 8)] * parts)  # imports, connections and the first request
            before = [cpu_seconds(each) for each in processes]
            began = time.perf_counter()
            loads = pool.starmap(load, [(port, size, args.tokens) for size in sizes])
            seconds = time.perf_counter() - began
            spent = [cpu_seconds(each) - start for each, start in zip(processes, before, strict=True)]
    made, firsts = streams * args.tokens, sorted(first for each in loads for first in each.first_seconds)
    names = ["server"] if len(processes) == 1 else ["front_end", "engine"]
    return {
        "tokens_per_second": made / seconds,
        "chunks_per_token": sum(each.chunks for each in loads) / made,
        "microseconds": {name: each / made * 1e6 for name, each in zip(names, spent, strict=True)},
        "load_seconds": sum(each.cpu_seconds for each in loads),
        "ttft_p50_ms": 1e3 * statistics.median(firsts),
        "ttft_p99_ms": 1e3 * firsts[min(len(firsts) - 1, int(0.99 * len(firsts)))],
    }


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


def main() -> None:
    """Measure each number of streams, and print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--tokens", type=int, default=256, help="output tokens of a stream")
    parser.add_argument("--step-ms", type=float, default=H200_MS)
    parser.add_argument("--processes", type=int, default=2, help="processes of the load")
    parser.add_argument("--output", type=Path, default=Path("bench-results/front_end.json"))
    parser.add_argument("flags", nargs="*", help="flags of headrace serve, after --")
    args = parser.parse_args()
    results = []
    for streams in args.streams:
        offline, http = alone(args, streams), measured(args, streams, args.flags)
        step = args.step_ms / 1000
        slowest = max(streams * each / 1e6 for each in http["microseconds"].values())
        calculated = min(1.0, step / slowest) if "engine" in http["microseconds"] else step / (step + slowest)
        share = http["tokens_per_second"] / offline["tokens_per_second"]
        results.append(
            {"streams": streams, "offline": offline, "http": http, "share": share, "calculated": calculated}
        )
        each = ", ".join(f"{name} {used:.1f}" for name, used in http["microseconds"].items())
        say(
            f"{streams} streams: {http['tokens_per_second']:,.0f} of {offline['tokens_per_second']:,.0f} tokens/s "
            f"({100 * share:.0f} %, calculated {100 * calculated:.0f} %), µs per token: {each} "
            f"(offline {offline['microseconds']:.1f}), TTFT {http['ttft_p50_ms']:.0f}/{http['ttft_p99_ms']:.0f} ms, "
            f"chunks per token {http['chunks_per_token']:.2f}, load {http['load_seconds']:.1f} s"
        )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps({"arguments": vars(args), "results": results}, default=str, indent=1))


if __name__ == "__main__":
    main()
