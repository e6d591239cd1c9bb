"""The streaming detokenizer: tokens to text, one token at a time.

A token's text depends on its neighbours: characters are split across tokens (byte-level BPE, byte fallback), and the
first token loses its leading space (metaspace). There are two implementations with one interface. `PieceDetokenizer`
keeps at most one incomplete character and covers the decoders of all supported model families. `WindowDetokenizer`
decodes a window of the last few tokens, for any other decoder. Stop strings are handled elsewhere.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from typing import Any, Protocol

from headrace.text.tokenizer import Tokenizer

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


class Pieces:
    """The text that each token of a vocabulary adds, computed on first use.

    A piece is ``str`` if it is text by itself, and ``bytes`` if it is part of a character. There is one instance per
    tokenizer, shared by all its texts and threads (a race only computes the same piece twice).

    Args:
        tokenizer: the tokenizer with the vocabulary and decoder.
        steps: the decoder's steps, as `decoder_steps` returns them.
    """

    def __init__(self, tokenizer: Tokenizer, steps: Sequence[dict[str, Any]]) -> None:
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
        self._known: dict[int, str | bytes] = {}

    def __getitem__(self, token: int) -> str | bytes:
        piece = self._known.get(token)
        if piece is None:
            piece = self._known[token] = self._compute(token)
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
        text = self._decode()
        waiting = len(self._window) - self._read
        if text.endswith(REPLACEMENT) and waiting < CHARACTER_BYTES:
            return ""
        added = text[len(self._returned) :]
        del self._window[: self._read]
        self._read = len(self._window)
        self._returned = self._decode()
        return added

    def finish(self) -> str:
        return self._decode()[len(self._returned) :]

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)


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
