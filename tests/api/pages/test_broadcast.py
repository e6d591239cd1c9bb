"""Snapshots are made once for all who listen, and only while one does."""

import asyncio
from contextlib import aclosing

from headrace.api.pages import MOST_LISTENERS, Broadcast, SnapshotStream, Topic
from tests.doubles.topics import Topics

SERVER, ACME = Topic("", None), Topic("requests", "acme")


class Service:
    """What a broadcast asks of the service."""

    draining = False
    counted = 0

    def count(self):
        self.counted += 1

    def now(self):
        return float(self.counted)


def broadcast(topics=None, seconds=0.005):
    return Broadcast(Service(), topics or Topics(), seconds)


async def take(stream, count):
    return [await anext(stream) for _ in range(count)]


def test_nothing_is_made_before_the_first_and_after_the_last_listener():
    async def run():
        topics = Topics()
        cast = broadcast(topics)
        await asyncio.sleep(0.02)
        assert topics.measured == 0
        async with aclosing(cast.follow(SERVER)) as stream:
            await take(stream, 2)
            assert cast.listening
        assert not cast.listening
        made = topics.measured
        await asyncio.sleep(0.03)
        assert topics.measured == made

    asyncio.run(run())


def test_a_topic_is_made_once_for_all_its_listeners():
    async def run():
        topics = Topics()
        cast = broadcast(topics)
        streams = [cast.follow(topic) for topic in (SERVER, SERVER, SERVER, ACME)]
        seen = await asyncio.gather(*(take(stream, 4) for stream in streams))
        assert seen[0] == seen[1] == seen[2] != seen[3]
        assert topics.made[SERVER] == topics.made[ACME] == topics.measured
        for stream in streams:
            await stream.aclose()
        assert not cast.listening

    asyncio.run(run())


def test_a_slow_listener_gets_the_newest_snapshot_and_no_backlog():
    async def run():
        topics = Topics()
        cast = broadcast(topics)
        async with aclosing(cast.follow(SERVER)) as slow, aclosing(cast.follow(SERVER)) as quick:
            await take(slow, 1)
            last = (await take(quick, 10))[-1]
            assert (await take(slow, 1))[0] == last

    asyncio.run(run())


def test_a_drain_ends_all_streams():
    async def run():
        cast = broadcast()
        seen = []

        async def listen():
            async for snapshot in cast.follow(SERVER):
                seen.append(snapshot)
                cast._service.draining = True

        await asyncio.wait_for(listen(), 60)
        assert len(seen) == 1
        assert not cast.listening

    asyncio.run(run())


def test_a_snapshot_that_fails_ends_no_stream(caplog):
    class Failing(Topics):
        def measure(self, now):
            super().measure(now)
            if self.measured == 2:
                raise RuntimeError("no figures")

    async def run():
        async with aclosing(broadcast(Failing()).follow(SERVER)) as stream:
            await take(stream, 3)

    asyncio.run(run())
    assert "no snapshot could be made" in caplog.text


def test_the_number_of_listeners_is_bounded():
    async def run():
        cast = broadcast()
        streams = [cast.follow(SERVER) for _ in range(MOST_LISTENERS)]
        for stream in streams:
            assert not cast.full
            await anext(stream)
        assert cast.full
        for stream in streams:
            await stream.aclose()
        assert not cast.full

    asyncio.run(run())


def test_a_client_that_is_gone_listens_no_longer():
    """As the server calls it: the disconnect arrives while the stream waits for the next snapshot."""

    async def run():
        cast = broadcast(seconds=0.005)
        gone, sent = asyncio.Event(), []

        async def receive():
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)
            if len(sent) == 4:
                gone.set()

        scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
        await asyncio.wait_for(SnapshotStream(cast.follow(SERVER))(scope, receive, send), 60)
        assert [message["type"] for message in sent[:2]] == ["http.response.start", "http.response.body"]
        assert not cast.listening

    asyncio.run(run())


def test_a_client_that_does_not_read_holds_up_no_other():
    async def run():
        cast = broadcast()
        blocked = asyncio.Event()

        async def receive():
            await asyncio.Event().wait()

        async def send(message):
            if message["type"] == "http.response.body":
                blocked.set()
                await asyncio.Event().wait()

        scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
        stuck = asyncio.create_task(SnapshotStream(cast.follow(SERVER))(scope, receive, send))
        await asyncio.wait_for(blocked.wait(), 60)
        async with aclosing(cast.follow(SERVER)) as stream:
            await asyncio.wait_for(take(stream, 5), 60)
        stuck.cancel()
        await asyncio.gather(stuck, return_exceptions=True)
        assert not cast.listening

    asyncio.run(run())
