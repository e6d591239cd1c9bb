"""The snapshot: the index of a block file, written at shutdown and read at the next start.

```
 {"headrace_blocks": 1, "fingerprint": …, "blocks": n, …}\\n     the same engine must have written it
 slot u32, checksum u32, parent 32 bytes, key 32 bytes, tokens i64 × block size     n times
 checksum u32 of all that
```
Everything in it is verified. Another model, size or dtype, a damaged file, or a key that does not match its tokens
result in a warning and an empty cache. The content of a slot is verified when it is read.
"""

from __future__ import annotations

import json
import struct
import zlib
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.core.block_keys import chained_key
from headrace.core.memory.lower_tier import Saved
from headrace.files import PRIVATE_FILE, replacing

MAGIC = "headrace_blocks"
VERSION = 1
_ENTRY = struct.Struct("<II32s32s")
_CHECKSUM = struct.Struct("<I")


class NotUsable(Exception):
    """A snapshot that does not belong to this engine, or is damaged."""


def write_snapshot(
    path: Path, identity: Mapping[str, Any], saved: Sequence[Saved], checksums: Mapping[int, int]
) -> int:
    """Write the content of the slots, completely or not at all; returns the number of blocks. Raises OSError."""
    entries = [
        _ENTRY.pack(each.block, checksum, each.parent, each.key) + array("q", each.tokens).tobytes()
        for each in saved
        if (checksum := checksums.get(each.block)) is not None
    ]
    header = json.dumps({MAGIC: VERSION, **identity, "blocks": len(entries)}).encode() + b"\n"
    content = header + b"".join(entries)
    with replacing(path, PRIVATE_FILE) as file:
        file.write(content + _CHECKSUM.pack(zlib.crc32(content)))
    return len(entries)


def read_snapshot(
    path: Path, identity: Mapping[str, Any], block_size: int, num_slots: int
) -> list[tuple[Saved, int]]:
    """The blocks that a file lists, each with its checksum, in the order in which they were written.

    Raises:
        NotUsable: it belongs to another engine, or is damaged.
        OSError: it cannot be read.
    """
    content = path.read_bytes()
    body, checksum = content[: -_CHECKSUM.size], content[-_CHECKSUM.size :]
    if len(checksum) < _CHECKSUM.size or zlib.crc32(body) != _CHECKSUM.unpack(checksum)[0]:
        raise NotUsable("it is damaged")
    line, _, entries = body.partition(b"\n")
    try:
        header = dict(json.loads(line))
    except (ValueError, TypeError):
        raise NotUsable("it is not a snapshot") from None
    for name, value in {MAGIC: VERSION, **identity}.items():
        if header.get(name) != value:
            raise NotUsable(f"its {name} is {header.get(name)!r}, not {value!r}")
    size = _ENTRY.size + 8 * block_size
    if len(entries) != header.get("blocks", -1) * size:
        raise NotUsable("its length is wrong")
    return [_entry(entries[at : at + size], num_slots) for at in range(0, len(entries), size)]


def _entry(entry: bytes, num_slots: int) -> tuple[Saved, int]:
    slot, checksum, parent, key = _ENTRY.unpack_from(entry)
    tokens = array("q", entry[_ENTRY.size :])
    if slot >= num_slots:
        raise NotUsable(f"it lists slot {slot} of {num_slots}")
    if chained_key(parent, tokens) != key:
        raise NotUsable("a key does not match its tokens")
    return Saved(slot, parent, key, tuple(tokens)), checksum
