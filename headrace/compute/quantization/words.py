"""Small integers packed in 32-bit words, as in all formats on disk: the lowest bits hold the first."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def halves_of(words: Tensor) -> Tensor:
    """Words int32 [rows, n] of 4-bit values plus 8 as uint8 [rows, 4n]: what `QuantizedWeight` holds."""
    return words.reshape(-1).view(torch.uint8).view(len(words), -1)


def integers_of(words: Tensor, bits: Literal[4, 8]) -> Tensor:
    """The values of words int32 [rows, n], which are stored plus half their range: int8 [rows, n * 32 / bits]."""
    halves = halves_of(words)
    if bits == 8:
        return (halves ^ 128).view(torch.int8)
    return torch.stack((halves & 15, halves >> 4), -1).flatten(1).to(torch.int8) - 8


def words_of(integers: Tensor, bits: Literal[4, 8]) -> Tensor:
    """The inverse of `integers_of`; an incomplete last word of a row is padded with zero bits."""
    limit, per_word = 1 << (bits - 1), 32 // bits
    stored = (integers.to(torch.int16) + limit).to(torch.uint8)
    padding = -stored.shape[1] % per_word
    stored = torch.nn.functional.pad(stored, (0, padding))
    if bits == 4:
        stored = stored[:, ::2] | (stored[:, 1::2] << 4)
    return stored.reshape(-1).view(torch.int32).view(len(stored), -1)
