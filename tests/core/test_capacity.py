import pytest

from headrace.core.capacity import NO_WINDOWS, WindowGroups, blocks_needed, most_blocks, why_unservable
from tests.doubles.scenes import request


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_blocks_needed(tokens, blocks):
    assert blocks_needed(tokens, 16) == blocks


@pytest.mark.parametrize(
    ("position", "first"), [(0, 0), (9, 0), (10, 0), (12, 0), (13, 1), (16, 1), (17, 2), (40, 7)]
)
def test_the_first_block_that_a_window_reaches(position, first):
    assert WindowGroups(1, 10, 8).first(position, 4) == first


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(1, 1 + 3), (16, 4 + 12), (20, 5 + 15), (24, 6 + 18), (400, 100 + 18)]
)
def test_a_sequence_has_blocks_of_window_groups_for_a_window_and_a_chunk(tokens, blocks):
    assert most_blocks(tokens, 4, WindowGroups(3, 10, 8)) == blocks
    assert most_blocks(tokens, 4) == most_blocks(tokens, 4, NO_WINDOWS) == blocks_needed(tokens, 4)


@pytest.mark.parametrize("chunk", [1, 3, 8])
@pytest.mark.parametrize("window", [1, 2, 7, 9])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_no_row_needs_more_blocks_of_window_groups(chunk, window, size):
    groups = WindowGroups(1, window, chunk)
    most = groups.most_blocks(10_000, size)
    for start in range(60):
        for end in range(start + 1, start + chunk + 1):  # the position after the row has a block, too
            assert end // size + 1 - groups.first(start, size) <= most


def test_a_request_that_needs_all_blocks_of_window_groups_is_served():
    windows, asked = WindowGroups(2, 8, 4), request("a", tokens=30, max_tokens=10)
    needed = most_blocks(40, 4, windows)
    assert why_unservable(asked, 64, needed, 4, windows) == ""
    assert f"may need {needed} KV blocks, but there are only {needed - 1}" in why_unservable(
        asked, 64, needed - 1, 4, windows
    )
    assert why_unservable(asked, 64, needed - 1, 4) == ""
