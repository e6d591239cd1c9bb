"""Events of a stream: read from any number on, by several readers, while it grows and later."""

from __future__ import annotations

import asyncio

from headrace.api.responses.streams import EventLog

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
