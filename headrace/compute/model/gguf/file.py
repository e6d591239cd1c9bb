"""A GGUF file: its metadata, and where its tensors are. https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

```
magic  version  tensor count  pair count │ key, type, value ... │ name, dims, type, offset ... │ padding │ data
```

All numbers are little-endian. Everything is read from a memory map, and nothing is believed: each length, count and
offset is compared with the size of the file before it is used. A model may be split into files named
``name-00001-of-00003.gguf``, of which the first has the metadata.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePath
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from headrace.compute.checkpoint import ModelError

Scalar: TypeAlias = int | float | bool | str
Value: TypeAlias = Scalar | tuple[Scalar, ...]
Bytes: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


class TensorType(NamedTuple):
    """A type of tensors: ``block`` consecutive elements of a row take ``size`` bytes."""

    name: str
    block: int
    size: int


TYPES: Final[Mapping[int, TensorType]] = {
    number: TensorType(*each)
    for number, each in {
        0: ("F32", 1, 4),
        1: ("F16", 1, 2),
        2: ("Q4_0", 32, 18),
        3: ("Q4_1", 32, 20),
        6: ("Q5_0", 32, 22),
        7: ("Q5_1", 32, 24),
        8: ("Q8_0", 32, 34),
        10: ("Q2_K", 256, 84),
        11: ("Q3_K", 256, 110),
        12: ("Q4_K", 256, 144),
        13: ("Q5_K", 256, 176),
        14: ("Q6_K", 256, 210),
        16: ("IQ2_XXS", 256, 66),
        17: ("IQ2_XS", 256, 74),
        18: ("IQ3_XXS", 256, 98),
        19: ("IQ1_S", 256, 50),
        20: ("IQ4_NL", 32, 18),
        21: ("IQ3_S", 256, 110),
        22: ("IQ2_S", 256, 82),
        23: ("IQ4_XS", 256, 136),
        24: ("I8", 1, 1),
        25: ("I16", 1, 2),
        26: ("I32", 1, 4),
        27: ("I64", 1, 8),
        28: ("F64", 1, 8),
        29: ("IQ1_M", 256, 56),
        30: ("BF16", 1, 2),
        34: ("TQ1_0", 256, 54),
        35: ("TQ2_0", 256, 66),
        39: ("MXFP4", 32, 17),
        40: ("NVFP4", 64, 36),
    }.items()
}
"""The types of tensors by their numbers, with the names of the format's documentation."""

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = "general.alignment"
_MOST_DIMENSIONS = 4
_LARGEST_ALIGNMENT = 1 << 20
_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor in a file. ``shape`` has the rows first: that of a linear layer is (outputs, inputs).

    ``offset`` and ``nbytes`` are the bytes of the file at which it starts and that it takes.
    """

    name: str
    shape: tuple[int, ...]
    type: TensorType
    path: Path
    offset: int
    nbytes: int


def is_gguf(path: PurePath) -> bool:
    """Whether a model is a GGUF file, and not a folder."""
    return path.suffix == ".gguf"


class GgufFile:
    """A model in GGUF, open for reading.

    ``metadata`` are the values of the first file by their keys; arrays are tuples. ``tensors`` are those of all files
    by their names.
    """

    def __init__(self, path: Path, parts: Iterable[_Part]) -> None:
        parts = tuple(parts)
        self.path = path
        self.metadata: Mapping[str, Value] = parts[0].metadata
        self.tensors: dict[str, GgufTensor] = {}
        self._maps = {part.path: part.data for part in parts}
        for part in parts:
            for tensor in part.tensors:
                if tensor.name in self.tensors:
                    raise _broken(part.path, f"has the tensor {tensor.name!r:.80} a second time")
                self.tensors[tensor.name] = tensor

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Read the header of a file, or of all files of a split model, whose first one ``path`` names.

        Raises:
            ModelError: it is not GGUF in a supported version, is truncated or damaged, or a part of it is missing.
        """
        first = _Part(path)
        count = first.split("count", 1)
        if count == 1:
            return cls(path, [first])
        parts = [first, *(_Part(each) for each in _others(path, count))]
        for number, part in enumerate(parts):
            if (part.split("no", -1), part.split("count", -1)) != (number, count):
                raise _broken(part.path, f"is not part {number + 1} of {count} according to its metadata")
        file = cls(path, parts)
        wanted = first.split("tensors.count", len(file.tensors))
        if wanted != len(file.tensors):
            raise _broken(path, f"and its other parts have {len(file.tensors)} tensors, not {wanted}")
        return file

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files of the model, the first one first."""
        return tuple(self._maps)

    def data(self, tensor: GgufTensor) -> Bytes:
        """The bytes of a tensor, uint8 [rows, bytes of a row], still in the file."""
        rows = prod(tensor.shape[:-1])
        whole = np.frombuffer(self._maps[tensor.path], np.uint8, tensor.nbytes, tensor.offset)
        return whole.reshape(rows, tensor.nbytes // rows)


class _Part:
    """One file of a model: what its header says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = _mapped(path)
        reader = _Reader(path, self.data)
        tensors, pairs = reader.start()
        self.metadata = reader.metadata(pairs)
        self.tensors = reader.tensors(tensors, self._alignment())

    def _alignment(self) -> int:
        alignment = self.metadata.get(_ALIGNMENT, 32)
        if type(alignment) is not int or not 8 <= alignment <= _LARGEST_ALIGNMENT or alignment % 8:
            raise _broken(self.path, f"has {_ALIGNMENT} {alignment!r:.80}, which is not a multiple of 8")
        return alignment

    def split(self, name: str, default: int) -> int:
        """A number of the split, or ``default``."""
        value = self.metadata.get(f"split.{name}", default)
        if type(value) is not int:
            raise _broken(self.path, f"has split.{name} {value!r:.80}, which is not a number")
        return value


class _Reader:
    """Reads a header from its start; ``_at`` is the next byte."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0

    def start(self) -> tuple[int, int]:
        """The number of tensors and of pairs of metadata."""
        magic = self._data[:4]
        if magic != _MAGIC:
            raise ModelError(
                f"{self._path} is not a GGUF file: it starts with {magic!r} instead of {_MAGIC!r}"
            )
        self._at = 4
        version = self._number("I")
        if version not in _VERSIONS and not version & 0xFFFF:
            raise ModelError(
                f"{self._path} is big-endian; convert the model again, on a little-endian machine"
            )
        if version not in _VERSIONS:
            raise ModelError(
                f"{self._path} is GGUF version {version}; supported are 2 and 3: convert the model again"
            )
        tensors = self._count(24, "tensors")
        return tensors, self._count(13, "metadata values")

    def metadata(self, pairs: int) -> dict[str, Value]:
        values: dict[str, Value] = {}
        for _ in range(pairs):
            key = self._string("a key")
            if key in values:
                raise _broken(self._path, f"has the metadata {key!r:.80} a second time")
            kind = self._number("I")
            values[key] = self._array(key) if kind == _ARRAY else self._scalar(kind, key)
        return values

    def tensors(self, count: int, alignment: int) -> list[GgufTensor]:
        """The table of tensors, with offsets from the start of the file."""
        entries = [self._entry() for _ in range(count)]
        start = -(-self._at // alignment) * alignment
        tensors = [self._placed(*entry, alignment, start) for entry in entries]
        end = start
        for tensor in sorted(tensors, key=lambda each: each.offset):
            if tensor.offset < end:
                raise _broken(self._path, f"has the tensor {tensor.name!r:.80} over the data of another")
            end = tensor.offset + tensor.nbytes
        return tensors

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("a tensor's name")
        dimensions = self._number("I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise _broken(self._path, f"has the tensor {name!r:.80} with {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        return name, shape, self._number("I"), self._number("Q")

    def _placed(
        self, name: str, shape: tuple[int, ...], number: int, offset: int, alignment: int, start: int
    ) -> GgufTensor:
        kind = TYPES.get(number)
        if kind is None:
            raise ModelError(f"{self._path}: tensor {name!r:.80} has the unknown type {number}")
        if not all(shape) or shape[-1] % kind.block:
            raise _broken(self._path, f"has the tensor {name!r:.80} of shape {list(shape)} in {kind.name}")
        if offset % alignment:
            raise _broken(
                self._path, f"has the tensor {name!r:.80} at {offset}, not at a multiple of {alignment}"
            )
        nbytes = prod(shape) // kind.block * kind.size
        if start + offset + nbytes > len(self._data):
            raise _broken(
                self._path,
                f"is truncated: tensor {name!r:.80} ends at byte {start + offset + nbytes} of {len(self._data)}",
            )
        return GgufTensor(name, shape, kind, self._path, start + offset, nbytes)

    def _array(self, key: str) -> tuple[Scalar, ...]:
        kind = self._number("I")
        if kind == _STRING:
            return tuple(self._string(key) for _ in range(self._count(8, key)))
        code = self._code(kind, key)
        count = self._count(struct.calcsize(code), key)
        return self._take(f"<{count}{code}")

    def _scalar(self, kind: int, key: str) -> Scalar:
        if kind == _STRING:
            return self._string(key)
        value: Scalar = self._take(f"<{self._code(kind, key)}")[0]
        return value

    def _code(self, kind: int, key: str) -> str:
        if kind not in _SCALARS:
            raise _broken(self._path, f"has the metadata {key!r:.80} of the unknown type {kind}")
        return _SCALARS[kind]

    def _string(self, what: str) -> str:
        length = self._count(1, what)
        self._at += length
        try:
            return self._data[self._at - length : self._at].decode()
        except UnicodeDecodeError:
            raise _broken(self._path, f"has text that is not UTF-8 in {what}") from None

    def _count(self, least: int, what: str) -> int:
        """A number of things that take at least ``least`` bytes each in the rest of the file."""
        count = self._number("Q")
        if count * least > len(self._data) - self._at:
            raise _broken(self._path, f"is truncated: {what} would be {count} in {len(self._data)} bytes")
        return count

    def _number(self, code: str) -> int:
        return int(self._take(f"<{code}")[0])

    def _take(self, layout: str) -> tuple[Scalar, ...]:
        try:
            values = struct.unpack_from(layout, self._data, self._at)
        except struct.error:
            raise _broken(self._path, f"is truncated at byte {len(self._data)}, in its header") from None
        self._at += struct.calcsize(layout)
        return values


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise ModelError(f"{path} is empty; download it again") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error


def _others(path: Path, count: int) -> list[Path]:
    """The other files of a model in ``count`` files."""
    name = _SPLIT_NAME.fullmatch(path.name)
    if name is None or int(name["count"]) != count:
        raise ModelError(
            f"{path} is part of a model in {count} files; its name must end in -00001-of-{count:05}.gguf"
        )
    paths = [
        path.with_name(f"{name['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)
    ]
    if int(name["number"]) != 1:
        raise ModelError(f"{path} is a later part of a split model; name the first one: {paths[0].name}")
    missing = [each.name for each in paths if not each.is_file()]
    if missing:
        shown = ", ".join(missing[:3])
        raise ModelError(f"{path} is the first of {count} files, and {shown} is missing; download it too")
    return paths[1:]


def _broken(path: Path, what: str) -> ModelError:
    return ModelError(f"{path} {what}; the file is damaged: download it again")
