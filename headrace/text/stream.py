"""The text of one output while its tokens arrive: only whole characters, and no part of a stop string.

It combines a detokenizer (tokens to text) and a matcher of stop strings (text that may be sent). The server creates one
`TextStream` per output, pushes the emitted tokens, and cancels the request when `stopped` is set.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from headrace.text.parsing.calls import Schemas
from headrace.text.parsing.formats import ReasoningFormat, ToolFormat
from headrace.text.parsing.machine import Machine
from headrace.text.tokenizer import Tokenizer

# The streaming detokenizer: tokens to text, one token at a time.
#
# A token's text depends on its neighbours: characters are split across tokens (byte-level BPE, byte fallback), and the
# first token loses its leading space (metaspace). There are two implementations with one interface. `PieceDetokenizer`
# keeps at most one incomplete character and covers the decoders of all supported model families. `WindowDetokenizer`
# decodes a window of the last few tokens, for any other decoder. Stop strings are handled elsewhere.
#
# The library's own `DecodeStream` replaces neither: after bytes that form no character it raises for byte fallback, and
# returns nothing more of a byte-level text until a whole character comes. It also takes six times as long per token.

REPLACEMENT = "\ufffd"
# A character has at most four bytes: if four tokens still end in a replacement character, they are invalid.
CHARACTER_BYTES = 4
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_PIECEWISE = re.compile("ByteLevel|Metaspace|(Replace )*(ByteFallback )?Fuse( Strip)?")


class Detokenizer(Protocol):
    """Turns the tokens of one text into its text; the returned pieces joined are the whole text."""

    def push(self, token: int) -> str:
        """The text that ``token`` completes; empty while a character is incomplete."""

    def finish(self) -> str:
        """The remaining text: a replacement character for a character that was never completed."""


class Pieces(dict[int, str | bytes]):
    """The text that each token of a vocabulary adds, computed on first use.

    A piece is ``str`` if it is text by itself, and ``bytes`` if it is part of a character. There is one instance per
    tokenizer, shared by all its texts and threads (a race only computes the same piece twice).

    Args:
        tokenizer: the tokenizer with the vocabulary and decoder.
        steps: the decoder's steps, as `decoder_steps` returns them.
    """

    def __init__(self, tokenizer: Tokenizer, steps: Sequence[dict[str, Any]]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._replacements = [
            (step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"
        ]
        self.first_unmarked: str | None = None
        self.strip = 0
        kinds = [step["type"] for step in steps]
        self._byte_level = kinds == ["ByteLevel"]
        self._byte_fallback = "ByteFallback" in kinds
        for step in steps:
            if step["type"] == "Strip":
                self.strip = step["start"]
            elif step["type"] == "Metaspace":
                self._replacements.append((step["replacement"], " "))
                if step["prepend_scheme"] != "never":
                    self.first_unmarked = step["replacement"]
        # The library writes U+FFFD once per byte in a broken run of byte-fallback tokens, else per character.
        self.errors = PER_BYTE if self._byte_fallback else "replace"

    def __missing__(self, token: int) -> str | bytes:
        piece = self[token] = self._compute(token)
        return piece

    def knows(self, token: int) -> bool:
        """Whether the vocabulary has ``token``; a model may sample padding ids beyond it, which have no text."""
        return self._tokenizer.token(token) is not None

    def first(self, token: int) -> str | bytes:
        """The piece of ``token`` at the beginning of a text, where a metaspace decoder drops its space marks."""
        text = self._tokenizer.token(token)
        if self.first_unmarked is None or text is None:
            return self[token]
        return text.replace(self.first_unmarked, "")

    def _compute(self, token: int) -> str | bytes:
        text = self._tokenizer.token(token)
        if text is None:
            return ""
        if self._byte_level:
            return _text_if_whole(_byte_level_bytes(text))
        for old, new in self._replacements:
            text = text.replace(old, new)
        if self._byte_fallback and (byte := _BYTE_TOKEN.fullmatch(text)):
            return _text_if_whole(bytes.fromhex(byte[1]))
        return text


class PieceDetokenizer:
    """Joins pieces and holds back an incomplete character: constant work per token.

    It differs from decoding all tokens at once in one case. If byte-fallback tokens contain valid characters and then
    an invalid one in the same run, the library replaces all of them, and this class keeps the valid ones.
    """

    __slots__ = ("_begun", "_bytes", "_pieces", "_skip", "_strip", "_unfinished")

    def __init__(self, pieces: Pieces, skip: frozenset[int]) -> None:
        self._pieces = pieces
        self._skip = skip
        self._bytes = codecs.getincrementaldecoder("utf-8")(pieces.errors)
        self._unfinished = False
        self._strip = pieces.strip
        self._begun = False

    def push(self, token: int) -> str:
        if token in self._skip:
            return ""
        if self._begun:
            piece = self._pieces[token]
        else:
            piece = self._pieces.first(token)
            self._begun = self._pieces.knows(token)
        if not piece:
            return ""
        if isinstance(piece, str):
            text = self._break_off() + piece if self._unfinished else piece
        else:
            text = self._bytes.decode(piece)
            self._unfinished = bool(self._bytes.getstate()[0])
        return self._stripped(text) if self._strip else text

    def finish(self) -> str:
        return self._stripped(self._break_off())

    def _break_off(self) -> str:
        text = self._bytes.decode(b"", final=True)
        self._bytes.reset()
        self._unfinished = False
        return text

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
            else:
                text = text[1:]
                self._strip -= 1
        return text


class WindowDetokenizer:
    """Decodes the last few tokens with and without the new one; the difference is what it added."""

    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._window: list[int] = []
        self._read = 0  # number of tokens of the window already returned
        self._returned = ""  # their text

    def push(self, token: int) -> str:
        if token in self._skip or self._tokenizer.token(token) is None:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        waiting = len(self._window) - self._read
        if text.endswith(REPLACEMENT):
            if waiting < CHARACTER_BYTES:
                return ""
            if (before := self._before_character(text)) is not None:
                return before
        added = text[len(self._returned) :]
        del self._window[: self._read]
        self._read = len(self._window)
        self._returned = self._decode(self._window)
        return added

    def finish(self) -> str:
        return self._decode(self._window)[len(self._returned) :]

    def _before_character(self, text: str) -> str | None:
        """The text before the last tokens, which may begin a character that is not complete and are kept.

        They may where the tokens before them and they themselves have the same text apart as together. None: nowhere.
        """
        size = len(self._window)
        for cut in range(size - 1, max(self._read, size - CHARACTER_BYTES), -1):
            before = self._decode(self._window[:cut])
            if before + self._decode(self._window[cut:]) == text:
                added = before[len(self._returned) :]
                del self._window[:cut]
                self._read, self._returned = 0, ""
                return added
        return None

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


def decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The steps of a tokenizer's decoder as in its file; empty if it has no decoder."""
    decoder = tokenizer.backend.decoder
    if decoder is None:
        return []
    spec: dict[str, Any] = json.loads(decoder.__getstate__())
    steps: list[dict[str, Any]] = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    return steps


def has_pieces(steps: Sequence[dict[str, Any]]) -> bool:
    """Whether a decoder with these steps works token by token, as `Pieces` implements it."""
    if not _PIECEWISE.fullmatch(" ".join(step["type"] for step in steps)):
        return False
    return all(
        "String" in step["pattern"]
        if step["type"] == "Replace"
        else step["type"] != "Strip" or (step["content"] == " " and step["stop"] == 0)
        for step in steps
    )


def _text_if_whole(raw: bytes) -> str | bytes:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's representation of bytes: printable Latin-1 as itself, the other bytes from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()


def _byte_level_bytes(text: str) -> bytes:
    try:
        return bytes([_BYTE_OF[char] for char in text])
    except KeyError:  # an added token in plain text
        return text.encode("utf-8")


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


PER_BYTE = "headrace.replace_each_byte"
codecs.register_error(PER_BYTE, _replace_each_byte)


# Finds stop strings in a growing text, and holds back text that may become one.
#
# It handles only characters; `text.stream` handles tokens and their texts.


class Match(NamedTuple):
    """A stop string was found: the text before it (including it, if requested), and which one it was."""

    text: str
    stop: str


class StopMatcher:
    """Searches a text for stop strings, however the text is split into parts.

    The stop string that is complete first wins; of two that end at the same character, the longer one. So the result
    does not depend on how the model split its text into tokens.

    Args:
        stops: non-empty strings.
        include: keep the stop string in the text.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def __bool__(self) -> bool:
        """Whether there is anything to search for."""
        return bool(self._stops)

    @property
    def held(self) -> int:
        """Number of characters held back."""
        return len(self._held)

    def push(self, text: str) -> str | Match:
        """The text that may be shown now, or the match that ends it."""
        if not self._stops:
            return text
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, start, stop = min(found)
            self._held = ""
            return Match(text[: end if self._include else start], stop)
        cut = self._held_from(text)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """Return the text held back, when it can no longer become a stop string."""
        text, self._held = self._held, ""
        return text

    def _held_from(self, text: str) -> int:
        """Start of the longest suffix that is the beginning of a stop string."""
        first = len(text)
        for stop in self._stops:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= at < first and not stop.startswith(text[at:]):
                at = text.find(stop[0], at + 1)
            if 0 <= at < first:
                first = at
        return first


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

    __slots__ = ("_detokenizer", "_length", "_stopped", "_stops", "_streams", "_unwatched", "plain")

    def __init__(
        self, streams: TextStreams, detokenizer: Detokenizer, stops: StopMatcher, min_tokens: int = 0
    ) -> None:
        self._streams = streams
        self._detokenizer = detokenizer
        self._stops = stops
        self.plain = not stops
        self._unwatched = min_tokens
        self._length = 0
        self._stopped: str | None = None

    def push(self, tokens: Sequence[int]) -> TextDelta:
        """Push the next tokens of the answer; tokens after a stop string are ignored."""
        began = perf_counter()
        if len(tokens) == 1 and self._stopped is None and not self._unwatched:  # the common case
            offset, text = self._length, self._detokenizer.push(tokens[0])
            self._length += len(text)
            seen = text if self.plain or not text else self._watch(text)
            self._streams.seconds += perf_counter() - began
            # Once per token, in half the time of calling its class.
            return tuple.__new__(TextDelta, (seen, self._stopped, (text,), offset))
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

    def push_plain(self, tokens: Sequence[int]) -> str:
        """The text that the next tokens add to an answer that is ``plain``."""
        began, push = perf_counter(), self._detokenizer.push
        text = push(tokens[0]) if len(tokens) == 1 else "".join([push(token) for token in tokens])
        self._length += len(text)
        self._streams.seconds += perf_counter() - began
        return text

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


# The text of an output that ends with its first tool call, for requests that allow only one.
#
# It replaces a `text.stream.TextStream`, so that live outputs, shared computations and cached responses end at the same
# token.


class FirstCallStream:
    """Ends the text of ``stream`` at the token that completes a call; `TextDelta.stopped` is then `AFTER_CALL`."""

    def __init__(
        self,
        stream: TextStream,
        tools: ToolFormat,
        reasoning: ReasoningFormat | None,
        opened: bool,
        schemas: Schemas,
        limited: bool = False,
    ) -> None:
        self._stream = stream
        self._machine = Machine(tools, reasoning, opened=opened, schemas=schemas, limited=limited)

    def push(self, tokens: Sequence[int]) -> TextDelta:
        """See `TextStream.push`."""
        shown: list[str] = []
        texts: list[str] = []
        offset, stopped = 0, None
        for at, token in enumerate(tokens):
            if self._machine.called:
                stopped = AFTER_CALL
                break
            delta = self._stream.push((token,))
            offset = offset if at else delta.offset
            shown.append(delta.text)
            texts += delta.texts
            stopped = delta.stopped
            if stopped is not None:
                break
            self._machine.push(delta.text)
        if stopped is None and self._machine.called:
            stopped = AFTER_CALL
        return TextDelta("".join(shown), stopped, tuple(texts), offset)

    def finish(self) -> TextDelta:
        """See `TextStream.finish`."""
        return self._stream.finish()
