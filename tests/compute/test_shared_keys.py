"""Which rows of a step are groups that begin with the same blocks."""

from __future__ import annotations

import random

import numpy as np
import pytest

from headrace.compute import shared_keys
from headrace.compute.shared_keys import MOST_GROUPS, RowGroups, find_groups, shared_blocks

SIZE = 16
REST = MOST_GROUPS - 1


@pytest.mark.parametrize(
    ("tables", "most", "expected"),
    [
        ([[4, 5, 6]], 2, 2),
        ([[4, 5, 6], [4, 5, 7]], 2, 2),
        ([[4, 5, 6], [4, 5, 6]], 2, 2),
        ([[4, 5, 6], [4, 1, 6], [4, 5, 6]], 3, 1),
        ([[4, 5], [3, 5]], 1, 0),
        ([[4, 5], [4, 5]], 0, 0),
    ],
)
def test_only_the_blocks_before_the_first_difference_are_shared(
    tables: list[list[int]], most: int, expected: int
) -> None:
    assert shared_blocks(np.array(tables, dtype=np.int32), most) == expected


def groups_of(*rows: tuple[str, int], tokens: int = 1) -> RowGroups | None:
    """The groups of rows, each with the names of its blocks and how often each of them is repeated as other blocks."""
    width = max(len(names) * repeated for names, repeated in rows)
    tables = np.zeros((len(rows), width), dtype=np.int32)
    for row, (names, repeated) in enumerate(rows):
        blocks = [ord(name) * 1000 + place for name in names for place in range(repeated)]
        tables[row, : len(blocks)] = blocks
    most = np.array([len(names) * repeated for names, repeated in rows])
    return find_groups(tables, most, np.full(len(rows), tokens), SIZE)


@pytest.mark.parametrize(
    ("keys", "rows", "worth"),
    [(320, 2, 0), (32_000, 2, 32_000), (1008, 64, 960), (240, 1000, 0), (256, 33, 256), (256, 32, 0)],
)
def test_many_shared_keys_are_read_once_in_whole_tiles(keys: int, rows: int, worth: int) -> None:
    found = groups_of(*[("a", keys // SIZE)] * rows)
    assert (0 if found is None else int(found.keys[0])) == worth


def test_rows_are_divided_where_that_spares_more() -> None:
    found = groups_of(("ab", 64), ("ab", 64), ("ac", 64), ("ac", 64), ("d", 640), ("ab", 64), ("ac", 64))
    assert found is not None  # 1,024 keys of six rows spare 5,120; 2,048 of three and three 8,192
    assert found.keys.tolist() == [2048, 2048, 2048, 2048, 0, 2048, 2048]
    assert found.group.tolist() == [0, 0, 1, 1, REST, 0, 1]
    found = groups_of(*[("ab", 64)] * 2, *[("ac", 64)] * 2, *[("a", 64)] * 8)
    assert found is not None
    assert found.keys.tolist() == [1024] * 12


def test_further_groups_than_there_is_room_for_share_nothing() -> None:
    found = groups_of(*[(name, 600 + 4 * place) for place, name in enumerate("abcdefghij") for _ in range(2)])
    assert found is not None
    assert [int((found.group == REST).sum()), len(set(found.group.tolist()))] == [
        2 * (10 - REST),
        MOST_GROUPS,
    ]
    assert found.group[-1] == 0  # the longest


def test_rows_of_nested_prefixes_end_the_search() -> None:
    """Each row goes one block further than the one before: the worst that a tree of rows can be."""
    tables = np.tril(np.arange(1, 301)[:, None] * 0 + np.arange(1, 301)) + np.triu(
        np.full((300, 300), 7_000), 1
    )
    found = find_groups(tables.astype(np.int32), np.arange(1, 301), np.ones(300, dtype=np.int64), SIZE)
    assert found is None or (found.keys <= 300 * SIZE).all()


@pytest.mark.parametrize("seed", range(200))
def test_every_shared_key_is_that_of_the_row_in_whose_table_it_is_found(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LEAST_SHARED", "LEAST_SPARED", "SHARED_TILE"):
        monkeypatch.setattr(shared_keys, name, SIZE)
    draw = random.Random(seed)
    fresh = iter(range(1, 10_000))
    tables: list[list[int]] = []
    for _ in range(draw.randint(2, 20)):
        start = draw.choice(tables)[: draw.randint(0, 6)] if tables and draw.random() < 0.7 else []
        tables.append(start + [next(fresh) for _ in range(draw.randint(0, 4))])
    width = max(map(len, tables)) + 1
    most = np.array([draw.randint(0, len(table)) for table in tables])
    lengths = np.array([draw.randint(1, 3) for _ in tables])
    filled = np.array([table + [0] * (width - len(table)) for table in tables], dtype=np.int32)
    found = find_groups(filled, most, lengths, SIZE)
    if found is None:
        return
    owners = np.repeat(np.arange(len(tables)), lengths)
    order, flat = found.arrange(owners, owners)
    assert sorted(order.tolist()) == list(range(len(owners)))
    place = 0
    for begin, count, keys, row in flat.reshape(-1, 4).tolist():
        members = owners[order[begin : begin + count]]
        assert begin == place
        place += count
        for member in members.tolist():
            assert found.keys[member] == keys <= most[member] * SIZE
            assert tables[member][: keys // SIZE] == tables[row][: keys // SIZE]
    assert place == len(owners)
