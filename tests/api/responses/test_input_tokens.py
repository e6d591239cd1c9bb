"""The count of a prompt's tokens is the count that its response reports."""

from __future__ import annotations

import pytest

from tests.api.responses.test_routes import TOOLS, create, options  # noqa: F401

PATH = "/v1/responses/input_tokens"
IMAGE = {"type": "input_image", "image_url": "x"}
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "What is the weather in Paris?"}]},
    {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": '{"city": "Paris"}'},
    {"type": "function_call_output", "call_id": "c", "output": "21 degrees"},
]


def counted(house, headers=None, **body):
    answer = house.client.post(PATH, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.json().keys() == {"object", "input_tokens"}
    assert answer.json()["object"] == "response.input_tokens"
    return answer.json()["input_tokens"]


@pytest.mark.parametrize(
    "body",
    [
        {"input": "Hi"},
        {"input": "Hi", "instructions": "Be kind."},
        {"input": ITEMS, "tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": False},
        {"input": "Hi", "reasoning": {"effort": "high"}, "text": {"format": {"type": "text"}}},
    ],
    ids=str,
)
def test_it_counts_what_a_response_reads(house, body):
    count = counted(house, **body)
    assert count == create(house, **body)["usage"]["input_tokens"] > 0


def test_earlier_responses_are_counted(house):
    first = create(house)["id"]
    both = counted(house, input="And then?", previous_response_id=first)
    assert both == create(house, input="And then?", previous_response_id=first)["usage"]["input_tokens"]
    assert both > counted(house, input="And then?")
    assert counted(house, previous_response_id=first) < both


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "input", "invalid_value"),
        ({"input": "Hi", "conversation": "conv_1"}, "conversation", "unsupported_parameter"),
        ({"input": "Hi", "max_output_tokens": 5}, "max_output_tokens", "unknown_parameter"),
        ({"input": "Hi", "tool_choice": "required"}, "tool_choice", "invalid_value"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            None,
            "unsupported_parameter",
        ),
    ],
)
def test_what_is_wrong_is_refused_by_its_name(house, body, param, code):
    answer = house.client.post(PATH, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, code)
    assert error["param"] == (param or "input[0].content[0].type")


def test_an_earlier_response_that_is_not_stored_is_named(house):
    answer = house.client.post(PATH, json={"input": "Hi", "previous_response_id": "resp_none"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "previous_response_id")


def test_another_model_is_not_found(house):
    answer = house.client.post(PATH, json={"input": "Hi", "model": "another"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
