""""""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

import pytest

from headrace.compute.blockfile import BlockFile, Damaged, NotUsable, read_snapshot, write_snapshot
from headrace.core.block_keys import chained_key, root_key
from headrace.core.images import ImageSpan, contents
from headrace.core.memory.lower_tier import Saved

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


IDENTITY = {"fingerprint": "abc", "dtype": "float32"}
SIZE = 4


def blocks(count: int = 3) -> list[Saved]:
    made, parent = [], root_key("a secret salt", "")
    for i in range(count):
        tokens = tuple(range(100 * i, 100 * i + SIZE))
        key = chained_key(parent, tokens)
        made.append(Saved(count - i, parent, key, tokens))
        parent = key
    return made


def written(path: Path) -> Path:
    file = path / "snapshot"
    assert write_snapshot(file, IDENTITY, blocks(), {1: 11, 2: 12, 3: 13}) == 3
    return file


def read_saved(file: Path, **changed: object) -> list[tuple[Saved, int]]:
    return read_snapshot(file, {**IDENTITY, **changed}, SIZE, 4)


def test_what_was_written_is_read_in_its_order(tmp_path: Path) -> None:
    file = written(tmp_path)
    assert read_saved(file) == list(zip(blocks(), [13, 12, 11], strict=True))
    assert file.stat().st_mode & 0o077 == 0
    assert list(tmp_path.iterdir()) == [file]
    assert b"a secret salt" not in file.read_bytes()


def test_slots_that_hold_nothing_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "snapshot"
    assert write_snapshot(file, IDENTITY, blocks(), {1: 11, 3: 13}) == 2
    assert [checksum for _, checksum in read_saved(file)] == [13, 11]


def test_blocks_with_images_are_left_out(tmp_path: Path) -> None:
    first, second, third = blocks()
    shown = tuple(contents(second.tokens, (ImageSpan(1, 2, bytes(32)),)))
    second = second._replace(tokens=shown, key=chained_key(first.key, shown))
    file = tmp_path / "snapshot"
    assert write_snapshot(file, IDENTITY, [first, second, third], {1: 11, 2: 12, 3: 13}) == 2
    assert [saved.tokens for saved, _ in read_saved(file)] == [first.tokens, third.tokens]


@pytest.mark.parametrize("changed", [{"fingerprint": "other"}, {"dtype": "bfloat16"}, {"layout": "new"}])
def test_another_engines_blocks_are_not_used(tmp_path: Path, changed: dict[str, str]) -> None:
    with pytest.raises(NotUsable, match=f"its {next(iter(changed))} is"):
        read_saved(written(tmp_path), **changed)


def test_any_damaged_byte_is_found(tmp_path: Path) -> None:
    file = written(tmp_path)
    whole = file.read_bytes()
    for place in range(0, len(whole), 7):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(NotUsable):
            read_saved(file)
    for length in (0, 3, 4, 50, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(NotUsable):
            read_saved(file)


def sealed(content: bytes) -> bytes:
    return content + zlib.crc32(content).to_bytes(4, "little")


@pytest.mark.parametrize("content", [b"", b"[1, 2]\n", b"{}\n", b"not JSON\n", b"3\n"])
def test_some_other_file_is_not_used(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "snapshot"
    file.write_bytes(sealed(content))
    with pytest.raises(NotUsable):
        read_saved(file)


def test_a_list_that_lies_is_not_used(tmp_path: Path) -> None:
    file = written(tmp_path)
    header, _, body = file.read_bytes()[:-4].partition(b"\n")
    reported = json.loads(header)
    file.write_bytes(sealed(json.dumps({**reported, "blocks": 2}).encode() + b"\n" + body))
    with pytest.raises(NotUsable, match="length"):
        read_saved(file)
    token = len(body) - 8
    file.write_bytes(sealed(header + b"\n" + body[:token] + b"\x07" + body[token + 1 :]))
    with pytest.raises(NotUsable, match="does not match its tokens"):
        read_saved(file)
    file.write_bytes(sealed(header + b"\n" + b"\xff" + body[1:]))
    with pytest.raises(NotUsable, match="slot 255 of 4"):
        read_saved(file)
