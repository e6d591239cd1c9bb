"""Rows of images in memory that a server shares with the processes of its engine.

```
 engine's process: encoder ── write_rows ──> file in memory ── SharedRows ──> requests in an engine's process
                                                  │
 server: a place in it for each image, until nothing refers to it
```
The file has no name: the engine's processes inherit its descriptor, one after the other. Messages say where the rows of
an image are, so no byte of them passes through the server or its socket. At a place are

```
 length of the head, 4 bytes | head: JSON, padded | rows | deep rows | offsets
```
"""

from __future__ import annotations

import ctypes
import json
import logging
import math
import mmap
import os
import struct
import threading
from queue import SimpleQueue
from weakref import WeakValueDictionary, finalize

import numpy as np
import torch

from headrace.compute.device import huge_memory
from headrace.compute.images.slots import ImageRows

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
_ALIGNED = 64
"""Bytes whose multiple the rows begin at."""

_PIECE = 1 << 20
"""Bytes that are written without an operation of torch, at each of which a `slices.SlicedCall` may pause."""

_PUNCH_HOLE, _KEEP_SIZE = 2, 1  # linux/falloc.h


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


class PlacedRows:
    """The rows of an image in the file, which take memory until this object is gone."""

    __slots__ = ("__weakref__", "_freed", "at", "nbytes")

    def __init__(self, at: int, nbytes: int, freed: SimpleQueue[tuple[int, int] | None]) -> None:
        self.at, self.nbytes = at, nbytes
        self._freed = freed

    def __del__(self) -> None:
        self._freed.put((self.at, _whole_pages(self.nbytes)))  # a queue that allows this at any time


class RowsFile:
    """The file of a server, with the descriptor ``fd``.

    Places follow each other and none is used again: the file has holes where images were. A thread gives their memory
    back, which takes milliseconds for a large image.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("headrace-image-rows", os.MFD_CLOEXEC)
        self._end = 0
        self._freed: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
        threading.Thread(
            target=_free, args=(self.fd, self._freed), name="headrace-image-rows", daemon=True
        ).start()
        finalize(self, self._freed.put, None)

    def place(self, nbytes: int) -> PlacedRows:
        """A place for so many bytes; it takes no memory before they are written."""
        at = self._end
        self._end += _whole_pages(nbytes)
        return PlacedRows(at, nbytes, self._freed)


def _free(fd: int, freed: SimpleQueue[tuple[int, int] | None]) -> None:
    """Free places until there is None; then close the file."""
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    while (place := freed.get()) is not None:
        if fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, *map(ctypes.c_int64, place)):
            why = os.strerror(ctypes.get_errno())
            logger.error("the memory of an image's rows is not given back: %s", why)
    os.close(fd)


def stored_bytes(features: ImageRows) -> int:
    """The bytes that the features of an image take in a file."""
    return len(_head(features)) + features.nbytes


def write_rows(fd: int, at: int, features: ImageRows) -> None:
    """Write the features of an image to a file."""
    at = _write(fd, at, memoryview(_head(features)))
    for tensor in (features.rows,) if features.deep is None else (features.rows, features.deep):
        data = tensor.detach().contiguous().cpu().flatten().view(torch.uint8)
        for begin in range(0, len(data), _PIECE):
            at = _write(fd, at, data[begin : begin + _PIECE].numpy().data)
    _write(fd, at, memoryview(features.offsets.tobytes()))


def _write(fd: int, at: int, left: memoryview) -> int:
    while left:
        written = os.pwrite(fd, left, at)  # other threads run meanwhile
        at, left = at + written, left[written:]
    return at


def _head(features: ImageRows) -> bytes:
    rows, deep = features.rows, features.deep
    head = json.dumps(
        {
            "dtype": str(rows.dtype).removeprefix("torch."),
            "rows": list(rows.shape),
            "deep": None if deep is None else list(deep.shape),
            "grid": features.grid,
        }
    ).encode()
    head += b" " * (-(len(head) + _LENGTH.size) % _ALIGNED)
    return _LENGTH.pack(len(head)) + head


def read_rows(fd: int, at: int, nbytes: int, device: torch.device) -> ImageRows:
    """The features of an image in a file, on ``device``."""
    # Small pages of a large image take milliseconds to free, in the thread of the engine.
    data = huge_memory(nbytes)
    left = data.numpy().data
    while left:
        read = os.preadv(fd, [left], at)  # other threads run meanwhile
        if not read:
            raise EOFError("the rows of an image are not in the file")
        at, left = at + read, left[read:]
    (length,) = _LENGTH.unpack_from(data.numpy().data)
    begin = _LENGTH.size + length
    head = json.loads(data[_LENGTH.size : begin].numpy().tobytes())
    dtype = getattr(torch, head["dtype"])

    def tensor(shape: list[int]) -> torch.Tensor:
        nonlocal begin
        end = begin + math.prod(shape) * dtype.itemsize
        found, begin = data[begin:end].view(dtype).reshape(shape), end
        return found.to(device)

    rows = tensor(head["rows"])
    deep = None if head["deep"] is None else tensor(head["deep"])
    offsets = data[begin:].numpy().copy().view(np.int64)
    grid = None if head["grid"] is None else (head["grid"][0], head["grid"][1])
    return ImageRows(rows, offsets, deep, grid)


class SharedRows:
    """The rows of open requests, read from a file. Equal images are held once, as long as a request has them."""

    def __init__(self, fd: int, device: torch.device) -> None:
        self._fd = fd
        self._device = device
        self._held: WeakValueDictionary[bytes, ImageRows] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._held)

    def of(self, digest: bytes, at: int, nbytes: int) -> ImageRows:
        """The rows of an image with this digest, which are in the file, too."""
        found = self._held.get(digest)
        if found is None:
            found = self._held[digest] = read_rows(self._fd, at, nbytes, self._device)
        return found
