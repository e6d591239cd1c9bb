"""Warm-up requests, which run before those of clients, so that one-time costs do not delay these.

On a CPU one is enough. Triton compiles each variant of a kernel when it is first launched, which takes about a second,
and caches it in a folder for the next process (``TRITON_CACHE_DIR``, by default ``~/.triton/cache``). So on a GPU there
are steps of each kind: one row and many, short and long prompts, contexts that several programs share, and a prefix
that rows share.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

from headrace.core.engine import Engine
from headrace.core.events import Finished
from headrace.core.request import Request, SamplingParams

logger = logging.getLogger(__name__)

_OUTPUT = 2
_RANDOM = SamplingParams(temperature=1.0, max_tokens=_OUTPUT, ignore_eos=True)
_GREEDY = SamplingParams(temperature=0.0, max_tokens=_OUTPUT, ignore_eos=True)
_FILTERED = SamplingParams(
    temperature=1.0, top_k=20, top_p=0.9, presence_penalty=0.1, max_tokens=_OUTPUT, ignore_eos=True
)
_TOKENS = 64
"""Prompts have tokens below this number, which every vocabulary has."""
_LONG = 1100


def groups(compiles: bool, longest: int) -> list[list[Request]]:
    """Groups of requests that run together; ``compiles``: the kernels are compiled when they are first launched.

    A request has at most ``longest`` tokens.
    """
    shapes = [(1, 4, _RANDOM)]
    if compiles:
        shapes += [
            (1, 40, _FILTERED),
            (1, 300, _GREEDY),
            (1, _LONG, _GREEDY),
            (20, 5, _FILTERED),
            (48, 6, _GREEDY),
        ]
    made: list[list[Request]] = []
    for number, (count, length, params) in enumerate(shapes):
        some = min(length, longest - _OUTPUT)
        made.append([_request(f"{number}-{row}", number + row, some, params) for row in range(count)])
    if compiles and longest > _LONG + _OUTPUT:
        made.append([_request(f"shared-{row}", 0, _LONG, _GREEDY) for row in range(10)])
    return made


def _request(name: str, first: int, length: int, params: SamplingParams) -> Request:
    # Its arrival time is minus infinity, so no policy holds it back to form a larger batch.
    tokens = tuple((first + each) % _TOKENS for each in range(length))
    return Request(f"warm-up-{name}", tokens, params, arrived=-math.inf)


def answer(engine: Engine, requests: Sequence[Sequence[Request]]) -> None:
    """Run each group, and then empty the prefix cache."""
    for number, group in enumerate(requests, 1):
        if len(requests) > 1:
            logger.info("warm-up: steps of kind %d of %d", number, len(requests))
        for request in group:
            engine.submit(request, time.monotonic())
        running = len(group)
        while running:
            running -= sum(isinstance(event, Finished) for event in engine.step(time.monotonic()))
    while engine.wake_at(time.monotonic()) is not None:
        engine.step(time.monotonic())
    engine.reset_prefix_cache(lower=False)
    engine.take_events()
