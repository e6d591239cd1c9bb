"""What fewer bits cost: a model against itself, on a text.

Perplexity tells what it comes to in predicting the text, the divergence how far the two are apart whatever the text
says next, agreement how often greedy decoding would go another way.
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
    """Of one model beside another, over the same tokens.

    ``divergence`` is the mean of KL(plain ‖ other) in nats, ``agreement`` the share of tokens at which both find the
    same one likeliest.
    """

    plain_perplexity: float
    perplexity: float
    divergence: float
    agreement: float
    tokens: int

    @property
    def growth(self) -> float:
        """Of the perplexity, as a share of the plain model's."""
        return self.perplexity / self.plain_perplexity - 1

    def faults(self) -> list[str]:
        """Which bounds it is past."""
        found = []
        if not self.growth <= MOST_PERPLEXITY:
            found.append(f"perplexity grew by {self.growth:.1%}, more than {MOST_PERPLEXITY:.0%}")
        if not self.divergence <= MOST_DIVERGENCE:
            found.append(f"divergence is {self.divergence:.3f} nats a token, more than {MOST_DIVERGENCE}")
        return found


def compare(plain: Reader, other: Reader, windows: Iterable[Sequence[int]]) -> Quality:
    """Both read every window, each by itself."""
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
