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
import dataclasses
import json
import multiprocessing
import pickle
import random
import secrets
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.stage import Server, markdown_head, markdown_row, plain_parser, serving
from headrace.config import options
from headrace.core.memory.restore import AlwaysRestore
from headrace.core.peers import Pulled
from headrace.core.request import Request, SamplingParams
from headrace.fleet.kv_transfer.exporter import Exporter, Published
from headrace.fleet.kv_transfer.link import Link
from headrace.fleet.kv_transfer.shared_memory import SharedMemory
from headrace.lab.bench.client import Connections, Endpoint, ask
from headrace.lab.bench.stats import Record as RequestRecord
from headrace.lab.bench.stats import percentile
from headrace.lab.workload.dataset import fixed_lengths
from headrace.lab.workload.population import arriving, poisson
from headrace.lab.workload.work import Work
from headrace.testing.engines import Record
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
    print(markdown_head(("block, KiB", "blocks", "MB", "milliseconds, median", "GB/s", "find, ms")))
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
        numbers = (total / seconds / 1e9, find)
        shown = (f"{total / 1e6:.1f}", f"{seconds * 1e3:.2f}", *(f"{each:.2f}" for each in numbers))
        print(markdown_row((f"{kibibytes:,}", blocks, *shown)))
        link.close()
        mine.send(None)
        process.join()


# -- serving -------------------------------------------------------------------------------------------

SEPARATE = ("P+D", "P+D at once")
"""A prefill and a decode server; requests go to the prefill server first, or to both at once."""

SERVED = (
    *("builtin", "--no-access-log", "--kv-cache-memory-bytes", "512MiB", "--max-model-len", "4096"),
    "--dtype",
)


@contextmanager
def servers(which: str, args: argparse.Namespace) -> Iterator[list[Server]]:
    """``1``, ``2``: number of servers that do both; `SEPARATE`: a prefill and a decode server."""
    flags: list[tuple[str, ...]] = []
    if which in SEPARATE:
        peers = {"peers": [f"127.0.0.1:{args.kv_port}"]}
        prefill = {"kv_connector": CONNECTOR, "kv_role": "kv_producer", "kv_port": args.kv_port}
        decode = {"kv_connector": CONNECTOR, "kv_role": "kv_consumer", "kv_connector_extra_config": peers}
        flags += [("--kv-transfer-config", json.dumps(config)) for config in (prefill, decode)]
        flags[1] += ("--kv-offload-bytes", "256MiB")
    else:
        flags += [()] * int(which)
    secret = {"HEADRACE_KV_TRANSFER_SECRET": SECRET.decode()}
    with ExitStack() as stack:
        yield [
            stack.enter_context(serving("headrace", *SERVED, args.dtype, *each, **secret)) for each in flags
        ]


async def compute_prompt(prefill: Connections, body: dict[str, Any]) -> dict[str, Any]:
    """Compute a prompt for another server; returns the fields for its request."""
    once = {"max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
    kept = {name: value for name, value in body.items() if name != "stream_options"}
    pieces: list[bytes] = []
    status = await prefill.post(
        "/v1/completions", {}, json.dumps(kept | once).encode(), lambda _, data: pieces.append(data)
    )
    answer = json.loads(b"".join(pieces))
    assert status == 200, answer
    return {"kv_transfer_params": answer["kv_transfer_params"]}


async def load_servers(
    running: Sequence[Server], which: str, rate: float, args: argparse.Namespace
) -> list[RequestRecord]:
    """Requests at random times, ``rate`` a second on average; prompts share nothing."""
    count = max(1, round(rate * args.seconds))
    seed = random.Random(f"{args.seed} {rate} {args.seconds}").getrandbits(32)  # no prompt of another rate
    drawn = fixed_lengths(count, args.prompt_tokens, args.output_tokens, seed, range(8, 900))
    work = arriving(drawn, poisson(count, rate, seed))
    extra = {"skip_special_tokens": False}  # so that each token has text
    endpoints = [Endpoint(each.url, "builtin", extra=extra) for each in running]
    pools = [Connections(each.url) for each in running]
    there = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": args.kv_port}
    began = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - began

    async def send(number: int, each: Work) -> RequestRecord:
        await asyncio.sleep(max(0.0, each.arrival - clock()))
        at = -1 if which in SEPARATE else number % len(running)
        endpoint, computing = endpoints[at], None
        if which in SEPARATE:
            computing = asyncio.create_task(compute_prompt(pools[0], endpoint.body(each)))
            more = {"kv_transfer_params": there | {"remote_prefill_runs": True}}
            if which == "P+D":
                more = await computing
            endpoint = dataclasses.replace(endpoint, extra=extra | more)
        record = await ask(pools[at], endpoint, each, each.arrival, clock)
        if computing is not None:
            await computing
        return record()

    records = await asyncio.gather(*(send(number, each) for number, each in enumerate(work)))
    for pool in pools:
        pool.close()
    assert not any(each.error for each in records), next(each.error for each in records if each.error)
    return list(records)


def measure_serving(args: argparse.Namespace) -> None:
    """Each arrangement of servers at each rate."""
    times = ("TTFT p50", "TTFT p99", "ITL p50", "ITL p99")
    print(markdown_head(("servers", "requests/s", "requests", *times, "cached tokens")))
    for which in args.arrangements:
        with servers(which, args) as running:
            asyncio.run(load_servers(running, which, 4.0, argparse.Namespace(**vars(args) | {"seconds": 2})))
            for rate in args.rates:
                records = asyncio.run(load_servers(running, which, rate, args))
                firsts = [each.ttft or 0.0 for each in records]
                gaps = [gap for each in records for gap in each.gaps]
                shown = [
                    f"{1e3 * percentile(seconds, share):.1f}"
                    for seconds in (firsts, gaps)
                    for share in (50, 99)
                ]
                cached = sum(each.cached_tokens for each in records)
                cells = (which, f"{rate:g}", len(records), *shown, f"{cached:,}")
                print(markdown_row(cells), flush=True)


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


def run(loaded: Loaded, requests: Sequence[Request]) -> Record:
    """Serve requests together, until nothing is left to do."""
    record = Record()
    for request in requests:
        loaded.engine.submit(request, time.monotonic())
    while len(record.ends) < len(requests) or loaded.engine.wake_at(0.0) is not None:
        record.fold(loaded.engine.step(time.monotonic()))
    return record


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
    right = run(teacher, requests).tokens
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
            found = run(puller, requests)
            timer.join()
            process.join()
            some, none = (
                sum(getattr(each, what) for each in found.of(Pulled)) for what in ("blocks", "failed")
            )
            wrong += sum(found.tokens.get(name) != right[name] for name in right)
            lost += sum(name not in found.ends for name in right)
            twice += sum(len(ends) > 1 for ends in found.ends.values())
            cut += bool(some) and bool(none)
            came, failed = came + some, failed + none
            puller.engine.check_consistency()
            assert puller.engine.scheduler.pool.num_free == puller.engine.scheduler.pool.num_blocks
    columns = ("kills", "within a transfer", "blocks pulled", "blocks failed", "requests", "wrong")
    print(markdown_head((*columns, "not ended", "ended twice")))
    count = args.kills * len(requests)
    print(markdown_row((args.kills, cut, f"{came:,}", f"{failed:,}", count, wrong, lost, twice)))
    close(puller)
    close(teacher)


def main() -> None:
    """Run one part."""
    parser = plain_parser(__doc__)
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
    {"speed": speed, "serving": measure_serving, "kills": kills}[args.part](args)


if __name__ == "__main__":
    main()
