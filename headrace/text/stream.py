"""The text of one output while its tokens arrive: only whole characters, and no part of a stop string.

It combines `text.detokenize` (tokens to text) and `text.stops` (text that may be sent). The server creates one
`TextStream` per output, pushes the emitted tokens, and cancels the request when `stopped` is set.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple, Protocol

from headrace.text.detokenize import (
    CHARACTER_BYTES,
    Detokenizer,
    PieceDetokenizer,
    Pieces,
    WindowDetokenizer,
    decoder_steps,
    has_pieces,
)
from headrace.text.stops import Match, StopMatcher
from headrace.text.tokenizer import Tokenizer

AFTER_CALL = ""
"""Replaces the stop string if the output ended with its first tool call."""


class TextDelta(NamedTuple):
    """What a push added to an answer.

    ``text`` may be shown now. ``stopped`` is the stop string that ended the answer, None while it continues.
    ``texts`` has one entry per token used: what it added to the text, shown or held back (empty while a character is
    incomplete). Tokens after the stop string are not used. ``offset`` is the position of the first of ``texts`` in
    the answer, in characters.
    """

    text: str
    stopped: str | None = None
    texts: tuple[str, ...] = ()
    offset: int = 0


class Texts(Protocol):
    """The text of one answer while its tokens arrive."""

    def push(self, tokens: Sequence[int]) -> TextDelta: ...

    def finish(self) -> TextDelta: ...


class TextStreams:
    """Creates the text streams of one tokenizer, which share the computed pieces of its vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.seconds = 0.0
        """Time that all streams have spent on turning tokens into text."""
        steps = decoder_steps(tokenizer)
        self._pieces = Pieces(tokenizer, steps) if has_pieces(steps) else None

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token by itself, which may be a part of a character."""
        if self._pieces is None:
            return self._tokenizer.decode([token], skip_special_tokens=False).encode()
        piece = self._pieces[token]
        return piece if isinstance(piece, bytes) else piece.encode()

    def open(
        self,
        *,
        prompt: Sequence[int] = (),
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        keep: frozenset[int] = frozenset(),
    ) -> TextStream:
        """A stream for one answer.

        Args:
            prompt: the tokens that the answer continues; only the last few are used. They decide whether the first
                word keeps its leading space, and may begin the answer's first character.
            stop: strings that end the answer.
            include_stop_str_in_output: cut after the stop string instead of before it.
            skip_special_tokens: leave special tokens out of the text.
            min_tokens: stop strings are ignored in the text of this many first tokens.
            keep: special tokens that stay in the text even so.
        """
        skip = self._tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        skip -= keep
        detokenizer: Detokenizer
        if self._pieces is None:
            detokenizer = WindowDetokenizer(self._tokenizer, skip)
        else:
            detokenizer = PieceDetokenizer(self._pieces, skip)
        for token in prompt[-CHARACTER_BYTES:]:
            detokenizer.push(token)
        return TextStream(self, detokenizer, StopMatcher(stop, include_stop_str_in_output), min_tokens)


class TextStream:
    """Turns the tokens of an answer into text that may be shown; for one thread at a time."""

    def __init__(
        self, streams: TextStreams, detokenizer: Detokenizer, stops: StopMatcher, min_tokens: int = 0
    ) -> None:
        self._streams = streams
        self._detokenizer = detokenizer
        self._stops = stops
        self._unwatched = min_tokens
        self._length = 0
        self._stopped: str | None = None

    def push(self, tokens: Sequence[int]) -> TextDelta:
        """Push the next tokens of the answer; tokens after a stop string are ignored."""
        began = perf_counter()
        shown: list[str] = []
        texts: list[str] = []
        offset = self._length
        for token in tokens:
            if self._stopped is not None:
                break
            text = self._detokenizer.push(token)
            texts.append(text)
            self._length += len(text)
            if self._unwatched:
                self._unwatched -= 1
                shown.append(text)
            elif text:
                shown.append(self._watch(text))
        self._streams.seconds += perf_counter() - began
        return TextDelta("".join(shown), self._stopped, tuple(texts), offset)

    def finish(self) -> TextDelta:
        """End the answer: returns all text held back, unless a stop string has ended it before."""
        if self._stopped is not None:
            return TextDelta("", self._stopped, (), self._length)
        text = self._watch(self._detokenizer.finish())
        if self._stopped is None:
            text += self._stops.flush()
        return TextDelta(text, self._stopped, (), self._length)

    def _watch(self, text: str) -> str:
        seen = self._stops.push(text)
        if isinstance(seen, Match):
            self._stopped = seen.stop
            return seen.text
        return seen
