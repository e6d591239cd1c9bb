from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence

import httpx
import pytest

from benchmarks.peers.front import Stream, serve
from benchmarks.peers.server import first_tokens
from headrace.lab.bench.client import Endpoint, offer
from headrace.lab.workload.work import Work
from tests.doubles.shared_stores import free_port


class Counting:
    """Answers with the prompt's first id and those after it, from a thread of its own."""

    def submit(self, prompt: Sequence[int], max_tokens: int, stream: Stream) -> None:
        def answer() -> None:
            for i in range(max_tokens):
                stream.put([prompt[0] + i])
            stream.end(len(prompt))

        threading.Thread(target=answer).start()


@pytest.fixture(scope="module")
def endpoint() -> Endpoint:
    port = free_port()
    threading.Thread(target=serve, args=(Counting(), "counting", port), daemon=True).start()
    url = f"http://127.0.0.1:{port}"
    for _ in range(1200):
        try:
            return Endpoint(url, httpx.get(f"{url}/v1/models").json()["data"][0]["id"])
        except httpx.TransportError:
            time.sleep(0.05)
    raise TimeoutError("the front does not answer")


def test_the_benchmarks_client_reads_whole_answers_of_many_at_once(endpoint):
    work = [Work(f"w{i}", (10 * i, 7, 7), max_tokens=5 + i, ignore_eos=True) for i in range(8)]
    records = asyncio.run(offer(endpoint, work))
    assert [record.error for record in records] == [""] * 8
    assert [record.output_tokens for record in records] == [5 + i for i in range(8)]
    assert [record.prompt_tokens for record in records] == [3] * 8
    assert all(record.finish_reason == "length" for record in records)


def test_tokens_come_as_they_were_drawn(endpoint):
    assert endpoint.model == "counting"
    assert first_tokens(endpoint, Work("w", (40, 1), max_tokens=3, ignore_eos=True)) == [40, 41, 42]
