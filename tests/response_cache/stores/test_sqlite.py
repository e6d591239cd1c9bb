import asyncio
import os
import sqlite3
import stat
import subprocess
import sys
from contextlib import asynccontextmanager

import pytest

from headrace.response_cache.stores import sqlite
from headrace.response_cache.stores.sqlite import SQLiteStore

TAGS = ("*",)
KEYS = [bytes([i]) * 32 for i in range(200)]


@asynccontextmanager
async def opened(path, max_bytes=1 << 24, **more):
    store = SQLiteStore(path, max_bytes, **more)
    try:
        yield store
    finally:
        await store.close()


def test_answers_outlive_the_process(tmp_path):
    path = tmp_path / "deep" / "answers.db"

    async def run():
        async with opened(path) as store:
            await store.put(KEYS[0], b"v", 60.0, ("tag", "*"))
            await store.clear("other")
        async with opened(path) as store:
            assert await store.get(KEYS[0]) == b"v"
            assert await store.versions() == {"other": 1}

    asyncio.run(run())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_two_processes_share_one_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite, "BUSY_SECONDS", 60.0)
    path = tmp_path / "answers.db"
    other = """
import asyncio, sys
from headrace.response_cache.stores import sqlite
from headrace.response_cache.stores.sqlite import SQLiteStore
sqlite.BUSY_SECONDS = 60.0
async def run():
    store = SQLiteStore(sys.argv[1], 1 << 24)
    for i in range(200):
        await store.put(bytes([i]) * 32, b"theirs", 60.0, ("*",))
    await store.clear("news")
    await store.close()
asyncio.run(run())
"""

    async def run():
        async with opened(path) as store:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", other, str(path), env=os.environ | {"PYTHONPATH": ":".join(sys.path)}
            )
            for key in KEYS:
                await store.put(key, b"mine", 60.0, TAGS)
            assert await process.wait() == 0
            assert {await store.get(key) for key in KEYS} <= {b"mine", b"theirs"}
            assert await store.versions() == {"news": 1}

    asyncio.run(run())


def test_it_stays_within_its_room_and_drops_what_was_not_used(tmp_path):
    async def run():
        now = [1000.0]
        async with opened(tmp_path / "answers.db", 1 << 20, clock=lambda: now[0]) as store:
            for key in KEYS[:60]:
                await store.put(key, os.urandom(8000), 1e6, TAGS)
            now[0] += 1000
            assert await store.get(KEYS[0]) is not None
            for key in KEYS[60:]:
                now[0] += 61
                assert await store.get(KEYS[0]) is not None
                await store.put(key, os.urandom(8000), 1e6, TAGS)
            kept = [key for key in KEYS if await store.get(key) is not None]
            assert KEYS[0] in kept
            assert KEYS[-1] in kept
            assert KEYS[1] not in kept
            assert store.facts().nbytes <= 1 << 20
            assert store.facts().evictions == len(KEYS) - len(kept)

    asyncio.run(run())


def test_a_file_that_breaks_while_it_is_in_use_is_begun_anew(tmp_path):
    path = tmp_path / "answers.db"

    async def run():
        async with opened(path) as store:
            for key in KEYS:
                await store.put(key, os.urandom(4000), 60.0, TAGS)
            sqlite3.connect(path).execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            with path.open("r+b") as file:
                file.seek(4096)
                file.write(b"\xff" * (path.stat().st_size - 4096))
            failures = 0
            for attempt in range(6):
                try:
                    await store.put(KEYS[0], b"%d" % attempt, 60.0, TAGS)
                    await store.get(KEYS[0])
                except sqlite3.DatabaseError:
                    failures += 1
            assert failures < 4
            assert await store.get(KEYS[0]) == b"5"

    asyncio.run(run())


def test_a_folder_that_cannot_be_written_is_said_at_the_start(tmp_path):
    (tmp_path / "answers").mkdir()
    with pytest.raises(OSError, match="answers"):
        SQLiteStore(tmp_path / "answers", 1 << 20)
    (tmp_path / "answers").rmdir()
    (tmp_path / "answers").write_text("")
    with pytest.raises(OSError, match="answers"):
        SQLiteStore(tmp_path / "answers" / "db", 1 << 20)


FULL_DISK = """
import asyncio, resource, signal, sys
from headrace.response_cache.stores.sqlite import SQLiteStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

async def run():
    store = SQLiteStore(sys.argv[1], 1 << 24)
    kept, refused = [], 0
    for i in range(100):
        try:
            await store.put(bytes([i]) * 32, bytes([i]) * 10_000, 60.0, ("*",))
            kept.append(i)
        except Exception:
            refused += 1
    assert kept and refused, (kept, refused)
    for i in kept:
        assert await store.get(bytes([i]) * 32) == bytes([i]) * 10_000
    await store.close()

asyncio.run(run())
"""


def test_on_a_full_disk_what_was_written_can_still_be_read(tmp_path):
    path = str(tmp_path / "answers.db")
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, path],
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
