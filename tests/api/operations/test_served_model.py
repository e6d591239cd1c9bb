"""LoRA adapters over HTTP: loaded, listed, chosen by model name in every dialect, replaced and unloaded."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from headrace.api.compile.policies import Rules
from headrace.core.events import Arrived
from headrace.core.tenancy.tenants import TenantLimits, Tenants, TenantTerms
from headrace.service.sleep import Part
from tests.api.conftest import PresentWeights
from tests.waiting import eventually

SAID = [{"role": "user", "content": "Hi"}]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 4}),
    ("/v1/chat/completions", {"messages": SAID, "max_tokens": 4}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 4}),
    ("/v1/messages", {"messages": SAID, "max_tokens": 4}),
]


def load(house: Any, name: str = "sql", path: str = "/adapters/sql", **more: Any) -> Any:
    return house.client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path} | more)


def adapters_of(house: Any) -> list[str]:
    """The adapters of all requests so far."""
    return [event.adapter for event in house.counted() if isinstance(event, Arrived)]


def test_an_adapter_is_loaded_and_listed_with_its_parent(house: Any) -> None:
    answer = load(house)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    base, adapter = house.client.get("/v1/models").json()["data"]
    assert (base["id"], base["parent"]) == ("fox", None)
    assert (adapter["id"], adapter["parent"], adapter["root"]) == ("sql", "fox", "/adapters/sql")
    assert house.client.get("/v1/models/sql").json()["parent"] == "fox"
    spoken = {"anthropic-version": "2023-06-01"}
    assert [each["id"] for each in house.client.get("/v1/models", headers=spoken).json()["data"]] == [
        "fox",
        "sql",
    ]


@pytest.mark.parametrize(("path", "body"), CALLS)
def test_a_request_chooses_an_adapter_by_its_model_name(house: Any, path: str, body: dict[str, Any]) -> None:
    load(house)
    answers = [house.client.post(path, json=body | {"model": name}) for name in ("sql", "fox", "other")]
    assert [answer.status_code for answer in answers] == [200, 200, 404]
    assert [answer.json()["model"] for answer in answers[:2]] == ["sql", "fox"]
    assert adapters_of(house) == ["digest 1", ""]
    assert "other" in answers[2].text


def test_a_streamed_answer_has_the_name_of_the_adapter(house: Any) -> None:
    load(house)
    body = {"model": "sql", "prompt": "Hi", "max_tokens": 4, "stream": True}
    assert '"model":"sql"' in house.client.post("/v1/completions", json=body).text.replace(" ", "")


def test_other_weights_under_the_same_name_are_another_adapter(house: Any) -> None:
    load(house)
    body = {"model": "sql", "prompt": "A prompt that fills several blocks of the cache.", "max_tokens": 4}
    first = [house.client.post("/v1/completions", json=body).json() for _ in range(2)]
    refused = load(house)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "lora_name"
    assert "'sql' has already been loaded; set load_inplace" in error["message"]
    assert load(house, load_inplace=True).status_code == 200
    assert house.shelf.retired == ["digest 1"]
    later = [house.client.post("/v1/completions", json=body).json() for _ in range(2)]
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in (*first, *later)]
    assert [bool(tokens) for tokens in cached] == [False, True, False, True]
    assert adapters_of(house) == ["digest 1", "digest 1", "digest 2", "digest 2"]


def test_an_unloaded_adapter_is_not_found(house: Any) -> None:
    load(house)
    answer = house.client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    assert [each["id"] for each in house.client.get("/v1/models").json()["data"]] == ["fox"]
    path, body = CALLS[0]
    assert house.client.post(path, json=body | {"model": "sql"}).status_code == 404
    again = house.client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
    error = again.json()["error"]
    assert (again.status_code, error["param"], error["code"]) == (404, "lora_name", "model_not_found")
    assert load(house).status_code == 200


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"lora_name": "fox"}, "lora_name", "the name 'fox' is that of a served model"),
        ({"lora_name": "builtin"}, "lora_name", "the name 'builtin' is that of a served model"),
        ({"lora_name": " "}, "lora_name", "must not be empty"),
        ({"lora_name": ""}, "lora_name", "lora_name"),
        ({"lora_path": None}, "lora_path", "lora_path"),
        ({"rank": 8}, "rank", "rank"),
        ({"is_3d_lora_weight": True}, "is_3d_lora_weight", "is_3d_lora_weight is not supported yet"),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_the_reason(
    house: Any, body: dict[str, Any], param: str, message: str
) -> None:
    answer = house.client.post(
        "/v1/load_lora_adapter", json={"lora_name": "sql", "lora_path": "/a/sql"} | body
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert message in error["message"]
    assert len(house.client.get("/v1/models").json()["data"]) == 1


def test_a_folder_without_an_adapter_is_not_found(house: Any) -> None:
    answer = load(house, path="/a/missing")
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (404, "lora_path", "adapter_not_found")
    assert "'sql' cannot be loaded: adapter_config.json cannot be read" in error["message"]
    assert len(house.client.get("/v1/models").json()["data"]) == 1


def test_what_a_client_of_vllm_sends_by_default_is_taken(house: Any) -> None:
    assert load(house, load_inplace=False, is_3d_lora_weight=False).status_code == 200
    body = {"lora_name": "sql", "lora_int_id": None}
    assert house.client.post("/v1/unload_lora_adapter", json=body).status_code == 200


def test_adapters_have_no_numbers(house: Any) -> None:
    load(house)
    body = {"lora_name": "sql", "lora_int_id": 1}
    answer = house.client.post("/v1/unload_lora_adapter", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_int_id")


def test_one_of_two_names_of_the_same_files_may_go(house: Any) -> None:
    house.shelf.add = lambda folder: "digest"
    assert load(house, "one").status_code == load(house, "two").status_code == 200
    house.client.post("/v1/unload_lora_adapter", json={"lora_name": "one"})
    assert house.shelf.retired == []
    house.client.post("/v1/unload_lora_adapter", json={"lora_name": "two"})
    assert house.shelf.retired == ["digest"]


@pytest.mark.parametrize("name", ["a,b", "a\nb", " a", "a\u202eb", "\ud800", "a\x00"])
def test_a_name_that_logs_and_metrics_cannot_show_is_refused(house: Any, name: str) -> None:
    raw = json.dumps({"lora_name": name, "lora_path": "/adapters/sql"})
    answer = house.client.post(
        "/v1/load_lora_adapter", content=raw, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400
    assert house.shelf.looks == 0


def test_a_name_may_have_slashes_and_letters_of_all_scripts(house: Any) -> None:
    for name in ("team/sql-v2", "../sql", "запрос"):
        assert load(house, name).status_code == 200
        assert house.client.post(CALLS[0][0], json=CALLS[0][1] | {"model": name}).json()["model"] == name


LIMITED = Tenants(
    {
        "acme": TenantTerms(
            limits=TenantLimits(requests_per_minute=2), models={"sql": TenantLimits(requests_per_minute=1)}
        )
    }
)


@pytest.mark.parametrize("options", [{"rules": Rules(tenants=LIMITED)}])
def test_limits_by_the_name_of_an_adapter_count_its_requests_only(house: Any) -> None:
    load(house)
    load(house, "chat", "/adapters/chat")
    path, body = CALLS[0]

    def ask(name: str) -> tuple[int, str | None]:
        answer = house.client.post(path, json=body | {"model": name}, headers={"X-Tenant-Id": "acme"})
        return answer.status_code, answer.headers.get("x-ratelimit-limit-requests")

    assert ask("sql") == (200, "1")
    assert ask("sql") == (429, "1")
    assert ask("chat") == ask("fox") == (200, "2")
    assert ask("chat") == ask("fox") == (429, "2")


def test_a_prefix_is_warmed_with_an_adapter(house: Any) -> None:
    load(house)
    prefix = {"prompt": "A prefix of a few blocks of the cache.", "model": "sql"}
    assert house.client.post("/v1/cache/warm", json={"prefixes": [prefix]}).status_code == 202
    while house.client.get("/v1/cache/warm").json()["computed"] < 1:
        time.sleep(0.01)
    assert adapters_of(house) == ["digest 1"]
    used = [
        house.client.post(
            "/v1/completions", json={"model": name, "prompt": prefix["prompt"], "max_tokens": 1}
        )
        for name in ("sql", "fox")
    ]
    cached = [each.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for each in used]
    assert [bool(tokens) for tokens in cached] == [True, False]
    missing = house.client.post("/v1/cache/warm", json={"prefixes": [prefix | {"model": "other"}]})
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "prefixes[0].model")


PATH = "/v1/completions"
BODY = {"prompt": "abc", "max_tokens": 3}
WEIGHTS = PresentWeights()


def begin(house, answers, body=BODY) -> threading.Thread:
    """Send a request that the engine holds but cannot compute yet."""
    house.runner.gate.clear()
    running = threading.Thread(target=lambda: answers.append(house.client.post(PATH, json=body)))
    running.start()
    eventually(house.service.open_requests)
    return running


def state(house) -> str:
    lines = [line for line in house.client.get("/metrics").text.splitlines() if "engine_sleep_state{" in line]
    (line,) = [line for line in lines if line.endswith(" 1.0")]
    return line.partition('sleep_state="')[2].partition('"')[0]


def test_a_sleeping_model_rejects_requests_until_it_is_woken_up(house):
    assert house.client.get("/is_sleeping").json() == {"is_sleeping": False, "sleeping": []}
    slept = house.client.post("/sleep").json()
    assert (slept["is_sleeping"], slept["sleeping"], slept["prefix_cache_reset"]) == (
        True,
        ["kv_cache"],
        True,
    )
    assert house.client.get("/is_sleeping").json() == {"is_sleeping": True, "sleeping": ["kv_cache"]}
    assert state(house) == "weights_offloaded"
    rejected = house.client.post(PATH, json=BODY)
    assert (rejected.status_code, rejected.json()["error"]["code"]) == (503, "sleeping")
    assert int(rejected.headers["retry-after"]) >= 1
    ready = house.client.get("/health/ready")
    assert (ready.status_code, ready.json()["status"]) == (503, "sleeping")
    assert house.client.get("/health").status_code == 200
    assert house.client.post("/wake_up").json()["is_sleeping"] is False
    assert state(house) == "awake"
    assert house.client.post(PATH, json=BODY).status_code == 200


def test_the_prefix_cache_is_empty_after_sleep(house):
    body = {"prompt": [70] * 40, "max_tokens": 1}

    def cached() -> int:
        usage = house.client.post(PATH, json=body).json()["usage"]
        return int((usage["prompt_tokens_details"] or {}).get("cached_tokens", 0))

    assert (cached(), cached() > 0) == (0, True)
    house.client.post("/sleep")
    house.client.post("/wake_up")
    assert (cached(), cached() > 0) == (0, True)


@pytest.mark.parametrize("options", [{"weights": WEIGHTS}])
def test_level_2_drops_the_weights_and_parts_wake_up_one_by_one(house):
    assert house.client.post("/sleep?level=2").json()["sleeping"] == ["kv_cache", "weights"]
    assert (WEIGHTS.dropped, state(house)) == (1, "discard_all")
    house.client.post("/sleep?level=2")
    assert WEIGHTS.dropped == 1  # it sleeps already
    half = house.client.post("/wake_up?tags=kv_cache").json()
    assert (half["is_sleeping"], half["sleeping"]) == (True, ["weights"])
    assert house.client.post(PATH, json=BODY).status_code == 503
    WEIGHTS.problem = "the disk is gone"
    failed = house.client.post("/wake_up?tags=weights")
    assert (failed.status_code, failed.json()["error"]["code"]) == (409, "not_woken_up")
    assert "the disk is gone" in failed.json()["error"]["message"]
    assert house.client.get("/is_sleeping").json()["sleeping"] == ["weights"]
    WEIGHTS.problem = ""
    assert house.client.post("/wake_up?tags=weights").json()["is_sleeping"] is False
    assert house.client.post(PATH, json=BODY).status_code == 200


def test_running_requests_end_before_the_model_sleeps(house):
    answers, slept = [], []
    running = begin(house, answers)
    sleeping = threading.Thread(target=lambda: slept.append(house.client.post("/sleep")))
    sleeping.start()
    eventually(lambda: house.service.sleeping)
    assert house.client.post(PATH, json=BODY).status_code == 503
    assert house.client.get("/is_sleeping").json()["is_sleeping"] is False
    house.runner.gate.set()
    running.join(60)
    sleeping.join(60)
    assert answers[0].json()["choices"][0]["finish_reason"] == "length"
    assert (slept[0].json()["is_sleeping"], slept[0].json()["open_requests"]) == (True, 0)


def test_wake_up_ends_the_wait_for_running_requests(house):
    answers, slept = [], []
    running = begin(house, answers)
    sleeping = threading.Thread(target=lambda: slept.append(house.client.post("/sleep")))
    sleeping.start()
    eventually(lambda: house.service.sleeping)
    woken = threading.Thread(target=lambda: house.client.post("/wake_up"))
    woken.start()
    sleeping.join(60)
    assert (slept[0].status_code, slept[0].json()["error"]["code"]) == (409, "woken_up")
    house.runner.gate.set()
    running.join(60)
    woken.join(60)
    assert answers[0].status_code == 200
    assert house.client.post(PATH, json=BODY).status_code == 200


def test_running_requests_can_be_aborted(house):
    answers, slept = [], []
    running = begin(house, answers)
    sleeping = threading.Thread(target=lambda: slept.append(house.client.post("/sleep?mode=abort")))
    sleeping.start()
    running.join(60)  # before the step that is under way ends
    house.runner.gate.set()
    sleeping.join(60)
    assert answers[0].status_code >= 400 or answers[0].json()["choices"][0]["finish_reason"] == "abort"
    assert (slept[0].json()["is_sleeping"], slept[0].json()["aborted_requests"]) == (True, 1)


def test_kept_requests_continue_with_the_same_answer(house):
    expected = house.client.post(PATH, json=BODY).json()["choices"][0]["text"]
    answers, slept = [], []
    running = begin(house, answers)
    sleeping = threading.Thread(target=lambda: slept.append(house.client.post("/sleep?mode=keep")))
    sleeping.start()
    eventually(lambda: house.service.sleeping)
    house.runner.gate.set()
    sleeping.join(60)
    assert slept[0].json()["open_requests"] == 1
    assert house.client.get("/health").status_code == 200
    assert not answers
    house.client.post("/wake_up")
    running.join(60)
    assert answers[0].json()["choices"][0]["text"] == expected


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/sleep?level=0", "level"),
        ("/sleep?level=x", "level"),
        ("/sleep?mode=drop", "mode"),
        ("/sleep?tags=disk", "tags"),
        ("/wake_up?tags=disk", "tags"),
    ],
)
def test_bad_parameters_are_named(house, path, field):
    answer = house.client.post(path)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert not house.service.sleeping


@pytest.mark.parametrize("options", [{"refused_parts": {Part.WEIGHTS: "weights cannot be dropped with --x"}}])
def test_a_part_that_cannot_sleep_is_refused_by_name(house):
    refused = house.client.post("/sleep?level=2")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "level")
    assert "--x" in refused.json()["error"]["message"]
    assert house.client.post("/sleep?tags=kv_cache").json()["sleeping"] == ["kv_cache"]
