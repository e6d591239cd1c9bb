import asyncio
import logging
import os

import pytest

from headrace.api.auth.api_keys import read_keys
from headrace.api.auth.key_file import KeyFile


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "keys"
    file.write_text("first\n")
    return file


@pytest.fixture
def key_file(path):
    return KeyFile(lambda: read_keys([], str(path)), str(path), poll_seconds=0.01)


def accepted(key_file, key):
    return key_file.keys.identify(f"Bearer {key}") is not None


def test_a_changed_file_is_read_once_it_stays_the_same(path, key_file):
    key_file.watch.check()
    path.write_text("second\nthird\n")
    key_file.watch.check()
    assert accepted(key_file, "first")  # it may still be being written
    key_file.watch.check()
    assert accepted(key_file, "second")
    assert not accepted(key_file, "first")


def test_a_file_that_takes_the_old_ones_place_is_noticed(path, key_file, tmp_path):
    new = tmp_path / "new"
    new.write_text("other\n")
    os.utime(new, ns=(0, path.stat().st_mtime_ns))
    new.replace(path)  # same size and time, another inode
    key_file.watch.check()
    key_file.watch.check()
    assert accepted(key_file, "other")


@pytest.mark.parametrize("broken", ["", "secret acme nonsense\n", None])
def test_a_broken_file_keeps_the_old_keys_and_warns_once(path, key_file, caplog, broken):
    if broken is None:
        path.unlink()
    else:
        path.write_text(broken)
    for _ in range(4):
        key_file.watch.check()
    assert accepted(key_file, "first")
    (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "previous keys stay valid" in record.getMessage()
    assert "secret" not in caplog.text


def test_the_log_says_how_many_keys_there_are_and_never_which(path, key_file, caplog):
    path.write_text("sk-one\nsk-two acme\nsk-three - admin\n")
    with caplog.at_level(logging.INFO):
        assert key_file.reload()
    assert "2 inference, 0 metrics, 1 admin" in caplog.text
    assert "sk-" not in caplog.text


def test_the_file_is_watched_while_the_server_runs(path, key_file):
    async def rotate():
        key_file.watch.start()
        path.write_text("second\n")
        until = asyncio.get_running_loop().time() + 60
        while not accepted(key_file, "second"):
            assert asyncio.get_running_loop().time() < until
            await asyncio.sleep(0.01)
        await key_file.watch.stop()

    asyncio.run(rotate())


def test_without_a_file_there_is_nothing_to_watch():
    async def idle():
        key_file = KeyFile(lambda: read_keys(["a"], None), None)
        key_file.watch.start()
        await key_file.watch.stop()
        assert key_file.reload()
        return key_file

    assert accepted(asyncio.run(idle()), "a")
