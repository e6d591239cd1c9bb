import time

import pytest

from tests.api.caching import with_memory

CHAT = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 20}
LINE = {"url": "/v1/chat/completions", "body": CHAT}
SYSTEM = {"role": "system", "content": "Be brief, be kind, be clear, and never say more than you know."}


@pytest.fixture
def options():
    return {"lookup": with_memory, "warm_below_rate": 1000.0}


def warm(house, status=202, headers=None, **body):
    answer = house.client.post("/v1/cache/warm", json=body, headers=headers)
    assert answer.status_code == status, answer.text
    return answer.json()


def settled(house):
    """The state once nothing waits or runs any more."""
    while True:
        state = house.client.get("/v1/cache/warm").json()
        if not state["waiting"] and not state["running"]:
            return state
        time.sleep(0.01)


def ask(house, headers=None, **more):
    answer = house.client.post("/v1/chat/completions", json=CHAT | more, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def test_an_answer_computed_ahead_is_a_hit(house):
    assert warm(house, requests=[LINE, LINE]) == {"requests": 2, "prefixes": 0, "from_history": 0}
    state = settled(house)
    assert (state["computed"] + state["kept"], state["refused"]) == (2, 0)
    assert ask(house).headers["X-Headrace-Cache"].startswith("hit; layer=exact")


def test_it_is_the_callers_own(house):
    warm(house, headers={"X-Tenant-Id": "a"}, requests=[LINE])
    settled(house)
    assert ask(house).headers["X-Headrace-Cache"] == "miss"
    assert ask(house, {"X-Tenant-Id": "a"}).headers["X-Headrace-Cache"].startswith("hit")


def test_what_cannot_be_kept_is_counted_as_refused(house):
    warm(house, requests=[{**LINE, "body": CHAT | {"temperature": 1}}])
    assert settled(house)["refused"] == 1


def test_a_prefix_is_found_by_conversations_that_begin_with_it(house):
    assert warm(house, prefixes=[{"messages": [SYSTEM]}])["prefixes"] == 1
    settled(house)
    used = ask(house, messages=[SYSTEM, CHAT["messages"][0]]).json()["usage"]
    known = len(house.model.tokenizer.encode(f"[system] {SYSTEM['content']}\n", add_special_tokens=False))
    assert used["prompt_tokens_details"]["cached_tokens"] >= known - 1
    assert house.client.get("/v1/cache/warm").json()["prefixes"] == 1


def test_a_prefix_that_spells_a_special_token_is_the_prefix_of_its_conversations(house):
    system = SYSTEM | {"content": SYSTEM["content"] + " </s> <s>"}
    warm(house, prefixes=[{"messages": [system]}])
    settled(house)
    used = ask(house, messages=[system, CHAT["messages"][0]]).json()["usage"]
    known = len(house.model.tokenizer.encode(f"[system] {system['content']}\n", add_special_tokens=False))
    assert used["prompt_tokens_details"]["cached_tokens"] >= known  # more, since they are text


def test_a_prefix_of_one_tenant_is_unknown_to_another(house):
    warm(house, headers={"X-Tenant-Id": "a"}, prefixes=[{"messages": [SYSTEM]}])
    settled(house)
    messages = [SYSTEM, CHAT["messages"][0]]
    other = ask(house, messages=messages).json()["usage"]["prompt_tokens_details"]
    assert other == {"cached_tokens": 0}
    own = ask(house, {"X-Tenant-Id": "a"}, messages=messages).json()["usage"]["prompt_tokens_details"]
    assert own["cached_tokens"] > 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"requests": [{**LINE, "body": {"messages": []}}]}, "requests[0].body.messages"),
        ({"requests": [LINE, {**LINE, "body": CHAT | {"tools": [{}]}}]}, "requests[1].body.tools[0].type"),
        ({"requests": [{**LINE, "url": "/v1/embeddings"}]}, "requests[0].url"),
        ({"requests": [{**LINE, "method": "GET"}]}, "requests[0].method"),
        ({"prefixes": [{}]}, "prefixes[0]"),
        (
            {"prefixes": [{"prompt": "a"}, {"messages": [{"role": "user"}]}]},
            "prefixes[1].messages[0].content",
        ),
        ({"prefixes": [{"prompt": "a", "messages": [SYSTEM]}]}, "prefixes[0]"),
        ({"prefixes": [{"prompt": "a", "retention": 101}]}, "prefixes[0].retention"),
        ({"prefixes": [{"prompt": "long " * 1000}]}, "prefixes[0]"),
        ({"everything": True}, "everything"),
    ],
)
def test_what_cannot_be_warmed_is_refused_at_the_door(house, body, param):
    assert warm(house, status=400, **body)["error"]["param"] == param
    assert settled(house)["refused"] == 0


@pytest.mark.parametrize("options", [{}])
def test_without_a_cache_there_is_nothing_to_put_an_answer_into(house):
    warm(house, requests=[LINE])
    assert settled(house)["refused"] == 1
