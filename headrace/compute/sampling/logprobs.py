"""Log-probabilities of chosen tokens: the log-softmax of the model's own logits.

Bias, penalties, temperature and filters are not included, as in the defaults of OpenAI and vLLM: the numbers describe
the model, not the sampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrace.compute.batch import Ints
from headrace.compute.transfer import Download, upload
from headrace.core.plan import TokenLogprob


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities in transfer to the host; `read` converts them after the download has arrived."""

    tokens: int
    logprobs: int
    ranks: int
    tops: tuple[tuple[Ints, int, int], ...]

    def read(self, host: list[torch.Tensor]) -> list[TokenLogprob]:
        """One value per scored line, in order; ``host`` is the result of `Download.wait`."""
        alternatives: dict[int, tuple[tuple[int, float], ...]] = {}
        for lines, values, ids in self.tops:
            for line, top_ids, top_values in zip(
                lines.tolist(), host[ids].tolist(), host[values].tolist(), strict=True
            ):
                alternatives[line] = tuple(zip(top_ids, top_values, strict=True))
        columns = (host[self.tokens].tolist(), host[self.logprobs].tolist(), host[self.ranks].tolist())
        return [
            TokenLogprob(token, logprob, rank, alternatives.get(line, ()))
            for line, (token, logprob, rank) in enumerate(zip(*columns, strict=True))
        ]


def score(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    counts: np.ndarray[Any, np.dtype[np.int64]],
    download: Download,
) -> Scores:
    """Score ``tokens`` int64 [S] under ``logits`` float32 [S, V], with ``counts[i]`` alternatives for line ``i``.

    The rank is 1 plus the number of tokens strictly likelier. Lines are grouped by their count, so that the
    alternatives of one request do not depend on how many another asked for.
    """
    total = logits.logsumexp(-1)
    chosen = logits.gather(1, tokens.unsqueeze(1))
    tops: list[tuple[Ints, int, int]] = []
    for count in np.unique(counts[counts > 0]).tolist():
        lines = np.flatnonzero(counts == count)
        part, part_total = logits, total
        if lines.size != len(logits):
            (at,) = upload(logits.device, lines)
            part, part_total = logits.index_select(0, at), total.index_select(0, at)
        best = part.topk(min(count, logits.shape[1]), dim=-1)
        values = download.add(best.values - part_total.unsqueeze(1))
        tops.append((lines, values, download.add(best.indices)))
    return Scores(
        tokens=download.add(tokens),
        logprobs=download.add(chosen.squeeze(1) - total),
        ranks=download.add((logits > chosen).sum(-1) + 1),
        tops=tuple(tops),
    )
