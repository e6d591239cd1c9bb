"""An application is started and stopped without a server, and its failures are reported."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from starlette.applications import Starlette

from headrace.api.runtime.lifespan import lifespan_of


def application(seen: list[str], failing: str = "") -> Starlette:
    @asynccontextmanager
    async def lifespan(app):
        for what in ("start", "stop"):
            if what == failing:
                raise OSError(f"cannot {what}")
            seen.append(what)
            if what == "start":
                yield

    return Starlette(lifespan=lifespan)


async def use(app, seen: list[str]) -> None:
    async with lifespan_of(app):
        seen.append("used")


def test_the_application_is_started_before_and_stopped_after_the_block():
    seen: list[str] = []
    asyncio.run(use(application(seen), seen))
    assert seen == ["start", "used", "stop"]


@pytest.mark.parametrize(
    ("failing", "reported", "expected"),
    [("start", "failed during startup", []), ("stop", "failed during shutdown", ["start", "used"])],
)
def test_failures_are_raised(failing, reported, expected):
    seen: list[str] = []
    with pytest.raises(RuntimeError, match=reported):
        asyncio.run(use(application(seen, failing), seen))
    assert seen == expected


def test_an_application_that_knows_no_lifespan_is_reported():
    async def app(scope, receive, send):
        assert scope["type"] == "http"

    with pytest.raises(AssertionError):
        asyncio.run(use(app, []))
