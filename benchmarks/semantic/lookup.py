"""Time of a lookup in the semantic cache: its parts in process, and whole hits over HTTP.

    python -m benchmarks.semantic lookup [--entries 100000] [--rounds 200]

A server with the draft model answers some short questions and is stopped. Entries with random vectors are added to the
same partition, and the server is restarted. Then each question is sent again in other words. The parts are those of one
lookup among as many entries, on one thread.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.caches.responses import Connection
from benchmarks.stage import Server, plain_parser, server
from headrace.compute.encoder.sentences import Sentences
from headrace.lab.bench.stats import median, percentile
from headrace.response_cache.rules.calibration import Calibration, Stratum, Tally
from headrace.response_cache.rules.judge import Curve, Judge, Rule, Score
from headrace.response_cache.semantic.partitions import Partitions, vector_of
from headrace.response_cache.semantic.rows import Row, RowStore

THRESHOLD = 0.9
BY_COSINE = Score(0.0, (("cosine", Curve((0.0, 1.0), (0.0, 1.0))),))
STOPS = list(range(200))
"""The first token ends an answer, because only complete answers are cached for similar requests."""

PLACES = (
    "Paris",
    "Rome",
    "Oslo",
    "Lima",
    "Cairo",
    "Delhi",
    "Quito",
    "Sofia",
    "Tunis",
    "Accra",
    "Dakar",
    "Porto",
)
KINDS = ("airport", "harbour", "old town")
QUESTIONS = [f"What is the best way to reach the {kind} of {place}?" for place in PLACES for kind in KINDS]
OTHERS = ("What would be", "Which is", "So what is")
"""Openings with the same meaning."""


def calibration(encoder: str) -> Calibration:
    """A calibration that uses the cosine alone, because the time of a lookup does not depend on the score."""
    tallies = (Tally(THRESHOLD, 3000, 0),)
    return Calibration(encoder, (Stratum(0, BY_COSINE, tallies, tallies, 10_000, 10_000),))


def fill(template: Row, entries: int) -> Iterator[Row]:
    """Entries with random vectors in the partition of ``template``."""
    draw = np.random.default_rng(0)
    for start in range(0, entries, 1000):
        vectors = draw.normal(size=(1000, len(template.vector) // 4)).astype(np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        for place, vector in enumerate(vectors):
            number = start + place
            key = number.to_bytes(32, "little")
            yield replace(
                template, key=key, question=f"filler {number:x}", vector=vector.tobytes(), answer=number
            )


def seconds_of(call: Callable[[], object], rounds: int) -> list[float]:
    """Seconds of each round, after some that are not counted."""
    taken = []
    for number in range(rounds + 10):
        began = time.perf_counter()
        call()
        if number >= 10:
            taken.append(time.perf_counter() - began)
    return taken


def show(name: str, seconds: list[float]) -> None:
    """One line: median and tail in milliseconds."""
    print(f"  {name:<34} {1e3 * median(seconds):8.2f} ms p50 {1e3 * percentile(seconds, 99):8.2f} ms p99")


def parts(sentences: Sentences, entries: int, rounds: int) -> None:
    """Embedding, searching and judging, one after the other."""
    question, near = QUESTIONS[0], QUESTIONS[0].replace("What is", "What would be")
    [vector] = sentences.embed([question])
    assert vector is not None
    template = Row(b"k", b"p", question, vector, 1, "yes", b"", (), time.time() + 3600)
    rows = Partitions(sentences.dimensions, 1 << 40)
    rows.keep(template)
    for row in fill(template, entries):
        rows.keep(row)
    judge = Judge([Rule(0, BY_COSINE, THRESHOLD)])
    found = rows.nearest(b"p", vector_of(vector))
    show("embed a short question", seconds_of(lambda: sentences.embed([near]), rounds))
    show(f"search {entries:,} entries", seconds_of(lambda: rows.nearest(b"p", vector_of(vector)), rounds))
    show("judge", seconds_of(lambda: judge.decide(near, found, entries), rounds))


def serving(folder: Path) -> AbstractContextManager[Server]:
    """A server whose responses are cached in ``folder``."""
    flags = ["--response-cache", "memory", "--response-cache", f"sqlite:{folder / 'answers'}"]
    flags += ["--semantic-cache", "serve", "--semantic-calibration", str(folder / "calibration.json")]
    flags += ["--semantic-deadline", "1.0", "--semantic-audit", "0", "--semantic-cache-bytes", str(4 << 30)]
    return server(argparse.Namespace(model="builtin-draft", device="auto"), *flags)


def ask(client: Connection, question: str) -> tuple[float, str]:
    """Seconds of one call, and the response header of the caches."""
    body: dict[str, Any] = {"model": "builtin-draft", "messages": [{"role": "user", "content": question}]}
    body |= {"temperature": 0, "stop_token_ids": STOPS}
    seconds, answer = client.post(json.dumps(body).encode())
    note = answer.split(b"\r\nx-headrace-cache: ")
    if len(note) != 2:
        raise RuntimeError(f"an answer without a note of the caches: {answer[:200]!r}")
    return seconds, note[1].partition(b"\r\n")[0].decode()


def over_http(sentences: Sentences, entries: int) -> list[float]:
    """Whole calls that are served with the response of a similar request: the seconds of each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "calibration.json").write_text(calibration(sentences.name).to_text())
        with serving(folder) as running, closing(Connection(running.url)) as client:
            computed = [ask(client, question)[0] for question in QUESTIONS]
            time.sleep(1.0)  # responses are cached in the background
        with closing(sqlite3.connect(folder / "answers.semantic")) as connection:
            [partition] = connection.execute("SELECT DISTINCT partition FROM rows").fetchone()
        row_store = RowStore(folder / "answers.semantic", sentences.name)
        template = Row(
            b"", partition, "", bytes(4 * sentences.dimensions), 0, "filler", b"", (), time.time() + 3600
        )
        row_store.write(fill(template, entries), [])
        row_store.close()
        with serving(folder) as running, closing(Connection(running.url)) as client:
            began = time.perf_counter()
            while ask(client, f"{QUESTIONS[0][:-1]} then?")[1] == "miss":
                time.sleep(0.2)
            print(f"  index rebuilt {time.perf_counter() - began:.1f} s after the start")
            calls = [
                ask(client, question.replace("What is", opening))
                for question in QUESTIONS
                for opening in OTHERS
            ]
        hits = [seconds for seconds, note in calls if "layer=semantic" in note]
        print(f"  {len(hits)} of {len(calls)} calls were semantic hits among {entries:,} entries")
        show("computed (one token) over HTTP", computed)
        show("semantic hit over HTTP", hits)
        return hits


def main() -> None:
    """Measure and print."""
    parser = plain_parser(__doc__)
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=200)
    given = parser.parse_args()
    sentences = Sentences.from_name()
    parts(sentences, given.entries, given.rounds)
    over_http(sentences, given.entries)
