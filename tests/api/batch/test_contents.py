from pathlib import Path

import pytest

from headrace.api.batch.contents import Contents


def test_an_upload_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    contents = Contents(tmp_path / "files")
    upload = contents.upload()
    upload.write(b"ab")
    upload.write(b"c")
    assert not contents.path("file-1").exists()
    upload.sync()
    upload.keep(contents.path("file-1"))
    upload.drop()
    assert contents.path("file-1").read_bytes() == b"abc"
    dropped = contents.upload()
    dropped.write(b"x")
    dropped.drop()
    assert not list((tmp_path / "files" / "uploads").iterdir())


def test_what_a_killed_server_left_is_deleted(tmp_path: Path) -> None:
    contents = Contents(tmp_path)
    contents.upload().write(b"half")
    contents.path("file-1").write_bytes(b"1")
    contents.path("file-2").write_bytes(b"2")
    contents.tidy({"file-1"})
    assert not list((tmp_path / "uploads").iterdir())
    assert contents.path("file-1").exists()
    assert not contents.path("file-2").exists()


def test_one_server_uses_a_folder(tmp_path: Path) -> None:
    contents = Contents(tmp_path)
    with pytest.raises(OSError, match="another server uses"):
        Contents(tmp_path)
    contents.close()
    Contents(tmp_path).close()


def test_others_on_the_machine_cannot_read_it(tmp_path: Path) -> None:
    Contents(tmp_path / "files")
    assert (tmp_path / "files").stat().st_mode & 0o077 == 0
