"""KV transfer between servers: shared memory, separate prefill and decode servers, and peers killed in a transfer.

- ``speed``: GB/s from one process to another, by size of a block.
- ``serving``: TTFT and inter-token latency of one prefill and one decode server, compared with one server and with two
  servers that each do both, at several rates. The client acts as a proxy: it sends a request to the prefill server
  first, or to both at once.
- ``kills``: a peer is killed while its blocks are pulled: wrong tokens, requests that ended twice or never.

All processes share the cores of one machine.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import pickle
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from headrace.config import options
from headrace.core.events import Emitted, Finished
from headrace.core.memory.restore import AlwaysRestore
from headrace.core.peers import Pulled
from headrace.core.request import Request, SamplingParams
from headrace.fleet.kv_transfer.exporter import Exporter, Published
from headrace.fleet.kv_transfer.link import Link
from headrace.fleet.kv_transfer.shared_memory import SharedMemory
from headrace.lab.bench.stats import percentile
from headrace.wiring.model import Loaded, close, load

SECRET = b"benchmark"
CONNECTOR = "SharedMemoryConnector"
IDENTITY = {"connector": CONNECTOR}


def key(number: int) -> bytes:
    """The key of a block in ``speed``."""
    return number.to_bytes(32, "little")


# -- speed ---------------------------------------------------------------------------------------------


def publish(parent: Connection, blocks: int, size: int) -> None:
    """A process that publishes blocks of ``size`` bytes."""
    pages = [memoryview(secrets.token_bytes(size)) for _ in range(blocks)]

    def copy(block: int, target: memoryview) -> None:
        target[:] = pages[block]

    published = Published(copy)
    for number in range(blocks):
        published.stored(None, key(number), (), number)
    slots = max(1, min(512, (64 << 20) // size))
    exporter = Exporter(
        SharedMemory(), published, IDENTITY, SECRET, host="127.0.0.1", port=0, slots=slots, slot_bytes=size
    )
    parent.send(exporter.port)
    parent.recv()
    exporter.close()


def speed(args: argparse.Namespace) -> None:
    """Pull the same blocks several times."""
    print("| block, KiB | blocks | MB | milliseconds, median | GB/s | find, ms |")
    print("|---|---|---|---|---|---|")
    for kibibytes in args.sizes:
        size = kibibytes << 10
        blocks = min(512, (args.megabytes << 20) // size)
        mine, its = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=publish, args=(its, blocks, size), daemon=True
        )
        process.start()
        link = Link("127.0.0.1", mine.recv(), SharedMemory(), IDENTITY, SECRET, block_bytes=size, timeout=30)
        targets = [memoryview(bytearray(size)) for _ in range(blocks)]
        keys = [key(number) for number in range(blocks)]
        took, found = [], []
        for _ in range(args.repeat + 2):  # the first touch memory that was never used
            began = time.perf_counter()
            assert link.find(keys) == blocks
            between = time.perf_counter()
            assert all(link.read(keys, targets))
            took.append(time.perf_counter() - between)
            found.append(between - began)
        seconds, total = statistics.median(took[2:]), blocks * size
        find = statistics.median(found[2:]) * 1e3
        pace = total / seconds / 1e9
        shown = f"{total / 1e6:.1f} | {seconds * 1e3:.2f} | {pace:.2f} | {find:.2f}"
        print(f"| {kibibytes:,} | {blocks} | {shown} |")
        link.close()
        mine.send(None)
        process.join()


# -- serving -------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """One request as measured by its client, in seconds."""

    first: float
    gaps: list[float]
    cached: int


SEPARATE = ("P+D", "P+D at once")
"""A prefill and a decode server; requests go to the prefill server first, or to both at once."""


class Server:
    """A server process with the built-in model; ``url`` is its address once it is ready."""

    def __init__(self, folder: Path, *given: str) -> None:
        self._log = folder / f"{secrets.token_hex(4)}.log"
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "headrace",
                    "serve",
                    "builtin",
                    "--port",
                    "0",
                    "--no-access-log",
                    *given,
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"HEADRACE_KV_TRANSFER_SECRET": SECRET.decode()},
            )
        self.url = ""

    def wait(self) -> str:
        """The whole log of the start."""
        for _ in range(600):
            text = self._log.read_text()
            for line in text.splitlines():
                if " ready " in line:
                    self.url = next(word for word in line.split() if word.startswith("http"))
                    return text
            if self._process.poll() is not None:
                break
            time.sleep(0.1)
        raise SystemExit(f"a server did not start:\n{self._log.read_text()}")

    def end(self) -> None:
        self._process.terminate()
        self._process.wait()


@contextmanager
def servers(which: str, args: argparse.Namespace) -> Iterator[list[Server]]:
    """``1``, ``2``: number of servers that do both; `SEPARATE`: a prefill and a decode server."""
    common = ["--dtype", args.dtype, "--kv-cache-memory-bytes", "512MiB", "--max-model-len", "4096"]
    with tempfile.TemporaryDirectory() as folder:
        started: list[Server] = []
        try:
            if which in SEPARATE:
                config = {"kv_connector": CONNECTOR, "kv_role": "kv_producer", "kv_port": args.kv_port}
                option = "--kv-transfer-config"
                started.append(Server(Path(folder), *common, option, json.dumps(config)))
                started[0].wait()
                peers = {"peers": [f"127.0.0.1:{args.kv_port}"]}
                config = {
                    "kv_connector": CONNECTOR,
                    "kv_role": "kv_consumer",
                    "kv_connector_extra_config": peers,
                }
                more = ["--kv-offload-bytes", "256MiB", option, json.dumps(config)]
                started.append(Server(Path(folder), *common, *more))
            else:
                started += [Server(Path(folder), *common) for _ in range(int(which))]
            for server in started:
                server.wait()
            yield started
        finally:
            for server in started:
                server.end()


async def compute_prompt(client: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Compute a prompt for another server; returns the fields for its request."""
    once = {"max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
    kept = {name: value for name, value in body.items() if name != "stream_options"}
    async with client.post(f"{url}/v1/completions", json=kept | once) as answer:
        return {"kv_transfer_params": (await answer.json())["kv_transfer_params"]}


async def ask(
    client: aiohttp.ClientSession, urls: Sequence[str], which: str, kv_port: int, body: dict[str, Any]
) -> Answer:
    """One streamed request; with `SEPARATE` servers, its prompt is computed by the first one."""
    began = time.perf_counter()
    computing = asyncio.create_task(compute_prompt(client, urls[0], body)) if which in SEPARATE else None
    if computing is not None and which == "P+D":
        body = body | await computing
    elif computing is not None:
        there = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": kv_port}
        body = body | {"kv_transfer_params": there | {"remote_prefill_runs": True}}
    times: list[float] = []
    cached = 0
    async with client.post(f"{urls[-1]}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                if chunk["choices"] and chunk["choices"][0]["text"]:
                    times.append(time.perf_counter())
                elif chunk.get("usage"):
                    cached = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]
    if computing is not None:
        await computing
    return Answer(times[0] - began, [b - a for a, b in itertools.pairwise(times)], cached)


async def load_servers(
    running: Sequence[Server], which: str, rate: float, args: argparse.Namespace
) -> list[Answer]:
    """Requests at random times, ``rate`` a second on average; prompts share nothing."""
    rng, tasks = random.Random(f"{args.seed} {rate} {args.seconds}"), []
    turns = itertools.cycle([server.url for server in running])
    urls = [server.url for server in running]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        until = time.perf_counter() + args.seconds
        due = time.perf_counter()
        while due < until:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            body = {
                "prompt": [rng.randrange(8, 900) for _ in range(args.prompt_tokens)],
                "max_tokens": args.output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "skip_special_tokens": False,  # so that each token has text
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            to = urls if which in SEPARATE else [next(turns)]
            tasks.append(asyncio.create_task(ask(client, to, which, args.kv_port, body)))
            due += rng.expovariate(rate)
        return list(await asyncio.gather(*tasks))


def serving(args: argparse.Namespace) -> None:
    """Each arrangement of servers at each rate."""
    print("| servers | requests/s | requests | TTFT p50 | TTFT p99 | ITL p50 | ITL p99 | cached tokens |")
    print("|---|---|---|---|---|---|---|---|")
    for which in args.arrangements:
        with servers(which, args) as running:
            asyncio.run(load_servers(running, which, 4.0, argparse.Namespace(**vars(args) | {"seconds": 2})))
            for rate in args.rates:
                answers = asyncio.run(load_servers(running, which, rate, args))
                firsts = [answer.first for answer in answers]
                gaps = [gap for answer in answers for gap in answer.gaps]
                numbers = (
                    1e3 * percentile(firsts, 50),
                    1e3 * percentile(firsts, 99),
                    1e3 * percentile(gaps, 50),
                    1e3 * percentile(gaps, 99),
                )
                shown = " | ".join(f"{number:.1f}" for number in numbers)
                cached = sum(answer.cached for answer in answers)
                print(f"| {which} | {rate:g} | {len(answers)} | {shown} | {cached:,} |", flush=True)


# -- kills ---------------------------------------------------------------------------------------------


def serve_pages(parent: Connection, file: str, port: int, identity: dict[str, Any]) -> None:
    """A peer that holds blocks that another process has computed, and copies them slowly."""
    pages: dict[bytes, bytes] = pickle.loads(Path(file).read_bytes())
    keys = list(pages)

    def copy(block: int, target: memoryview) -> None:
        half = len(target) // 2
        target[:half] = pages[keys[block]][:half]
        time.sleep(0.0005)
        target[half:] = pages[keys[block]][half:]

    published = Published(copy)
    for number, each in enumerate(keys):
        published.stored(None, each, (), number)
    size = len(pages[keys[0]])
    exporter = Exporter(
        SharedMemory(), published, identity, SECRET, host="127.0.0.1", port=port, slots=8, slot_bytes=size
    )
    parent.send(exporter.port)
    parent.recv()
    exporter.close()


def run(loaded: Loaded, requests: Sequence[Request]) -> tuple[dict[str, list[int]], int, int, dict[str, int]]:
    """Serve requests together: their tokens, blocks pulled, blocks that failed, and how often each ended."""
    tokens: dict[str, list[int]] = {}
    ends: dict[str, int] = {}
    came = failed = 0
    for request in requests:
        loaded.engine.submit(request, time.monotonic())
    while len(ends) < len(requests) or loaded.engine.wake_at(0.0) is not None:
        for event in loaded.engine.step(time.monotonic()):
            if isinstance(event, Emitted):
                tokens.setdefault(event.request_id, []).extend(event.tokens)
            elif isinstance(event, Finished):
                ends[event.request_id] = ends.get(event.request_id, 0) + 1
            elif isinstance(event, Pulled):
                came, failed = came + event.blocks, failed + event.failed
    return tokens, came, failed, ends


def kills(args: argparse.Namespace) -> None:
    """Kill the peer of an engine at random moments."""
    port = args.kv_port
    common = {
        "model": "builtin",
        "dtype": "float32",
        "max_model_len": 1024,
        "kv_cache_memory_bytes": 64 << 20,
    }
    config = {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"peers": [f"127.0.0.1:{port}"], "timeout_seconds": 0.5},
    }
    teacher = load(options(common))
    given = {"kv_transfer_config": json.dumps(config), "kv_transfer_secret": SECRET.decode()}
    puller = load(options(common | given | {"kv_offload_bytes": 64 << 20}))
    lower, transfer = puller.engine.scheduler.pool.lower, puller.transfer
    assert lower is not None
    assert transfer is not None
    assert transfer.importer is not None
    lower._restore = AlwaysRestore()  # so small a model computes faster
    rng = random.Random(args.seed)
    requests = [
        Request(
            f"r{i}",
            tuple(rng.randrange(8, 900) for _ in range(320)),
            SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
        )
        for i in range(8)
    ]
    right = run(teacher, requests)[0]
    pool = teacher.engine.scheduler.pool
    memory = bytearray(transfer.block_bytes)
    pages = {}
    for block in pool.full_blocks():
        teacher.runner._kv.copy_out(block.id, memoryview(memory))
        pages[block.key] = bytes(memory)
    wrong = lost = twice = cut = came = failed = 0
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "pages")
        Path(file).write_bytes(pickle.dumps(pages))
        for _ in range(args.kills):
            mine, its = multiprocessing.Pipe()
            process = multiprocessing.get_context("spawn").Process(
                target=serve_pages, args=(its, file, port, dict(transfer.identity)), daemon=True
            )
            process.start()
            mine.recv()
            puller.engine.reset_prefix_cache()
            for link in transfer.importer._links.values():
                link._rests_until = 0.0
            timer = threading.Timer(rng.uniform(0.0, 0.12), process.kill)
            timer.start()
            tokens, some, none, ends = run(puller, requests)
            timer.join()
            process.join()
            wrong += sum(tokens.get(name) != right[name] for name in right)
            lost += sum(name not in ends for name in right)
            twice += sum(count > 1 for count in ends.values())
            cut += bool(some) and bool(none)
            came, failed = came + some, failed + none
            puller.engine.check_consistency()
            assert puller.engine.scheduler.pool.num_free == puller.engine.scheduler.pool.num_blocks
    print(
        "| kills | within a transfer | blocks pulled | blocks failed | requests | wrong | not ended | ended twice |"
    )
    print("|---|---|---|---|---|---|---|---|")
    count = args.kills * len(requests)
    print(f"| {args.kills} | {cut} | {came:,} | {failed:,} | {count} | {wrong} | {lost} | {twice} |")
    close(puller)
    close(teacher)


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("speed", "serving", "kills"))
    parser.add_argument("--sizes", type=int, nargs="+", default=[48, 256, 2048], help="KiB of a block")
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument(
        "--arrangements", nargs="+", default=["1", "2", *SEPARATE], choices=("1", "2", *SEPARATE)
    )
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0, 6.0, 12.0])
    parser.add_argument("--seconds", type=float, default=12.0, help="of each rate")
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--kv-port", type=int, default=14_790)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    {"speed": speed, "serving": serving, "kills": kills}[args.part](args)


if __name__ == "__main__":
    main()
