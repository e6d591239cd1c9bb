"""Measurements for a calibration: steps of an engine in this process, and the HTTP overhead of a server."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from headrace.core.events import Finished
from headrace.core.request import Request, SamplingParams
from headrace.lab.bench.engine import Loop
from headrace.lab.bench.record import Record, Target
from headrace.lab.bench.stats import median
from headrace.lab.calibration.fit import Measured
from headrace.lab.calibration.recorder import StepRecorder
from headrace.lab.workload import Work
from headrace.lab.workload.lengths import log_normal
from headrace.lab.workload.tokens import VOCABULARY

ANSWER_MEDIAN = 24
"""Median output tokens; short outputs, because a server mostly computes prompts together with outputs."""

STREAM_TOKENS = 96
VISITS = 12
VISIT_TOKENS = (16, 256)
"""Prompts of visits: few tokens, and as many as a context of twice that allows."""

VISIT_GAP, VISIT_TIMES = 0.05, 3
"""Seconds between visits without streams, and how many times as long as their prompts take: few wait for another."""

VISITED = 8
"""Maximum number of streams during visits."""

PASSES = 4
"""How often all batch sizes are run, so that drift of the machine is not attributed to some of them."""

TURNS = 5
"""How often server and engine are measured alternately."""


class Group(NamedTuple):
    """Requests, and how many of them are open at once."""

    open_at_once: int
    requests: Sequence[Request]


def groups(max_num_seqs: int, max_model_len: int, seed: int = 0) -> Iterator[Group]:
    """Loops of 1, 2, 4 … ``max_num_seqs`` requests at once, up and down `PASSES` times; prompts and answers of many
    lengths, no prefix shared. The first one, of the largest size, is for warming up.
    """
    rng = random.Random(seed)
    longest = max(1, max_model_len // 2)
    up = [1]
    while up[-1] < max_num_seqs:
        up.append(min(2 * up[-1], max_num_seqs))
    passes = [size for number in range(PASSES) for size in (up, up[::-1])[number % 2]]
    for number, size in enumerate([max_num_seqs, *passes]):
        requests = [
            Request(
                f"calibrate-{number}-{i}",
                prompt,
                SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True),
            )
            for i, (prompt, answer) in enumerate(_drawn(2 + size, longest, rng))
        ]
        yield Group(size, requests)


def _drawn(count: int, longest: int, rng: random.Random) -> Iterator[tuple[tuple[int, ...], int]]:
    """Prompts, and the lengths of their outputs."""
    prompts = log_normal(count, max(1, min(192, longest // 8)), 1.0, 1, longest, rng)
    answers = log_normal(count, ANSWER_MEDIAN, 0.7, 4, max(4, min(256, longest)), rng)
    for prompt, answer in zip(prompts, answers, strict=True):
        yield tuple(rng.choices(VOCABULARY, k=prompt)), answer


def measure_steps(
    loop: Loop,
    recorder: StepRecorder,
    groups: Iterable[Group],
    before: Callable[[], object],
    clock: Callable[[], float] = time.monotonic,
) -> list[Measured]:
    """Runs one group after the other through an engine whose runner is behind ``recorder``.

    ``before`` each it is made to forget the prompts of those before: kept, they would make it go on to memory that was
    never used, and the system clears that beside the steps. The first group's steps are left out for the same reason.
    """
    for number, group in enumerate(groups):
        if number == 1:
            recorder.measured.clear()
        before()
        recorder.pause()
        to_come, open_ = deque(group.requests), 0
        while to_come or open_:
            while to_come and open_ < group.open_at_once:
                loop.submit(to_come.popleft(), clock())
                open_ += 1
            open_ -= sum(type(event) is Finished for event in loop.step(clock()))
    return recorder.measured


def visits(seconds: float, tokens: Sequence[int], turn: int = 0) -> list[Work]:
    """Single requests with prompts of ``tokens`` in turn, one after the other, spread over about ``seconds``."""
    rng = random.Random(2 * turn)
    return [
        Work(
            f"visit{i}",
            tuple(rng.choices(VOCABULARY, k=tokens[i % 2])),
            2,
            arrival=seconds * (0.1 + 0.7 * (i + rng.random()) / VISITS),
            ignore_eos=True,
        )
        for i in range(VISITS)
    ]


def stream_work(streams: int, turn: int = 0) -> list[Work]:
    """Equal streams that run at once."""
    rng = random.Random(2 * turn + 1)
    return [
        Work(f"stream{i}", tuple(rng.choices(VOCABULARY, k=16)), STREAM_TOKENS, ignore_eos=True)
        for i in range(streams)
    ]


def busy_work(streams: int, max_model_len: int, turn: int = 0) -> list[Work]:
    """Prompts and outputs as in `groups`, which keep the batch full."""
    rng = random.Random(f"busy {turn}")
    drawn = _drawn(2 * streams, max(1, max_model_len // 2), rng)
    return [Work(f"busy{i}", prompt, answer, ignore_eos=True) for i, (prompt, answer) in enumerate(drawn)]


class FrontSeconds(NamedTuple):
    """What HTTP adds: per request and token of its prompt, per step that tells something, and per part of an answer;
    ``prompt`` is the last one where the next step computes prompts. A request that is read during a step delays the
    next one by ``stall``."""

    request: float
    token: float
    step: float
    event: float
    prompt: float
    stall: float


def front_seconds(
    server: Target, engine: Target, streams: int, max_model_len: int, prompt_seconds: Callable[[int], float]
) -> FrontSeconds:
    """What HTTP adds, from the same work given to a server and to the engine alone, in turns.

    Both take requests when they arrive, and forget prompts before they begin. One stream and many tell what a step
    costs from what each part of an answer does: sockets, threads and the client are woken for a step, however little it
    tells. Prompts beside answers miss the core that HTTP works on; what only decodes waits for memory anyway. What a
    request costs is what it delays streams by, and where nothing else runs, how much later its first token is than
    ``prompt_seconds`` of the fit: waking up threads and cores is part of it.

    Raises:
        RuntimeError: a request failed.
    """
    visited = max(1, min(VISITED, streams // 2))
    seconds = _tpot(engine.run(stream_work(visited, -1))) * STREAM_TOKENS
    server.run(stream_work(visited, -1))  # connections and first uses
    server.run(busy_work(streams, max_model_len, -1))  # memory that was never used
    lengths = (VISIT_TOKENS[0], max(VISIT_TOKENS[0] + 1, min(VISIT_TOKENS[1], max_model_len // 2)))
    gap = max(VISIT_GAP, VISIT_TIMES * prompt_seconds(lengths[1]))
    waits, alone, together, beside = [], [], [], []
    busy: list[tuple[float, int, int]] = []  # what a full batch takes longer, its steps and its tokens
    for turn in range(TURNS):
        one, many = stream_work(1, turn), stream_work(streams, turn)
        apart = visits(VISITS * gap, lengths, turn)
        among = stream_work(visited, turn) + visits(seconds, lengths, turn)
        lone = server.run(apart)
        waits.append([_ttft(lone[i::2]) - prompt_seconds(lengths[i]) for i in range(2)])
        beside.append(_tpot(server.run(among)[:visited]) - _tpot(engine.run(among)[:visited]))
        alone.append(_tpot(server.run(one)) - _tpot(engine.run(one)))
        together.append(_tpot(server.run(many)) - _tpot(engine.run(many)))
        mixed = busy_work(streams, max_model_len, turn)
        served, computed = _whole(server.run(mixed)), _whole(engine.run(mixed))
        steps = len({seconds for record in computed for seconds in record.token_seconds})
        tokens = sum(record.output_tokens for record in computed)
        busy.append((_seconds(served) - _seconds(computed), steps, tokens))
    event = max(0.0, median(together) - median(alone)) / max(1, streams - 1)
    step = max(0.0, median(alone) - event)
    writing = step + visited * event  # the output of a step of the visited streams
    stall = max(0.0, median(beside) - writing) * (STREAM_TOKENS - 1) / VISITS
    requests = 2 * streams
    prompt = median([(longer - steps * step - requests * stall) / tokens for longer, steps, tokens in busy])
    short, long = (max(0.0, median(wait) - step - event) for wait in zip(*waits, strict=True))
    token = max(0.0, long - short) / (lengths[1] - lengths[0])
    request = max(0.0, short - lengths[0] * token)
    return FrontSeconds(request, token, step, event, max(0.0, prompt), stall)


def _seconds(records: Sequence[Record]) -> float:
    return max(record.finished for record in records) - min(record.arrived for record in records)


def _ttft(records: Sequence[Record]) -> float:
    return median([record.ttft for record in _whole(records) if record.ttft is not None])


def _tpot(records: Sequence[Record]) -> float:
    return median([record.tpot for record in _whole(records) if record.tpot is not None])


def _whole(records: Sequence[Record]) -> Sequence[Record]:
    failed = next((record for record in records if record.error), None)
    if failed is not None:
        raise RuntimeError(f"{failed.id}: {failed.error}")
    return records
