"""Rows of images in a file that two processes share."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.compute.images.rows_file import PlacedRows, RowsFile, read_rows, stored_bytes, write_rows
from headrace.compute.images.slots import ImageRows
from tests.compute.images.test_cache import image

CPU = torch.device("cpu")
SOON = 30.0
PAGE = os.sysconf("SC_PAGE_SIZE")


def memory_of(file: RowsFile, expected: int) -> int:
    """The bytes of memory that a file takes, once its thread has given back all but those ``expected``."""
    gc.collect()
    end = time.monotonic() + SOON
    while (found := 512 * os.fstat(file.fd).st_blocks) != expected and time.monotonic() < end:
        time.sleep(0.001)
    return found


def stored(file: RowsFile, features: ImageRows) -> PlacedRows:
    placed = file.place(stored_bytes(features))
    write_rows(file.fd, placed.at, features)
    return placed


def large(pages: int, value: float) -> ImageRows:
    """Rows that take a little more than so many pages."""
    return ImageRows(torch.full((pages, PAGE // 4), value), np.arange(0))


def test_rows_are_the_same_after_the_file() -> None:
    file, plain = RowsFile(), image(5).features
    deep = torch.arange(2 * 5 * 6, dtype=torch.bfloat16).reshape(2, 5, 6)
    rows = torch.randn(5, 6).to(torch.bfloat16)
    for given in (
        plain,
        replace(plain, rows=rows, deep=deep, grid=(2, 3)),
        replace(plain, rows=rows.T[:, :3]),
    ):
        placed = stored(file, given)
        found = read_rows(file.fd, placed.at, placed.nbytes, CPU)
        assert torch.equal(found.rows, given.rows)
        assert found.rows.dtype == given.rows.dtype
        assert found.offsets.tolist() == given.offsets.tolist()
        assert found.grid == given.grid
        assert found.deep is None if given.deep is None else torch.equal(found.deep, given.deep)


def test_a_place_takes_memory_from_the_first_byte_until_nothing_refers_to_it() -> None:
    file = RowsFile()
    first, unused, second = stored(file, large(3, 1.0)), file.place(1 << 40), stored(file, large(2, 2.0))
    assert memory_of(file, 7 * PAGE) == 7 * PAGE
    del first, unused
    assert memory_of(file, 3 * PAGE) == 3 * PAGE
    assert torch.equal(read_rows(file.fd, second.at, second.nbytes, CPU).rows, large(2, 2.0).rows)
    del second
    assert memory_of(file, 0) == 0


def test_rows_are_written_and_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system reads and writes at most 2 GiB at once."""
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:1000], at))
    monkeypatch.setattr(os, "preadv", lambda fd, data, at: preadv(fd, [data[0][:900]], at))
    file, given = RowsFile(), large(2, 3.0)
    placed = stored(file, given)
    assert torch.equal(read_rows(file.fd, placed.at, placed.nbytes, CPU).rows, given.rows)


def test_rows_that_are_not_in_the_file_cannot_be_read() -> None:
    file = RowsFile()
    with pytest.raises(EOFError, match="the rows of an image are not in the file"):
        read_rows(file.fd, 0, 100, CPU)


def test_only_a_process_that_gets_the_descriptor_has_the_file() -> None:
    file = RowsFile()
    placed = stored(file, large(1, 1.0))
    command = [
        sys.executable,
        "-c",
        f"import os; print(len(os.pread({file.fd}, {placed.nbytes}, {placed.at})))",
    ]
    with_it = subprocess.run(command, pass_fds=[file.fd], capture_output=True, text=True, check=False)
    without = subprocess.run(command, close_fds=False, capture_output=True, text=True, check=False)
    assert (with_it.stdout.strip(), without.returncode) == (str(placed.nbytes), 1)


def test_the_file_ends_with_its_owner() -> None:
    file = RowsFile()
    place = f"/proc/self/fd/{file.fd}"

    def is_open() -> bool:
        try:
            return "headrace-image-rows" in os.readlink(place)
        except FileNotFoundError:
            return False

    assert is_open()
    del file
    end = time.monotonic() + SOON
    while is_open():
        assert time.monotonic() < end
        time.sleep(0.001)
