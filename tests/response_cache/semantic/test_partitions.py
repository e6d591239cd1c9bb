from __future__ import annotations

import random

from headrace.response_cache.semantic.partitions import Partitions, cosine, vector_of
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
