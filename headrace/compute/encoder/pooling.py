"""Pooling: one vector of an input from the hidden states of its tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.compute.encoder.packed import Packed


class Dense(NamedTuple):
    """A linear layer after pooling, and its activation."""

    linear: Callable[[Tensor], Tensor]
    activation: Callable[[Tensor], Tensor]


def pool(mode: str, hidden: Tensor, rows: Packed) -> Tensor:
    """Vectors [rows, hidden] of the first token (``cls``), the last one (``last``), or the mean of all tokens."""
    if mode == "mean":
        means = [
            hidden[group.start : group.end].view(group.rows, group.length, -1).mean(1)
            for group in rows.groups
        ]
        return means[0] if len(means) == 1 else torch.cat(means)
    at = torch.tensor(rows.starts, device=hidden.device)
    if mode == "last":
        at += torch.tensor(rows.lengths, device=hidden.device) - 1
    return hidden[at]
