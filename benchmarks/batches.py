"""Batches on a server: ``python -m benchmarks.batches``.

Two measurements:

1. A batch of ``--lines`` lines runs while the server is killed with SIGKILL ``--kills`` times at random moments and
   restarted. Afterwards every line must have exactly one result.
2. Interactive requests (Poisson arrivals, ``--rate`` per second) are sent in blocks of ``--block`` seconds, alternately
   with a running batch and without one. The order alternates from pair to pair. The 95 % interval of the ratio is from
   a bootstrap over pairs of blocks.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from os import kill
from pathlib import Path
from typing import Any

import httpx

from benchmarks.stage import Server, arguments, publish, say, server
from benchmarks.warming import StreamedAnswer, percentile
from benchmarks.warming_beside import Pair, ask, interval, make_block
from headrace.lab.bench.client import Connections

CHAT = "/v1/chat/completions"
WORDS = (
    "the",
    "fox",
    "river",
    "stone",
    "small",
    "bright",
    "old",
    "garden",
    "runs",
    "sleeps",
    "under",
    "over",
    "home",
)
LINE_TOKENS = 16
LONG_TOKENS = 256
ANSWER_TOKENS = 32
POLL_SECONDS = 0.05


def sentence(rng: random.Random, words: int = 24) -> str:
    """Some words."""
    return " ".join(rng.choices(WORDS, k=words))


def make_lines(count: int, tokens: int, seed: int) -> bytes:
    """An input file; groups of 50 lines share the beginning of their prompts."""
    rng = random.Random(seed)
    beginnings = [sentence(rng, 60) for _ in range(max(1, count // 50))]
    lines = []
    for number in range(count):
        text = f"{rng.choice(beginnings)} {sentence(rng)}"
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, "ignore_eos": True}
        lines.append({"custom_id": f"r{number}", "method": "POST", "url": CHAT, "body": body})
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


class Client:
    """A client of the server's files and batches API."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=120.0, trust_env=False)

    def upload(self, raw: bytes) -> str:
        """Upload a file; returns its id."""
        form = {"files": {"file": ("in.jsonl", raw)}, "data": {"purpose": "batch"}}
        return str(self._http.post("/v1/files", **form).raise_for_status().json()["id"])  # type: ignore[arg-type]

    def begin(self, file: str) -> str:
        """Create a batch; returns its id."""
        body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
        return str(self._http.post("/v1/batches", json=body).raise_for_status().json()["id"])

    def batch(self, id: str) -> dict[str, Any]:
        """The current state of a batch."""
        batch: dict[str, Any] = self._http.get(f"/v1/batches/{id}").raise_for_status().json()
        return batch

    def cancel(self, id: str) -> None:
        """Cancel a batch and wait for its end."""
        self._http.post(f"/v1/batches/{id}/cancel").raise_for_status()
        while self.batch(id)["status"] != "cancelled":
            time.sleep(POLL_SECONDS)

    def results(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        """The lines of both output files."""
        rows: list[dict[str, Any]] = []
        for name in ("output_file_id", "error_file_id"):
            if batch[name]:
                text = self._http.get(f"/v1/files/{batch[name]}/content").raise_for_status().text
                rows += map(json.loads, text.splitlines())
        return rows


def run_killed(args: Namespace, folder: Path) -> dict[str, Any]:
    """Run the batch, kill and restart the server, and count lost and repeated results."""
    rng = random.Random(args.seed)
    moments = sorted(rng.random() for _ in range(args.kills))
    id, began, killed = "", time.perf_counter(), []
    while True:
        with server(args, "--batch-path", str(folder)) as running:
            client = Client(running.url)
            id = id or client.begin(client.upload(make_lines(args.lines, LINE_TOKENS, args.seed)))
            batch = client.batch(id)
            while batch["status"] in ("validating", "in_progress", "finalizing"):
                done = batch["request_counts"]["completed"]
                if len(killed) < args.kills and done >= args.lines * moments[len(killed)]:
                    time.sleep(rng.random())
                    kill(running.pid, signal.SIGKILL)
                    killed.append(done)
                    say(f"killed after about {done} of {args.lines} lines")
                    break
                time.sleep(POLL_SECONDS)
                batch = client.batch(id)
            else:
                counts = Counter(row["custom_id"] for row in client.results(batch))
                break
    expected = {f"r{number}" for number in range(args.lines)}
    return {
        "status": batch["status"],
        "request_counts": batch["request_counts"],
        "killed_at": killed,
        "lost": len(expected - counts.keys()),
        "twice": sum(count > 1 for count in counts.values()),
        "unknown": len(counts.keys() - expected),
        "seconds": time.perf_counter() - began,
    }


async def play(connections: Connections, args: Namespace, number: int, salt: str) -> list[StreamedAnswer]:
    """One block of interactive requests."""
    rng = random.Random(args.seed + number)
    texts = [sentence(rng) for _ in range(64)]
    tasks, begin = [], time.perf_counter()
    for due in make_block(texts, args.rate, args.block, args.seed + number):
        body = {
            "messages": [{"role": "user", "content": due.text}],
            "max_tokens": ANSWER_TOKENS,
            "stream": True,
            "cache_salt": salt,
        }
        await asyncio.sleep(max(0.0, begin + due.at - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(connections, json.dumps(body).encode())))
    answers = list(await asyncio.gather(*tasks))
    await asyncio.sleep(max(0.0, begin + args.block - time.perf_counter()))
    return answers


def measure_interactive(running: Server, args: Namespace) -> tuple[list[Pair], int]:
    """All pairs of blocks, and how many lines of batches ran in the loaded blocks."""
    client = Client(running.url)
    file = client.upload(make_lines(args.beside_lines, LONG_TOKENS, args.seed + 1))
    pairs, lines = [], 0
    for number in range(-1, args.pairs):  # the first pair warms up
        answers: dict[bool, list[StreamedAnswer]] = {}
        for with_batch in (False, True) if number % 2 else (True, False):
            id = client.begin(file) if with_batch else ""
            while with_batch and client.batch(id)["request_counts"]["completed"] < 8:
                time.sleep(POLL_SECONDS)
            answers[with_batch] = asyncio.run(_block(running.url, args, number, f"{number} {with_batch}"))
            if with_batch:
                lines += client.batch(id)["request_counts"]["completed"] if number >= 0 else 0
                client.cancel(id)
        if number >= 0:
            pairs.append(Pair(answers[False], answers[True]))
    return pairs, lines


async def _block(url: str, args: Namespace, number: int, salt: str) -> list[StreamedAnswer]:
    connections = Connections(url)
    try:
        return await play(connections, args, number, salt)
    finally:
        connections.close()


def ratios(pairs: Sequence[Pair], seed: int) -> dict[str, Any]:
    """TTFT and duration with a batch and without."""
    alone = [each for pair in pairs for each in pair.alone]
    with_batch = [each for pair in pairs for each in pair.beside]
    say("               alone ms  beside ms    ratio      95 %")
    found: dict[str, Any] = {"requests": len(alone)}
    for name in ("ttft", "seconds"):
        for percent in (50, 90, 99):

            def figure(answers: list[StreamedAnswer], name: str = name, percent: int = percent) -> float:
                return percentile([getattr(each, name) for each in answers], percent)

            low, high = interval(pairs, figure, seed)
            without, loaded = figure(alone), figure(with_batch)
            say(
                f"{name:8} p{percent:<4} {without * 1e3:9.2f} {loaded * 1e3:10.2f} {loaded / without:8.3f}"
                f"  {low:.3f}-{high:.3f}"
            )
            found[f"{name}_p{percent}"] = {
                "alone_seconds": without,
                "beside_seconds": loaded,
                "ratio": loaded / without,
                "interval": (low, high),
            }
    return found


def main() -> None:
    """Measure, print, write."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--block", type=float, default=8.0, help="seconds")
    parser.add_argument("--rate", type=float, default=4.0)
    parser.add_argument("--beside-lines", type=int, default=4000)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        if args.lines:
            found["killed"] = run_killed(args, Path(name) / "killed")
            say(found["killed"])
        if args.pairs:
            with server(args, "--batch-path", f"{name}/beside") as running:
                pairs, lines = measure_interactive(running, args)
            found["beside"] = ratios(pairs, args.seed) | {"pairs": len(pairs), "lines_beside": lines}
            say(f"{len(pairs)} pairs of blocks; {lines} lines of batches ran beside them")
    publish("batches", args, [], [], **found)


if __name__ == "__main__":
    main()
