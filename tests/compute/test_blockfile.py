from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

from headrace.compute.blockfile import BlockFile, Damaged

BYTES = 1000


def content(number: int) -> memoryview:
    return memoryview(bytes((number + i) % 256 for i in range(BYTES)))


def read(file: BlockFile, slot: int) -> bytes:
    target = memoryview(bytearray(BYTES))
    assert file.read(slot, target) == zlib.crc32(target)
    return bytes(target)


def test_every_slot_gives_back_what_was_written_to_it_last(tmp_path: Path) -> None:
    file = BlockFile(tmp_path / "deep" / "blocks", 3, BYTES)
    for slot in (0, 2, 1, 2):
        file.write(slot, content(7 * slot))
    file.write(2, content(99))
    assert [read(file, slot) for slot in range(3)] == [bytes(content(n)) for n in (0, 7, 99)]
    assert (tmp_path / "deep" / "blocks").stat().st_size == 3 * BYTES, "the probe is cut off again"
    assert file.speed.read > 0
    assert file.speed.write > 0
    file.close()


def test_block_files_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    BlockFile(tmp_path / "deep" / "blocks", 1, BYTES).close()
    assert (tmp_path / "deep").stat().st_mode & 0o077 == 0
    assert (tmp_path / "deep" / "blocks").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("place", [0, BYTES - 1])
def test_one_changed_byte_changes_the_checksum(tmp_path: Path, place: int) -> None:
    file = BlockFile(tmp_path / "blocks", 2, BYTES)
    written = file.write(1, content(3))
    target = memoryview(bytearray(BYTES))
    assert file.read(1, target) == written
    with (tmp_path / "blocks").open("r+b") as other:
        other.seek(BYTES + place)
        byte = other.read(1)[0]
        other.seek(BYTES + place)
        other.write(bytes([byte ^ 1]))
    assert file.read(1, target) != written


def test_a_file_that_was_cut_is_damaged(tmp_path: Path) -> None:
    file = BlockFile(tmp_path / "blocks", 2, BYTES)
    file.write(1, content(3))
    os.truncate(tmp_path / "blocks", BYTES + 10)
    with pytest.raises(Damaged, match="shorter"):
        read(file, 1)


def test_a_file_belongs_to_one_process_at_a_time(tmp_path: Path) -> None:
    first = BlockFile(tmp_path / "blocks", 2, BYTES)
    with pytest.raises(OSError, match="temporarily unavailable"):
        BlockFile(tmp_path / "blocks", 2, BYTES)
    first.close()
    BlockFile(tmp_path / "blocks", 2, BYTES).close()
