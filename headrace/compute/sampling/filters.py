"""The filters of the distribution: min-p, top-k, top-p. Each sets what it removes to minus infinity, in place.

Every filter is a threshold on the logit, so tokens of equal logit are kept or removed together: what a row
keeps depends neither on the order in which a sort leaves ties nor on its neighbours. None sorts a whole
vocabulary where a few candidates settle the matter.
"""

from __future__ import annotations

import torch

NUCLEUS = (64, 1024)
"""How many candidates top-p looks at first; only a flatter distribution than that is sorted whole."""


def min_p(logits: torch.Tensor, share: torch.Tensor) -> None:
    """Remove tokens less likely than ``share`` (float32 [S]) of the likeliest token's probability."""
    threshold = logits.amax(-1, keepdim=True) + share.log().unsqueeze(1)
    logits.masked_fill_(logits < threshold, -torch.inf)


def top_k(logits: torch.Tensor, k: torch.Tensor, largest: int) -> None:
    """Keep the ``k`` (int64 [S], each in 1..largest) likeliest tokens and all that tie with the last."""
    candidates = logits.topk(largest, dim=-1).values
    logits.masked_fill_(logits < candidates.gather(1, k.unsqueeze(1) - 1), -torch.inf)


def top_p(logits: torch.Tensor, mass: torch.Tensor) -> None:
    """Keep the fewest likeliest tokens whose probabilities sum to at least ``mass`` (float64 [S]), with ties.

    Nucleus sampling, Holtzman et al., arXiv:1904.09751.
    """
    total = logits.logsumexp(-1, keepdim=True)
    vocab = logits.shape[1]
    # Whether the candidates suffice must be read on the host: free on a CPU; a GPU sorts faster than it asks.
    stages = [count for count in NUCLEUS if count < vocab] if logits.is_cpu else []
    threshold, held = _nucleus(logits, total, mass, [*stages, vocab][0])
    for count in [*stages, vocab][1:]:
        short = (held < mass).nonzero().squeeze(1)
        if not len(short):
            break
        threshold[short], held[short] = _nucleus(logits[short], total[short], mass[short], count)
    logits.masked_fill_(logits < threshold, -torch.inf)


def _nucleus(
    logits: torch.Tensor, total: torch.Tensor, mass: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest logit [S, 1] of the nucleus among the ``count`` likeliest, and the mass [S] that they hold."""
    candidates = logits.topk(count, dim=-1).values
    probabilities = (candidates - total).exp().double()
    summed = probabilities.cumsum(-1)
    kept = (summed - probabilities < mass.unsqueeze(1)).sum(-1, keepdim=True).clamp_(min=1)
    return candidates.gather(1, kept - 1), summed[:, -1]
