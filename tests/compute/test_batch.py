"""How many first blocks rows have in common."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.compute.batch import shared_blocks, worth_sharing


@pytest.mark.parametrize(
    ("tables", "most", "expected"),
    [
        ([[4, 5, 6]], 2, 0),
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


@pytest.mark.parametrize(
    ("keys", "tokens", "expected"),
    [(320, 2, 0), (32_000, 2, 32_000), (1000, 64, 960), (255, 1000, 0), (256, 33, 256), (256, 32, 0)],
)
def test_many_shared_keys_are_read_once_in_whole_tiles(keys: int, tokens: int, expected: int) -> None:
    assert worth_sharing(keys, tokens) == expected
