"""Tokens of one text or of a pair of texts for an encoder, cut at a limit without losing the special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from headrace.compute.model.spec import ModelError
from headrace.core.embedding import TokenRow

_AT_ONCE = 32
"""Texts in one call of the library, which uses all cores for a call and none between two."""


class TextTokenizer:
    """The tokenizer of a folder; one instance serves all threads.

    ``lower_case``: texts are converted to lower case first.
    """

    def __init__(self, backend: tokenizers.Tokenizer, lower_case: bool = False) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._lower = lower_case

    @classmethod
    def from_folder(cls, folder: Path, lower_case: bool = False) -> TextTokenizer:
        """Read ``tokenizer.json``.

        Raises:
            ModelError: it is missing or damaged.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{folder} contains no tokenizer.json")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)), lower_case)
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"{path} cannot be read: {error}") from error

    def texts(self, texts: Sequence[str], limit: int | None = None) -> list[TokenRow]:
        """The tokens of each text with its special tokens; at most ``limit``, cut at the text's end.

        Raises:
            ValueError: a text is not valid Unicode, or the limit leaves no room for the special tokens.
        """
        if limit is None:
            return [TokenRow(tuple(each.ids)) for each in self._encode(texts, special=True)]
        room = self._room(limit, pair=False)
        rows = []
        for each in self._encode(texts, special=False):
            each.truncate(room)
            rows.append(TokenRow(tuple(self._backend.post_process(each).ids)))
        return rows

    def pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        limit: int | None = None,
        second_limit: int | None = None,
    ) -> list[TokenRow]:
        """The tokens of each pair: at most ``limit``, cut from the longer text; of the second ``second_limit``.

        Raises:
            ValueError: a text is not valid Unicode, or the limit leaves no room for the special tokens.
        """
        room = None if limit is None else self._room(limit, pair=True)
        distinct = list(dict.fromkeys(text for pair in pairs for text in pair))
        encoded = dict(zip(distinct, self._encode(distinct, special=False), strict=True))
        rows = []
        for one, other in pairs:
            first, second = encoded[one], encoded[other]
            lengths = len(first.ids), min(len(second.ids), second_limit or len(second.ids))
            if room is not None:
                lengths = _shares(*lengths, room)
            rows.append(self._joined(first, second, *lengths))
        return rows

    def _joined(
        self, first: tokenizers.Encoding, second: tokenizers.Encoding, one: int, other: int
    ) -> TokenRow:
        parts = (tokenizers.Encoding.merge([first]), tokenizers.Encoding.merge([second]))
        parts[0].truncate(one)
        parts[1].truncate(other)
        joined = self._backend.post_process(*parts)
        kinds = joined.type_ids
        return TokenRow(tuple(joined.ids), kinds.index(1) if 1 in kinds else 0)

    def _room(self, limit: int, *, pair: bool) -> int:
        special = self._backend.num_special_tokens_to_add(pair)
        if limit <= special:
            raise ValueError(f"a limit of {limit} tokens leaves no room beside {special} special tokens")
        return limit - special

    def _encode(self, texts: Sequence[str], *, special: bool) -> list[tokenizers.Encoding]:
        lowered = [text.lower() for text in texts] if self._lower else texts
        encoded: list[tokenizers.Encoding] = []
        for begin in range(0, len(lowered), _AT_ONCE):
            part = list(lowered[begin : begin + _AT_ONCE])
            try:
                encoded += self._backend.encode_batch(part, add_special_tokens=special)
            except (TypeError, UnicodeError) as error:
                raise ValueError("text must be valid Unicode (it contains a lone surrogate)") from error
        return encoded


def _shares(one: int, other: int, room: int) -> tuple[int, int]:
    """The lengths of two texts that fit into ``room`` together, cut from the longer one."""
    if one + other <= room:
        return one, other
    half = room // 2
    if one <= half:
        return one, room - one
    if other <= half:
        return room - other, other
    return half, room - half
