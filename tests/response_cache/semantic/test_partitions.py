from __future__ import annotations

import random

import numpy as np
import pytest

from headrace.response_cache.semantic.partitions import _SCANNED, Index, Partitions, cosine, vector_of
from tests.response_cache.semantic.scenes import DIMENSIONS, embed_one, row


def near(rows: Partitions, partition: bytes, question: str) -> list[str]:
    return [each.text for each in rows.nearest(partition, vector_of(embed_one(question)))]


def test_partitions_never_meet():
    rows = Partitions(DIMENSIONS, 1 << 20)
    draw = random.Random(3)
    for number in range(300):
        partition = bytes([draw.randrange(6)])
        rows.keep(
            row(
                f"shoes number {number}",
                partition,
                key=bytes([number % 256, number // 256]),
                said=partition.hex(),
            )
        )
        for each in range(6):
            found = rows.nearest(bytes([each]), vector_of(embed_one("shoes")))
            kept = [rows.row(one.row) for one in found]
            assert all(one is not None and one.partition == bytes([each]) for one in kept)
    assert near(rows, b"unknown", "shoes") == []


def test_one_row_per_entry():
    rows = Partitions(DIMENSIONS, 1 << 20)
    rows.keep(row("red shoes", key=b"k"))
    rows.keep(row("blue shoes", key=b"k"))
    assert near(rows, b"p", "red shoes") == ["blue shoes"]
    assert rows.forget(b"k")
    assert not rows.forget(b"k")
    assert near(rows, b"p", "red shoes") == []
    assert rows.facts() == (0, 0, 0)


def test_what_was_not_served_for_longest_goes_first():
    room = row("shoes 0").nbytes * 3
    rows = Partitions(DIMENSIONS, room)
    for number in range(3):
        assert rows.keep(row(f"shoes {number}")) == []
    [first, *_] = rows.nearest(b"p", vector_of(embed_one("shoes 0")))
    rows.served(first.row)
    assert rows.keep(row("shoes 3")) == [b"shoes 1"]
    assert set(near(rows, b"p", "shoes")) == {"shoes 0", "shoes 2", "shoes 3"}
    assert rows.facts() == (3, room, 1)


def test_tags():
    rows = Partitions(DIMENSIONS, 1 << 20)
    rows.keep(row("red shoes", tags=("*", "a")))
    rows.keep(row("blue shoes", tags=("*", "b")))
    assert rows.forget_tag("a") == [b"red shoes"]
    assert rows.forget_tag("a") == []
    assert near(rows, b"p", "shoes") == ["blue shoes"]


def test_answers_that_say_the_same_share_a_class():
    rows = Partitions(DIMENSIONS, 1 << 20)
    rows.keep(row("refund please", answer=1, said="within 30 days"))
    rows.keep(row("refund form", answer=2, said="it is on our site"))
    close = rows.nearest(b"p", vector_of(embed_one("refund now")))

    def class_of(said: str) -> int:
        return rows.class_of(b"new", close, said, embed_one(said))

    assert class_of("Within 30 days.") == 1
    assert class_of("it is on our site") == 2
    assert class_of("never") not in (1, 2)
    assert class_of("never") == class_of("nothing alike")  # named after the entry
    assert cosine(b"", embed_one("never")) is None


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
    for number, vector in enumerate(vectors):
        index.add(100 + number, vector)
    found = index.nearest(vectors[7], 5)
    cosines = vectors @ vectors[7]
    assert [number for number, _ in found] == [100 + place for place in np.argsort(-cosines)[:5]]
    assert found[0] == (107, pytest.approx(1.0, abs=1e-6))
    assert len(index.nearest(vectors[7], 80)) == 50


def test_many_vectors_are_compared_by_signs_and_ranked_exactly():
    vectors = clustered(3 * _SCANNED)
    index = Index(DIMENSIONS)
    for number, vector in enumerate(vectors):
        index.add(number, vector)
    questions = vectors[::97] + 0.1 * drawn(len(vectors[::97]), seed=3)
    questions /= np.linalg.norm(questions, axis=1, keepdims=True)
    right = 0
    for question in questions:
        cosines = vectors @ question
        [(number, cosine)] = index.nearest(question, 32)[:1]
        assert cosine == pytest.approx(cosines[number], abs=1e-5)
        right += number == int(cosines.argmax())
    assert right >= 0.9 * len(questions)


def test_what_is_removed_is_never_found_and_the_others_are():
    vectors = clustered(2 * _SCANNED)
    index = Index(DIMENSIONS)
    for number, vector in enumerate(vectors):
        index.add(number, vector)
    gone = set(range(0, len(vectors), 3)) | {len(vectors) - 1}
    for number in gone:
        index.remove(number)
    assert len(index) == len(vectors) - len(gone)
    for number in range(0, len(vectors), 31):
        found = [near for near, _ in index.nearest(vectors[number], 8)]
        assert gone.isdisjoint(found)
        assert (number in found) == (number not in gone)


def test_a_row_may_be_given_another_vector():
    vectors = drawn(3)
    index = Index(DIMENSIONS)
    index.add(1, vectors[0])
    index.add(1, vectors[1])
    assert len(index) == 1
    assert index.nearest(vectors[1], 1) == [(1, pytest.approx(1.0, abs=1e-6))]
