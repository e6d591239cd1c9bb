from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.testclient import TestClient

from headrace.api.app import create_app, lifespan_of
from headrace.api.auth.access import Access
from headrace.api.auth.api_keys import Keys
from headrace.api.exchange import Hooks
from headrace.api.routing import Endpoints, route

PAGE = "https://page.example"
ASKING = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization",
}


@pytest.mark.parametrize("options", [{"origins": (PAGE,), "keys": ("alpha",)}])
def test_a_browser_may_ask_without_a_key_and_call_with_one(house):
    asked = house.client.options("/v1/completions", headers=ASKING)
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in asked.headers["access-control-allow-headers"]
    refused = house.client.get("/v1/models", headers={"Origin": PAGE})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == PAGE  # so that the page can read why
    headers = {"Origin": PAGE, "Authorization": "Bearer alpha"}
    answer = house.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=headers)
    assert answer.status_code == 200
    reported = answer.headers["access-control-expose-headers"]
    assert all(
        name in reported for name in ("X-Request-Id", "X-Headrace-Cache", "x-ratelimit-remaining-tokens")
    )


@pytest.mark.parametrize(
    ("options", "origin"),
    [({"origins": (PAGE,)}, "https://other.example"), ({}, PAGE)],
    ids=["other", "none"],
)
def test_other_pages_may_not(house, origin):
    assert house.client.options("/v1/models", headers=ASKING | {"Origin": origin}).status_code in (400, 403)
    assert (
        "access-control-allow-origin" not in house.client.get("/health", headers={"Origin": origin}).headers
    )


class Work:
    """Work beside the server, or the road itself; it may fail to stop."""

    def __init__(self, name, log, fails=False):
        self.name, self.log, self.fails = name, log, fails

    def start(self):
        self.log.append(f"start {self.name}")

    async def stop(self):
        self.log.append(f"stop {self.name}")
        if self.fails:
            raise OSError(28, "No space left on device")


class Road(Work):
    async def start(self):
        super().start()


def test_work_that_fails_to_stop_keeps_none_of_the_others_from_it():
    log = []
    beside = [Work("a", log), Work("b", log, fails=True), Work("c", log)]
    app = create_app(
        Road("road", log), [], Keys({}), beside, hooks=Hooks(stopped=(lambda: log.append("hook"),))
    )

    async def run():
        async with lifespan_of(app):
            pass

    with pytest.raises(RuntimeError):
        asyncio.run(run())
    assert log == [
        *(f"start {name}" for name in ("road", *"abc")),
        *(f"stop {name}" for name in (*"cba", "road")),
        "hook",
    ]


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


class Overlapping(Endpoints):
    """Routes of which an earlier one with parameters matches the path of a later one."""

    @route("GET /a/{name}", Access.PUBLIC)
    async def named(self, request: Request) -> Response:
        return Response(f"named {request.path_params['name']}")

    @route("GET /a/b", Access.PUBLIC)
    async def behind(self, request: Request) -> Response:
        return Response("never")

    @route("POST /a/b", Access.PUBLIC)
    async def plain(self, request: Request) -> Response:
        return Response(f"plain {request.path_params}")


@pytest.mark.parametrize(
    ("method", "path", "answer"),
    [
        ("GET", "/a/b", (200, "named b")),
        ("GET", "/a/%7Bname%7D", (200, "named {name}")),
        ("POST", "/a/b", (200, "plain {}")),
        ("POST", "/a/c", (405, "")),
        ("POST", "/a", (404, "")),
    ],
)
def test_a_route_without_parameters_does_not_pass_one_before_it(method, path, answer):
    client = TestClient(create_app(None, Overlapping().routes(), Keys({})), base_url="http://localhost")
    response = client.request(method, path)
    assert response.status_code == answer[0]
    assert response.text == answer[1] or not answer[1]
