from __future__ import annotations

import pytest

RULES = "You are an agent. Read a file before you edit it. Keep the style of the code. "


SYSTEM = {"role": "system", "content": RULES}


def ask(house, text, status=200, headers=None, **more):
    body = {"messages": [SYSTEM, {"role": "user", "content": text}], "max_tokens": 3} | more
    answer = house.client.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == status, answer.text
    return answer.json()


def retentions(house):
    """The number of full blocks of each retention priority; all that was told to the engine has been done."""

    async def settled():
        house.service.count()
        return await house.service.between_steps(
            lambda: [b.retention for b in house.engine.scheduler.pool.full_blocks()]
        )

    found = house.client.portal.call(settled)
    return {priority: found.count(priority) for priority in set(found)}


def until(house, condition):
    """The retentions once they fulfil a condition: sessions are followed after the answer is sent."""
    for _ in range(1000):
        if condition(found := retentions(house)):
            return found
    raise AssertionError(found)


@pytest.mark.parametrize("named", [{"session_id": "s"}, {"headers": {"X-Session-Id": "s"}}])
def test_a_session_retains_its_newest_prompt(house, named):
    ask(house, "One two three four five six", **named)
    first = retentions(house)
    assert set(first) == {60}
    ask(house, "Another thing altogether", **named)
    found = until(house, lambda found: 0 in found)
    assert set(found) == {0, 60}
    assert found[60] > found[0] > 3


def test_without_a_session_nothing_is_retained(house):
    ask(house, "One")
    assert set(retentions(house)) == {35}


def test_a_session_is_released_by_its_last_request(house):
    ask(house, "One", session_id="s")
    ask(house, "One", session_id="s", agent_hint={"release": True})
    blocks = sum(retentions(house).values())
    until(house, lambda found: found.get(35, 0) >= blocks - 2)  # those of the answer are not the session's


def test_a_session_is_released_by_name(house):
    ask(house, "One", session_id="s/1", headers={"X-Tenant-Id": "a"})
    url = "/v1/sessions/s%2F1"
    assert house.client.delete(url).status_code in (404, 405)
    ask(house, "One", session_id="s", headers={"X-Tenant-Id": "a"})
    missing = house.client.delete("/v1/sessions/s")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "session_not_found")
    for _ in range(1000):
        gone = house.client.delete("/v1/sessions/s", headers={"X-Tenant-Id": "a"})
        if gone.status_code == 200:
            break
    assert gone.json() == {"id": "s", "object": "session", "released": True}


def test_a_hint_needs_a_session(house):
    error = ask(house, "One", 400, agent_hint={"release": True})["error"]
    assert error["param"] == "agent_hint"
    error = ask(house, "One", 400, session_id="")["error"]
    assert error["param"] == "session_id"
    error = ask(house, "One", 400, headers={"X-Session-Id": "s" * 200})["error"]
    assert error["param"] == "X-Session-Id"


def test_every_dialect_has_sessions(house):
    message = {"messages": [{"role": "user", "content": RULES}], "max_tokens": 3, "session_id": "m"}
    assert house.client.post("/v1/messages", json=message).status_code == 200
    item = {"input": RULES, "max_output_tokens": 3, "store": False, "session_id": "r"}
    assert house.client.post("/v1/responses", json=item).status_code == 200
    assert set(retentions(house)) == {60}


def test_a_stored_response_retains_its_prompt_until_it_is_deleted(house):
    body = {"input": RULES, "max_output_tokens": 3}
    first = house.client.post("/v1/responses", json=body).json()
    assert set(retentions(house)) == {50}
    second = house.client.post("/v1/responses", json=body | {"previous_response_id": first["id"]}).json()
    assert retentions(house)[50] > 10
    assert house.client.delete(f"/v1/responses/{second['id']}").status_code == 200
    until(house, lambda found: found.get(35, 0) > 10)
    unstored = house.client.post("/v1/responses", json={"input": "Q" * 30, "store": False}).json()
    assert unstored["status"] == "completed"
