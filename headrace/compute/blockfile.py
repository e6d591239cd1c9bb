"""The block file: KV blocks on disk in one file of equal slots, and the checksums of what was written.

`mover` verifies the checksums when it reads; `write_snapshot` stores them for the next process. Only one process may
use the file at a time. `core.memory.tiers` allocates its slots.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import time
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headrace.core.block_keys import chained_key
from headrace.core.memory.lower_tier import Saved
from headrace.files import PRIVATE_FILE, private_folder, private_opener, replacing

BLOCKS_FILE = "blocks.kv"
"""The name of a block file in the folder of its tier."""

PROBE_BYTES = 4 << 20
"""Bytes written and read back when a file is opened, to test the disk and measure its speed."""


class Damaged(OSError):
    """A slot does not hold what was written to it."""


class DiskSpeed(NamedTuple):
    """Bytes per second of writes (including fsync), and of reads that bypass the page cache."""

    write: float
    read: float


class BlockFile:
    """``num_slots`` slots of ``slot_bytes``; several threads may read and write at once.

    ``checksums`` are those of complete slots, over the parts of all ranks of a model.

    Raises:
        OSError: the folder cannot be created or written, another process has the file, or the disk returned other
            bytes than were written.
    """

    def __init__(self, path: Path, num_slots: int, slot_bytes: int) -> None:
        self.path = path
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.checksums: dict[int, int] = {}
        private_folder(path.parent)
        self._file = private_opener(str(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._file, num_slots * slot_bytes)
            self.speed = self._probe()
        except OSError:
            os.close(self._file)
            raise

    def write(self, slot: int, content: memoryview) -> int:
        """Fill a slot; returns the checksum of ``content``. Raises OSError on failure."""
        self._write_at(slot * self.slot_bytes, content)
        return zlib.crc32(content)

    def read(self, slot: int, target: memoryview) -> int:
        """Read a slot into ``target``; returns the checksum of what was read. Raises OSError on failure."""
        self._read_at(slot * self.slot_bytes, target)
        return zlib.crc32(target)

    def flush(self) -> None:
        """Make everything written survive a power failure."""
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)

    def _probe(self) -> DiskSpeed:
        """Write behind the last slot, read it back from the disk itself, then truncate the file again."""
        content = memoryview(os.urandom(PROBE_BYTES))
        target = memoryview(bytearray(PROBE_BYTES))
        end = self.num_slots * self.slot_bytes
        began = time.perf_counter()
        self._write_at(end, content)
        os.fsync(self._file)
        written = time.perf_counter()
        os.posix_fadvise(self._file, end, PROBE_BYTES, os.POSIX_FADV_DONTNEED)
        self._read_at(end, target)
        done = time.perf_counter()
        os.ftruncate(self._file, end)
        if target != content:
            raise Damaged(f"{self.path}: the disk returned other bytes than were written")
        return DiskSpeed(PROBE_BYTES / (written - began), PROBE_BYTES / (done - written))

    def _write_at(self, offset: int, content: memoryview) -> None:
        done = 0
        while done < len(content):
            done += os.pwrite(self._file, content[done:], offset + done)

    def _read_at(self, offset: int, target: memoryview) -> None:
        done = 0
        while done < len(target):
            count = os.preadv(self._file, [target[done:]], offset + done)
            if not count:
                raise Damaged(f"{self.path} is shorter than it was")
            done += count


# The snapshot: the index of a block file, written at shutdown and read at the next start.
#
#  {"headrace_blocks": 1, "fingerprint": …, "blocks": n, …}\n     the same engine must have written it
#  slot u32, checksum u32, parent 32 bytes, key 32 bytes, tokens i64 × block size     n times
#  checksum u32 of all that
# Everything in it is verified. Another model, size or dtype, a damaged file, or a key that does not match its tokens
# result in a warning and an empty cache. The content of a slot is verified when it is read.

MAGIC = "headrace_blocks"
VERSION = 1
_ENTRY = struct.Struct("<II32s32s")
_CHECKSUM = struct.Struct("<I")


class NotUsable(Exception):
    """A snapshot that does not belong to this engine, or is damaged."""


def write_snapshot(
    path: Path, identity: Mapping[str, Any], saved: Sequence[Saved], checksums: Mapping[int, int]
) -> int:
    """Write the content of the slots, completely or not at all; returns the number of blocks. Raises OSError.

    Blocks with positions of images are left out: an entry has room for tokens only.
    """
    entries = [
        _ENTRY.pack(each.block, checksum, each.parent, each.key) + array("q", each.tokens).tobytes()
        for each in saved
        if min(each.tokens) >= 0 and (checksum := checksums.get(each.block)) is not None
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
            raise NotUsable(f"its {name} is {header.get(name)!r:.80}, not {value!r:.80}")
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


# The file of checkpoints of recurrent states, written at shutdown and read at the next start.
#
#  {"headrace_states": 1, "fingerprint": …, "state_bytes": n, "states": n, …}
#      the same engine must have written it
#  key 32 bytes, blocks u32, checksum u32, state     n times, least valuable first
#
# The header is verified before anything is read, and each state by its checksum. A key stands for all tokens
# before it, so a state of a known key is the right one. A damaged state is skipped.

STATES_MAGIC = "headrace_states"
STATES_VERSION = 1
_STATE = struct.Struct("<32sII")
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
        file.write(json.dumps({STATES_MAGIC: STATES_VERSION, **identity}).encode() + b"\n")
        for key, blocks, state in states:
            file.write(_STATE.pack(key, blocks, _state_checksum(key, blocks, state)) + state)
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
        for name, value in {STATES_MAGIC: STATES_VERSION, **identity}.items():
            if header.get(name) != value:
                raise NotUsable(f"its {name} is {header.get(name)!r:.80}, not {value!r:.80}")
        while len(head := file.read(_STATE.size)) == _STATE.size:
            key, blocks, checksum = _STATE.unpack(head)
            state = file.read(state_bytes)
            if len(state) == state_bytes and _state_checksum(key, blocks, state) == checksum:
                yield SavedState(key, blocks, state)


def _state_checksum(key: bytes, blocks: int, state: bytes) -> int:
    """Over key and place, too: a state under another key would be a wrong one."""
    return zlib.crc32(state, zlib.crc32(key + blocks.to_bytes(4, "little")))
