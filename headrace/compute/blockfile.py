"""Blocks of keys and values on a disk: one file of equal slots, and a checksum of each slot in memory.

A slot is read back only if its bytes are those that were written, in this run or, by `snapshot`, in one before. The
file belongs to one process at a time. Knows bytes only; what they mean and which slot is free is `core.memory.tiers`'
word.
"""

from __future__ import annotations

import fcntl
import os
import time
import zlib
from pathlib import Path
from typing import NamedTuple

PROBE_BYTES = 4 << 20
"""Written and read back when a file is opened: whether the disk works, and how fast it is."""


class Damaged(OSError):
    """A slot does not hold what was written to it."""


class DiskSpeed(NamedTuple):
    """Bytes per second of writing until it is safe, and of reading what is not in memory any more."""

    write: float
    read: float


class BlockFile:
    """``num_slots`` slots of ``slot_bytes``; reading and writing may be called from several threads at once.

    Raises:
        OSError: the folder cannot be made or written, another process has the file, or the disk gave back something
            else than it was given.
    """

    def __init__(self, path: Path, num_slots: int, slot_bytes: int) -> None:
        self.path = path
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.checksums: dict[int, int] = {}
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._file, num_slots * slot_bytes)
            self.speed = self._probe()
        except OSError:
            os.close(self._file)
            raise

    def write(self, slot: int, content: memoryview) -> None:
        """Fill a slot. Raises OSError when it cannot be; the slot then holds nothing."""
        self.checksums.pop(slot, None)
        self._write_at(slot * self.slot_bytes, content)
        self.checksums[slot] = zlib.crc32(content)

    def read(self, slot: int, target: memoryview) -> None:
        """Read a slot into ``target``. Raises `Damaged` when it is not what was written, OSError when it fails."""
        self._read_at(slot * self.slot_bytes, target)
        if zlib.crc32(target) != self.checksums.get(slot):
            raise Damaged(f"slot {slot} of {self.path} is damaged")

    def flush(self) -> None:
        """Let all that was written outlive a power failure."""
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)

    def _probe(self) -> DiskSpeed:
        """Write behind the last slot and read it back from the disk itself, then cut it off again."""
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
            raise Damaged(f"{self.path} gave back something else than it was given")
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
