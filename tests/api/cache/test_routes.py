import json

import pytest

from headrace.core.events import Arrived
from tests.api.caching import with_memory
from tests.api.openai.test_chat import HI, events

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GREEDY = {"temperature": 0}

SHAPES = [
    {},
    {"max_tokens": 4},
    {"stop": ["END of"]},
    {"stop": ["日本"], "include_stop_str_in_output": True},
    {"logprobs": True, "top_logprobs": 2},
    {"return_token_ids": True},
    {"n": 3},
    {"n": 2, "seed": 5, "temperature": 1},
]


@pytest.fixture
def options() -> dict:
    return {"lookup": with_memory}


def post(house, path=CHAT, headers=None, **more):
    body = ({"messages": HI} if path == CHAT else {"prompt": "hi you"}) | GREEDY | more
    answer = house.client.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def note(answer):
    return answer.headers["X-Headrace-Cache"]


def arrivals(house):
    """How many sequences the engine was given."""
    return sum(isinstance(event, Arrived) for event in house.counted())


def without_names(document):
    """An answer without what is minted anew for each."""
    return {name: value for name, value in document.items() if name not in ("id", "created", "usage")}


def written(answer, streamed):
    """What each choice says, put together again from its chunks where it was streamed."""
    if not streamed:
        shown = answer.json()["choices"]
        return [
            (c.get("text", c.get("message", {}).get("content")), c["finish_reason"], c["stop_reason"])
            for c in shown
        ]
    texts, ends = {}, {}
    for event in events(answer):
        for choice in event["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + text
            if choice["finish_reason"]:
                ends[choice["index"]] = (choice["finish_reason"], choice["stop_reason"])
    return [(texts[index], *ends[index]) for index in sorted(texts)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_one_entry_serves_streams_and_documents_alike(house, shape, path):
    if path == COMPLETIONS and "logprobs" in shape:
        shape = {"logprobs": 2}
    for first, second in ((False, True), (True, False)):
        house.client.post("/v1/cache/clear", json={"scope": "all"})
        live = post(house, path, stream=first, **shape)
        assert note(live) == "miss"
        computed = arrivals(house)
        for streamed in (first, second):
            replayed = post(house, path, stream=streamed, **shape)
            assert note(replayed).startswith("hit; layer=exact; age=")
            assert written(replayed, streamed) == written(live, first)
        again = post(house, path, stream=False, **shape).json()
        assert arrivals(house) == computed
        if not first:
            assert without_names(again) == without_names(live.json())
            assert again["id"] != live.json()["id"]


def test_usage_is_the_answers_and_its_whole_prompt_was_cached(house):
    live, hit = post(house).json()["usage"], post(house).json()["usage"]
    assert {**hit, "prompt_tokens_details": None} == {**live, "prompt_tokens_details": None}
    assert hit["prompt_tokens_details"] == {"cached_tokens": live["prompt_tokens"]}
    streamed = events(post(house, stream=True, stream_options={"include_usage": True}))
    assert streamed[-1]["usage"] == hit


@pytest.mark.parametrize(
    "more", [{"echo": True}, {"echo": True, "max_tokens": 0}, {"best_of": 3, "seed": 1, "temperature": 1}]
)
def test_fields_of_completions_are_served_from_cache_too(house, more):
    live, hit = (post(house, COMPLETIONS, **more) for _ in range(2))
    assert note(hit).startswith("hit")
    assert without_names(hit.json()) == without_names(live.json())


def test_what_may_not_be_kept_says_why(house):
    assert note(post(house, temperature=1)) == "bypass; reason=sampled-without-a-seed"
    assert note(post(house, COMPLETIONS, prompt_logprobs=1)) == "bypass; reason=prompt_logprobs"
    assert note(post(house, headers={"Cache-Control": "no-store"})) == "bypass; reason=no_store"
    assert note(post(house)) == "miss"


@pytest.mark.parametrize("options", [{}])
def test_without_a_cache_no_header_speaks_of_one(house):
    assert "X-Headrace-Cache" not in post(house).headers
    assert list(house.client.get("/v1/cache/stats").json()["layers"]) == ["prefix"]


def test_a_tenants_answers_are_its_own(house):
    ann, bob = {"X-Tenant-Id": "ann"}, {"X-Tenant-Id": "bob"}
    assert note(post(house, headers=ann)) == "miss"
    assert note(post(house, headers=bob)) == "miss"
    assert note(post(house, headers=ann)).startswith("hit")
    assert note(post(house, headers=ann, cache_salt="pepper")) == "miss"
    assert note(post(house, user="ann")).startswith("hit")  # the header is another way to say who one is


def test_clearing_by_tag_and_by_tenant(house):
    ann, bob = {"X-Tenant-Id": "ann"}, {"X-Tenant-Id": "bob"}
    tagged = {"response_cache": {"tags": ["news"]}}

    def clear(headers, **body):
        answer = house.client.post("/v1/cache/clear", json=body, headers=headers)
        assert answer.json() == {"cleared": True, "stores": {"memory": True}}

    def notes():
        return [note(post(house, headers=who, **tagged))[:3] for who in (ann, bob)]

    assert notes() == ["mis", "mis"]
    clear(ann, tags=["sports"])
    assert notes() == ["hit", "hit"]
    clear(ann, tags=["sports", "news"])
    assert notes() == ["mis", "hit"]
    clear(bob, scope="tenant")
    assert notes() == ["hit", "mis"]
    clear(ann, scope="all")
    assert notes() == ["mis", "mis"]


@pytest.mark.parametrize(
    "body", [{}, {"tags": ["a"], "scope": "all"}, {"tags": []}, {"scope": "world"}, {"key": "x"}]
)
def test_an_unclear_clearing_is_refused(house, body):
    assert house.client.post("/v1/cache/clear", json=body).status_code == 400


@pytest.mark.parametrize("options", [{"lookup": with_memory, "keys": ("alpha", "beta")}])
def test_with_keys_a_tenant_cannot_invalidate_or_report_entries_of_another(house):
    alpha, beta = ({"Authorization": f"Bearer {key}"} for key in ("alpha", "beta"))
    mine = post(house, headers=alpha).json()["id"]
    assert house.client.post("/v1/cache/clear", json={"scope": "all"}, headers=beta).status_code == 403
    assert house.client.post("/v1/cache/clear", json={"scope": "tenant"}, headers=beta).status_code == 200
    assert house.client.post("/v1/cache/feedback", json={"id": mine}, headers=beta).status_code == 404
    assert note(post(house, headers=alpha)).startswith("hit")
    assert note(post(house, headers=beta)) == "miss"


def test_an_answer_that_was_wrong_is_computed_from_then_on(house):
    post(house)
    hit = post(house)
    reported = house.client.post("/v1/cache/feedback", json={"id": hit.json()["id"]})
    assert reported.json() == {"id": hit.json()["id"], "deleted": 1}
    for _ in range(2):
        assert note(post(house)) == "miss"
    assert house.client.post("/v1/cache/feedback", json={"id": "chatcmpl-nobody"}).status_code == 404


def test_a_response_reported_as_wrong_is_never_served_again(house):
    wrong = post(house, temperature=1, response_cache={"samples": 2}).json()["id"]
    house.client.post("/v1/cache/feedback", json={"id": wrong})
    for _ in range(40):
        post(house, temperature=1, response_cache={"samples": 2})
    assert arrivals(house) == 3


def test_the_ledger_counts_tokens(house):
    live = post(house).json()["usage"]
    post(house)
    post(house, temperature=1)
    stats = house.client.get("/v1/cache/stats").json()
    exact = stats["layers"]["exact"]
    assert (exact["hits"], exact["misses"], exact["hit_rate"]) == (1, 1, 0.5)
    assert exact["saved_prompt_tokens"] == live["prompt_tokens"]
    assert exact["saved_output_tokens"] == live["completion_tokens"]
    assert stats["bypasses"] == {"sampled without a seed": 1}
    page = house.client.get("/metrics").text
    assert 'headrace:response_cache_hits_total{layer="exact",model_name=""} 1.0' in page
    assert json.loads(house.client.get("/v1/cache/stats").text)


def test_a_request_that_was_spared_can_be_explained(house):
    post(house)
    answer = post(house).json()
    reported = house.client.get(f"/v1/requests/{answer['id']}").json()
    assert reported["state"] == "finished"
    assert reported["finish"]["layer"] == "exact"
    assert reported["output_tokens"] == answer["usage"]["completion_tokens"]
