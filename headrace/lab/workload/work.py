"""One request of a workload, which each target converts to its own kind, and one call of a trace, without any text.

The content of a call is given by reference: a `Span` is a range of a stream of tokens. Two calls with the same span
share its tokens; `Synthesis` generates them. `speedup` and `resampled` change the arrival times of calls.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeGuard


class Message(NamedTuple):
    """One turn of a chat."""

    role: str
    content: str


Prompt = str | tuple[int, ...] | tuple[Message, ...]
"""Plain text, token ids, or a chat."""


@dataclass(frozen=True, slots=True)
class Work:
    """A prompt, the maximum length of its output, and its arrival.

    ``arrival`` is in seconds after the start of the run. ``ignore_eos`` makes the output exactly ``max_tokens`` long.
    ``expect`` is a label for the role of the request in its workload (``short``, ``long``, ``intruder`` ...).
    """

    id: str
    prompt: Prompt
    max_tokens: int
    arrival: float = 0.0
    ignore_eos: bool = False
    temperature: float = 0.0
    expect: str = ""
    tenant: str = "default"
    service_class: str = "default"


def is_chat(prompt: Prompt) -> TypeGuard[tuple[Message, ...]]:
    """Whether a prompt is a chat, which needs the chat endpoint."""
    return not isinstance(prompt, str) and isinstance(prompt[0], Message)


class Span(NamedTuple):
    """Tokens ``[start, start + length)`` of a stream; equal streams have equal tokens, others differ."""

    stream: int
    start: int
    length: int


class Call(NamedTuple):
    """A call of a language model.

    ``arrival`` is in seconds after the first call. ``content`` are the prompt's spans, which add up to
    ``prompt_tokens``; empty if nothing is shared. ``answer`` is the span of the output, which later turns may contain.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    tenant: str = "default"
    service_class: str = "default"
    content: tuple[Span, ...] = ()
    answer: Span | None = None


RUN_CALLS = 64
"""Block size of the block bootstrap in calls; blocks preserve bursts."""


def speedup(calls: Iterable[Call], factor: float) -> Iterator[Call]:
    """The calls with arrival times divided by ``factor``.

    Raises:
        ValueError: the factor is not above 0.
    """
    if not factor > 0:
        raise ValueError(f"--speedup: expected a number above 0, got {factor:g}")
    return (call._replace(arrival=call.arrival / factor) for call in calls)


def resampled(calls: Sequence[Call], count: int, seed: int = 0) -> Iterator[Call]:
    """``count`` calls drawn with replacement in blocks of `RUN_CALLS` neighbours (block bootstrap).

    A call keeps its gap to the call before it in the trace, and its content: drawn twice, it has the same tokens.

    Raises:
        ValueError: the trace has no calls.
    """
    if not calls:
        raise ValueError("--resample: the trace has no requests")
    return _runs(calls, count, random.Random(seed))


def _runs(calls: Sequence[Call], count: int, rng: random.Random) -> Iterator[Call]:
    now: float | None = None
    for start in range(0, count, RUN_CALLS):
        at = rng.randrange(len(calls))
        for i in range(at, at + min(RUN_CALLS, count - start)):
            before, call = calls[(i - 1) % len(calls)], calls[i % len(calls)]
            now = 0.0 if now is None else now + max(0.0, call.arrival - before.arrival)
            yield call._replace(arrival=now)


WIDE = range(1 << 40)
"""Vocabulary for simulations: a stream's number is one token, so streams differ from the first token on."""

POOL_TOKENS = 1 << 16
_NUMBERS = 1 << 40
_SCATTER = 0x9E3779B1


@lru_cache(maxsize=2)
def _pool(vocabulary: range, seed: int) -> tuple[int, ...]:
    """`POOL_TOKENS` tokens, twice in a row. A plan simulates many fleets over the same ones."""
    rng = random.Random(seed)
    pool = tuple(rng.choice(vocabulary) for _ in range(POOL_TOKENS))
    return pool + pool


class Synthesis:
    """Generates the tokens of spans, with ids in ``vocabulary``.

    Stream numbers are at least 0; each call without content gets a new stream.
    """

    def __init__(self, vocabulary: range = WIDE, seed: int = 0) -> None:
        self._pool = _pool(vocabulary, seed)
        self._vocabulary = vocabulary
        self._mark_tokens = 1
        while len(vocabulary) ** self._mark_tokens < _NUMBERS:
            self._mark_tokens += 1
        self._alone = 0

    def prompt(self, call: Call) -> tuple[int, ...]:
        """The prompt of a call; without content, it shares no prefix with others."""
        if not call.content:
            self._alone += 1
            return self._tokens(2 * self._alone + 1, 0, call.prompt_tokens)
        if len(call.content) == 1:
            return self.span(call.content[0])
        return tuple(token for span in call.content for token in self.span(span))

    def answer(self, call: Call) -> tuple[int, ...]:
        """The output of a call."""
        return self.span(call.answer) if call.answer else self._pool[: call.output_tokens]

    def span(self, span: Span) -> tuple[int, ...]:
        """The tokens of a span."""
        return self._tokens(2 * span.stream, span.start, span.length)

    def _tokens(self, number: int, start: int, length: int) -> tuple[int, ...]:
        marked = self._mark_tokens - start
        if marked > 0:
            return (self._mark(number)[start:] + self._stretch(number, self._mark_tokens, length - marked))[
                :length
            ]
        return self._stretch(number, start, length)

    def _mark(self, number: int) -> tuple[int, ...]:
        tokens = []
        for _ in range(self._mark_tokens):
            number, digit = divmod(number, len(self._vocabulary))
            tokens.append(self._vocabulary[digit])
        return tuple(tokens)

    def _stretch(self, number: int, start: int, length: int) -> tuple[int, ...]:
        at = (number * _SCATTER + start) % POOL_TOKENS
        if length <= POOL_TOKENS:
            return self._pool[at : at + max(0, length)]
        return tuple(self._pool[(at + i) % POOL_TOKENS] for i in range(length))


def replayed(calls: Iterable[Call], synthesis: Synthesis) -> Iterator[Work]:
    """The calls as work for a server or engine, with outputs of exactly the recorded length."""
    for number, call in enumerate(calls):
        yield Work(
            f"w{number}",
            synthesis.prompt(call),
            call.output_tokens,
            call.arrival,
            ignore_eos=True,
            tenant=call.tenant,
            service_class=call.service_class,
        )
