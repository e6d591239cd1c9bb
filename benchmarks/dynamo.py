"""Two Headrace workers behind NVIDIA Dynamo: routing by KV events compared with round robin, and a killed worker.

The requests are a part of a trace whose prompts share prefixes (``--trace``, Mooncake's JSON lines), or begin with one
of ``--prefixes`` system prompts of 1,500 tokens. Each mode gets a new frontend and new workers, so both begin with
empty caches. ``--kill KILL`` or ``--kill TERM`` ends a worker in the middle of the run
with that signal; the frontend then continues its requests on the other one. Needs ``pip install "headrace[dynamo]"``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from headrace.lab.bench.client import Endpoint, ServerTarget
from headrace.lab.bench.record import Record
from headrace.lab.bench.stats import percentile
from headrace.lab.workload import Work
from headrace.lab.workload.call import Synthesis, replayed
from headrace.lab.workload.dataset import VOCABULARY
from headrace.lab.workload.distributions import poisson
from headrace.lab.workload.traces import read_trace

PREFIX_TOKENS = 1500
START_SECONDS = 60.0
STOP_SECONDS = 60.0


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago. Dynamo reads its system port as a number of 16 bits with a sign."""
    found: list[int] = []
    while len(found) < count:
        with contextlib.suppress(OSError), socket.socket() as probe:
            port = random.randrange(20_000, 32_768)
            probe.bind(("127.0.0.1", port))
            found.append(port)
    return found


def workload(args: argparse.Namespace) -> list[Work]:
    """The requests of all runs."""
    return from_trace(args) if args.trace else with_prefixes(args)


def with_prefixes(args: argparse.Namespace) -> list[Work]:
    """Requests that each begin with one of several system prompts, drawn at random, at random times."""
    rng = random.Random(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.choice(VOCABULARY) for _ in range(count))

    prefixes = [tokens(PREFIX_TOKENS) for _ in range(args.prefixes)]
    times = poisson(args.requests, args.rate, seed=0)
    return [
        Work(f"w{i}", rng.choice(prefixes) + tokens(64), args.output, at, ignore_eos=True)
        for i, at in enumerate(times)
    ]


def from_trace(args: argparse.Namespace) -> list[Work]:
    """The first requests of the trace whose prompts are short enough, at the given rate."""
    calls = (call for call in read_trace(Path(args.trace)) if call.prompt_tokens <= args.longest)
    work = []
    for each in replayed(calls, Synthesis(VOCABULARY)):
        work.append(replace(each, max_tokens=min(each.max_tokens, args.output)))
        if len(work) == args.requests:
            break
    span = work[-1].arrival - work[0].arrival
    return [
        replace(each, arrival=(each.arrival - work[0].arrival) / span * len(work) / args.rate)
        for each in work
    ]


class Fleet:
    """A frontend and its workers on this machine, without etcd: they find each other in a folder."""

    def __init__(self, folder: str, mode: str, args: argparse.Namespace) -> None:
        port, *systems = free_ports(1 + args.workers)
        self.url = f"http://127.0.0.1:{port}"
        shared = {"DYN_FILE_KV": f"{folder}/discovery", "DYN_TCP_RPC_HOST": "127.0.0.1", "DYN_LOG": "warn"}
        self._environment = os.environ | shared
        self._log = Path(folder, "log.txt").open("wb")  # noqa: SIM115
        plane = ("--discovery-backend", "file", "--request-plane", "tcp")
        options = ("--kv-cache-memory-bytes", args.kv_bytes)
        self.workers = [
            self._start("headrace.fleet.dynamo", "builtin", *options, *plane, DYN_SYSTEM_PORT=str(each))
            for each in systems
        ]
        host = ("--http-host", "127.0.0.1", "--http-port", str(port))
        routing = ("--router-mode", mode, "--migration-limit", "3")
        self._frontend = self._start("dynamo.frontend", *host, *routing, *plane)
        for each in systems:
            self._await(f"http://127.0.0.1:{each}/health", b'"ready"')
        self._await(f"{self.url}/v1/models", b'"builtin"')

    def _start(self, module: str, *options: str, **environment: str) -> subprocess.Popen[bytes]:
        command = (sys.executable, "-m", module, *options)
        return subprocess.Popen(
            command, env=self._environment | environment, stdout=self._log, stderr=subprocess.STDOUT
        )

    def _await(self, url: str, word: bytes) -> None:
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                if word in urllib.request.urlopen(url, timeout=5).read():
                    return
            time.sleep(0.1)
        self.close()
        log = Path(self._log.name).read_text(encoding="utf-8", errors="replace")
        raise SystemExit(f"{url} did not become ready; the log ends with\n{log[-2000:]}")

    def close(self) -> None:
        """End all processes as an operator would, and wait for them."""
        processes = (self._frontend, *self.workers)
        for each in processes:
            each.terminate()
        for each in processes:
            try:
                each.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()
        self._log.close()


@contextlib.contextmanager
def fleet(mode: str, args: argparse.Namespace) -> Iterator[Fleet]:
    """A running fleet."""
    with tempfile.TemporaryDirectory() as folder:
        running = Fleet(folder, mode, args)
        try:
            yield running
        finally:
            running.close()


def report(name: str, records: Sequence[Record]) -> None:
    """Print one line of results."""
    failed = [each for each in records if each.error]
    whole = [each for each in records if not each.error]
    prompt, cached = sum(each.prompt_tokens for each in whole), sum(each.cached_tokens for each in whole)
    ttfts = [each.ttft for each in whole if each.ttft is not None]
    print(
        f"{name:<14} {len(records):>5} requests {len(failed):>3} failed  prefix hits {100 * cached / prompt:5.1f} %"
        f"  TTFT p50 {1e3 * percentile(ttfts, 50):7.1f} ms  p95 {1e3 * percentile(ttfts, 95):8.1f} ms"
        f"  e2e p95 {1e3 * percentile([each.e2e for each in whole], 95):8.1f} ms",
        flush=True,
    )
    for each in failed[:3]:
        print(f"  {each.id}: {each.error}")


def routing(args: argparse.Namespace, work: Sequence[Work]) -> None:
    """Run each mode in turn, each on its own fleet."""
    for turn in range(args.rounds):
        for mode in ("round-robin", "kv") if turn % 2 == 0 else ("kv", "round-robin"):
            with fleet(mode, args) as running:
                report(mode, ServerTarget(mode, Endpoint(running.url, "builtin")).run(work))


def killed(args: argparse.Namespace, work: Sequence[Work]) -> None:
    """End a worker when a third of the requests has been answered."""
    for _ in range(args.rounds):
        with fleet("kv", args) as running:
            target = ServerTarget("kv", Endpoint(running.url, "builtin"))

            def end(
                target: ServerTarget = target, worker: subprocess.Popen[bytes] = running.workers[0]
            ) -> None:
                while target.completed < len(work) // 3:
                    time.sleep(0.01)
                worker.send_signal(signal.Signals[f"SIG{args.kill}"])

            thread = threading.Thread(target=end, daemon=True)
            thread.start()
            report(f"SIG{args.kill}", target.run(work))
            thread.join()
            print(f"  the worker's exit status: {running.workers[0].wait(STOP_SECONDS)}")


def main() -> None:
    """Run the measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", help="trace with shared prefixes, Mooncake's JSON lines")
    source.add_argument("--prefixes", type=int, help="number of system prompts")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second")
    parser.add_argument("--longest", type=int, default=4000, help="tokens of the longest prompt that is used")
    parser.add_argument("--output", type=int, default=32, help="most tokens of an output")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kv-bytes", default="64MiB", help="KV cache of each worker")
    parser.add_argument(
        "--kill", choices=("KILL", "TERM"), help="end a worker with this signal in the middle"
    )
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    (killed if args.kill else routing)(args, workload(args))


if __name__ == "__main__":
    main()
