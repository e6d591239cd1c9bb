"""Scores pairs of short texts with a cross-encoder, as the second judge of the semantic cache.

It implements `response_cache.rules.judge.PairScorer`. A pair is scored in both orders; the lower score counts:
a cross-encoder is not symmetric, and whether two questions have one answer is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from headrace.compute.device import alone
from headrace.compute.encoder.models import CrossEncoder, read_pair_classifier, run
from headrace.compute.encoder.sentences import digest
from headrace.compute.model.hub import resolve_folder

_BATCH = 32
"""Pairs scored in one forward pass, each in both orders."""


class PairJudge:
    """A cross-encoder; its ``name`` ends in a digest of weights, tokenizer and configuration.

    Pairs that are longer than the model's context have no score, because a score of their beginnings would be
    misleading.
    """

    def __init__(self, model: CrossEncoder, name: str) -> None:
        self.name = name
        self.boundary = model.boundary
        self._model = model

    @classmethod
    def from_name(cls, name: str) -> PairJudge:
        """The cross-encoder in a local folder, or one on the hub.

        Raises:
            ModelError: there is no cross-encoder of that name, or it needs something that is not supported.
        """
        folder = resolve_folder(name)
        return cls(
            read_pair_classifier(folder.name, folder, torch.device("cpu")),
            f"{folder.name}@{digest(folder, 'config.json')}",
        )

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[float | None]:
        """The score of each pair; None if it is too long."""
        both = self._model.tokenizer.pairs([pair for a, b in pairs for pair in ((a, b), (b, a))])
        fitting = [
            index
            for index in range(len(pairs))
            if max(len(row.tokens) for row in both[2 * index : 2 * index + 2]) <= self._model.max_tokens
        ]
        scores: list[float | None] = [None] * len(pairs)
        for start in range(0, len(fitting), _BATCH):
            batch = fitting[start : start + _BATCH]
            rows = [row for index in batch for row in both[2 * index : 2 * index + 2]]
            # Without a thread team of its own, as in `sentences`.
            found = alone(partial(run, self._model.run(rows)))[:, 0].tolist()
            for place, index in enumerate(batch):
                scores[index] = min(found[2 * place : 2 * place + 2])
        return scores
