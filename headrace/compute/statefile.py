"""The file of checkpoints of recurrent states, written at shutdown and read at the next start.

```
 {"headrace_states": 1, "fingerprint": …, "state_bytes": n, "states": n, …}\n     the same engine must have written it
 key 32 bytes, blocks u32, checksum u32, state     n times, least valuable first
```
The header is verified before anything is read, and each state by its checksum. A key stands for all tokens before it,
so a state of a known key is the right one. A damaged state is skipped.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headrace.compute.blockfile import NotUsable
from headrace.files import PRIVATE_FILE, replacing

MAGIC = "headrace_states"
VERSION = 1
_ENTRY = struct.Struct("<32sII")
_LONGEST_HEADER = 1 << 16


class SavedState(NamedTuple):
    """The content of a checkpoint: the key of the block that ends there, its number of blocks, and the state."""

    key: bytes
    blocks: int
    state: bytes


def write_states(path: Path, identity: Mapping[str, Any], states: Iterable[SavedState]) -> int:
    """Write states, completely or not at all; returns their number. Raises OSError."""
    count = 0
    with replacing(path, PRIVATE_FILE) as file:
        file.write(json.dumps({MAGIC: VERSION, **identity}).encode() + b"\n")
        for key, blocks, state in states:
            file.write(_ENTRY.pack(key, blocks, _checksum(key, blocks, state)) + state)
            count += 1
    return count


def read_states(path: Path, identity: Mapping[str, Any], state_bytes: int) -> Iterator[SavedState]:
    """The states of a file that are not damaged, in the order in which they were written.

    Raises:
        NotUsable: it belongs to another engine.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        try:
            header = dict(json.loads(file.readline(_LONGEST_HEADER)))
        except (ValueError, TypeError):
            raise NotUsable("it is not a file of states") from None
        for name, value in {MAGIC: VERSION, **identity}.items():
            if header.get(name) != value:
                raise NotUsable(f"its {name} is {header.get(name)!r:.80}, not {value!r:.80}")
        while len(head := file.read(_ENTRY.size)) == _ENTRY.size:
            key, blocks, checksum = _ENTRY.unpack(head)
            state = file.read(state_bytes)
            if len(state) == state_bytes and _checksum(key, blocks, state) == checksum:
                yield SavedState(key, blocks, state)


def _checksum(key: bytes, blocks: int, state: bytes) -> int:
    """Over key and place, too: a state under another key would be a wrong one."""
    return zlib.crc32(state, zlib.crc32(key + blocks.to_bytes(4, "little")))
