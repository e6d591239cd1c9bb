from __future__ import annotations

import logging
import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.files import (
    PRIVATE_FILE,
    Layout,
    open_database,
    private_folder,
    private_opener,
    replace_text,
    replacing,
)

LAYOUT = Layout("a store of tests", "t", ("CREATE TABLE t (a);",))
OPENINGS = (lambda each: open_database(each, LAYOUT), lambda each: open(each, "ab", opener=private_opener))  # noqa: SIM115


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


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def usual_umask():
    """The umask of most machines, under which new files are readable by everyone."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("usual_umask")
def test_a_database_and_the_files_beside_it_are_private_from_the_start(tmp_path):
    path = tmp_path / "store.db"
    database = open_database(path, LAYOUT)
    database.execute("INSERT INTO t VALUES (1)")
    found = {each.name: mode(each) for each in path.parent.iterdir()}
    assert found == dict.fromkeys(("store.db", "store.db-wal", "store.db-shm"), 0o600)
    database.close()


@pytest.mark.usefixtures("usual_umask")
def test_an_existing_database_loses_the_permissions_of_others_and_nothing_else(tmp_path):
    path = tmp_path / "store.db"
    old = sqlite3.connect(path)
    old.execute("PRAGMA journal_mode = WAL")
    old.execute("CREATE TABLE t (a)")
    old.execute("PRAGMA user_version = 1")
    old.commit()
    files = [tmp_path / name for name in ("store.db", "store.db-wal", "store.db-shm")]
    assert [mode(each) for each in files] == [0o644] * 3
    new = open_database(path, LAYOUT)
    assert [mode(each) for each in files] == [0o600] * 3
    assert new.execute("SELECT count(*) FROM t").fetchone() == (0,)
    assert mode(tmp_path) == 0o700  # pytest's own
    tmp_path.chmod(0o755)
    open_database(path, LAYOUT).close()
    assert mode(tmp_path) == 0o755
    new.close()
    old.close()


def test_a_second_connection_does_not_release_the_locks_of_the_first(tmp_path):
    path = tmp_path / "store.db"
    first = open_database(path, LAYOUT)
    first.execute("BEGIN IMMEDIATE")
    open_database(path, LAYOUT).close()
    other = "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0).execute('INSERT INTO t VALUES (1)')"
    found = subprocess.run([sys.executable, "-c", other, path], capture_output=True, text=True, check=False)
    assert "database is locked" in found.stderr
    first.close()


@pytest.mark.usefixtures("usual_umask")
def test_an_opened_file_is_private_new_or_old(tmp_path):
    for name, before in (("new", None), ("old", 0o644), ("group", 0o660)):
        path = tmp_path / name
        if before is not None:
            path.write_bytes(b"x")
            path.chmod(before)
        with open(path, "ab", opener=private_opener):
            assert mode(path) == (0o600 if before is None else before & 0o700), name
        assert path.read_bytes() == (b"" if before is None else b"x")


@pytest.mark.usefixtures("usual_umask")
def test_a_private_file_is_replaced_by_a_private_one(tmp_path):
    path = tmp_path / "experiments.json"
    replace_text(path, "old")
    assert mode(path) == 0o644
    replace_text(path, "new", PRIVATE_FILE)
    assert mode(path) == 0o600


@pytest.mark.usefixtures("usual_umask")
def test_a_link_of_the_operator_is_followed_to_a_file_that_exists_or_not(tmp_path):
    for name in ("there", "missing"):
        target, link = tmp_path / name / "store.db", tmp_path / f"{name}.db"
        target.parent.mkdir()
        if name == "there":
            target.write_bytes(b"")
        link.symlink_to(target)
        open_database(link, LAYOUT).close()
        assert link.is_symlink()
        assert mode(target) == 0o600


@pytest.mark.parametrize("kind", ["link", "file"])
def test_what_a_stranger_left_in_a_shared_folder_is_refused(tmp_path, monkeypatch, kind):
    shared, victim = tmp_path / "tmp", tmp_path / "victim"
    shared.mkdir()
    shared.chmod(0o1777)
    path = shared / "headrace.db"
    victim.write_text("of another user")
    path.symlink_to(victim) if kind == "link" else path.write_text("")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    folder, lstat = os.stat, os.lstat
    stranger = os.getuid()

    def owned_by_another(name, *args, **more):
        found = folder(name, *args, **more)
        return os.stat_result((*found[:4], stranger + 2, *found[5:])) if Path(name) == shared else found

    monkeypatch.setattr(os, "stat", owned_by_another)
    assert lstat(path).st_uid == stranger
    for opening in OPENINGS:
        with pytest.raises(OSError, match="another user made it"):
            opening(path)
    assert victim.read_text() == "of another user"


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """A folder in which all users can create files; what is named there with ``stranger`` belongs to another user."""
    folder, lstat = tmp_path / "tmp", os.lstat
    folder.mkdir()
    folder.chmod(0o1777)

    def found(name, *args, **more):
        real = lstat(name, *args, **more)
        planted = Path(name).name.startswith("stranger")
        return os.stat_result((*real[:4], os.getuid() + 1, *real[5:])) if planted else real

    monkeypatch.setattr(os, "lstat", found)
    return folder


@pytest.mark.parametrize("ending", ["-journal", "-wal", "-shm"])
def test_a_strangers_journal_is_not_written_into_a_database(shared, monkeypatch, ending):
    planted = shared / f"own{ending}"
    planted.write_bytes(b"of a stranger")
    lstat = os.lstat
    monkeypatch.setattr(
        os, "lstat", lambda name, *args: lstat(shared / "stranger" if Path(name) == planted else name, *args)
    )
    (shared / "stranger").write_bytes(b"")
    with pytest.raises(OSError, match="another user made it"):
        open_database(shared / "own", LAYOUT)
    assert planted.read_bytes() == b"of a stranger"


def test_a_file_is_not_replaced_through_a_strangers_link(shared, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("of this user")
    (shared / "stranger").symlink_to(victim)
    with pytest.raises(OSError, match="another user made it"), replacing(shared / "stranger") as file:
        file.write(b"x")
    assert victim.read_text() == "of this user"
    (shared / "own").symlink_to(victim)
    with replacing(shared / "own") as file:
        file.write(b"x")
    assert victim.read_text() == "x"


def test_a_strangers_link_on_the_way_to_a_file_is_refused(shared, tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    (shared / "stranger").symlink_to(own)
    (shared / "linked").symlink_to(own)
    for opening in OPENINGS:
        with pytest.raises(OSError, match="another user made it"):
            opening(shared / "stranger" / "headrace.db")
    assert list(own.iterdir()) == []
    open_database(shared / "linked" / "headrace.db", LAYOUT).close()
    assert (own / "headrace.db").exists()


def test_a_mode_that_cannot_be_changed_is_a_warning(tmp_path, monkeypatch, caplog):
    path = tmp_path / "store.db"
    path.write_bytes(b"")
    path.chmod(0o644)

    def refused(*args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chmod", refused)
    with caplog.at_level(logging.WARNING):
        open_database(path, LAYOUT).close()
    assert f"other users can read {path}" in caplog.text


@pytest.mark.usefixtures("usual_umask")
def test_missing_folders_are_private_and_existing_ones_stay(tmp_path):
    (tmp_path / "a").mkdir()
    private_folder(tmp_path / "a" / "b" / "c")
    assert [mode(tmp_path / each) for each in ("a", "a/b", "a/b/c")] == [0o755, 0o700, 0o700]
