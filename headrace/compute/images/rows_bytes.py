"""Rows of images as bytes, in which they cross the boundary between two processes.

```
 length of the head, 4 bytes | head: JSON, padded | rows | deep rows | offsets
```
"""

from __future__ import annotations

import json
import math
import struct
from weakref import WeakValueDictionary

import numpy as np
import torch

from headrace.compute.images.slots import ImageRows

_LENGTH = struct.Struct("<I")
_ALIGNED = 64
"""Bytes whose multiple the rows begin at."""


def to_bytes(features: ImageRows) -> bytes:
    """The features of an image as bytes."""
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
    parts = [_LENGTH.pack(len(head)), head, _raw(rows)]
    if deep is not None:
        parts.append(_raw(deep))
    return b"".join([*parts, features.offsets.tobytes()])


def _raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes()


def from_bytes(data: bytes, device: torch.device) -> ImageRows:
    """The features of an image that `to_bytes` made these bytes of, on ``device``."""
    (length,) = _LENGTH.unpack_from(data)
    at = _LENGTH.size + length
    head = json.loads(data[_LENGTH.size : at])
    dtype, own = getattr(torch, head["dtype"]), bytearray(data)

    def tensor(shape: list[int]) -> torch.Tensor:
        nonlocal at
        count = math.prod(shape)
        found = torch.frombuffer(own, dtype=dtype, count=count, offset=at)
        at += count * dtype.itemsize
        return found.reshape(shape).to(device)

    rows = tensor(head["rows"])
    deep = None if head["deep"] is None else tensor(head["deep"])
    offsets = np.frombuffer(data, np.uint8, offset=at).copy().view(np.int64)
    grid = None if head["grid"] is None else (head["grid"][0], head["grid"][1])
    return ImageRows(rows, offsets, deep, grid)


class SharedRows:
    """The rows of open requests, made of bytes; those of equal images are held once, as long as a request has them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: WeakValueDictionary[bytes, ImageRows] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._held)

    def of(self, digest: bytes, data: bytes) -> ImageRows:
        """The rows of an image with this digest, which ``data`` has."""
        found = self._held.get(digest)
        if found is None:
            found = self._held[digest] = from_bytes(data, self._device)
        return found
