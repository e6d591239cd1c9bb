from __future__ import annotations

from headrace.core.memory.fence import Fence


def test_a_table_is_free_when_its_last_step_has_been_committed():
    fence = Fence()
    fence.hold([1, 2], until_step=4)
    fence.hold([3], until_step=5)
    assert fence.lift(3) == []
    assert fence.num_blocks == 3
    assert fence.lift(4) == [[1, 2]]
    assert fence.num_blocks == 1
    assert fence.lift(9) == [[3]]
    assert (fence.num_blocks, fence.tables) == (0, [])
