"""Steps, timelines and simulations over HTTP."""

from __future__ import annotations

import threading
import time

import pytest

from headrace.wiring.pages import StepWatch
from tests.api.caching import with_memory
from tests.observe.steps.trace_events import check_trace

PATH = "/v1/completions"
SIMULATION = {"requests": [{"prompt_tokens": 20, "output_tokens": 4}] * 2, "max_num_seqs": 1}


def timeline(house, request_id, query="", **headers):
    return house.client.get(f"/v1/requests/{request_id}/timeline{query}", headers=headers)


def test_a_request_has_a_timeline(house):
    call_id = house.client.post(PATH, json={"prompt": "xyz", "max_tokens": 4}).json()["id"]
    shown = timeline(house, call_id).json()
    assert (shown["id"], shown["state"], shown["output_tokens"]) == (call_id, "finished", 4)
    assert [each["stage"] for each in shown["stages"]][-2:] == ["prefill", "decode"]
    assert len(shown["token_seconds"]) == 4
    assert shown["chunks"][0]["tokens"] == shown["prompt_tokens"]
    assert shown["finish"]["reason"] == "length"
    assert "served_seconds" in shown["cost"]
    assert "xyz" not in str(shown)


def test_a_timeline_is_exported_as_a_file(house):
    call_id = house.client.post(PATH, json={"prompt": "x", "max_tokens": 4}).json()["id"]
    answer = timeline(house, call_id, "?format=perfetto")
    check_trace(answer.json())
    assert answer.headers["Content-Disposition"] == f'attachment; filename="{call_id}.perfetto.json"'
    assert timeline(house, call_id, "?format=xml").json()["error"]["param"] == "format"


def test_a_call_with_two_choices_has_two_timelines(house):
    call_id = house.client.post(PATH, json={"prompt": "x", "max_tokens": 4, "n": 2}).json()["id"]
    assert [each["output_tokens"] for each in timeline(house, call_id).json()["sequences"]] == [4, 4]
    names = [
        each["args"]["name"]
        for each in timeline(house, call_id, "?format=perfetto").json()["traceEvents"]
        if each["name"] == "thread_name"
    ]
    assert len(names) == 2


@pytest.mark.parametrize("options", [{"lookup": with_memory}])
def test_cache_lookups_are_in_the_timeline(house):
    for _ in range(2):
        answer = house.client.post(PATH, json={"prompt": "x", "max_tokens": 4, "temperature": 0})
        house.quiet()
    shown = timeline(house, answer.json()["id"]).json()
    assert [each["event"] for each in shown["events"]] == ["cache_lookup", "served_from_cache"]
    assert shown["events"][0]["outcome"] == "hit"


@pytest.mark.parametrize("options", [{"keys": ("alpha", "beta")}])
def test_a_timeline_belongs_to_its_tenant(house):
    mine, other = ({"Authorization": f"Bearer {key}"} for key in ("alpha", "beta"))
    call_id = house.client.post(PATH, json={"prompt": "x", "max_tokens": 2}, headers=mine).json()["id"]
    assert timeline(house, call_id, **mine).status_code == 200
    for query in ("", "?format=perfetto"):
        answer = timeline(house, call_id, query, **other)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "request_not_found")


def test_steps_are_recorded_from_the_first_look_on(house):
    assert house.client.get("/v1/steps").json()["steps"] == []
    house.client.post(PATH, json={"prompt": "xyz", "max_tokens": 4})
    shown = house.client.get("/v1/steps").json()
    assert shown["source"] == "server"
    assert shown["settings"] == {"block_size": 4}
    kinds = [row["kind"] for step in shown["steps"] for row in step["rows"]]
    assert kinds[0] == "prefill"
    assert kinds[1:] == ["decode"] * (len(kinds) - 1)
    assert len(kinds) >= 4
    assert len(shown["memory"]["cells"]) == 256
    last = shown["steps"][-1]["step"]
    assert house.client.get(f"/v1/steps?after={last}").json()["steps"] == []
    assert len(house.client.get("/v1/steps?limit=2").json()["steps"]) == 2
    check_trace(house.client.get("/v1/steps?format=perfetto").json())


@pytest.mark.parametrize("options", [{"step_seconds": 0.05, "reply": lambda prompt, seed: [65] * 300}])
def test_the_block_table_of_a_request_is_shown_while_it_runs(house):
    body = {"prompt": "abcdefghijk", "max_tokens": 240, "ignore_eos": True, "request_id": "one"}
    waiting = threading.Thread(target=house.client.post, args=(PATH,), kwargs={"json": body})
    waiting.start()
    table = None
    until = time.monotonic() + 60
    while table is None and time.monotonic() < until:
        table = house.client.get("/v1/steps?request=cmpl-one").json()["memory"]["table"]
    assert table["request_id"] == "cmpl-one"
    assert len(set(table["blocks"])) == table["total"] >= 3
    assert (table["shared"], table["copied"], table["host"], table["disk"]) == (0, 0, 0, 0)
    assert house.client.get("/v1/steps").json()["memory"]["table"] is None
    assert house.client.post("/abort_request", json={"request_id": "cmpl-one"}).status_code == 200
    waiting.join()
    while house.service.open_requests():
        time.sleep(0.005)
    assert house.client.get("/v1/steps?request=cmpl-one").json()["memory"]["table"] is None


@pytest.mark.parametrize("query", ["after=x", "after=-2", "limit=0", "limit=1001", "format=csv"])
def test_bad_queries_name_the_parameter(house, query):
    error = house.client.get(f"/v1/steps?{query}").json()["error"]
    assert error["param"] == query.split("=")[0]


def test_a_fold_is_attached_while_it_is_read(house):
    seen = []

    class Fold:
        def fold(self, event, now):
            seen.append(event)

    made = []

    async def look():
        watch = StepWatch(house.service, lambda: made.append(Fold()) or made[-1], seconds=0.0)
        assert watch.look() is watch.look()
        assert watch.attached
        return watch

    watch = house.client.portal.call(look)
    until_idle = house.client.portal.call
    while watch.attached:
        until_idle(_turn)
    before = len(seen)
    house.client.post(PATH, json={"prompt": "x", "max_tokens": 4})
    house.quiet()
    assert (len(seen), len(made)) == (before, 1)


async def _turn():
    """Let the loop run once."""


def test_a_simulation_returns_its_steps(house):
    shown = house.client.post("/v1/simulations", json=SIMULATION).json()
    assert shown["source"] == "simulation"
    assert [each["id"] for each in shown["requests"]] == ["A", "B"]
    assert shown["summary"]["output_tokens"] == 8
    assert all(len(step["rows"]) == 1 for step in shown["steps"])
    check_trace(house.client.post("/v1/simulations?format=perfetto", json=SIMULATION).json())


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"requests": []}, "requests"),
        ({"num_blocks": 1}, "num_blocks"),
        ({"num_blocks": "1"}, "num_blocks"),
        ({"scheduling_policy": "random"}, "scheduling_policy"),
        ({"slots": 1}, "slots"),
        ({"requests": [{"prompt_tokens": 1}]}, "requests[0].output_tokens"),
        ({"requests": [{"prompt_tokens": 1, "output_tokens": 1, "arrival": 100}]}, "requests[0].arrival"),
    ],
)
def test_a_wrong_simulation_names_the_field(house, change, param):
    answer = house.client.post("/v1/simulations", json=SIMULATION | change)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_each_stop_of_the_tour_can_be_simulated(house):
    stops = house.client.get("/v1/tour").json()["data"]
    for stop in stops:
        for run in stop["runs"]:
            assert house.client.post("/v1/simulations", json=run["scenario"]).status_code == 200
