from __future__ import annotations

import threading
import time

import pytest

from headrace.service.sleep import Part
from tests.api.conftest import PresentWeights

PATH = "/v1/completions"
BODY = {"prompt": "abc", "max_tokens": 3}
WEIGHTS = PresentWeights()


def begin(house, answers, body=BODY) -> threading.Thread:
    """Send a request that the engine holds but cannot compute yet."""
    house.runner.gate.clear()
    running = threading.Thread(target=lambda: answers.append(house.client.post(PATH, json=body)))
    running.start()
    until(house.service.open_requests)
    return running


def until(condition) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


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
    until(lambda: house.service.sleeping)
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
    until(lambda: house.service.sleeping)
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
    until(lambda: house.service.sleeping)
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
