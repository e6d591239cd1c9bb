from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.testclient import TestClient

from headrace.api.app import Edge, create_app, lifespan_of
from headrace.api.auth.access import Access, AccessCheck
from headrace.api.auth.api_keys import Grant, Keys
from headrace.api.exchange import Hooks
from headrace.api.openai.routes import Api
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


PATH = "/v1/completions"


def tenant_of(house, body=None, **headers) -> str:
    answer = house.client.post(PATH, json={"prompt": "x", "max_tokens": 1} | (body or {}), headers=headers)
    return house.client.get(f"/v1/requests/{answer.json()['id']}", headers=headers).json()["tenant"]


def test_every_answer_carries_a_request_id(house):
    for path in ("/health", "/nothing", "/v1/requests/none"):
        assert house.client.get(path).headers["x-request-id"].startswith("req_")
    assert house.client.get("/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"


@pytest.mark.parametrize("given", ["", "x" * 129, "ä".encode(), "a\tb", "a\x7f"])
def test_an_id_that_is_none_is_replaced(house, given):
    assert (
        house.client.get("/health", headers={"X-Request-Id": given})
        .headers["x-request-id"]
        .startswith("req_")
    )


@pytest.mark.parametrize("options", [{"keys": ("alpha", "beta")}])
def test_keys_guard_all_but_liveness_and_the_description(house):
    open_paths = ("/health", "/health/ready", "/ping", "/livez", "/readyz", "/healthz", "/version")
    for path in (*open_paths, "/docs", "/openapi.json"):
        assert house.client.get(path).status_code == 200
    for path in ("/v1/models", "/metrics", "/server_info", "/v1/requests/x", "/nothing", "/metrics%0A"):
        refused = house.client.get(path)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert refused.headers["www-authenticate"] == "Bearer"
        assert refused.headers["x-request-id"]
    assert house.client.post(PATH, json={"prompt": "x"}).status_code == 401
    assert house.client.get("/v1/models", headers={"Authorization": "Bearer beta"}).status_code == 200


def test_the_tenant_is_the_header_or_the_user(house):
    assert tenant_of(house) == "default"
    assert tenant_of(house, {"user": "ann"}) == "ann"
    assert tenant_of(house, {"user": "ann"}, **{"X-Tenant-Id": "acme"}) == "acme"
    refused = house.client.post(PATH, json={"prompt": "x"}, headers={"X-Tenant-Id": "x" * 200})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "X-Tenant-Id")


@pytest.mark.parametrize("options", [{"keys": ("alpha",)}])
def test_a_key_is_the_tenant_whatever_else_is_claimed(house):
    headers = {"Authorization": "Bearer alpha", "X-Tenant-Id": "acme"}
    assert (
        tenant_of(house, {"user": "ann"}, **headers) == Keys({"alpha": Grant()}).identify("Bearer alpha").name
    )


def test_a_bug_in_a_route_is_a_500_that_tells_nothing(house, monkeypatch):
    async def broken(self, request, form, not_yet):
        raise ZeroDivisionError("the inside")

    monkeypatch.setattr(Api, "_read_generation", broken)
    answer = house.client.post(PATH, json={"prompt": "x"})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "inside" not in answer.text
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize("begun", [False, True])
def test_a_request_without_output_at_shutdown_gets_an_error(begun):
    sent = []

    async def stuck(scope, receive, send):
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.sleep(60)

    async def send(message):
        sent.append(message)

    async def cut_off():
        scope = {"type": "http", "method": "POST", "path": PATH, "headers": []}
        answering = asyncio.create_task(Edge(stuck, AccessCheck(Keys({}), {}))(scope, None, send))
        await asyncio.sleep(0)
        answering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answering

    asyncio.run(cut_off())
    if begun:
        assert [message["type"] for message in sent] == ["http.response.start"]
    else:
        assert sent[0]["status"] == 503
        assert json.loads(sent[1]["body"])["error"]["code"] == "draining"


PROMPT = json.dumps({"prompt": "x", "max_tokens": 1})


@pytest.mark.parametrize(
    "path", [PATH, "/pause", "/resume", "/v1/cache/clear", "/reset_prefix_cache", "/nothing"]
)
def test_a_page_of_another_origin_is_refused_on_every_route(house, path):
    for headers in (
        {"Origin": "https://evil.example", "Content-Type": "text/plain"},
        {"Origin": "null", "Content-Type": "application/json"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Content-Type": "text/plain"},
    ):
        refused = house.client.post(path, content="{}", headers=headers)
        assert refused.status_code == 403
        error = refused.json()["error"]
        assert (error["code"], error["param"]) == ("origin_not_allowed", "Origin")
        assert "--allowed-origins" in error["message"]
        assert "access-control-allow-origin" not in refused.headers
    assert not house.service.paused


def test_a_refusal_shows_a_long_origin_in_part(house):
    refused = house.client.get("/health", headers={"Origin": "https://" + "x" * 5000})
    assert refused.status_code == 403
    assert len(refused.text) < 600


@pytest.mark.parametrize(
    "options", [{"origins": (each,)} for each in ("https://page.example", "https://Page.example:443/")]
)
def test_an_allowed_page_is_served_and_may_read_it(house):
    headers = {"Origin": "https://page.example", "Sec-Fetch-Site": "cross-site"}
    answer = house.client.post(PATH, json={"prompt": "x", "max_tokens": 1}, headers=headers)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://page.example"
    assert (
        house.client.post(PATH, json={}, headers=headers | {"Origin": "https://b.example"}).status_code == 403
    )


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json", None]
)
def test_bodies_that_are_json_or_not_declared_are_read(house, kind):
    headers = {} if kind is None else {"Content-Type": kind}
    assert house.client.post(PATH, content=PROMPT, headers=headers).status_code == 200


def test_the_form_type_of_curl_is_read_but_not_from_a_browser(house):
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    assert house.client.post(PATH, content=PROMPT, headers=form).status_code == 200
    for sign in ({"Origin": "http://testserver"}, {"Sec-Fetch-Site": "same-origin"}):
        assert house.client.post(PATH, content=PROMPT, headers=form | sign).status_code == 415
        assert house.client.post(PATH, content=PROMPT, headers=sign).status_code == 415
        right = sign | {"Content-Type": "application/json"}
        assert house.client.post(PATH, content=PROMPT, headers=right).status_code == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "multipart/form-data; boundary=x", "text/html", "application/xml", "json"]
)
def test_other_types_are_refused_by_name(house, kind):
    for path in (PATH, "/pause"):
        refused = house.client.post(path, content=PROMPT, headers={"Content-Type": kind})
        assert refused.status_code == 415
        error = refused.json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_media_type", "Content-Type")
        assert kind in error["message"]
    assert house.client.post("/resume", headers={"Content-Type": kind}).status_code == 200  # it has no body


@pytest.mark.parametrize(
    "name",
    [
        "Authorization",
        "x-api-key",
        "Host",
        "Origin",
        "Content-Type",
        "X-Tenant-Id",
        "Sec-Fetch-Site",
        "X-Session-Id",
    ],
)
def test_a_header_that_comes_twice_is_refused(house, name):
    for second in ("a", "b"):
        refused = house.client.get("/health", headers=[(name, "a"), (name, second)])
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "duplicate_header"
        assert name.lower() in refused.json()["error"]["message"].lower()


@pytest.mark.parametrize("options", [{"keys": ("alpha", "beta")}])
def test_two_ways_to_send_a_key_must_agree(house):
    both = {"Authorization": "Bearer alpha", "x-api-key": "alpha"}
    assert house.client.get("/v1/models", headers=both).status_code == 200
    for other in ("beta", "unknown"):
        refused = house.client.get("/v1/models", headers=both | {"x-api-key": other})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "duplicate_header")


def test_keys_that_differ_do_not_matter_where_none_is_needed(house):
    both = {"Authorization": "Bearer alpha", "x-api-key": "beta"}
    assert house.client.get("/v1/models", headers=both).status_code == 200
