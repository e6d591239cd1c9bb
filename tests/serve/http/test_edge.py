import asyncio
import json

import pytest

from headrace.serve.auth.access import AccessCheck
from headrace.serve.auth.api_keys import Grant, Keys
from headrace.serve.http.edge import Edge
from headrace.serve.http.openai.routes import Api

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
        answering = asyncio.create_task(Edge(stuck, AccessCheck(Keys({})))(scope, None, send))
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
