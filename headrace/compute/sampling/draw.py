"""Drawing one token per row from probabilities and one uniform number, by inverse distribution function.

Tokens are summed in the order of their ids, so no order of sorting can change what is drawn. The sum goes in
two levels: over pieces of the vocabulary, then inside the one piece that holds the answer, in double
precision where it matters; a running sum over a vocabulary of 150,000 in single precision would misplace rare
tokens, and in double precision would cost more than the rest of sampling.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

PIECE = 128
"""Vocabulary entries per piece; it divides most models' vocabularies, which then need no padding."""

_BELOW_ONE = 1.0 - 2.0**-52


def draw(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Tokens int64 [S] from ``probabilities`` float32 [S, V] and ``uniform`` float64 [S] in [0, 1).

    Rows need not sum to one. A token of probability zero is never drawn. A row of NaN gives some token
    inside the vocabulary; the caller knows such rows already.
    """
    vocab = probabilities.shape[1]
    pieces = F.pad(probabilities, (0, -vocab % PIECE)).view(len(probabilities), -1, PIECE)
    edges = pieces.sum(-1).double().cumsum(-1)
    target = (uniform * edges[:, -1]).unsqueeze(1)
    piece = torch.searchsorted(edges, target, right=True).clamp_(max=pieces.shape[1] - 1)
    inside = pieces.gather(1, piece.unsqueeze(2).expand(-1, 1, PIECE)).squeeze(1).double().cumsum(-1)
    before = F.pad(edges, (1, 0)).gather(1, piece)
    # The piece's single-precision sum and its running sum differ in the last digits: stay inside the piece.
    rest = torch.minimum(target - before, inside[:, -1:] * _BELOW_ONE)
    offset = torch.searchsorted(inside, rest, right=True).clamp_(max=PIECE - 1)
    return (piece * PIECE + offset).squeeze(1).clamp_(max=vocab - 1)
