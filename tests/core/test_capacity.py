import pytest

from headrace.core.capacity import blocks_needed


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_blocks_needed(tokens, blocks):
    assert blocks_needed(tokens, 16) == blocks
