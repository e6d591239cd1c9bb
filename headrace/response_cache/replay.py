"""Sends a cached response to a reader: at once, or in chunks at the pace of a stream.

It goes through the same queue that computed responses use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from enum import StrEnum

from headrace.core.events import Emitted, Finished
from headrace.core.request import Request
from headrace.response_cache.rules.entry import Entry
from headrace.service.answer import Answer

TOKENS_AT_ONCE = 32
"""Tokens per chunk of a replay at immediate pace: still a stream, with little overhead."""


class Pace(StrEnum):
    """The speed at which a cached response is streamed."""

    IMMEDIATE = "immediate"
    ORIGINAL = "original"


def tell_whole(answer: Answer, index: int, entry: Entry) -> None:
    """Send all of ``entry`` at once, to a reader that waits for the end."""
    request = answer.requests[index]
    answer.cached_tokens[index] = len(request.tokens)
    if entry.tokens:
        answer.tell(index, Emitted(request.id, entry.tokens, entry.logprobs))
    answer.tell(index, _end(request, entry))


async def tell_paced(answer: Answer, index: int, entry: Entry, pace: Pace) -> None:
    """Send ``entry`` in chunks, to a reader that streams them."""
    request = answer.requests[index]
    answer.cached_tokens[index] = len(request.tokens)
    began = asyncio.get_running_loop().time()
    for after, start, end in _pieces(entry, pace):
        await asyncio.sleep(max(0.0, began + after - asyncio.get_running_loop().time()))
        answer.tell(index, Emitted(request.id, entry.tokens[start:end], entry.logprobs[start:end]))
    answer.tell(index, _end(request, entry))


def _pieces(entry: Entry, pace: Pace) -> Iterator[tuple[float, int, int]]:
    """Chunks: seconds since the beginning, and the range of tokens to send."""
    if pace is Pace.ORIGINAL and entry.pulses:
        start = 0
        for pulse in entry.pulses:
            yield pulse.seconds, start, start + pulse.tokens
            start += pulse.tokens
    else:
        for start in range(0, len(entry.tokens), TOKENS_AT_ONCE):
            yield 0.0, start, min(start + TOKENS_AT_ONCE, len(entry.tokens))


def _end(request: Request, entry: Entry) -> Finished:
    prompt = len(request.tokens)
    return Finished(request.id, entry.reason, prompt, len(entry.tokens), prompt, stop_token=entry.stop_token)
