"""The endpoints of the Responses API over a scripted model: what is refused, stored, listed, cancelled."""

import json
import random
import sqlite3
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace.api.responses.store import ResponseStore
from tests.api.conftest import time_runs_out
from tests.api.openai.test_tool_use import mutated
from tests.api.tool_scenes import TIME, TOOL_TEMPLATE, WEATHER

PATH = "/v1/responses"
TOOLS = [{"type": "function"} | tool["function"] for tool in (WEATHER, TIME)]
CALL = (
    "<think>\nI need it.\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\nSo.'
)


@pytest.fixture
def options(request):
    return {"template": TOOL_TEMPLATE, "max_model_len": 2000, "num_blocks": 2000} | getattr(
        request, "param", {}
    )


def create(house, status=200, headers=None, **body):
    answer = house.client.post(PATH, json={"input": "Hi"} | body, headers=headers)
    assert answer.status_code == status, answer.text
    return answer.json()


def events(house, **body):
    with house.client.stream("POST", PATH, json={"input": "Hi", "stream": True} | body) as answer:
        text = "".join(answer.iter_text())
    blocks = text.strip().split("\n\n")
    assert blocks.pop() == "data: [DONE]"
    read = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        read.append(event)
    assert [event["sequence_number"] for event in read] == list(range(len(read)))
    return read


def test_a_response(house):
    response = create(house, metadata={"a": "b"}, instructions="Be kind.", max_output_tokens=500)
    assert response["id"].startswith("resp_")
    assert (response["object"], response["status"], response["error"]) == ("response", "completed", None)
    (message,) = response["output"]
    assert message["content"][0]["text"].startswith("The naïve fox")
    assert response["metadata"] == {"a": "b"}
    assert response["instructions"] == "Be kind."
    assert response["usage"]["output_tokens"] > 0
    assert response["usage"]["total_tokens"] == sum(
        response["usage"][f"{e}_tokens"] for e in ("input", "output")
    )
    assert house.client.get(f"{PATH}/{response['id']}").json() == response


@pytest.mark.parametrize("options", [{"answer": CALL}], indirect=True)
def test_a_stream_has_the_same_items_as_a_whole_response(house):
    whole = create(house, tools=TOOLS)
    kinds = ["reasoning", "message", "function_call", "message"]
    assert [item["type"] for item in whole["output"]] == kinds
    read = events(house, tools=TOOLS)
    last = read[-1]["response"]

    def plain(response):
        return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]

    assert plain(last) == plain(whole)
    assert [event["type"] for event in read[:3]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
    ]
    assert read[-1]["type"] == "response.completed"
    for index, item in enumerate(last["output"]):
        own = [event for event in read if event.get("output_index") == index]
        assert (own[0]["type"], own[-1]["type"]) == (
            "response.output_item.added",
            "response.output_item.done",
        )
        assert own[-1]["item"] == item
        spelt = "".join(event.get("delta", "") for event in own)
        assert spelt == item.get("arguments", (item.get("content") or [{}])[0].get("text"))
    assert house.client.get(f"{PATH}/{last['id']}").json() == last


def test_a_cut_off_response_is_incomplete(house):
    response = create(house, max_output_tokens=3)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"
    assert events(house, max_output_tokens=3)[-1]["type"] == "response.incomplete"


def test_an_error_in_a_stream_is_a_failed_response(house, monkeypatch):
    time_runs_out(house, monkeypatch)
    read = events(house)
    assert read[-1]["type"] == "response.failed"
    assert read[-1]["response"]["error"]["code"] == "deadline_exceeded"
    stored = house.client.get(f"{PATH}/{read[0]['response']['id']}").json()
    assert stored["status"] == "failed"


def test_a_response_continues_another(house):
    first = create(house)
    second = create(house, input="And?", previous_response_id=first["id"], instructions="New.")
    third = create(house, input="So?", previous_response_id=second["id"])
    assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"]
    assert house.client.delete(f"{PATH}/{first['id']}").json()["deleted"]
    assert house.client.get(f"{PATH}/{first['id']}").status_code == 404
    error = create(house, 404, previous_response_id=third["id"])["error"]
    assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")
    assert first["id"] in error["message"]


def test_an_item_of_a_stored_response_is_sent_by_its_id(house):
    first = create(house, input="Hi")
    (item,) = first["output"]
    again = {"role": "user", "content": "And?"}
    hi = {"role": "user", "content": "Hi"}
    by_id = create(house, input=[hi, {"type": "item_reference", "id": item["id"]}, again])
    whole = create(house, input=[hi, item, again])
    assert create(house, input=[hi, {"id": item["id"]}, again])["usage"] == whole["usage"]
    assert by_id["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    listed = house.client.get(f"{PATH}/{by_id['id']}/input_items", params={"order": "asc"}).json()["data"]
    assert listed[1] == item


@pytest.mark.parametrize("id", ["msg_nowhere", "msg_nowhere_0", "resp_x", "_", "x" * 256])
def test_an_item_that_is_not_stored_is_named(house, id):
    item = create(house)["output"][0]["id"]
    reference = {"type": "item_reference", "id": id}
    error = create(house, 404, input=[reference])["error"]
    assert (error["param"], error["code"]) == ("input[0].id", "item_not_found")
    wrong = {"type": "item_reference", "id": item.replace("msg", "rs", 1)}
    assert create(house, 404, input=[wrong])["error"]["param"] == "input[0].id"


@pytest.mark.parametrize("options", [{"keys": ["a", "b"]}], indirect=True)
def test_a_reference_reaches_only_the_keys_own_items(house):
    mine, others = ({"Authorization": f"Bearer {key}"} for key in "ab")
    reference = {"type": "item_reference", "id": create(house, headers=mine)["output"][0]["id"]}
    assert create(house, input=[reference, {"role": "user", "content": "And?"}], headers=mine)["output"]
    create(house, 404, input=[reference], headers=others)


def test_store_false_stores_nothing(house):
    response = create(house, store=False)
    assert response["store"] is False
    assert house.client.get(f"{PATH}/{response['id']}").status_code == 404
    create(house, 404, previous_response_id=response["id"])


def test_input_items_are_listed_in_pages(house):
    given = [{"role": "user", "content": str(n)} for n in range(5)]
    path = f"{PATH}/{create(house, input=given)['id']}/input_items"
    page = house.client.get(path, params={"order": "asc", "limit": 2}).json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["0", "1"]
    assert page["has_more"]
    rest = house.client.get(path, params={"order": "asc", "after": page["last_id"]}).json()
    assert [item["content"][0]["text"] for item in rest["data"]] == ["2", "3", "4"]
    assert not rest["has_more"]
    newest = house.client.get(path).json()["data"]
    assert [item["content"][0]["text"] for item in newest] == ["4", "3", "2", "1", "0"]
    for query, param in (("limit=0", "limit"), ("order=x", "order"), ("after=x", "after"), ("x=1", "x")):
        answer = house.client.get(f"{path}?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("options", [{"keys": ("alpha", "beta")}], indirect=True)
def test_a_key_reaches_only_its_own_responses(house):
    alpha, beta = ({"Authorization": f"Bearer {key}"} for key in ("alpha", "beta"))
    id = create(house, headers=alpha)["id"]
    for path in (f"{PATH}/{id}", f"{PATH}/{id}/input_items"):
        assert house.client.get(path, headers=beta).status_code == 404
        assert house.client.get(path, headers=alpha).status_code == 200
    assert house.client.delete(f"{PATH}/{id}", headers=beta).status_code == 404
    assert house.client.post(f"{PATH}/{id}/cancel", headers=beta).status_code == 404
    create(house, 404, headers=beta, previous_response_id=id)
    create(house, 200, headers=alpha, previous_response_id=id)


def wait_for(house, id, *statuses):
    while (response := house.client.get(f"{PATH}/{id}").json())["status"] not in statuses:
        pass
    return response


def test_a_response_in_the_background(house):
    response = create(house, background=True)
    assert (response["status"], response["output"]) == ("queued", [])
    done = wait_for(house, response["id"], "completed")
    assert done["output"][0]["content"][0]["text"].startswith("The naïve fox")
    assert done["usage"]["output_tokens"] > 0
    assert house.client.post(f"{PATH}/{response['id']}/cancel").json() == done


@pytest.mark.parametrize("options", [{"step_seconds": 0.02}], indirect=True)
def test_a_response_in_the_background_is_queued_then_in_progress_then_completed(house):
    house.runner.gate.clear()
    id = create(house, background=True)["id"]
    for _ in range(5):
        assert house.client.get(f"{PATH}/{id}").json()["status"] == "queued"
    house.runner.gate.set()
    statuses = ["queued"]
    while statuses[-1] != "completed":
        status = house.client.get(f"{PATH}/{id}").json()["status"]
        statuses += [status] if status != statuses[-1] else []
        assert len(statuses) < 4
    assert statuses == ["queued", "in_progress", "completed"]


def test_a_response_in_the_background_is_cancelled_while_it_is_queued(house):
    house.runner.gate.clear()
    id = create(house, background=True)["id"]
    assert house.client.get(f"{PATH}/{id}").json()["status"] == "queued"
    cancelled = house.client.post(f"{PATH}/{id}/cancel").json()
    assert (cancelled["status"], cancelled["output"], cancelled["usage"]) == ("cancelled", [], None)
    house.runner.gate.set()
    assert house.client.get(f"{PATH}/{id}").json() == cancelled


def test_a_response_in_the_background_is_cancelled(house):
    house.runner.gate.clear()
    id = create(house, background=True)["id"]
    create(house, 400, previous_response_id=id)
    cancelled = house.client.post(f"{PATH}/{id}/cancel").json()
    assert (cancelled["status"], cancelled["error"]) == ("cancelled", None)
    assert house.client.get(f"{PATH}/{id}").json() == cancelled
    other = create(house, background=True)["id"]
    assert house.client.delete(f"{PATH}/{other}").json()["deleted"]
    assert house.client.get(f"{PATH}/{other}").status_code == 404
    house.runner.gate.set()
    answer = house.client.post(f"{PATH}/{create(house, max_output_tokens=1)['id']}/cancel")
    assert answer.status_code == 400


def follow(house, id, **query):
    """The events of a stored response's stream, as they were numbered."""
    answer = house.client.get(f"{PATH}/{id}", params={"stream": "true"} | query)
    assert answer.status_code == 200, answer.text
    *blocks, done = answer.text.strip().split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(block.split("\n")[1].removeprefix("data: ")) for block in blocks]


@pytest.mark.parametrize("options", [{"answer": CALL}], indirect=True)
@pytest.mark.parametrize("more", [{}, {"tools": TOOLS}])
def test_a_stored_stream_can_be_read_again_from_any_event_on(house, more):
    read = events(house, **more)
    id = read[-1]["response"]["id"]
    assert follow(house, id) == read
    for after in (0, 3, len(read) - 1, len(read) + 5):
        assert follow(house, id, starting_after=after) == read[after + 1 :]


def test_what_has_no_stored_stream_is_refused(house):
    whole = create(house)["id"]
    streamed = events(house)[-1]["response"]["id"]
    for id, query, param in (
        (whole, "stream=true", "stream"),
        (streamed, "stream=yes", "stream"),
        (streamed, "stream=true&starting_after=-1", "starting_after"),
        (streamed, "starting_after=1", "starting_after"),
    ):
        answer = house.client.get(f"{PATH}/{id}?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert house.client.get(f"{PATH}/resp_x?stream=true").status_code == 404
    assert house.client.delete(f"{PATH}/{streamed}").status_code == 200
    assert house.client.get(f"{PATH}/{streamed}?stream=true").status_code == 404


def test_a_stream_in_the_background_has_the_items_of_a_stream(house):
    read = events(house, background=True)
    names = [event["type"] for event in read]
    assert names[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert (names[-1], read[0]["response"]["status"]) == ("response.completed", "queued")
    done = read[-1]["response"]
    assert done["background"]
    assert house.client.get(f"{PATH}/{done['id']}").json() == done
    assert follow(house, done["id"], starting_after=2) == read[3:]
    text = "".join(event["delta"] for event in read if event["type"] == "response.output_text.delta")
    assert text == done["output"][0]["content"][0]["text"]


@pytest.mark.parametrize("options", [{"step_seconds": 0.02}], indirect=True)
def test_a_stream_in_the_background_is_followed_while_it_runs_and_cancelled(house):
    house.runner.gate.clear()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(events, house, background=True, request_id="mine")
        while house.client.get(f"{PATH}/resp_mine").status_code != 200:
            assert not first.done()
        second = threads.submit(follow, house, "resp_mine", starting_after=0)
        cancelled = house.client.post(f"{PATH}/resp_mine/cancel").json()
        house.runner.gate.set()
        read = first.result(60)
        assert second.result(60) == read[1:]
    assert cancelled["status"] == "cancelled"
    assert read[-1]["type"] == "response.cancelled"
    assert follow(house, "resp_mine") == read


def test_an_item_is_named_by_its_id(house):
    first = create(house, input=[{"role": "user", "content": "One"}])
    (given,) = house.client.get(f"{PATH}/{first['id']}/input_items").json()["data"]
    (said,) = first["output"]
    asked = [
        {"id": given["id"]},
        {"type": "item_reference", "id": said["id"]},
        {"role": "user", "content": "Two"},
    ]
    second = create(house, input=asked)
    stored = house.client.get(f"{PATH}/{second['id']}/input_items", params={"order": "asc"}).json()["data"]
    assert stored[:2] == [given, said]
    whole = create(house, input=[{"role": "user", "content": "Two"}], previous_response_id=first["id"])
    assert whole["usage"]["input_tokens"] == second["usage"]["input_tokens"]
    error = create(
        house, 404, input=[{"role": "user", "content": "x"}, {"type": "item_reference", "id": "no"}]
    )
    assert (error["error"]["param"], error["error"]["code"]) == ("input[1].id", "item_not_found")


@pytest.mark.parametrize("options", [{"keys": ("alpha", "beta")}], indirect=True)
def test_a_key_names_only_its_own_items(house):
    alpha, beta = ({"Authorization": f"Bearer {key}"} for key in ("alpha", "beta"))
    (said,) = create(house, headers=alpha)["output"]
    create(house, 404, headers=beta, input=[{"type": "item_reference", "id": said["id"]}])
    create(house, 200, headers=alpha, input=[{"type": "item_reference", "id": said["id"]}])


def compact(house, status=200, **body):
    answer = house.client.post(f"{PATH}/compact", json={"model": "fox"} | body)
    assert answer.status_code == status, answer.text
    return answer.json()


@pytest.mark.parametrize("options", [{"answer": "<think>Hm.</think>They launch on Tuesday."}], indirect=True)
def test_a_compaction_stands_for_the_conversation(house):
    given = [{"role": "user", "content": "Launch on Tuesday?"}, {"role": "assistant", "content": "Yes."}]
    compacted = compact(house, input=given, prompt_cache_key="k")
    assert (compacted["object"], compacted["id"][:5]) == ("response.compaction", "resp_")
    assert compacted["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    (item,) = compacted["output"]
    assert (item["type"], item["id"][:4]) == ("compaction", "cmp_")
    response = create(house, input=[item, {"role": "user", "content": "And now?"}])
    plain = "Summary of the conversation so far:\nThey launch on Tuesday.\n\nAnd now?"
    assert response["usage"]["input_tokens"] == create(house, input=plain)["usage"]["input_tokens"]
    again = compact(house, previous_response_id=response["id"], instructions="Be short.")
    assert again["output"][0]["encrypted_content"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": ...}, "model"),
        ({"model": "other"}, "model"),
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": "x", "tools": []}, "tools"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
    ],
)
def test_what_cannot_be_compacted_is_refused_by_name(house, body, param):
    asked = {name: value for name, value in ({"model": "fox"} | body).items() if value is not ...}
    answer = house.client.post(f"{PATH}/compact", json=asked)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"] == param


def test_log_probabilities_of_the_text(house):
    response = create(house, top_logprobs=2, max_output_tokens=4)
    entries = response["output"][0]["content"][0]["logprobs"]
    assert len(entries) == 4
    assert all(entry["token"] and "top_logprobs" in entry for entry in entries)
    read = events(house, include=["message.output_text.logprobs"], max_output_tokens=4)
    spelt = [e for event in read if event["type"] == "response.output_text.delta" for e in event["logprobs"]]
    assert len(spelt) == 4


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"input": 5}, "input", "invalid_type"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": [5]}, "input[0]", "invalid_type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "invalid_value"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing_required_parameter"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id", "missing_required_parameter"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input", "invalid_compaction"),
        ({"input": [{"type": "compaction", "encrypted_content": "hr1_AAAA"}]}, "input", "invalid_compaction"),
        ({"input": [{"type": "compaction"}]}, "input[0].encrypted_content", "missing_required_parameter"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type", "unsupported_parameter"),
        (
            {"input": [{"type": "function_call", "name": "f"}]},
            "input[0].call_id",
            "missing_required_parameter",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
            "unsupported_parameter",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file"}]}]},
            "input[0].output[0].type",
            "unsupported_parameter",
        ),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
            "input[0].encrypted_content",
            "invalid_value",
        ),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "f"}]}]},
            "tools[0].tools[0].type",
            "unsupported_parameter",
        ),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools", "missing_required_parameter"),
        ({"tools": [{"type": "custom", "name": "f"}]}, "tools[0].type", "unsupported_parameter"),
        (
            {"tools": [{"type": "web_search"}], "tool_choice": "required"},
            "tool_choice",
            "invalid_value",
        ),
        ({"tools": [{"type": "file_search"}]}, "tools[0].type", "unsupported_parameter"),
        ({"tools": [{"type": "computer_use_preview"}]}, "tools[0].type", "unsupported_parameter"),
        ({"tools": [TOOLS[0], {"type": "mcp"}]}, "tools[1].type", "unsupported_parameter"),
        ({"tools": [{"type": "function", "name": "no name"}]}, "tools[0].name", "invalid_value"),
        ({"tools": [WEATHER]}, "tools[0].name", "missing_required_parameter"),
        ({"tools": TOOLS + TOOLS}, "tools", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tools": TOOLS, "tool_choice": {"type": "mcp"}}, "tool_choice.type", "unsupported_parameter"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "invalid_value"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "missing_required_parameter"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format", "unsupported_parameter"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "invalid_value"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "invalid_value"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"max_output_tokens": 10**6}, "max_output_tokens", "context_length_exceeded"),
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"top_p": 2}, "top_p", "invalid_value"),
        ({"conversation": "c"}, "conversation", "unsupported_parameter"),
        ({"prompt": {"id": "x"}}, "prompt", "unsupported_parameter"),
        ({"max_tool_calls": 3}, "max_tool_calls", "unsupported_parameter"),
        ({"include": ["file_search_call.results"]}, "include[0]", "invalid_value"),
        ({"background": True, "store": False}, "background", "invalid_value"),
        ({"background": True, "stream": True, "store": False}, "background", "invalid_value"),
        ({"stream_options": {}}, "stream_options", "invalid_value"),
        ({"messages": []}, "messages", "unknown_parameter"),
        ({"max_tokens": 5}, "max_tokens", "unknown_parameter"),
        ({"previous_response_id": ""}, "previous_response_id", "invalid_value"),
    ],
)
def test_what_is_wrong_is_refused_by_its_name(house, body, param, code):
    error = create(house, 400, **body)["error"]
    assert (error["param"], error["code"]) == (param, code), error


def test_an_unknown_response_is_404(house):
    for method, more in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        answer = house.client.request(method, f"{PATH}/resp_x{more}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")


def test_no_body_is_a_server_error(house):
    """Valid bodies with random changes: each is answered, or refused with a message and a code."""
    chance = random.Random(7)
    valid = {
        "input": [
            {"role": "user", "content": "q"},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
            {"type": "function_call", "call_id": "c", "name": "get_time", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "noon"},
        ],
        "tools": TOOLS,
        "tool_choice": "auto",
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "text"}},
        "store": False,
        "max_output_tokens": 5,
    }
    statuses = set()
    for _ in range(400):
        body = mutated(chance, valid)
        answer = house.client.post(PATH, json=body)
        statuses.add(answer.status_code)
        assert answer.status_code in (200, 400), (body, answer.text)
        if answer.status_code == 400:
            assert answer.json()["error"]["code"]
    assert statuses == {200, 400}


NAMESPACE = {"type": "namespace", "name": "city", "tools": TOOLS}
AGENT = {"client_metadata": {"turn": "1"}, "tools": [NAMESPACE, {"type": "web_search", "external": False}]}


@pytest.mark.parametrize(
    "options", [{"answer": CALL.replace("get_weather", "city__get_weather")}], indirect=True
)
def test_functions_of_a_namespace(house):
    response = create(house, **AGENT)
    call = next(item for item in response["output"] if item["type"] == "function_call")
    assert (call["namespace"], call["name"]) == ("city", "get_weather")
    assert [tool["type"] for tool in response["tools"]] == ["namespace"]
    done = [e for e in events(house, **AGENT) if e["type"] == "response.function_call_arguments.done"]
    assert [event["name"] for event in done] == ["get_weather"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "21"}
    given = [{"role": "user", "content": "Hi"}, call, result]
    spelt = {**call, "name": "city__get_weather", "namespace": None}
    counted = [create(house, input=[given[0], each, given[2]]) for each in (call, spelt)]
    assert len({response["usage"]["input_tokens"] for response in counted}) == 1


def test_two_functions_that_the_model_would_see_under_one_name_are_refused(house):
    plain = {"type": "function", "name": "city__get_time"}
    assert create(house, 400, tools=[NAMESPACE, plain])["error"]["param"] == "tools"


@pytest.fixture
def full_disk(monkeypatch):
    def fail(*given):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(ResponseStore, "_write", fail)


def test_a_response_that_could_not_be_stored_says_so(house, full_disk):
    response = create(house, store=True)
    assert (response["status"], response["store"]) == ("completed", False)
    assert create(house, store=False)["store"] is False
    get = house.client.get(f"/v1/responses/{response['id']}")
    assert get.status_code == 404


def test_the_last_event_of_a_stream_that_could_not_be_stored_says_so(house, full_disk):
    *_, last = events(house, store=True)
    assert last["type"] == "response.completed"
    assert last["response"]["store"] is False


def test_a_background_response_that_could_not_be_stored_is_refused(house, full_disk):
    error = create(house, 507, background=True)["error"]
    assert (error["param"], error["code"]) == ("background", "insufficient_storage")


def test_what_is_stored_says_so(house):
    assert create(house)["store"] is True
    *_, last = events(house)
    assert last["response"]["store"] is True
