"""Quality of a quantized model: compared with the plain model on a text.

Perplexity measures the loss in predicting the text. Divergence measures the distance of the two distributions,
whatever token comes next. Agreement measures how often greedy decoding would choose the same token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from headrace.compute.model.reading import Reader

MOST_PERPLEXITY = 0.05
"""Bound: the perplexity may grow by this share."""
MOST_DIVERGENCE = 0.1
"""Bound: the mean divergence, in nats a token."""


class Quality(NamedTuple):
    """The quality of one model relative to another, over the same tokens.

    ``divergence`` is the mean of KL(plain ‖ other) in nats. ``agreement`` is the share of tokens at which both have
    the same likeliest token.
    """

    plain_perplexity: float
    perplexity: float
    divergence: float
    agreement: float
    tokens: int

    @property
    def growth(self) -> float:
        """Growth of the perplexity, as a share of the plain model's."""
        return self.perplexity / self.plain_perplexity - 1

    def faults(self) -> list[str]:
        """The bounds that it exceeds."""
        found = []
        if not self.growth <= MOST_PERPLEXITY:
            found.append(f"perplexity grew by {self.growth:.1%}, more than {MOST_PERPLEXITY:.0%}")
        if not self.divergence <= MOST_DIVERGENCE:
            found.append(f"divergence is {self.divergence:.3f} nats a token, more than {MOST_DIVERGENCE}")
        return found


def compare(plain: Reader, other: Reader, windows: Iterable[Sequence[int]]) -> Quality:
    """Let both models read every window separately, and compare them."""
    loss = other_loss = divergence = 0.0
    agreed = count = 0
    for tokens in windows:
        truth = torch.tensor(tokens[1:])
        a, b = (each.logits(tokens, len(tokens)).cpu()[:-1].log_softmax(-1) for each in (plain, other))
        loss += float(F.nll_loss(a, truth, reduction="sum"))
        other_loss += float(F.nll_loss(b, truth, reduction="sum"))
        divergence += float(F.kl_div(b, a, log_target=True, reduction="sum"))
        agreed += int((a.argmax(-1) == b.argmax(-1)).sum())
        count += len(truth)
    return Quality(
        math.exp(loss / count), math.exp(other_loss / count), divergence / count, agreed / count, count
    )
