from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from headrace.files import replace_text, replacing


def test_a_file_is_replaced_and_its_folder_created(tmp_path):
    path = tmp_path / "a" / "b.json"
    replace_text(path, "old")
    replace_text(path, "ü")
    assert path.read_text(encoding="utf-8") == "ü"
    assert list(path.parent.iterdir()) == [path]


def test_an_error_in_the_middle_leaves_the_old_file(tmp_path):
    path = tmp_path / "b.json"
    replace_text(path, "old")

    def half_written() -> None:
        with replacing(path) as file:
            file.write(b"ne")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        half_written()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_rest_of_a_killed_process_is_no_obstacle(tmp_path):
    (tmp_path / "b.json.new").write_text("a part of a longer text")
    replace_text(tmp_path / "b.json", "new")
    assert (tmp_path / "b.json").read_text() == "new"
    assert not (tmp_path / "b.json.new").exists()


def test_permissions_stay_and_a_link_is_followed(tmp_path):
    path, link = tmp_path / "b", tmp_path / "link"
    replace_text(path, "old")
    path.chmod(0o640)
    link.symlink_to(path)
    replace_text(link, "new")
    assert link.is_symlink()
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    with replacing(tmp_path / "secret", 0o600) as file:
        file.write(b"x")
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


def test_a_pipe_is_written_through_the_link_of_standard_output():
    """``/dev/stdout`` in a pipeline: its target has no path."""
    read, write = os.pipe()
    try:
        replace_text(Path(f"/dev/fd/{write}"), "text")
        assert os.read(read, 10) == b"text"
    finally:
        os.close(read)
        os.close(write)


def test_a_device_is_written_and_a_folder_is_refused(tmp_path):
    replace_text(Path("/dev/null"), "gone")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with pytest.raises(IsADirectoryError):
        replace_text(tmp_path, "text")
