"""Chat templates that need a process: each tenant has one at a time, and none waits for another tenant's."""

import asyncio
import threading

import pytest

from headrace.api.compile.model import MAX_WAITING, TemplateLanes
from headrace.api.errors import ApiError


def test_a_tenant_has_one_at_a_time_in_order_and_another_tenant_does_not_wait() -> None:
    async def scene() -> list[str]:
        lanes, begun, gate = TemplateLanes(), list[str](), threading.Event()

        def work(name: str) -> str:
            begun.append(name)
            if name != "b1":
                assert gate.wait(60)
            return name

        first = [
            asyncio.ensure_future(lanes.run("a", lambda n=n: work(f"a{n}"), "messages")) for n in range(3)
        ]
        await asyncio.sleep(0)
        assert await lanes.run("b", lambda: work("b1"), "messages") == "b1"
        assert "a1" not in begun
        gate.set()
        assert await asyncio.gather(*first) == ["a0", "a1", "a2"]
        await asyncio.sleep(0)
        assert lanes._lanes == {}
        return [name for name in begun if name != "b1"]

    assert asyncio.run(scene()) == ["a0", "a1", "a2"]


def test_the_turn_of_a_client_that_has_left_ends_with_its_work() -> None:
    async def scene() -> None:
        lanes, gate, ran = TemplateLanes(), threading.Event(), list[int]()
        left = asyncio.ensure_future(lanes.run("a", lambda: gate.wait(60), "messages"))
        waiting = asyncio.ensure_future(lanes.run("a", lambda: ran.append(1), "messages"))
        also_left = asyncio.ensure_future(lanes.run("a", lambda: ran.append(2), "messages"))
        await asyncio.sleep(0)
        left.cancel()
        also_left.cancel()
        await asyncio.sleep(0.01)
        assert not waiting.done()
        gate.set()
        await waiting
        await asyncio.sleep(0)
        assert ran == [1]
        assert lanes._lanes == {}

    asyncio.run(scene())


def test_too_many_templates_of_one_tenant_are_refused_and_models_own_are_not() -> None:
    async def scene() -> None:
        lanes, gate = TemplateLanes(), threading.Event()
        waiting = [
            asyncio.ensure_future(lanes.run("a", lambda: gate.wait(60), "chat_template"))
            for _ in range(MAX_WAITING + 1)
        ]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match=f"{MAX_WAITING} requests of this tenant wait") as raised:
            await lanes.run("a", lambda: None, "chat_template")
        assert (raised.value.status, raised.value.param) == (429, "chat_template")
        waiting.append(asyncio.ensure_future(lanes.run("a", lambda: True, "messages")))
        gate.set()
        assert all(await asyncio.gather(*waiting))

    asyncio.run(scene())


def test_an_error_of_the_work_is_raised_and_ends_the_turn() -> None:
    async def scene() -> None:
        lanes = TemplateLanes()
        with pytest.raises(ZeroDivisionError):
            await lanes.run("a", lambda: 1 // 0, "messages")
        assert await lanes.run("a", lambda: 2, "messages") == 2

    asyncio.run(scene())
