import asyncio
import functools
import sqlite3
import threading

import pytest

from headrace.response_cache import history as module
from headrace.response_cache.history import MAX_NOTES, History, HistoryListener, Recorded
from headrace.response_cache.rules.tags import EVERYTHING, tenant_tag, user_tag
from headrace.response_cache.rules.warming import DAY, HOUR

NOON = 20_000 * DAY + 12 * HOUR
WORDS = Recorded("/v1/completions", "key-1", None, b'{"prompt":"hi"}')


def on_a_loop(test):
    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(test(*args, **kwargs))

    return run


def log(path):
    return History(path / "history.db")


def times(history):
    """How often each request has arrived."""
    return [count for (count,) in history._rows.execute("SELECT times FROM questions ORDER BY id")]


async def candidates(history, engine=b"e", now=NOON):
    history.engine = engine
    return {each.key: each for each in await history.candidates(now)}


def computed(history, key, fresh_until=NOON, engine=b"old", seconds=1.0):
    history.engine = engine
    history.computed(key, seconds, 10, fresh_until)


@on_a_loop
async def test_what_was_asked_survives_a_restart(tmp_path):
    history = log(tmp_path)
    for minute in range(5):
        history.asked(b"k", "t", NOON + 60 * minute, WORDS)
    computed(history, b"k", NOON + DAY, seconds=1.5)
    await history.stop()
    again = log(tmp_path)
    found = (await candidates(again))[b"k"]
    assert (found.demand.times, found.seconds) == (5, 1.5)
    assert found.demand.expected(NOON + 300, HOUR) > 1
    assert await again.recorded(b"k") == WORDS
    await again.stop()


@on_a_loop
async def test_a_server_that_ends_while_notes_wait_for_the_disk_writes_them(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FLUSH_SECONDS", 0.001)
    history, disk = log(tmp_path), threading.Event()
    history._worker.submit(disk.wait, 60)
    history.asked(b"k", "t", NOON, WORDS)
    history.start()
    async with asyncio.timeout(60):
        while history._notes:  # until a flush has taken them
            await asyncio.sleep(0.001)
    ends = asyncio.create_task(history.stop())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    disk.set()
    await ends
    again = log(tmp_path)
    assert times(again) == [1]
    await again.stop()


@on_a_loop
async def test_without_consent_there_is_a_count_and_nothing_to_read(tmp_path):
    history = log(tmp_path)
    history.asked(b"k", "t", NOON, None)
    await history.flush()
    assert times(history) == [1]
    assert not await candidates(history)
    assert await history.recorded(b"k") is None
    await history.stop()
    assert b"hi" not in (tmp_path / "history.db").read_bytes()


@pytest.mark.parametrize(
    ("engine", "fresh_until", "wanted"),
    [(b"e", NOON + 1, False), (b"e", NOON, True), (b"another", NOON + 1, True), (None, NOON, False)],
)
@on_a_loop
async def test_wanted_is_what_this_engine_has_no_fresh_answer_to(tmp_path, engine, fresh_until, wanted):
    history = log(tmp_path)
    history.asked(b"k", "t", NOON, WORDS)
    if engine is not None:
        computed(history, b"k", fresh_until, engine)
    assert (b"k" in await candidates(history)) is wanted
    await history.stop()


@on_a_loop
async def test_the_longest_unasked_are_forgotten_first(tmp_path):
    history = History(tmp_path / "history.db", max_requests=3)
    for number in range(6):
        history.asked(bytes([number]), "t", NOON + number, WORDS)
        computed(history, bytes([number]))
    await history.flush()
    assert set(await candidates(history)) == {b"\x03", b"\x04", b"\x05"}
    await history.stop()


@on_a_loop
async def test_a_tenant_can_be_forgotten(tmp_path):
    history = log(tmp_path)
    for key, tenant in ((b"a", "t"), (b"b", "other")):
        history.asked(key, tenant, NOON, WORDS)
        computed(history, key)
        await history.register(tenant, WORDS._replace(body=tenant.encode()))
    await history.flush()
    history.asked(b"c", "t", NOON, WORDS)
    listener = HistoryListener(history)
    listener.cleared(EVERYTHING)
    listener.cleared(user_tag("t", "other"))
    assert len(times(history)) == 2
    listener.cleared(tenant_tag("t"))
    assert set(await candidates(history)) == {b"b"}
    assert [prefix.body for prefix in await history.prefixes()] == [b"other"]
    await history.flush()
    assert len(times(history)) == 1
    await history.stop()


@on_a_loop
async def test_a_file_that_fails_costs_notes_and_no_error(tmp_path, caplog):
    history = log(tmp_path)
    history._rows.execute("DROP TABLE questions")
    history.asked(b"k", "t", NOON, WORDS)
    await history.flush()
    history._rows.executescript("CREATE TABLE questions (body BLOB)")
    assert "cannot be written" in caplog.text
    history.start()
    await asyncio.sleep(0)
    await history.stop()


@on_a_loop
async def test_notes_do_not_pile_up_for_ever(tmp_path, caplog):
    history = log(tmp_path)
    for _ in range(MAX_NOTES + 2):
        history.asked(b"k", "t", NOON, None)
    await history.flush()
    assert times(history) == [MAX_NOTES]
    assert "has dropped 2 notes" in caplog.text
    await history.stop()


@on_a_loop
async def test_two_processes_share_a_file(tmp_path):
    one, other = log(tmp_path), log(tmp_path)
    one.asked(b"a", "t", NOON, WORDS)
    computed(one, b"a")
    await one.flush()
    other.asked(b"b", "t", NOON, WORDS)
    computed(other, b"b")
    await other.flush()
    assert set(await candidates(one)) == {b"a", b"b"}
    await one.stop()
    await other.stop()
    assert sqlite3.connect(tmp_path / "history.db").execute("PRAGMA integrity_check").fetchone() == ("ok",)


def kept(history, table="questions"):
    return dict(history._rows.execute(f"SELECT tenant, count(*) FROM {table} GROUP BY tenant"))


@on_a_loop
async def test_the_tenant_with_most_requests_loses_its_oldest(tmp_path):
    history = History(tmp_path / "history.db", max_requests=6)
    for tenant, number in (("a", 2), ("b", 3), ("c", 30)):
        for i in range(number):
            history.asked(f"{tenant}{i}".encode(), tenant, NOON + i, WORDS)
        await history.flush()
    assert kept(history) == {"a": 2, "b": 2, "c": 2}
    left = {key for (key,) in history._rows.execute("SELECT key FROM questions")}
    assert {b"a0", b"b2", b"c29"} < left
    await history.stop()


@pytest.mark.parametrize("counts", [(5,), (1, 9), (3, 3, 3), (0, 7, 2, 8), (4, 4, 1)])
def test_the_largest_counts_are_levelled(counts):
    counts = dict(zip("abcd", counts, strict=False))
    for excess in range(1, sum(counts.values()) + 1):
        taken = module._most(counts, excess)
        assert sum(taken.values()) == excess
        left = {each: count - taken.get(each, 0) for each, count in counts.items()}
        assert min(left.values()) >= 0
        assert max(left.values()) - min([left[each] for each in taken if taken[each]]) <= 1


@on_a_loop
async def test_bytes_are_bounded_by_the_tenant_with_most(tmp_path):
    history = History(tmp_path / "history.db", max_bytes=3 << 20)
    history.asked(b"small", "b", NOON, WORDS)
    for i in range(40):
        history.asked(b"%d" % i, "a", NOON + i, WORDS._replace(body=b"x" * 200_000))
        await history.flush()
    assert kept(history)["b"] == 1
    assert 1 <= kept(history)["a"] < 16
    assert history._used() <= 3 << 20
    await history.stop()


@on_a_loop
async def test_a_long_body_is_not_stored(tmp_path):
    history = log(tmp_path)
    history.asked(b"k", "t", NOON, WORDS._replace(body=b"x" * (module.MOST_BODY_BYTES + 1)))
    await history.flush()
    assert await history.recorded(b"k") is None
    assert times(history) == [1]
    await history.stop()


@on_a_loop
async def test_many_prefixes_of_one_tenant_do_not_evict_those_of_another(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_PREFIXES", 4)
    history = log(tmp_path)
    await history.register("b", WORDS)
    for i in range(9):
        await history.register("a", WORDS._replace(body=b"%d" % i))
    assert kept(history, "prefixes") == {"a": 3, "b": 1}
    assert [each.body for each in await history.prefixes()][1:] == [b"6", b"7", b"8"]
    await history.stop()
