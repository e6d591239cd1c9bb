"""Areas in shared memory: for servers of one user on one machine that see each other's processes.

An area is an anonymous file in memory (memfd). Its path in /proc is sent after the handshake, its size is sealed, and
the system frees it with the last process that has it open. The other side recognizes it by a mark in its first bytes.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

# The interface for transferring the bytes of blocks between processes.
#
# Each connection has an area of equal slots, which the publishing server fills and the other one reads. The reader's
# next request implies that all slots have been read, so no state is shared or left behind if either server is lost.


class CannotAttach(Exception):
    """The area of a peer cannot be read by this process."""


class Area(Protocol):
    """The slots of one connection, in the process that fills them."""

    slots: int

    def describe(self) -> Mapping[str, Any]:
        """The information that the other process needs to read the slots, as plain values for JSON."""
        ...

    def slot(self, number: int) -> memoryview:
        """A slot's bytes, to be written."""
        ...

    def close(self) -> None: ...


class View(Protocol):
    """The slots of a peer's area, in the process that reads them."""

    def read(self, slots: Sequence[int], targets: Sequence[memoryview]) -> None:
        """Copy each slot to its target. Raises OSError if it cannot; no target is written to afterwards."""
        ...

    def close(self) -> None: ...


class KVTransfer(Protocol):
    """A transfer method; ``name`` is its value of ``kv_connector``."""

    name: str

    def register(self, slots: int, slot_bytes: int) -> Area:
        """A new area. Raises OSError if there is no memory for it."""
        ...

    def attach(self, described: Mapping[str, Any], slot_bytes: int) -> View:
        """A peer's area.

        Raises:
            CannotAttach: it cannot be read from here.
        """
        ...


NAME = "SharedMemoryConnector"

MARK_BYTES = mmap.PAGESIZE
"""Bytes before the first slot, so that slots start at a page."""

_ADD_SEALS, _GET_SEALS, _SEAL_SHRINK = 1033, 1034, 2  # linux/fcntl.h


class SharedArea:
    """An area that this process fills."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.slots = slots
        self._slot_bytes = slot_bytes
        self._mark = secrets.token_bytes(16)
        self._file = os.memfd_create("headrace-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        size = MARK_BYTES + slots * slot_bytes
        os.ftruncate(self._file, size)
        fcntl.fcntl(self._file, _ADD_SEALS, _SEAL_SHRINK)
        self._memory = mmap.mmap(self._file, size)
        self._memory[: len(self._mark)] = self._mark

    def describe(self) -> Mapping[str, Any]:
        return {"process": os.getpid(), "file": self._file, "mark": self._mark.hex()}

    def slot(self, number: int) -> memoryview:
        begin = MARK_BYTES + number * self._slot_bytes
        return memoryview(self._memory)[begin : begin + self._slot_bytes]

    def close(self) -> None:
        os.close(self._file)  # the mapping ends with the last slot that is in use


class SharedView:
    """An area that another process fills."""

    def __init__(self, memory: mmap.mmap, slot_bytes: int) -> None:
        self._memory = memory
        self._slot_bytes = slot_bytes

    def read(self, slots: Sequence[int], targets: Sequence[memoryview]) -> None:
        for slot, target in zip(slots, targets, strict=True):
            begin = MARK_BYTES + slot * self._slot_bytes
            page = np.frombuffer(self._memory, np.uint8, self._slot_bytes, begin)
            np.copyto(np.frombuffer(target, np.uint8), page)  # which lets other threads run

    def close(self) -> None:
        """Nothing: the mapping ends when it is no longer referenced."""


class SharedMemory:
    """`KVTransfer` by shared memory."""

    name = NAME

    def register(self, slots: int, slot_bytes: int) -> SharedArea:
        return SharedArea(slots, slot_bytes)

    def attach(self, described: Mapping[str, Any], slot_bytes: int) -> SharedView:
        path = f"/proc/{int(described['process'])}/fd/{int(described['file'])}"
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CannotAttach(
                f"its memory cannot be opened as {path} ({error.strerror}); {_WHERE}"
            ) from None
        try:
            sealed = fcntl.fcntl(file, _GET_SEALS) & _SEAL_SHRINK
            memory = mmap.mmap(file, 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CannotAttach(f"{path} is not its memory ({error}); {_WHERE}") from None
        finally:
            os.close(file)
        mark = bytes.fromhex(described["mark"])
        if not sealed or memory[: len(mark)] != mark:
            raise CannotAttach(f"{path} is not its memory; {_WHERE}")
        return SharedView(memory, slot_bytes)


_WHERE = f"{NAME} needs both servers on one machine, of one user, with one /proc"
