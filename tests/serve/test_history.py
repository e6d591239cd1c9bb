import asyncio
import functools
import sqlite3

import pytest

from headrace.core.cache.demand import DAY, HOUR
from headrace.serve.history import MAX_NOTES, History, Recorded

NOON = 20_000 * DAY + 12 * HOUR
WORDS = Recorded("/v1/completions", "key-1", None, b'{"prompt":"hi"}')


def on_a_loop(test):
    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(test(*args, **kwargs))

    return run


def log(path):
    return History(path / "history.db")


async def candidates(history, engine=b"e", now=NOON):
    return {each.key: each for each in await history.candidates(engine, now)}


@on_a_loop
async def test_what_was_asked_survives_a_restart(tmp_path):
    history = log(tmp_path)
    for minute in range(5):
        history.asked(b"k", NOON + 60 * minute, WORDS)
    history.computed(b"k", 1.5, 40, b"old engine", NOON + DAY)
    await history.close()
    again = log(tmp_path)
    found = (await candidates(again))[b"k"]
    assert (found.demand.times, found.seconds) == (5, 1.5)
    assert found.demand.expected(NOON + 300, HOUR) > 1
    assert await again.question(b"k") == WORDS
    await again.close()


@on_a_loop
async def test_without_consent_there_is_a_count_and_nothing_to_read(tmp_path):
    history = log(tmp_path)
    history.asked(b"k", NOON, None)
    await history.flush()
    assert await history.counts() == (1, 0, 0)
    assert not await candidates(history)
    assert await history.question(b"k") is None
    await history.close()
    assert b"hi" not in (tmp_path / "history.db").read_bytes()


@pytest.mark.parametrize(
    ("engine", "fresh_until", "wanted"),
    [(b"e", NOON + 1, False), (b"e", NOON, True), (b"another", NOON + 1, True)],
)
@on_a_loop
async def test_wanted_is_what_this_engine_has_no_fresh_answer_to(tmp_path, engine, fresh_until, wanted):
    history = log(tmp_path)
    history.asked(b"k", NOON, WORDS)
    history.computed(b"k", 1.0, 10, engine, fresh_until)
    assert (b"k" in await candidates(history)) is wanted
    await history.close()


@on_a_loop
async def test_the_longest_unasked_are_forgotten_first(tmp_path):
    history = History(tmp_path / "history.db", max_questions=3)
    for number in range(6):
        history.asked(bytes([number]), NOON + number, WORDS)
    await history.flush()
    assert set(await candidates(history)) == {b"\x03", b"\x04", b"\x05"}
    await history.close()


@on_a_loop
async def test_a_caller_can_be_forgotten(tmp_path):
    history = log(tmp_path)
    history.asked(b"a", NOON, WORDS)
    history.asked(b"b", NOON, WORDS._replace(key_id="key-2"))
    await history.flush()
    await history.forget(key_id="key-1")
    assert set(await candidates(history)) == {b"b"}
    await history.forget()
    assert not await candidates(history)
    await history.close()


@on_a_loop
async def test_a_file_that_fails_costs_notes_and_no_error(tmp_path):
    history = log(tmp_path)
    history._rows.execute("DROP TABLE questions")
    history.asked(b"k", NOON, WORDS)
    await history.flush()
    history._rows.executescript("CREATE TABLE questions (body BLOB)")
    assert (await history.counts()).lost == 1
    history.start()
    await asyncio.sleep(0)
    await history.close()


@on_a_loop
async def test_notes_do_not_pile_up_for_ever(tmp_path):
    history = log(tmp_path)
    for _ in range(MAX_NOTES + 2):
        history.asked(b"k", NOON, None)
    await history.flush()
    assert (await history.counts()).lost == 2
    await history.close()


def test_another_kind_of_file_is_refused(tmp_path):
    (tmp_path / "history.db").write_text("no database, but long enough to look at" * 50)
    with pytest.raises(OSError, match="history of questions"):
        log(tmp_path)


@on_a_loop
async def test_two_processes_share_a_file(tmp_path):
    one, other = log(tmp_path), log(tmp_path)
    one.asked(b"a", NOON, WORDS)
    await one.flush()
    other.asked(b"b", NOON, WORDS)
    await other.flush()
    assert set(await candidates(one)) == {b"a", b"b"}
    await one.close()
    await other.close()
    assert sqlite3.connect(tmp_path / "history.db").execute("PRAGMA integrity_check").fetchone() == ("ok",)
