from __future__ import annotations

import numpy as np
import pytest

from headrace.response_cache.semantic.index import _SCANNED, Index

DIMENSIONS = 64


def drawn(count: int, seed: int = 0) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(count, DIMENSIONS)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def clustered(count: int) -> np.ndarray:
    centres = np.repeat(drawn(count // 40 + 1, seed=9), 40, axis=0)[:count]
    vectors = centres + 0.5 * drawn(count)
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def test_an_empty_index_has_nothing_near():
    assert Index(DIMENSIONS).nearest(drawn(1)[0], 5) == []


def test_few_vectors_are_compared_exactly():
    vectors = drawn(50)
    index = Index(DIMENSIONS)
    for row, vector in enumerate(vectors):
        index.add(100 + row, vector)
    found = index.nearest(vectors[7], 5)
    cosines = vectors @ vectors[7]
    assert [row for row, _ in found] == [100 + place for place in np.argsort(-cosines)[:5]]
    assert found[0] == (107, pytest.approx(1.0, abs=1e-6))
    assert len(index.nearest(vectors[7], 80)) == 50


def test_many_vectors_are_compared_by_signs_and_ranked_exactly():
    vectors = clustered(3 * _SCANNED)
    index = Index(DIMENSIONS)
    for row, vector in enumerate(vectors):
        index.add(row, vector)
    questions = vectors[::97] + 0.1 * drawn(len(vectors[::97]), seed=3)
    questions /= np.linalg.norm(questions, axis=1, keepdims=True)
    right = 0
    for question in questions:
        cosines = vectors @ question
        [(row, cosine)] = index.nearest(question, 32)[:1]
        assert cosine == pytest.approx(cosines[row], abs=1e-5)
        right += row == int(cosines.argmax())
    assert right >= 0.9 * len(questions)


def test_what_is_removed_is_never_found_and_the_others_are():
    vectors = clustered(2 * _SCANNED)
    index = Index(DIMENSIONS)
    for row, vector in enumerate(vectors):
        index.add(row, vector)
    gone = set(range(0, len(vectors), 3)) | {len(vectors) - 1}
    for row in gone:
        index.remove(row)
    assert len(index) == len(vectors) - len(gone)
    for row in range(0, len(vectors), 31):
        found = [near for near, _ in index.nearest(vectors[row], 8)]
        assert gone.isdisjoint(found)
        assert (row in found) == (row not in gone)


def test_a_row_may_be_given_another_vector():
    vectors = drawn(3)
    index = Index(DIMENSIONS)
    index.add(1, vectors[0])
    index.add(1, vectors[1])
    assert len(index) == 1
    assert index.nearest(vectors[1], 1) == [(1, pytest.approx(1.0, abs=1e-6))]
