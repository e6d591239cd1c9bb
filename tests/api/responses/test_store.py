"""The store of responses: bounds, tenants, chains, and what a restart finds."""

from __future__ import annotations

import asyncio
import json
import sqlite3

import pytest

from headrace.api.responses import store as module
from headrace.api.responses.store import BrokenChain, EventLog, Record, ResponseStore

BIG = 1 << 20


def response(id, previous=None, status="completed", text="x"):
    output = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}]
    return {"id": id, "previous_response_id": previous, "status": status, "output": output}


def record(id, tenant="ann", previous=None, status="completed", text="x"):
    return Record(tenant, [{"id": f"msg_{id}"}], response(id, previous, status, text))


class Clock:
    now = 1000.0

    def __call__(self):
        self.now += 1
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(clock):
    store = ResponseStore(None, BIG, clock)
    yield store
    store.close()


def get(store, id, tenant=None):
    return asyncio.run(store.get(tenant, id))


def test_a_response_is_stored_and_replaced(store):
    store.put(record("a", status="queued"))
    store.put(record("a", text="later"))
    assert get(store, "a") == record("a", text="later")
    assert get(store, "b") is None


def test_a_tenant_sees_only_its_own(store):
    store.put(record("a"))
    store.put(record("b", previous="a"))
    assert get(store, "a", "ann") is not None
    assert get(store, "a", "bob") is None
    assert not asyncio.run(store.delete("bob", "a"))
    with pytest.raises(BrokenChain):
        asyncio.run(store.chain("bob", "b"))
    assert asyncio.run(store.delete("ann", "a"))
    assert get(store, "a") is None


def test_the_id_of_another_tenant_is_not_replaced(store):
    store.put(record("a", "ann"))
    store.put(record("a", "bob", text="later"))
    assert get(store, "a") == record("a", "ann")
    assert set(store._sizes) == {"ann"}


@pytest.mark.parametrize("options", [{"keys": ("ann", "bob")}])
def test_the_id_of_a_stored_response_is_not_given_again(house):
    def create(key, **more):
        body = {"input": "Hi", "request_id": "mine", "max_output_tokens": 3} | more
        return house.client.post("/v1/responses", json=body, headers={"Authorization": f"Bearer {key}"})

    first = create("ann").json()
    for key in ("ann", "bob"):
        refused = create(key, input="Ho")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "request_id")
    shown = house.client.get("/v1/responses/resp_mine", headers={"Authorization": "Bearer ann"})
    assert shown.json() == first
    assert create("bob", store=False).json()["id"] == "resp_mine"


def test_what_could_not_be_written_does_not_count(clock):
    """The disk is full when a transaction ends; a constraint that is checked then stands for it."""
    store = ResponseStore(None, 3000, clock)
    store._connection.execute("PRAGMA foreign_keys = ON")
    store._connection.executescript(
        "CREATE TABLE disk (id INTEGER PRIMARY KEY);"
        "CREATE TABLE full (id INTEGER REFERENCES disk (id) DEFERRABLE INITIALLY DEFERRED);"
        "CREATE TRIGGER written AFTER INSERT ON responses BEGIN INSERT INTO full VALUES (1); END;"
    )
    for id in "abcdefgh":
        store.put(record(id, text="x" * 500))
    assert get(store, "a") is None
    assert (store._sizes, store._counts) == ({}, {})
    store._connection.execute("DROP TRIGGER written")
    store.put(record("b", "bob"))
    assert get(store, "b") is not None
    store.close()


def test_a_chain_is_the_oldest_first(store):
    for id, previous in (("a", None), ("b", "a"), ("c", "b"), ("other", "a")):
        store.put(record(id, previous=previous))
    chain = asyncio.run(store.chain("ann", "c"))
    assert [each.response["id"] for each in chain] == ["a", "b", "c"]


def test_a_chain_without_its_beginning_is_broken(store):
    for id, previous in (("a", None), ("b", "a"), ("c", "b")):
        store.put(record(id, previous=previous))
    asyncio.run(store.delete(None, "a"))
    with pytest.raises(BrokenChain, match="a"):
        asyncio.run(store.chain(None, "c"))


def test_a_chain_has_a_longest_length(store, monkeypatch):
    monkeypatch.setattr(module, "MAX_CHAIN", 2)
    for id, previous in (("a", None), ("b", "a"), ("c", "b")):
        store.put(record(id, previous=previous))
    assert len(asyncio.run(store.chain(None, "b"))) == 2
    with pytest.raises(BrokenChain, match="a"):
        asyncio.run(store.chain(None, "c"))


def test_the_tenant_that_uses_most_loses_its_least_recently_used(clock):
    store = ResponseStore(None, 2300, clock)
    store.put(record("small", tenant="bob"))
    store.put(record("a", text="x" * 600))
    store.put(record("b", text="x" * 600))
    asyncio.run(store.chain(None, "a"))  # uses it
    store.put(record("c", text="x" * 600))
    assert [id for id in ("small", "a", "b", "c") if get(store, id)] == ["small", "a", "c"]
    store.put(record("huge", text="x" * 3000))
    assert get(store, "huge") is None
    assert get(store, "small") is not None
    store.close()


def test_the_number_is_bounded(store, monkeypatch):
    monkeypatch.setattr(module, "MAX_RESPONSES", 2)
    for id in "abc":
        store.put(record(id))
    assert [id for id in "abc" if get(store, id)] == ["b", "c"]


def test_many_small_responses_of_one_tenant_do_not_evict_the_large_one_of_another(store, monkeypatch):
    monkeypatch.setattr(module, "MAX_RESPONSES", 4)
    store.put(record("large", tenant="bob", text="x" * 5000))
    for id in "abcdef":
        store.put(record(id))
    assert [id for id in ("large", *"abcdef") if get(store, id)] == ["large", "d", "e", "f"]


def test_old_responses_are_deleted(store, clock):
    store.put(record("a"))
    assert get(store, "a")
    clock.now += module.MAX_AGE_SECONDS
    assert get(store, "a") is None
    store.put(record("b"))
    assert get(store, "b")
    clock.now -= module.MAX_AGE_SECONDS
    assert get(store, "a") is None


def test_a_file_outlives_the_server_and_what_was_unfinished_has_failed(tmp_path, clock):
    path = tmp_path / "responses.db"
    store = ResponseStore(path, BIG, clock)
    store.put(record("a"))
    store.put(record("b", status="in_progress"))
    store.close()
    store.put(record("late"))
    store = ResponseStore(path, BIG, clock)
    assert get(store, "a") == record("a")
    assert get(store, "b").response["status"] == "failed"
    assert get(store, "b").response["error"]["code"] == "server_error"
    assert get(store, "late") is None
    store.close()


def test_bounds_hold_across_a_restart(tmp_path, clock):
    path = tmp_path / "responses.db"
    store = ResponseStore(path, 2500, clock)
    store.put(record("a", text="x" * 900))
    store.put(record("b", text="x" * 900))
    store.close()
    store = ResponseStore(path, 2500, clock)
    store.put(record("c", text="x" * 900))
    assert [id for id in "abc" if get(store, id)] == ["b", "c"]
    store.close()


def test_a_file_that_cannot_be_used_is_named(tmp_path, clock):
    path = tmp_path / "responses.db"
    store = ResponseStore(path, BIG, clock)
    with pytest.raises(OSError, match="locked"):
        ResponseStore(path, BIG, clock)
    store.close()
    with pytest.raises(OSError, match="No such file"):
        ResponseStore(tmp_path / "missing" / "x.db", BIG, clock)


def test_items_and_streams_go_with_their_response(store):
    store.put(record("a")._replace(events=b"123"))
    store.put(record("b", tenant="bob"))
    assert asyncio.run(store.events("a")) == b"123"
    assert asyncio.run(store.item("ann", "msg_a")) == {"id": "msg_a"}
    assert asyncio.run(store.item(None, "msg_b")) == {"id": "msg_b"}
    assert asyncio.run(store.item("ann", "msg_b")) is None
    assert asyncio.run(store.delete("ann", "a"))
    assert asyncio.run(store.events("a")) is None
    assert asyncio.run(store.item(None, "msg_a")) is None


def test_a_file_of_the_layout_before_is_taken_over(tmp_path, clock):
    path = tmp_path / "responses.db"
    old = sqlite3.connect(path)
    old.executescript(module._LAYOUT_1 + "PRAGMA user_version = 1;")
    row = record("a")
    old.execute(
        "INSERT INTO responses VALUES ('a', 'ann', NULL, 999, 999, 5, 'completed', ?, ?)",
        (json.dumps(row.input), json.dumps(row.response)),
    )
    old.commit()
    old.close()
    for _ in range(2):
        store = ResponseStore(path, BIG, clock)
        assert get(store, "a") == row
        assert asyncio.run(store.item("ann", "msg_a")) == {"id": "msg_a"}
        store.close()


EVENTS = [b'event: a\ndata: {"text":"x"}\n\n', b"event: b\ndata: {}\n\n", b"event: c\ndata: {}\n\n"]


def test_a_reader_waits_for_what_it_has_not_seen():
    async def run():
        log = EventLog()
        first, second = (asyncio.create_task(log.after(seen)) for seen in (0, 1))
        await asyncio.sleep(0)
        assert not first.done()
        log.append(EVENTS[0])
        assert await first == EVENTS[:1]
        assert not second.done()
        log.append(EVENTS[1])
        assert await second == [EVENTS[1]]
        late = asyncio.create_task(log.after(2))
        await asyncio.sleep(0)
        log.end()
        assert await late == []
        assert await log.after(0) == EVENTS[:2]

    asyncio.run(run())


def test_a_packed_log_is_the_same_log():
    log = EventLog()
    for event in EVENTS:
        log.append(event)
    log.end()
    again = EventLog.of(log.packed())
    assert again.ended
    assert asyncio.run(again.after(0)) == EVENTS
    assert asyncio.run(again.after(2)) == EVENTS[2:]
    assert asyncio.run(again.after(9)) == []
    assert asyncio.run(EventLog.of(EventLog().packed()).after(0)) == []
