"""An embedder whose vectors follow from words, and parts of a semantic cache around it."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence

import numpy as np

from headrace.response_cache.rules.judge import Curve, Judge, Rule, Score
from headrace.response_cache.semantic.partitions import Partitions
from headrace.response_cache.semantic.rows import Row
from headrace.response_cache.semantic.search_thread import SearchThread

DIMENSIONS = 64
COSINE = Score(0.0, (("cosine", Curve((0.0, 1.0), (0.0, 1.0))),))


def embed_one(text: str) -> bytes:
    """The first word counts most: questions that begin alike are near."""
    vector = np.zeros(DIMENSIONS, np.float32)
    for place, word in enumerate(text.split()):
        direction = np.random.default_rng(zlib.crc32(word.encode())).normal(size=DIMENSIONS)
        vector += (1.0 if place == 0 else 0.3) * (direction / np.linalg.norm(direction)).astype(np.float32)
    return (vector / np.linalg.norm(vector)).astype(np.float32).tobytes()


class Words:
    """A `core.ports.Embedder`. ``hold`` stops it until it is set; ``error`` is raised; over 20 words are too many."""

    name = "words@1"
    dimensions = DIMENSIONS

    def __init__(self) -> None:
        self.hold = threading.Event()
        self.hold.set()
        self.error: Exception | None = None
        self.texts: list[str] = []

    def embed(self, texts: Sequence[str]) -> list[bytes | None]:
        self.hold.wait(10)
        if self.error is not None:
            raise self.error
        self.texts += texts
        return [None if len(text.split()) > 20 else embed_one(text) for text in texts]


def librarian(
    embedder=None, row_store=None, max_bytes=1 << 20, threshold=0.8, judge=None, **more
) -> SearchThread:
    """One whose judge goes by the cosine alone."""
    rows = Partitions(DIMENSIONS, max_bytes)
    return SearchThread(
        embedder or Words(), judge or Judge([Rule(0, COSINE, threshold)]), rows, row_store, **more
    )


def row(
    question: str, partition=b"p", key: bytes | None = None, answer=1, said="yes", tags=(), expires=1e12
) -> Row:
    """A row whose key is its question, unless told otherwise."""
    own = question.encode() if key is None else key
    return Row(own, partition, question, embed_one(question), answer, said, embed_one(said), tags, expires)
