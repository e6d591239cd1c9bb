"""The reader of GGUF: what the gguf package writes, and every kind of damage."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter

from headrace.compute.checkpoint import ModelError
from headrace.compute.model.gguf.file import GgufFile
from tests.compute.model.gguf.files import Entry, gguf_bytes, pair, plain, text, write

VALUES = np.arange(12, dtype=np.float32).reshape(3, 4)
METADATA: dict[str, Any] = {"general.architecture": "llama", "llama.block_count": 2}


def test_reads_what_the_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_uint64("a.count", 2**40)
    writer.add_int8("a.small", -3)
    writer.add_bool("a.flag", True)
    writer.add_float64("a.float", 0.5)
    writer.add_string("a.text", "größer")
    writer.add_array("a.words", ["one", "", "drei"])
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_tensor("plain", VALUES)
    writer.add_tensor("half", VALUES.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile.open(path)
    assert file.metadata == {
        "general.architecture": "llama",
        "a.count": 2**40,
        "a.small": -3,
        "a.flag": True,
        "a.float": 0.5,
        "a.text": "größer",
        "a.words": ("one", "", "drei"),
        "a.numbers": (1, 2, 3),
    }
    assert [(t.shape, t.type.name) for t in file.tensors.values()] == [((3, 4), "F32"), ((3, 4), "F16")]
    assert np.array_equal(file.data(file.tensors["plain"]).view("<f4"), VALUES)
    assert np.array_equal(file.data(file.tensors["half"]).view("<f2"), VALUES)


def test_version_2_and_another_alignment(tmp_path: Path) -> None:
    entries = [plain("a", VALUES), plain("b", VALUES + 1)]
    path = write(tmp_path / "m.gguf", {**METADATA, "general.alignment": 64}, entries, version=2, alignment=64)
    file = GgufFile.open(path)
    assert np.array_equal(file.data(file.tensors["b"]).view("<f4"), VALUES + 1)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = gguf_bytes({**METADATA, "words": ["a", "b"]}, [plain("a", VALUES), plain("b", VALUES)])
    for length in range(len(whole)):
        path = tmp_path / "m.gguf"
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"truncated|empty|not a GGUF") as refusal:
            GgufFile.open(path)
        assert "\n" not in str(refusal.value)


def _claims(count: int) -> bytes:
    return text("k") + struct.pack("<IIQ", 9, 4, count)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"version": 1}, "version 1; supported are 2 and 3"),
        ({"version": 3 << 24}, "big-endian"),
        ({"counts": (2**62, 2)}, "truncated: tensors would be"),
        ({"counts": (1, 2**62)}, "truncated: metadata values would be"),
        ({"counts": (1, 3)}, "damaged"),
        ({"extra": _claims(2**61)}, "truncated: k would be"),
        ({"extra": text("k") + struct.pack("<IQ", 8, 2**63)}, "truncated: k would be"),
        ({"extra": text("k") + struct.pack("<IQ", 99, 0)}, "'k' of the unknown type 99"),
        ({"extra": text("k") + struct.pack("<IIQ", 9, 9, 1)}, "'k' of the unknown type 9"),
        ({"extra": text("k") + struct.pack("<IQ", 8, 2) + b"\xff\xff"}, "not UTF-8 in k"),
        ({"extra": pair("llama.block_count", 3)}, "'llama.block_count' a second time"),
        ({"extra": pair("general.alignment", 12)}, "general.alignment 12"),
        ({"extra": pair("general.alignment", 0)}, "general.alignment 0"),
        ({"extra": pair("general.alignment", "32")}, "general.alignment '32'"),
        ({"extra": pair("split.count", 2)}, "must end in -00001-of-00002.gguf"),
        ({"extra": pair("split.count", "2")}, "split.count '2'"),
    ],
)
def test_damaged_headers_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "m.gguf", METADATA, [plain("a", VALUES)], **options)
    with pytest.raises(ModelError, match=message) as refusal:
        GgufFile.open(path)
    assert str(path) in str(refusal.value)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([plain("a", VALUES), plain("a", VALUES)], "'a' a second time"),
        ([plain("a", VALUES), plain("b", VALUES)._replace(offset=32)], "'b' over the data of another"),
        ([plain("a", VALUES)._replace(offset=8)], "at 8, not at a multiple of 32"),
        ([plain("a", VALUES)._replace(offset=1 << 20)], "'a' ends at byte"),
        ([plain("a", VALUES)._replace(offset=2**63)], "'a' ends at byte"),
        ([plain("a", VALUES)._replace(shape=(2**62, 4))], "'a' ends at byte"),
        ([plain("a", VALUES)._replace(shape=(3, 0))], r"'a' of shape \[3, 0\]"),
        ([plain("a", VALUES)._replace(shape=())], "0 dimensions"),
        ([plain("a", VALUES)._replace(shape=(1, 1, 1, 3, 4))], "5 dimensions"),
        ([plain("a", VALUES)._replace(type=77)], "unknown type 77"),
        ([Entry("a", (3, 20), GGMLQuantizationType.Q8_0, b"\0" * 102)], r"'a' of shape \[3, 20\] in Q8_0"),
    ],
)
def test_damaged_tables_are_refused(tmp_path: Path, tensors: list[Entry], message: str) -> None:
    path = write(tmp_path / "m.gguf", METADATA, tensors)
    with pytest.raises(ModelError, match=message):
        GgufFile.open(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        GgufFile.open(path)
    path.write_bytes(b"PK\3\4 a zip")
    with pytest.raises(ModelError, match="is not a GGUF file"):
        GgufFile.open(path)


def _split(folder: Path, number: int, **changed: Any) -> Path:
    metadata = {"split.no": number, "split.count": 3, "split.tensors.count": 3} | changed
    return write(
        folder / f"m-0000{number + 1}-of-00003.gguf", metadata, [plain(f"t{number}", VALUES + number)]
    )


def test_split_files(tmp_path: Path) -> None:
    paths = [_split(tmp_path, number) for number in range(3)]
    file = GgufFile.open(paths[0])
    assert [file.data(t).view("<f4")[0, 0] for t in file.tensors.values()] == [0, 1, 2]
    with pytest.raises(ModelError, match=r"name the first one: m-00001-of-00003\.gguf"):
        GgufFile.open(paths[1])
    _split(tmp_path, 2, **{"split.no": 1})
    with pytest.raises(ModelError, match="is not part 3 of 3"):
        GgufFile.open(paths[0])
    _split(tmp_path, 2)
    _split(tmp_path, 0, **{"split.tensors.count": 4})
    with pytest.raises(ModelError, match="have 3 tensors, not 4"):
        GgufFile.open(paths[0])
    paths[2].unlink()
    with pytest.raises(ModelError, match=r"m-00003-of-00003\.gguf is missing"):
        GgufFile.open(paths[0])
