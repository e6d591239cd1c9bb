"""Tokens for calls without text: equal spans get equal tokens, and different streams share no prefix.

For speed, streams are slices of one random pool. A stream begins with its number, encoded in tokens, which also
determines the position of its slice.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

from headrace.lab.workload.call import Call, Span
from headrace.lab.workload.work import Work

WIDE = range(1 << 40)
"""Vocabulary for simulations: a stream's number is one token, so streams differ from the first token on."""

POOL_TOKENS = 1 << 16
_NUMBERS = 1 << 40
_SCATTER = 0x9E3779B1


class Synthesis:
    """Generates the tokens of spans, with ids in ``vocabulary``.

    Stream numbers are at least 0; each call without content gets a new stream.
    """

    def __init__(self, vocabulary: range = WIDE, seed: int = 0) -> None:
        rng = random.Random(seed)
        pool = tuple(rng.choice(vocabulary) for _ in range(POOL_TOKENS))
        self._pool = pool + pool
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
