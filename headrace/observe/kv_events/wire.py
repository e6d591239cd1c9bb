"""Changes of the prefix cache as bytes, in the format of vLLM's KV events.

```
 frame 1   topic
 frame 2   sequence number, 8 bytes, big-endian
 frame 3   msgpack [time, [event, …], data-parallel rank]
              ["BlockStored", [hash, …], parent hash or nil, [token, …], block size, nil, "GPU"]
              ["BlockRemoved", [hash, …], "GPU"]
              ["AllBlocksCleared"]
```
Source: vLLM, `vllm/distributed/kv_events.py`; the ``nil`` is the number of a LoRA adapter. A hash is the last 8 bytes
of the block's key as an unsigned number, as vLLM sends it by default.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from headrace.observe.kv_events.changes import Change, Cleared, Removed, Stored

MEDIUM = "GPU"
"""The medium that vLLM reports for device memory; readers compare it, so it is the same on every device."""

RANK = 0

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
"""The sequence number that ends a replay."""

_encode = msgspec.msgpack.Encoder().encode


def sequence_frame(number: int) -> bytes:
    """A sequence number as a frame."""
    return number.to_bytes(8, "big")


def batch_frame(changes: Sequence[Change], block_size: int, now: float) -> bytes:
    """A batch of changes as a frame; ``now`` is the wall clock in seconds."""
    return _encode([now, list(_events(changes, block_size)), RANK])


def block_hash(key: bytes) -> int:
    """The published hash of a block."""
    return int.from_bytes(key[-8:], "big")


def _events(changes: Iterable[Change], block_size: int) -> Iterable[list[Any]]:
    """The events of changes; consecutive stored blocks share an event, as do consecutive removed blocks."""
    event: list[Any] = []
    last: bytes | None = None  # the key of the block that `event` ends with, if it may grow
    for change in changes:
        if isinstance(change, Stored):
            if last is not None and change.parent == last:
                event[1].append(block_hash(change.key))
                event[3].extend(change.tokens)
            else:
                if event:
                    yield event
                parent = None if change.parent is None else block_hash(change.parent)
                event = [
                    *("BlockStored", [block_hash(change.key)], parent),
                    *(list(change.tokens), block_size, None, MEDIUM),
                ]
            last = change.key
            continue
        last = None
        if isinstance(change, Removed) and event and event[0] == "BlockRemoved":
            event[1].append(block_hash(change.key))
            continue
        if event:
            yield event
        event = (
            ["AllBlocksCleared"]
            if isinstance(change, Cleared)
            else ["BlockRemoved", [block_hash(change.key)], MEDIUM]
        )
    if event:
        yield event
