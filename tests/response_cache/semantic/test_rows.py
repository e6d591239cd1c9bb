from __future__ import annotations

import asyncio
import itertools
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import redis as redis_client

from headrace.core.events import Fault, Layer, LookedUp, StoreFaulted
from headrace.core.tenancy.gate import Limits
from headrace.response_cache.exact import ExactCache
from headrace.response_cache.lookup import CacheLookup
from headrace.response_cache.query import Turn
from headrace.response_cache.rules.cacheability import NO_DIRECTIVES, CacheDirectives
from headrace.response_cache.rules.entry import Damaged, Seal
from headrace.response_cache.rules.tags import EVERYTHING, TagVersions, tenant_tag, user_tag
from headrace.response_cache.semantic import rows as kept_rows
from headrace.response_cache.semantic.level import Mode, SemanticCache
from headrace.response_cache.semantic.rows import RowForm, RowStore, SharedRows, space_of
from headrace.response_cache.stores.redis import RedisStore
from headrace.response_cache.stores.tier import Tier
from headrace.service.service import Service
from headrace.testing.engines import hashing_engine
from headrace.testing.hashing_runner import VOCAB
from tests.doubles.cached_services import FINGERPRINT, House
from tests.doubles.clock import Clock
from tests.doubles.services import Book
from tests.doubles.shared_stores import patience, redis_server
from tests.response_cache.semantic.scenes import DIMENSIONS, Words, librarian, row

NOW = 1000.0


def rows(path: Path, encoder: str = "words@1") -> list[str]:
    row_store = RowStore(path, encoder)
    found = [each.question for each in row_store.load(NOW)]
    row_store.close()
    return found


def test_rows_come_back_as_they_were(tmp_path):
    kept = [
        row("red shoes", tags=("*", "tag:x")),
        row("blue hats", partition=b"other", answer=7, expires=NOW + 5),
    ]
    row_store = RowStore(tmp_path / "new" / "rows", "words@1")
    row_store.write(kept, [])
    row_store.close()
    again = RowStore(tmp_path / "new" / "rows", "words@1")
    assert sorted(again.load(NOW), key=lambda each: each.question) == [kept[1], kept[0]]
    again.close()


def test_writing_replaces_and_deletes(tmp_path):
    row_store = RowStore(tmp_path / "rows", "words@1")
    row_store.write([row("red shoes"), row("blue hats"), row("old socks", expires=NOW)], [])
    row_store.write([replace(row("red shoes"), answer=9)], [b"blue hats", b"never there"])
    assert [(each.question, each.answer) for each in row_store.load(NOW)] == [("red shoes", 9)]
    row_store.close()


def test_rows_of_another_encoder_are_of_no_use(tmp_path):
    row_store = RowStore(tmp_path / "rows", "words@1")
    row_store.write([row("red shoes")], [])
    row_store.close()
    assert rows(tmp_path / "rows", "words@1") == ["red shoes"]
    assert rows(tmp_path / "rows", "words@2") == []
    assert rows(tmp_path / "rows", "words@1") == []


def test_two_processes_may_have_it_open(tmp_path):
    first, second = RowStore(tmp_path / "rows", "words@1"), RowStore(tmp_path / "rows", "words@1")
    first.write([row("red shoes")], [])
    second.write([row("blue hats")], [])
    assert {each.question for each in first.load(NOW)} == {"red shoes", "blue hats"}
    first.close()
    second.close()
    with sqlite3.connect(tmp_path / "rows") as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


SEAL = Seal(b"secret")
SPACE = space_of(Words.name, DIMENSIONS, FINGERPRINT)
FORM = RowForm(SPACE, DIMENSIONS, SEAL)
ENDS = frozenset(range(VOCAB))  # whatever is drawn ends the answer, so it is whole
SECONDS = 60.0


@pytest.fixture(autouse=True, scope="module")
def _patience() -> Iterator[None]:
    with patience(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_rows, "POLL_SECONDS", 0.01)
        patch.setattr(kept_rows, "WRITE_SECONDS", SECONDS)
        patch.setattr("headrace.response_cache.exact.POLL_SECONDS", 0.05)
        yield


@pytest.fixture
def client(redis_port: int) -> Iterator[redis_client.Redis]:
    with redis_client.Redis(port=redis_port) as client:
        client.flushall()
        yield client


class Replica(House):
    """A server with an exact cache in Redis and a semantic cache whose rows are in the same one."""

    desk: object
    shared: SharedRows
    said = "yes"

    async def ask(self, text: str, tenant: str = "t", control: CacheDirectives = NO_DIRECTIVES) -> str:
        """Where the answer came from: "hit", or why it was computed."""
        prompt = (1, *text.encode())
        asked = self.question(5, prompt, control=control, tenant=tenant, eos_token_ids=ENDS)
        answer = await self.lookup.open([asked._replace(turn=lambda: Turn(text, b"c"))])
        while await answer.read():
            pass
        self.lookup.close(answer)
        await self.lookup.settle()
        await self.settled()
        if answer.note.startswith("hit"):
            return answer.note.split("; age")[0]
        return [each for each in self.events(LookedUp) if each.layer is Layer.SEMANTIC][-1].reason

    async def settled(self) -> None:
        """The search thread has done what it was told."""
        done = threading.Event()
        self.desk._add_task(done.set)
        await asyncio.to_thread(done.wait, SECONDS)

    def version(self, tag: str) -> object:
        """What the exact cache knows of a tag's clears."""
        return self.lookup._exact._versions.snapshot([tag])

    @property
    def entries(self) -> int:
        return self.desk.facts().entries or 0


@asynccontextmanager
async def replica(
    port: int, encoder: str = Words.name, seal: Seal = SEAL, clock: Clock | None = None, **more: object
) -> AsyncIterator[Replica]:
    made, runner = hashing_engine()
    book, clock = Book(), clock or Clock()
    service = Service(made, Limits(64, 10_000), [book])
    tier = Tier(RedisStore(f"redis://127.0.0.1:{port}/0", clock), SECONDS, seal, service.note)
    exact = ExactCache([tier], TagVersions(), clock)
    space = space_of(encoder, DIMENSIONS, FINGERPRINT)
    opened = tier.open_feed(space)
    assert opened is not None
    shared = SharedRows("redis", opened[0], RowForm(space, DIMENSIONS, seal), service.note, clock)
    desk = librarian(Words(), shared=shared, wall=clock, **more)
    semantic = SemanticCache(
        desk,
        exact,
        Mode.SERVE,
        lambda tokens: house.said,
        service.note,
        deadline=SECONDS,
        audit=0.0,
        max_error=0.1,
        confidence=0.95,
        shared=shared,
    )
    exact.heard = semantic.cleared_elsewhere
    lookup = CacheLookup(service, exact, FINGERPRINT, ttl=100.0, levels=[semantic], listeners=[semantic])
    house = Replica(lookup, service, runner, book, clock, None)
    house.desk, house.shared = desk, shared
    await lookup.start()
    try:
        await until(lambda: exact.whole)  # a store whose tags are not read yet is not searched
        yield house
    finally:
        await lookup.stop()


async def until(ready: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not ready():
            await asyncio.sleep(0.005)


def test_a_row_that_one_server_writes_serves_on_the_other_and_on_later_ones(redis_port, client):
    async def run():
        async with replica(redis_port) as one, replica(redis_port) as other:
            assert await one.ask("shoes red") == "no_neighbour"
            await until(lambda: other.entries == 1)
            assert await other.ask("shoes red nice") == "hit; layer=semantic"
            assert await other.ask("shoes red nice", tenant="another") == "no_neighbour"
            assert not (await other.ask("bread fresh")).startswith("hit")
            await until(lambda: one.entries == 3)  # also the other tenant's, in a partition of its own
            assert await one.ask("bread fresh please") == "hit; layer=semantic"
            assert one.shared.state()["damaged"] == other.shared.state()["damaged"] == 0
        async with replica(redis_port) as later:
            await until(lambda: later.entries == 3)
            assert await later.ask("shoes red nice") == "hit; layer=semantic"
            assert await later.ask("shoes red nice", tenant="third") == "no_neighbour"

    asyncio.run(run())


@pytest.mark.parametrize("tag", [user_tag("t", "sale"), tenant_tag("t"), EVERYTHING])
def test_what_one_server_clears_no_server_serves_or_loads(redis_port, client, tag):
    async def run():
        tagged = CacheDirectives(tags=("sale",))
        async with replica(redis_port) as one, replica(redis_port) as other:
            await one.ask("shoes red", control=tagged)
            await one.ask("bread fresh", tenant="another")
            await until(lambda: other.entries == 2)
            await one.lookup.clear(tag)
            left = 0 if tag == EVERYTHING else 1
            await until(lambda: one.entries == other.entries == left)
            await until(
                lambda: one.version(tag) == other.version(tag)
            )  # the rows are gone before the other hears why
            assert await other.ask("shoes red nice") == "no_neighbour"
            await until(lambda: one.entries == left + 1)
        async with replica(redis_port) as later:
            await until(lambda: later.entries == left + 1)
            assert await later.ask("shoes red") == "hit; layer=semantic"  # what was computed after the clear

    asyncio.run(run())


def test_a_wrong_answer_is_forgotten_everywhere(redis_port, client):
    async def run():
        async with replica(redis_port) as one, replica(redis_port) as other:
            await one.ask("shoes red")
            await until(lambda: other.entries == 1)
            served = next(iter(one.lookup._served.values()))
            await other.lookup.bar(served)
            await until(lambda: one.entries == other.entries == 0)
        async with replica(redis_port) as later:
            await until(lambda: later.shared._feed._position != (0, 0))
            assert later.entries == 0

    asyncio.run(run())


def test_a_redis_that_dies_and_comes_back_empty_costs_only_hits():
    async def run():
        with redis_server() as server:
            async with replica(server.port) as one, replica(server.port) as other:
                await one.ask("shoes red")
                await until(lambda: other.entries == 1)
                server.kill()
                for number in range(3):
                    assert not (await one.ask(f"bread fresh {number} {'x' * number}")).startswith("hit")
                    assert not (await other.ask("shoes red nice")).startswith("hit")
                assert other.entries >= 1, "what a store cannot answer is not lost"
                await until(lambda: not one.shared.state()["reachable"])
                with redis_server(server.port):
                    await until(lambda: one.shared.state()["reachable"] and other.shared.state()["reachable"])
                    before = other.shared.state()["read"]
                    async with asyncio.timeout(SECONDS):
                        for number in (
                            itertools.count()
                        ):  # a row is lost while one of them knows the old generation only
                            await one.ask(f"hats{number} felt{number}")
                            await asyncio.sleep(0.02)
                            if other.shared.state()["read"] > before:
                                break
                    faults = {each.fault for each in one.events(StoreFaulted) if each.store == "redis_rows"}
                    assert Fault.FAILED in faults

    asyncio.run(run())


def test_a_flush_begins_anew(redis_port, client):
    async def run():
        async with replica(redis_port) as one, replica(redis_port) as other:
            await one.ask("shoes red")
            await until(lambda: other.entries == 1)
            client.flushall()
            generations = one.shared._feed, other.shared._feed
            old = generations[0]._reading
            await until(lambda: all(each._generation() != old for each in generations))
            await one.ask("hats blue")
            await until(lambda: other.entries == 2)
            assert await other.ask("hats blue nice") == "hit; layer=semantic"
            assert await other.ask("shoes red nice") == "gone"  # its answer was lost

    asyncio.run(run())


def test_a_stream_that_was_lost_is_read_from_its_beginning(redis_port, client):
    async def run():
        async with replica(redis_port) as one, replica(redis_port) as other:
            await one.ask("shoes red")
            await until(lambda: other.entries == 1)
            feed = one.shared._feed._feed(one.shared._feed._generation())
            client.delete(feed)
            new = row("hats blue", expires=one.clock() + 50)
            client.set(f"{feed}:{new.key.hex()}", FORM.pack(new))
            client.xadd(feed, {"k": new.key}, id="1-1")  # of a clock that is behind
            await until(lambda: one.entries == other.entries == 2)

    asyncio.run(run())


def test_rows_of_others_stay_where_they_are(redis_port, client, monkeypatch):
    """Another encoder, another layout, another secret: nothing is read, nothing is deleted."""

    async def run():
        async with replica(redis_port) as one:
            await one.ask("shoes red")
            async with replica(redis_port, encoder="words@2") as other:
                assert await other.ask("shoes red nice") == "no_neighbour"
                await other.ask("hats blue")
            with monkeypatch.context() as newer:
                newer.setattr("headrace.response_cache.stores.redis.LAYOUT", 2)
                async with replica(redis_port) as third:
                    assert await third.ask("shoes red good") == "no_neighbour"
                    rows = [name for name in client.scan_iter("*:rows*") if name.count(b":") == 5]
                    await until(lambda: third.shared.state()["written"] == 1)
            assert one.entries == 1
            assert len([name for name in client.scan_iter("*:rows*") if name.count(b":") == 5]) >= len(rows)
        async with replica(redis_port, seal=Seal(b"another")) as stranger:
            await until(lambda: stranger.shared.state()["damaged"] == 1)
            assert stranger.entries == 0

    asyncio.run(run())


def test_damaged_rows_are_skipped_and_counted(redis_port, client):
    async def run():
        async with replica(redis_port) as one:
            await one.ask("shoes red")
            await until(lambda: one.shared.state()["written"] == 1)
            feed = one.shared._feed._feed(one.shared._feed._generation())
            good = FORM.pack(row("hats blue", expires=one.clock() + 50))
            other = FORM._replace(space=space_of("words@2", DIMENSIONS, FINGERPRINT))
            bad = {
                b"cut": good[:-1],
                b"empty": b"",
                b"moved": good,
                b"changed": good[:60] + bytes([good[60] ^ 1]) + good[61:],
                b"other": other.pack(row("hats blue", key=b"other")),
            }
            for key, value in bad.items():
                client.set(f"{feed}:{key.hex()}", value)
                client.xadd(feed, {"k": key})
            client.xadd(feed, {"unknown": b"field"})
            late = row("socks old", expires=one.clock() - 1)
            for each in (row("hats blue", expires=one.clock() + 50), late):
                client.set(f"{feed}:{each.key.hex()}", FORM.pack(each))
                client.xadd(feed, {"k": each.key})
            await until(lambda: one.entries == 2)
            await until(lambda: one.shared.state()["damaged"] == len(bad))
            faults = [each for each in one.events(StoreFaulted) if each.store == "redis_rows"]
            assert {each.fault for each in faults} == {Fault.DAMAGED}

    asyncio.run(run())


def test_expired_rows_are_forgotten(redis_port, client):
    async def run():
        clock = Clock()
        async with replica(redis_port, clock=clock) as one, replica(redis_port, clock=clock) as other:
            await one.ask("shoes red")
            await until(lambda: other.entries == 1)
            clock.now += 1000.0
            await one.ask("hats blue")
            await until(lambda: other.shared.state()["read"] == 2)
            await until(lambda: one.entries == other.entries == 1)

    asyncio.run(run())


def test_many_rows_come_in_batches_and_into_the_file_too(redis_port, client, tmp_path):
    count = 2 * kept_rows.AT_ONCE + 5

    async def run():
        async with replica(redis_port) as one:
            for number in range(count):
                one.shared.put(row(f"shoes {'red ' * (number % 7)}{number}", expires=one.clock() + 100))
            await until(lambda: one.shared.state()["written"] == count)
        async with replica(redis_port, row_store=RowStore(tmp_path / "rows", Words.name)) as later:
            await until(lambda: later.entries == later.shared.state()["read"] == count)

    asyncio.run(run())
    store = RowStore(tmp_path / "rows", Words.name)
    assert len(list(store.load(0.0))) == count
    store.close()


def test_rows_that_wait_for_a_dead_store_are_bounded(monkeypatch):
    monkeypatch.setattr(kept_rows, "WAITING", 3)

    class Dead:
        ready = False

    async def run():
        shared = SharedRows("redis", Dead(), FORM, print)
        shared._loop = asyncio.get_running_loop()
        for number in range(5):
            shared.put(row(f"shoes {number}"))
            shared.delete(b"wrong %d" % number)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        state = shared.state()
        assert (state["waiting"], state["dropped"]) == (3 + 5, 2)

    asyncio.run(run())


def test_a_row_comes_back_as_it_was():
    kept = row("red shoes", tags=("*", "tag:1"), answer=2**56 - 1, expires=5.5)
    kept = replace(kept, question="red \ud800")  # half of a pair, as JSON can spell it
    assert FORM.unpack(kept.key, FORM.pack(kept)) == kept
    bare = replace(kept, answer_vector=b"")
    assert FORM.unpack(kept.key, FORM.pack(bare)) == bare


@pytest.mark.parametrize(
    "wrong",
    [
        {"vector": b"\0" * 8},
        {"vector": b"\xff" * 4 * DIMENSIONS},
        {"answer_vector": b"\0" * 8},
        {"expires": float("inf")},
    ],
)
def test_a_row_that_could_not_be_searched_is_damaged(wrong):
    bad = replace(row("red shoes"), **wrong)
    with pytest.raises(Damaged):
        FORM.unpack(bad.key, FORM.pack(bad))
