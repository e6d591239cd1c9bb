import asyncio

import pytest
from starlette.datastructures import Headers

from headrace.api.exchange import PARTS, Disconnected, Exchange, Hooks


class Connected:
    """`exchange.ResponseParts` of a client that disconnects when it is told to."""

    def __init__(self) -> None:
        self.gone = None

    def watch(self, gone) -> None:
        self.gone = gone

    def unwatch(self) -> None:
        self.gone = None


def exchange(parts=None) -> Exchange:
    scope = {"method": "POST", "path": "/x", **({} if parts is None else {PARTS: parts})}
    return Exchange(scope, Headers({}), 0.0, Hooks())


async def failing() -> None:
    raise ValueError("as it is")


@pytest.mark.parametrize("parts", [None, Connected()])
def test_work_ends_as_it_does_without_a_client(parts):
    made = exchange(parts)

    async def five() -> int:
        await asyncio.sleep(0)
        return 5

    assert asyncio.run(made.while_connected(five())) == 5
    with pytest.raises(ValueError, match="as it is"):
        asyncio.run(made.while_connected(failing()))
    assert parts is None or parts.gone is None


def disconnects(parts: Connected, call: asyncio.Task[None]) -> None:
    parts.gone()


def is_cancelled(parts: Connected, call: asyncio.Task[None]) -> None:
    call.cancel()


@pytest.mark.parametrize(
    ("act", "error"), [(disconnects, Disconnected), (is_cancelled, asyncio.CancelledError)]
)
def test_a_client_that_disconnects_and_a_request_that_is_cancelled_end_the_work(act, error):
    parts, ends = Connected(), []

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ends.append("cancelled")

    async def scene() -> None:
        call = asyncio.create_task(exchange(parts).while_connected(endless()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        act(parts, call)
        with pytest.raises(error):
            await call

    asyncio.run(scene())
    assert (ends, parts.gone) == (["cancelled"], None)
