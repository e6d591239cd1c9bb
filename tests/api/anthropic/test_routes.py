"""Keys, errors and models as Anthropic's clients know them, and the response cache."""

import pytest

from headrace.api.auth.api_keys import Grant, Role
from tests.api.anthropic.scenes import HI, PATH, ask, events, said
from tests.api.caching import with_memory
from tests.api.conftest import at_a_step

GRANTS = {"good": Grant("acme"), "metrics": Grant(None, Role.METRICS), "admin": Grant(None, Role.ADMIN)}


@pytest.mark.parametrize("options", [{"grants": GRANTS}], indirect=True)
def test_keys_and_the_types_of_errors(house):
    def kind(status, path=PATH, headers=(), **more):
        body = {"model": "fox", "messages": HI, "max_tokens": 5} | more
        answer = house.client.post(path, json=body, headers=dict(headers))
        assert answer.status_code == status, answer.text
        assert answer.json()["type"] == "error"
        return answer.json()["error"]["type"]

    good = {"x-api-key": "good"}
    assert kind(401) == "authentication_error"
    assert kind(401, headers={"x-api-key": "bad"}) == "authentication_error"
    assert kind(403, headers={"x-api-key": "metrics"}) == "permission_error"
    assert kind(404, headers=good, model="other") == "not_found_error"
    assert kind(404, "/v1/messages/batches", headers=good) == "not_found_error"
    assert house.client.post("/pause", headers={"x-api-key": "admin"}).status_code == 200
    assert kind(529, headers=good) == "overloaded_error"
    assert kind(413, headers=good, system="x" * 200_000) == "request_too_large"
    assert house.client.get(PATH, headers=good).json()["error"]["type"] == "invalid_request_error"
    assert house.client.get(PATH, headers={"Authorization": "Bearer good"}).status_code == 405


@pytest.mark.parametrize("options", [{"grants": GRANTS}], indirect=True)
def test_a_key_in_either_header_is_the_tenants(house):
    for number, headers in enumerate(({"x-api-key": "good"}, {"Authorization": "Bearer good"})):
        body = {"model": "fox", "messages": HI, "max_tokens": 5, "request_id": f"r{number}"}
        assert house.client.post(PATH, json=body, headers=headers).status_code == 200
        reported = house.client.get(f"/v1/requests/msg_r{number}", headers=headers).json()
        assert reported["tenant"] == "acme"


def test_models_in_the_format_of_the_client(house):
    headers = {"anthropic-version": "2023-06-01"}
    listed = house.client.get("/v1/models", headers=headers).json()
    (card,) = listed["data"]
    assert (card["type"], card["id"], card["display_name"]) == ("model", "fox", "fox")
    assert card["created_at"].endswith("Z")
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "fox", "fox")
    assert house.client.get("/v1/models/fox", headers=headers).json() == card
    missing = house.client.get("/v1/models/bear", headers=headers).json()
    assert missing["error"]["type"] == "not_found_error"
    assert house.client.get("/v1/models").json()["object"] == "list"


@said("one two three four five six seven eight nine ten")
def test_an_error_inside_of_a_stream_is_an_event(house, monkeypatch):
    at_a_step(house, monkeypatch, lambda: house.runner.poison.add("msg_r"))
    body = {"messages": HI, "max_tokens": 25, "stream": True, "request_id": "r"}
    reported = events(house.client.post(PATH, json=body))
    assert reported[0]["type"] == "message_start"
    assert reported[-1]["type"] == "error"
    assert reported[-1]["error"] == {
        "type": "api_error",
        "message": "The server had an error while processing your request.",
    }


@pytest.mark.parametrize("options", [{"lookup": with_memory}], indirect=True)
def test_the_response_cache_serves_messages(house):
    first, second = ask(house, temperature=0), ask(house, temperature=0)
    assert second.headers["X-Headrace-Cache"].startswith("hit")
    assert first.json()["content"] == second.json()["content"]
    chat = {"messages": HI, "temperature": 0, "max_tokens": 200}
    answer = house.client.post("/v1/chat/completions", json=chat)
    assert answer.headers["X-Headrace-Cache"].startswith("hit")


@said("one two three four five six seven eight nine ten", step_seconds=0.02)
def test_a_missed_deadline_of_its_own_is_no_error_of_the_server(house):
    answer = house.client.post(PATH, json={"messages": HI, "max_tokens": 50, "deadline_ms": 50})
    assert (answer.status_code, answer.json()["error"]["type"]) == (408, "timeout_error")


@said("one two three four five six seven eight nine ten", step_seconds=0.05, request_timeout=0.2)
def test_a_timeout_of_the_server_is_504(house):
    answer = house.client.post(PATH, json={"messages": HI, "max_tokens": 50})
    assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout_error")
