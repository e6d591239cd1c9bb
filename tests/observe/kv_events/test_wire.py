"""Batches as readers of vLLM's format decode them: tagged arrays whose fields may only be appended."""

from __future__ import annotations

import msgspec

from headrace.observe.kv_events.changes import Cleared, Removed, Stored
from headrace.observe.kv_events.wire import batch_frame, block_hash


class Event(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    pass


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


A, B, C = (bytes([number]) * 32 for number in (1, 2, 255))


def decoded(*changes: Stored | Removed | Cleared) -> list[Event]:
    batch = msgspec.msgpack.decode(batch_frame(changes, 2, 12.5), type=Batch)
    assert (batch.ts, batch.data_parallel_rank) == (12.5, 0)
    return list(batch.events)


def test_blocks_of_one_chain_are_one_event() -> None:
    assert decoded(Stored(None, A, (1, 2)), Stored(A, B, (3, 4)), Stored(A, C, (5, 6))) == [
        BlockStored([block_hash(A), block_hash(B)], None, [1, 2, 3, 4], 2, None, "GPU"),
        BlockStored([block_hash(C)], block_hash(A), [5, 6], 2, None, "GPU"),
    ]


def test_removals_in_a_row_are_one_event_and_the_order_is_kept() -> None:
    assert decoded(Removed(A), Removed(B), Stored(None, A, (1, 2)), Removed(C), Cleared(), Removed(A)) == [
        BlockRemoved([block_hash(A), block_hash(B)], "GPU"),
        BlockStored([block_hash(A)], None, [1, 2], 2, None, "GPU"),
        BlockRemoved([block_hash(C)], "GPU"),
        AllBlocksCleared(),
        BlockRemoved([block_hash(A)], "GPU"),
    ]


def test_a_chain_does_not_go_on_behind_another_event() -> None:
    assert len(decoded(Stored(None, A, (1, 2)), Removed(C), Stored(A, B, (3, 4)))) == 3


def test_a_hash_is_an_unsigned_number_of_64_bits() -> None:
    assert block_hash(C) == (1 << 64) - 1
