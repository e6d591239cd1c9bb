"""The task that adds usage to a file: nothing is lost while the file cannot be written, or at the end."""

import logging

import pytest

from headrace.serve import usage_file
from headrace.serve.usage_file import UsageFile


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
