"""One of two servers ends under load, as a spot instance does, and a successor takes over its folders.

Clients send each request to the server of its prompt's prefix, and repeat a failed request at the next server. A batch
runs on the first server meanwhile. When a third of the requests has been answered, the first server gets ``--signal``,
and its successor starts at once: it waits for the folders of the disk tier and of the batches.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from argparse import Namespace
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from os import kill
from pathlib import Path
from signal import Signals
from typing import Any, NamedTuple

import httpx

from benchmarks.batches import LINE_TOKENS, POLL_SECONDS, Client, make_lines, sentence
from benchmarks.stage import Server, arguments, say, server

PREFIXES = 12
PREFIX_WORDS = 250
TRIES = 400
PAUSE_SECONDS = 0.05


class Reply(NamedTuple):
    """The answer to one request: by which server (0: the first or its successor) and after how many tries."""

    prefix: int
    url: str
    tries: int
    prompt_tokens: int
    cached_tokens: int


class Clients:
    """Clients with a retry, which know two addresses."""

    def __init__(self, urls: list[str], seed: int) -> None:
        self.urls = urls
        self.replies: list[Reply] = []
        self.unanswered = 0
        rng = random.Random(seed)
        self._prefixes = [sentence(rng, PREFIX_WORDS) for _ in range(PREFIXES)]
        self._http = httpx.Client(timeout=60.0, trust_env=False)
        self._lock = threading.Lock()

    def ask(self, number: int) -> None:
        """Send one request until a server answers it."""
        rng = random.Random(number)
        prefix = rng.randrange(PREFIXES)
        text = f"{self._prefixes[prefix]} {sentence(rng)}"
        body = {"model": "builtin", "prompt": text, "max_tokens": 32, "temperature": 0, "ignore_eos": True}
        for attempt in range(TRIES):
            url = self.urls[(prefix + attempt) % 2]
            usage = self._usage(url, body)
            if usage is not None:
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                with self._lock:
                    self.replies.append(Reply(prefix, url, attempt, usage["prompt_tokens"], cached))
                return
            time.sleep(PAUSE_SECONDS)
        with self._lock:
            self.unanswered += 1

    def _usage(self, url: str, body: dict[str, Any]) -> dict[str, Any] | None:
        try:
            reply = self._http.post(f"{url}/v1/completions", json=body)
        except httpx.TransportError:
            return None
        if reply.status_code != 200 or reply.json()["choices"][0]["finish_reason"] != "length":
            return None
        usage: dict[str, Any] = reply.json()["usage"]
        return usage


def successor(args: Namespace, flags: list[str], clients: Clients, stack: ExitStack) -> Server:
    """Start the server that takes over; clients learn its address when it is ready."""
    began = time.perf_counter()
    running = stack.enter_context(server(args, *flags))
    clients.urls[0] = running.url
    say(f"successor ready after {time.perf_counter() - began:.1f} s")
    return running


def run(args: Namespace, folder: Path) -> None:
    """One round."""

    def flags(name: str) -> list[str]:
        tier = ["--kv-offload-path", f"{folder}/{name}/kv", "--kv-offload-disk-bytes", "256MiB"]
        return [*tier, "--batch-path", f"{folder}/{name}/batches", "--takeover-timeout", "60s"]

    with ExitStack() as stack:
        first = stack.enter_context(server(args, *flags("a")))
        second = stack.enter_context(server(args, *flags("b")))
        clients = Clients([first.url, second.url], args.seed)
        client = Client(first.url)
        batch = client.begin(client.upload(make_lines(args.lines, LINE_TOKENS, args.seed)))
        with ThreadPoolExecutor(args.clients) as pool:
            asked = [pool.submit(clients.ask, number) for number in range(args.requests)]
            while len(clients.replies) < args.requests // 3:
                time.sleep(POLL_SECONDS)
            counts = client.batch(batch)["request_counts"]
            kill(first.pid, Signals[f"SIG{args.signal}"])
            say(
                f"SIG{args.signal} after {len(clients.replies)} answers, {counts['completed']} lines of the batch"
            )
            third = successor(args, flags("a"), clients, stack)
            for each in asked:
                each.result()
        client = Client(third.url)
        while (state := client.batch(batch))["status"] not in ("completed", "failed", "expired", "cancelled"):
            time.sleep(POLL_SECONDS)
        results = Counter(row["custom_id"] for row in client.results(state))
    report(args, clients, third.url, results)


def report(args: Namespace, clients: Clients, url: str, results: Counter[str]) -> None:
    """Print lost and repeated requests, and prefix hits at the successor."""
    firsts: dict[int, Reply] = {}
    for reply in clients.replies:
        if reply.url == url:
            firsts.setdefault(reply.prefix, reply)
    prompt = sum(each.prompt_tokens for each in firsts.values())
    cached = sum(each.cached_tokens for each in firsts.values())
    retried = sum(each.tries > 0 for each in clients.replies)
    say(f"requests      {args.requests}, unanswered {clients.unanswered}, answered after a retry {retried}")
    missing = args.lines - len(results)
    say(f"batch lines   {args.lines}, lost {missing}, repeated {sum(n > 1 for n in results.values())}")
    say(f"prefix hits   {cached} of {prompt} prompt tokens in the successor's first request of each prefix")


def main() -> None:
    """Run what the command line asks for."""
    parser = arguments(__doc__ or "", rounds=1)
    parser.add_argument("--signal", choices=("TERM", "KILL"), default="TERM")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--lines", type=int, default=400, help="lines of the batch")
    args = parser.parse_args()
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            run(args, Path(folder))


if __name__ == "__main__":
    main()
