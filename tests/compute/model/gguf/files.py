"""Writes small GGUF files, also damaged ones."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGMLQuantizationType

STRING, ARRAY = 8, 9


class Entry(NamedTuple):
    """A row of the table of tensors, with its bytes; ``offset`` None: behind those before it."""

    name: str
    shape: tuple[int, ...]
    type: int
    data: bytes
    offset: int | None = None


def plain(name: str, values: np.ndarray[Any, Any]) -> Entry:
    """A float32 tensor."""
    return Entry(name, values.shape, GGMLQuantizationType.F32, values.astype("<f4").tobytes())


def text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def pair(key: str, value: Any) -> bytes:
    """A pair of metadata: an int becomes uint32."""
    return text(key) + _typed(value)


def _typed(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", STRING) + text(value)
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    items = [_typed(item) for item in value]
    kind = items[0][:4] if items else struct.pack("<I", 4)
    return struct.pack("<I", ARRAY) + kind + struct.pack("<Q", len(items)) + b"".join(i[4:] for i in items)


def gguf_bytes(
    metadata: Mapping[str, Any],
    tensors: Sequence[Entry],
    *,
    version: int = 3,
    alignment: int = 32,
    extra: bytes = b"",
    counts: tuple[int, int] | None = None,
) -> bytes:
    """A file; ``extra`` is a pair of metadata more, ``counts`` those of tensors and pairs that it claims."""
    pairs = [pair(key, value) for key, value in metadata.items()] + ([extra] if extra else [])
    table, data = b"", b""
    for tensor in tensors:
        data += b"\0" * (-len(data) % alignment)
        offset = len(data) if tensor.offset is None else tensor.offset
        dims = tensor.shape[::-1]
        table += text(tensor.name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, tensor.type, offset)
        data += tensor.data
    claimed = counts or (len(tensors), len(pairs))
    head = b"GGUF" + struct.pack("<IQQ", version, *claimed) + b"".join(pairs) + table
    return head + b"\0" * (-len(head) % alignment) + data


def write(path: Path, metadata: Mapping[str, Any], tensors: Sequence[Entry], **options: Any) -> Path:
    path.write_bytes(gguf_bytes(metadata, tensors, **options))
    return path
