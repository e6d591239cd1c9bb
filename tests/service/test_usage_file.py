"""The task that adds usage to a file: nothing is lost while the file cannot be written, or at the end."""

import asyncio
import logging
import threading

import pytest

from headrace.service import usage_file
from headrace.service.usage_file import UsageFile


class Used(list):
    @property
    def empty(self):
        return not self


class Store:
    def __init__(self):
        self.added, self.full, self.closed = [], False, False

    def add(self, used):
        if self.full:
            raise OSError("no space left")
        self.added += used

    def tenants(self):
        return sorted(set(self.added))

    def tenant(self, tenant):
        return {"requests": self.added.count(tenant)}

    def focus(self, tenant):
        return f"csv of {tenant}"

    def close(self):
        self.closed = True


def make():
    used, store = [], Store()

    def take():
        taken = Used(used)
        used.clear()
        return taken

    return UsageFile(store, take), store, used


@pytest.mark.anyio
async def test_answers_include_what_came_since_the_last_write():
    file, _, used = make()
    used += ["a", "b", "a"]
    assert await file.tenant("a") == {"requests": 2}
    assert await file.tenants() == ["a", "b"]
    used.append("a")
    assert await file.focus("a") == "csv of a"
    assert await file.tenant("a") == {"requests": 3}


@pytest.mark.anyio
async def test_what_cannot_be_written_waits(caplog):
    file, store, used = make()
    store.full = True
    used.append("a")
    with caplog.at_level(logging.WARNING):
        assert await file.tenant("a") == {"requests": 0}
    assert "cannot be written: OSError: no space left" in caplog.text
    used.append("b")
    await file.tenants()
    assert used == ["b"], "usage was taken that cannot be written"
    store.full = False
    assert await file.tenants() == ["a", "b"]


@pytest.mark.anyio
async def test_it_writes_by_itself_and_at_the_end(monkeypatch):
    monkeypatch.setattr(usage_file, "WRITE_SECONDS", 0.0)
    file, store, used = make()
    used.append("a")
    file.start()
    for _ in range(60_000):
        if store.added:
            break
        await usage_file.asyncio.sleep(0.001)
    assert store.added == ["a"]
    used.append("b")
    await file.stop()
    assert store.added == ["a", "b"]
    assert store.closed


@pytest.mark.anyio
async def test_usage_counts_once_if_a_reader_leaves_while_it_is_written():
    """The thread goes on writing, so the next reader must wait for it."""
    file, store, used = make()
    begun, may_end, add = threading.Event(), threading.Event(), store.add

    def slowly(used):
        begun.set()
        may_end.wait(60.0)
        add(used)

    store.add = slowly
    used.append("a")
    reader = asyncio.create_task(file.tenants())
    await asyncio.to_thread(begun.wait, 60.0)
    reader.cancel()
    stopping = asyncio.create_task(file.stop())
    for _ in range(10):
        await asyncio.sleep(0)
    may_end.set()
    await stopping
    assert store.added == ["a"]
