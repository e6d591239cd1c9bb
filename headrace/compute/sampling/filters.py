"""Filters of the distribution: min-p, top-k, top-p. Each sets the logits that it removes to minus infinity, in place.

Every filter is a threshold on the logit, so tokens of equal logit are kept or removed together. The result does not
depend on how a sort orders ties, nor on neighbouring rows. No filter sorts the whole vocabulary if a few candidates
are enough.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

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
