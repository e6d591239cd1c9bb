"""Measuring what a calibration needs: the steps of an engine in this process, and what HTTP adds before a server."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence

from headrace.core.request import Request, SamplingParams
from headrace.lab.bench.engine import Loop
from headrace.lab.bench.record import Record, Target
from headrace.lab.bench.stats import median
from headrace.lab.simulate.fit import Measured
from headrace.lab.simulate.recorder import StepRecorder
from headrace.lab.workload import Work
from headrace.lab.workload.lengths import log_normal
from headrace.lab.workload.tokens import VOCABULARY

ANSWER_MEDIAN = 24
"""Tokens; short ones, since it is their number at once that matters, and it falls as they end."""

IDLE_REQUESTS = 12
STREAM_TOKENS = 48


def batches(max_num_seqs: int, max_model_len: int, seed: int = 0) -> Iterator[list[Request]]:
    """Batches of 1, 2, 4 … ``max_num_seqs`` requests, prompts and answers of many lengths, no prefix shared."""
    rng = random.Random(seed)
    longest = max(1, max_model_len // 2)
    size = 1
    while True:
        prompts = log_normal(size, max(1, min(192, longest // 8)), 1.0, 1, longest, rng)
        answers = log_normal(size, ANSWER_MEDIAN, 0.7, 4, max(4, min(256, longest)), rng)
        yield [
            Request(
                f"calibrate-{size}-{i}",
                tuple(rng.choices(VOCABULARY, k=prompt)),
                SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True),
            )
            for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]
        if size >= max_num_seqs:
            return
        size = min(2 * size, max_num_seqs)


def measure_steps(
    loop: Loop,
    recorder: StepRecorder,
    groups: Iterator[Sequence[Request]],
    clock: Callable[[], float] = time.monotonic,
) -> list[Measured]:
    """Runs one group after the other through an engine whose runner is behind ``recorder``."""
    for group in groups:
        recorder.pause()
        for request in group:
            loop.submit(request, clock())
        while loop.wake_at(clock()) is not None:
            loop.step(clock())
    return recorder.measured


def idle_work(count: int = IDLE_REQUESTS) -> list[Work]:
    """Single short requests, for one client that sends one after the other."""
    rng = random.Random(1)
    return [Work(f"idle{i}", tuple(rng.choices(VOCABULARY, k=16)), 2, ignore_eos=True) for i in range(count)]


def stream_work(streams: int) -> list[Work]:
    """As many streams as run at once, all alike."""
    rng = random.Random(2)
    return [
        Work(f"stream{i}", tuple(rng.choices(VOCABULARY, k=16)), STREAM_TOKENS, ignore_eos=True)
        for i in range(streams)
    ]


def front_seconds(
    server: Target,
    one_by_one: Target,
    streams: int,
    simulate: Callable[[Sequence[Work]], tuple[float, float]],
) -> tuple[float, float]:
    """What HTTP adds per request and per part of an answer.

    ``server`` takes all requests at once, ``one_by_one`` one after the other; ``simulate`` says the medians of TTFT and
    TPOT that the engine alone would have.

    Raises:
        RuntimeError: a request failed.
    """
    idle = idle_work()
    one_by_one.run(idle[:2])  # connections and first uses
    ttft, _ = _medians(one_by_one.run(idle))
    together = stream_work(streams)
    _, tpot = _medians(server.run(together))
    alone_ttft, _ = simulate(idle[:1])
    _, together_tpot = simulate(together)
    event = max(0.0, tpot - together_tpot) / streams
    return max(0.0, ttft - alone_ttft - event), event


def _medians(records: Sequence[Record]) -> tuple[float, float]:
    failed = next((record for record in records if record.error), None)
    if failed is not None:
        raise RuntimeError(f"{failed.id}: {failed.error}")
    return (
        median([record.ttft for record in records if record.ttft is not None]),
        median([record.tpot for record in records if record.tpot is not None]),
    )
