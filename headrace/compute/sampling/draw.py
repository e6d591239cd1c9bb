"""Selecting one token per row: the likeliest, or a draw from weights by a uniform number.

Both work on two levels: over pieces of the vocabulary, by a vectorized reduction, then inside the one piece that
holds the answer. A plain argmax on a CPU takes several times as long. A running sum over 150,000 weights in single
precision would misplace rare tokens, and in double precision would cost more than the rest of sampling.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

PIECE = 128
"""Vocabulary entries per piece; it divides the vocabularies of most models, which then need no padding."""

NOT_FINITE = -1
NOTHING_ALLOWED = -2
"""Used instead of a token if a row's largest logit is NaN or infinite, or if all are minus infinity."""

_BELOW_ONE = 1.0 - 2.0**-52


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """The first token int64 [S] of the largest logit in ``logits`` float32 [S, V], or a fault as in `or_fault`."""
    pieces = _pieces(logits, -torch.inf)
    piece = pieces.amax(-1).argmax(-1, keepdim=True)
    inside = _piece(pieces, piece)
    offset = inside.argmax(-1, keepdim=True)
    return or_fault((piece * PIECE + offset).squeeze(1), inside.gather(1, offset).squeeze(1))


def or_fault(tokens: torch.Tensor, peak: torch.Tensor) -> torch.Tensor:
    """``tokens`` [S], replaced by `NOT_FINITE` or `NOTHING_ALLOWED` according to the row's largest logit (``peak``
    [S]).
    """
    tokens = torch.where(peak == -torch.inf, NOTHING_ALLOWED, tokens)
    return torch.where(peak.isnan() | (peak == torch.inf), NOT_FINITE, tokens)


def draw(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Tokens int64 [S] by the inverse distribution function of ``weights`` float32 [S, V] at ``uniform`` [S].

    Weights need not sum to one; ``uniform`` is float64 in [0, 1). Tokens are summed in the order of their ids, so
    sorting cannot change the result. A token of weight zero is never selected. A row of NaN gives some token inside
    the vocabulary; the calling code detects such rows.
    """
    vocab = weights.shape[1]
    pieces = _pieces(weights, 0.0)
    edges = pieces.sum(-1).double().cumsum(-1)
    target = (uniform * edges[:, -1]).unsqueeze(1)
    piece = torch.searchsorted(edges, target, right=True).clamp_(max=pieces.shape[1] - 1)
    inside = _piece(pieces, piece).double().cumsum(-1)
    before = F.pad(edges, (1, 0)).gather(1, piece)
    # The piece's single-precision sum and its running sum differ in the last digits: stay inside the piece.
    rest = torch.minimum(target - before, inside[:, -1:] * _BELOW_ONE)
    offset = torch.searchsorted(inside, rest, right=True).clamp_(max=PIECE - 1)
    return (piece * PIECE + offset).squeeze(1).clamp_(max=vocab - 1)


def _pieces(rows: torch.Tensor, filler: float) -> torch.Tensor:
    """Rows [S, V] as [S, N, PIECE], with ``filler`` after the last entry.

    torch would copy even if nothing is missing: for 64 rows of 150,000 entries that took ten times as long as finding
    the largest.
    """
    missing = -rows.shape[1] % PIECE
    padded = F.pad(rows, (0, missing), value=filler) if missing else rows
    return padded.reshape(len(rows), -1, PIECE)


def _piece(pieces: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
    """The piece [S, PIECE] of each row [S, N, PIECE] that ``piece`` [S, 1] names."""
    return pieces.gather(1, piece.unsqueeze(2).expand(-1, 1, PIECE)).squeeze(1)
