"""Fill-in-the-middle: the prompt that asks a code model for the text between a prefix and a suffix.

Such models have three marker tokens. Their names and positions depend on the model family, which is recognized by the
vocabulary of the tokenizer.
"""

# ruff: noqa: RUF001 (markers are spelled as in the models)

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headrace.text.tokenizer import Tokenizer


class Family(NamedTuple):
    """Markers before the prefix, before the suffix and before the output, and further tokens that end an output.

    ``glued``: a suffix is tokenized without the space that the tokenizer adds before a text's first word.
    """

    name: str
    prefix: str
    suffix: str
    middle: str
    ends: tuple[str, ...] = ()
    glued: bool = False


FAMILIES = (
    Family(
        "Qwen2.5-Coder",
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>"),
    ),
    Family("StarCoder", "<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<fim_pad>", "<file_sep>")),
    Family("SantaCoder", "<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<fim-pad>",)),
    Family("DeepSeek-Coder", "<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    Family("CodeLlama", "▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",), glued=True),
)

GLUE = "☺"
"""A character that the tokenizer never merges with the next one."""


class Infill:
    """Makes the prompts of one tokenizer. ``ends`` are tokens that end the output in addition to the model's own."""

    def __init__(self, tokenizer: Tokenizer, family: Family) -> None:
        self.ends = tuple(token for text in family.ends if (token := _id(tokenizer, text)) is not None)
        self._tokenizer = tokenizer
        self._glued = family.glued
        self._prefix = _known(tokenizer, family.prefix)
        self._suffix = _known(tokenizer, family.suffix)
        self._middle = _known(tokenizer, family.middle)

    def prompt(self, prefix: str | Sequence[int], suffix: str, add_special_tokens: bool) -> list[int]:
        """The tokens that ask for the text between ``prefix``, a text or its tokens, and ``suffix``."""
        tokenizer = self._tokenizer
        if isinstance(prefix, str):
            plain = tokenizer.encode(prefix, add_special_tokens=False)
            whole = tokenizer.encode(prefix, add_special_tokens)
            around = len(whole) - len(plain)
            opening = whole[:around] if whole[around:] == plain else []
        else:
            plain, opening = list(prefix), []
        return [*opening, self._prefix, *plain, self._suffix, *self._after(suffix), self._middle]

    def _after(self, suffix: str) -> list[int]:
        if self._glued:
            mark = self._tokenizer.encode(GLUE, add_special_tokens=False)
            joined = self._tokenizer.encode(GLUE + suffix, add_special_tokens=False)
            if joined[: len(mark)] == mark:
                return joined[len(mark) :]
        return self._tokenizer.encode(suffix, add_special_tokens=False)


def find_infill(tokenizer: Tokenizer) -> Infill | None:
    """The `Infill` of the family that ``tokenizer`` belongs to; None if it has no markers."""
    for family in FAMILIES:
        markers = (family.prefix, family.suffix, family.middle)
        if all(_id(tokenizer, text) is not None for text in markers):
            return Infill(tokenizer, family)
    return None


def _id(tokenizer: Tokenizer, text: str) -> int | None:
    return tokenizer.backend.token_to_id(text)


def _known(tokenizer: Tokenizer, text: str) -> int:
    token = _id(tokenizer, text)
    assert token is not None, text
    return token
