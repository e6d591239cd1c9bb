"""Fractions of a schema keep all their digits on the way from the body to the compiler, on every endpoint."""

from __future__ import annotations

import json

import pytest

from headrace.api.batch.line_runner import _encoded
from headrace.api.batch.lines import parse_line
from headrace.core.constraint import ConstraintKind
from tests.api.caching import RequestsNoted
from tests.api.tool_scenes import TOOL_TEMPLATE
from tests.doubles.grammars import Compiled

SCENE = {
    "lookup": RequestsNoted,
    "grammars": Compiled(),
    "template": TOOL_TEMPLATE,
    "max_model_len": 2000,
    "num_blocks": 2000,
}
DIGITS = "0.1000000000000000055"
SCHEMA = {
    "type": "object",
    "properties": {"x": {"const": "NUMBER"}},
    "required": ["x"],
    "additionalProperties": False,
}
HI = [{"role": "user", "content": "hi"}]
TOOL = {"name": "f", "parameters": SCHEMA}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
DOORS = {
    "response_format": ("/v1/chat/completions", {"messages": HI, "response_format": FORMAT}),
    "structured_outputs": ("/v1/chat/completions", {"messages": HI, "structured_outputs": {"json": SCHEMA}}),
    "guided_json": ("/v1/completions", {"prompt": "hi", "guided_json": SCHEMA}),
    "text": (
        "/v1/responses",
        {"input": "hi", "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
    ),
    "output_config": (
        "/v1/messages",
        {
            "messages": HI,
            "max_tokens": 9,
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
    ),
    "tools": (
        "/v1/chat/completions",
        {"messages": HI, "tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"},
    ),
}


def body_of(field: str) -> tuple[str, str]:
    path, body = DOORS[field]
    return path, json.dumps({"model": "fox"} | body).replace('"NUMBER"', DIGITS)


@pytest.mark.parametrize("options", [SCENE])
@pytest.mark.parametrize("field", DOORS)
def test_a_schema_keeps_its_digits(house, field):
    path, body = body_of(field)
    answer = house.client.post(path, content=body)
    assert answer.status_code == 200, answer.text
    made = house.lookup.requests[-1].params.structured_outputs
    assert made.kind in (ConstraintKind.JSON, ConstraintKind.STRUCTURAL_TAG)
    assert f'"const":{DIGITS}' in made.source


@pytest.mark.parametrize("options", [SCENE])
@pytest.mark.parametrize("number", ["1e-400", "0.30000000000000004441", "12345678901234567890.5"])
def test_other_numbers_that_doubles_do_not_hold(house, number):
    schema = json.dumps(SCHEMA).replace('"NUMBER"', number)
    body = f'{{"prompt": "hi", "temperature": 0.25, "guided_json": {schema}}}'
    assert house.client.post("/v1/completions", content=body).status_code == 200
    params = house.lookup.requests[-1].params
    assert f'"const":{number}' in params.structured_outputs.source
    assert params.temperature == 0.25


def test_lines_of_batches_keep_the_digits():
    _, body = body_of("response_format")
    line = f'{{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {body}}}'
    assert DIGITS in _encoded(parse_line(1, line.encode()).body).decode()


@pytest.mark.parametrize("options", [SCENE])
def test_a_number_that_is_too_long_is_refused(house):
    schema = json.dumps(SCHEMA).replace('"NUMBER"', "1" * 5000)
    refused = house.client.post("/v1/completions", content=f'{{"prompt": "hi", "guided_json": {schema}}}')
    assert refused.status_code == 400
