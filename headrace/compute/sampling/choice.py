"""Sampling one token per row: temperature, min-p, top-k, top-p, then the draw. The definition of `Kernels.choose`, in
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from headrace.compute.batch import Ints
from headrace.compute.transfer import upload

# Filters of the distribution: min-p, top-k, top-p. Each sets the logits that it removes to minus infinity, in place.
#
# Every filter is a threshold on the logit, so tokens of equal logit are kept or removed together. The result does not
# depend on how a sort orders ties, nor on neighbouring rows. No filter sorts the whole vocabulary if a few candidates
# are enough.

NUCLEUS = 256
"""Number of candidates that top-p examines first; only flatter distributions are sorted completely."""

SORTED_AT_ONCE = 1 << 21
"""Number of logits; with temporary values about 30 bytes each."""


def min_p(logits: torch.Tensor, share: torch.Tensor) -> None:
    """Remove tokens less likely than ``share`` (float32 [S]) of the likeliest token's probability."""
    threshold = logits.amax(-1, keepdim=True) + share.log().unsqueeze(1)
    logits.masked_fill_(logits < threshold, -torch.inf)


def top_k(logits: torch.Tensor, k: torch.Tensor, mass: torch.Tensor, largest: int) -> None:
    """Keep the ``k`` (int64 [S], each in 1..largest) likeliest tokens, and of these the nucleus of ``mass``.

    Both are in one function because top-p after top-k examines no further tokens. ``mass`` float64 [S] is as in
    `top_p`, or infinite for no further filter.
    """
    places = torch.arange(largest, device=logits.device)
    for part in _parts(logits, largest):
        candidates = _largest(logits[part], largest)
        within = places < k[part].unsqueeze(1)
        candidates = candidates.masked_fill_(~within, -torch.inf)
        threshold, _ = _nucleus(candidates, candidates.logsumexp(-1, keepdim=True), mass[part], within)
        logits[part].masked_fill_(logits[part] < threshold, -torch.inf)


def top_p(logits: torch.Tensor, mass: torch.Tensor) -> None:
    """Keep the fewest likeliest tokens whose probabilities sum to at least ``mass`` (float64 [S]).

    Nucleus sampling, Holtzman et al., arXiv:1904.09751.
    """
    total = logits.logsumexp(-1, keepdim=True)
    vocab = logits.shape[1]
    if not logits.is_cpu:
        threshold = _sorted_whole(logits, total, mass)
    else:  # the host must read whether few candidates suffice: free on a CPU, slower than sorting on a GPU
        threshold, held = _nucleus(_largest(logits, min(NUCLEUS, vocab)), total, mass)
        if len(short := (held < mass).nonzero().squeeze(1)):
            threshold[short] = _sorted_whole(logits[short], total[short], mass[short])
    logits.masked_fill_(logits < threshold, -torch.inf)


def _sorted_whole(logits: torch.Tensor, total: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """The smallest logit [S, 1] of each row's nucleus among all of its tokens."""
    vocab = logits.shape[1]
    return torch.cat(
        [
            _nucleus(_largest(logits[part], vocab), total[part], mass[part])[0]
            for part in _parts(logits, vocab)
        ]
    )


def _parts(logits: torch.Tensor, candidates: int) -> Iterator[slice]:
    """The rows of ``logits`` in parts, so that ``candidates`` of each row can be sorted at once."""
    rows = max(1, SORTED_AT_ONCE // candidates)
    return (slice(begin, begin + rows) for begin in range(0, len(logits), rows))


def _nucleus(
    candidates: torch.Tensor, total: torch.Tensor, mass: torch.Tensor, within: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest logit [S, 1] of the nucleus, and the mass [S] of all ``candidates`` [S, K], largest first.

    ``total`` [S, 1] is the logarithm of the whole mass; candidates not ``within`` are ignored.
    """
    probabilities = (candidates - total).exp().double()
    summed = probabilities.cumsum(-1)
    kept = summed - probabilities < mass.unsqueeze(1)
    if within is not None:
        kept &= within
    last = kept.sum(-1, keepdim=True).clamp_(min=1) - 1
    return candidates.gather(1, last), summed[:, -1]


def _largest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` largest logits of each row, descending.

    Only values are needed. On a CPU numpy's vectorized sorts are several times faster than `torch.topk`, which also
    moves the indices.
    """
    if not logits.is_cpu:
        return logits.topk(count, dim=-1).values
    values, rest = logits.numpy(), logits.shape[1] - count
    if rest:
        values = np.partition(values, rest, axis=-1)[:, rest:]
    return torch.from_numpy(np.sort(values, axis=-1)[:, ::-1].copy())


# Selecting one token per row: the likeliest, or a draw from weights by a uniform number.
#
# Both work on two levels: over pieces of the vocabulary, by a vectorized reduction, then inside the one piece that
# holds the answer. A plain argmax on a CPU takes several times as long. A running sum over 150,000 weights in single
# precision would misplace rare tokens, and in double precision would cost more than the rest of sampling.

PIECE = 128
"""Vocabulary entries per piece; it divides the vocabularies of most models, which then need no padding."""

NOT_FINITE = -1
NOTHING_ALLOWED = -2
"""Used instead of a token if a row's largest logit is NaN or infinite, or if all are minus infinity."""

NO_DRAFT = -3
"""Placeholder for a missing draft, or one that cannot be correct; different from all tokens and faults."""

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


Reals = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


class TokenChoice(NamedTuple):
    """How a token is sampled from each of S rows; arrays [S] on the host.

    ``temperature`` > 0 divides the logits. First, tokens less likely than ``min_p`` times the likeliest are removed
    (0: none). Then only the ``top_k`` likeliest stay (outside 1..V-1: all). Of those, only the fewest that hold
    ``top_p`` of their mass stay (1 and more: all). ``uniform`` in [0, 1) selects the token.
    """

    temperature: Reals
    min_p: Reals
    top_k: Ints
    top_p: Reals
    uniform: Reals


def choose(logits: torch.Tensor, choice: TokenChoice) -> torch.Tensor:
    """A token int64 [S] sampled from each row of ``logits`` [S, V], or a fault as in `or_fault`."""
    wide = logits.float()
    (uniform,) = upload(logits.device, choice.uniform)
    return or_fault(draw(probabilities(wide, choice), uniform), wide.amax(-1))


def probabilities(logits: torch.Tensor, choice: TokenChoice) -> torch.Tensor:
    """The probabilities with which the tokens of ``logits`` float32 [S, V] are sampled; NaN in rows that give a
    fault.
    """
    device, vocab = logits.device, logits.shape[1]
    (temperature,) = upload(device, choice.temperature)
    scaled = (logits - logits.amax(-1, keepdim=True)).div_(temperature.to(logits.dtype).unsqueeze(1))
    if (rows := np.flatnonzero(choice.min_p > 0)).size:
        (share,) = upload(device, choice.min_p[rows])
        _on_rows(scaled, rows, lambda part: min_p(part, share.to(part.dtype)))
    masses = np.where(choice.top_p < 1, choice.top_p, np.inf)
    counted = (choice.top_k > 0) & (choice.top_k < vocab)
    if (rows := np.flatnonzero(counted)).size:
        counts = choice.top_k[rows]
        k, mass = upload(device, counts, masses[rows])
        largest = int(counts.max())
        _on_rows(scaled, rows, lambda part: top_k(part, k, mass, largest))
    if (rows := np.flatnonzero(~counted & (choice.top_p < 1))).size:
        (mass,) = upload(device, masses[rows])
        _on_rows(scaled, rows, lambda part: top_p(part, mass))
    return scaled.softmax(-1)


def _on_rows(logits: torch.Tensor, rows: Ints, change: Callable[[torch.Tensor], None]) -> None:
    """Apply ``change`` in place to some rows of ``logits``."""
    if rows.size == len(logits):
        change(logits)
        return
    (at,) = upload(logits.device, rows)
    part = logits.index_select(0, at)
    change(part)
    logits.index_copy_(0, at, part)


def counting_of(drawn: Any, drafts: Any, first: Any, offsets: Any) -> Any:
    """`step_sampling.Lines.counting` of tensors on any device; ``first`` is the first line of each line's row."""
    wrong = (drawn != drafts) * 1
    before = wrong.cumsum(0) - wrong
    return (before == before[first]) & ((drawn >= 0) | (offsets == 0))
