"""The block table of a request as it is counted for the page."""

from __future__ import annotations

from types import SimpleNamespace

from headrace.core.memory.block_pool import BlockPool
from headrace.core.memory.eviction import LeastRecentlyUsed
from headrace.observe.steps import record
from headrace.observe.steps.record import memory_of, memory_shown, table_of


def sequence_of(table: list[int], keys: list[bytes]) -> SimpleNamespace:
    return SimpleNamespace(request=SimpleNamespace(id="r"), table=table, keys=keys)


def test_shared_copied_and_stored_blocks_of_a_table_are_counted(monkeypatch):
    lower = SimpleNamespace(host={b"a", b"b", b"far"}, disk={b"b"})
    pool = BlockPool(16, 4, LeastRecentlyUsed(), lambda event: None)
    table = pool.allocate(4)
    pool.share(table[:2])
    pool.lower = lower
    found = table_of(pool, sequence_of(table, [b"a", b"b", b"c", b"d", b"far"]), {table[2], 15})
    assert (found.total, found.shared, found.copied, found.host, found.disk) == (4, 2, 1, 2, 1)
    assert list(found.blocks) == table
    monkeypatch.setattr(record, "MOST_TABLE", 3)
    short = table_of(pool, sequence_of(table, []), ())
    assert (short.total, len(short.blocks)) == (4, 3)
    pool.lower = None
    shown = memory_shown(memory_of(pool, {table[2]}, table=short))
    assert shown["table"]["request_id"] == "r"
    assert [shown["cells"][block] for block in table] == ["s", "s", "k", "u"]
