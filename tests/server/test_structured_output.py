"""Structured output over HTTP, against a real server process on the built-in model."""

from __future__ import annotations

import json
import re

import jsonschema
import openai
import pytest

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 2},
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
}
CHAT = {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 150, "seed": 3}
COMPLETION = {"prompt": "Once upon a time", "max_tokens": 150, "seed": 3}


def schema_format(schema, **more):
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": schema} | more}


def said(response) -> tuple[str, str]:
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return (choice["message"]["content"] if "message" in choice else choice["text"]), choice["finish_reason"]


@pytest.mark.parametrize("strict", [True, False, None])
@pytest.mark.parametrize("temperature", [0, 1, 1.8])
def test_an_answer_satisfies_the_schema(server, strict, temperature):
    body = CHAT | {"response_format": schema_format(PERSON, strict=strict), "temperature": temperature}
    text, reason = said(server.post("/v1/chat/completions", body))
    assert reason == "stop"
    jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": {"type": "json_object"}}, r"\{.*\}"),
        ({"structured_outputs": {"json": PERSON}}, r"\{.*\}"),
        ({"structured_outputs": {"json": json.dumps(PERSON), "whitespace_pattern": ""}}, r'\{"name":".*\}'),
        ({"structured_outputs": {"regex": r"\d{3}-\d{4}"}}, r"[0-9]{3}-[0-9]{4}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'root ::= "a" ("b" | "c")'}}, "ab|ac"),
        ({"guided_json": PERSON}, r"\{.*\}"),
        ({"guided_regex": "[xyz]{5}"}, "[xyz]{5}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'start: "a" "b"'}, "ab"),
        ({"response_format": {"type": "text"}, "structured_outputs": {}, "guided_json": None}, ".*"),
    ],
    ids=str,
)
def test_every_field_that_asks_for_structure(server, fields, pattern):
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        text, _ = said(server.post(path, body | fields))
        assert re.fullmatch(pattern, text, re.DOTALL), text


IDENTIFIER = 1234567890123456789
"""Not a double: its nearest is 1234567890123456768."""


def test_integers_of_64_bits_are_exact_on_every_way_in(server):
    holder = {
        "type": "object",
        "properties": {
            "id": {"const": IDENTIFIER},
            "of": {"enum": [IDENTIFIER + 2]},
            "at": {"type": "integer", "minimum": 2**63 - 1, "maximum": 2**63 - 1},
        },
        "required": ["id", "of", "at"],
        "additionalProperties": False,
    }
    wanted = {"id": IDENTIFIER, "of": IDENTIFIER + 2, "at": 2**63 - 1}
    chat, completion = CHAT | {"temperature": 0}, COMPLETION | {"temperature": 0}
    for fields in (
        {"response_format": schema_format(holder)},
        {"structured_outputs": {"json": holder}},
        {"guided_json": json.dumps(holder)},
    ):
        assert json.loads(said(server.post("/v1/chat/completions", chat | fields))[0]) == wanted
        assert json.loads(said(server.post("/v1/completions", completion | fields))[0]) == wanted
    function = {"name": "f", "parameters": holder}
    forced = chat | {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    (call,) = server.post("/v1/chat/completions", forced).json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == wanted
    response = server.post(
        "/v1/responses",
        {
            "input": "Hi",
            "max_output_tokens": 150,
            "text": {"format": {"type": "json_schema", "name": "holder", "schema": holder}},
        },
    )
    texts = [part["text"] for item in response.json()["output"] for part in item.get("content") or ()]
    assert json.loads(texts[0]) == wanted
    message = server.post(
        "/v1/messages",
        {
            "model": "builtin",
            "max_tokens": 150,
            "messages": [{"role": "user", "content": "Hi"}],
            "tools": [{"name": "f", "input_schema": holder}],
            "tool_choice": {"type": "tool", "name": "f"},
        },
    )
    assert [part["input"] for part in message.json()["content"] if part["type"] == "tool_use"] == [wanted]


def test_a_bound_that_no_number_satisfies_exactly_is_not_rounded_into_reach(server):
    field = {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}
    for seed in range(4):
        body = COMPLETION | {"guided_json": field, "seed": seed, "max_tokens": 40, "temperature": 1.5}
        text, reason = said(server.post("/v1/completions", body))
        assert reason != "stop" or 0 < float(text) <= 0.5, text


def test_a_structural_tag_constrains_what_follows_its_trigger(server):
    tag = {
        "structures": [
            {"begin": "<n>", "schema": {"type": "integer", "maximum": 99, "minimum": 10}, "end": "</n>"}
        ],
        "triggers": ["<n>"],
        "required": True,
    }
    text, reason = said(
        server.post("/v1/completions", COMPLETION | {"structured_outputs": {"structural_tag": tag}})
    )
    assert re.fullmatch(r"<n>[1-9][0-9]</n>", text), text
    assert reason == "stop"
    shown = {"type": "structural_tag", "structures": tag["structures"], "triggers": tag["triggers"]}
    said(server.post("/v1/chat/completions", CHAT | {"response_format": shown}))


def test_n_streams_logprobs_and_penalties_go_with_it(server):
    body = COMPLETION | {
        "guided_json": PERSON,
        "max_tokens": 500,
        "n": 3,
        "logprobs": 2,
        "presence_penalty": 0.5,
        "top_p": 0.9,
        "top_k": 40,
    }
    whole = server.post("/v1/completions", body).json()["choices"]
    streamed = ["", "", ""]
    for line in server.post("/v1/completions", body | {"stream": True}).text.splitlines():
        if line.startswith("data: {"):
            choice = json.loads(line[6:])["choices"][0]
            streamed[choice["index"]] += choice["text"]
    assert [choice["text"] for choice in whole] == streamed
    assert len(set(streamed)) > 1
    for text in streamed:
        jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.parametrize("limit", [1, 4, 9])
def test_a_cut_answer_is_reported_as_cut(server, limit):
    text, reason = said(
        server.post("/v1/completions", COMPLETION | {"guided_json": PERSON, "max_tokens": limit})
    )
    assert reason == "length"
    with pytest.raises(ValueError, match=r"Expecting|Unterminated|Invalid"):
        json.loads(text)


def test_a_stop_string_inside_the_structure_is_a_cut_and_one_at_its_end_is_none(server):
    body = COMPLETION | {"guided_json": PERSON}
    text, reason = said(server.post("/v1/completions", body | {"stop": '"age"'}))
    assert (reason, '"age"' in text) == ("length", False)
    text, reason = said(
        server.post("/v1/completions", body | {"stop": "}", "include_stop_str_in_output": True})
    )
    assert reason == "stop"
    jsonschema.validate(json.loads(text), PERSON)
    comma = server.post("/tokenize", {"prompt": ",", "add_special_tokens": False}).json()["tokens"]
    # The bias makes the token certain where a name may have it; numbers of other types draw other tokens.
    response = server.post(
        "/v1/completions", body | {"stop_token_ids": comma, "logit_bias": {str(comma[0]): 100}}
    )
    assert said(response)[1] == "length"
    assert response.json()["choices"][0]["stop_reason"] == comma[0]


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        (
            {
                "response_format": schema_format(
                    {"type": "object", "properties": {"a": {"uniqueItems": True}}}
                )
            },
            "response_format",
            "'uniqueItems' at '#/properties/a'",
        ),
        ({"guided_json": {"$ref": "https://example.com/s"}}, "guided_json", "remote references are refused"),
        ({"guided_json": "{"}, "guided_json", "not valid JSON"),
        ({"guided_regex": "(?=a)"}, "guided_regex", "look-around"),
        ({"guided_grammar": "nonsense"}, "guided_grammar", "neither Lark nor GBNF"),
        ({"guided_choice": []}, "guided_choice", "choice"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"rgx": "a"}}, "structured_outputs.rgx", "Unknown parameter"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex", "cannot be used together"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "ignore_eos"),
        ({"guided_regex": 3}, "guided_regex", "string"),
        ({"guided_regex": "a" * 300_000}, "guided_regex", "at most 262144"),
        ({"response_format": {"type": "jason"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "Missing"),
        (
            {"response_format": schema_format(PERSON, name="not a name")},
            "response_format.json_schema.name",
            "name",
        ),
        ({"guided_json": json.loads('{"items":' * 80 + "{}" + "}" * 80)}, "guided_json", "levels deep"),
    ],
    ids=str,
)
def test_what_cannot_be_enforced_is_400_with_the_field_and_the_reason(server, fields, param, why):
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        response = server.post(path, body | fields | {"stream": True})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == param
        assert why in error["message"], error


def test_a_grammar_that_fails_while_it_generates_costs_its_own_request_alone(server):
    ends = {str(token): -100 for token in (2, 7)}
    bomb = COMPLETION | {"guided_regex": "(a{1,5000}){1,5000}", "logit_bias": ends, "max_tokens": 150}
    response = server.post("/v1/completions", bomb)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["code"] == "structured_output_failed"
    streamed = server.post("/v1/completions", bomb | {"stream": True}).text
    assert "structured output failed" in streamed
    assert said(server.post("/v1/completions", COMPLETION | {"guided_choice": ["ok"]})) == ("ok", "stop")
    assert server.get("/health").status_code == 200


def test_min_tokens_yields_to_the_end_of_the_grammar_and_other_conflicts_are_errors(server):
    body = COMPLETION | {"guided_choice": ["yes", "no"], "min_tokens": 50}
    assert said(server.post("/v1/completions", body))[0] in ("yes", "no")
    response = server.post("/v1/completions", COMPLETION | {"guided_regex": "xy", "allowed_token_ids": [500]})
    assert response.status_code == 400, response.text
    assert "no token is left to sample" in response.json()["error"]["message"]


def test_a_cached_answer_is_that_of_its_own_schema():
    from tests.server.conftest import serving

    with serving("--response-cache", "memory") as server:
        body = COMPLETION | {"temperature": 0}
        first = server.post("/v1/completions", body | {"guided_json": PERSON})
        again = server.post("/v1/completions", body | {"guided_json": PERSON})
        reordered = PERSON | {"properties": dict(reversed(PERSON["properties"].items()))}
        other = server.post("/v1/completions", body | {"guided_json": reordered})
        free = server.post("/v1/completions", body)
        assert said(first) == said(again)
        assert len({said(response)[0] for response in (first, other, free)}) == 3
        assert list(json.loads(said(other)[0])) == ["pets", "age", "name"]
        (hits,) = re.findall(
            r'response_cache_hits_total\{.*layer="exact".*\} (.*)', server.get("/metrics").text
        )
        assert float(hits) == 1


def test_openais_client_parses_into_a_model(server):
    from pydantic import BaseModel, Field

    class Person(BaseModel):
        name: str = Field(max_length=20)
        age: int = Field(ge=0, le=120)

    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    model = client.models.list().data[0].id
    answer = client.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": "Hi"}],
        response_format=Person,
        max_tokens=150,
        temperature=0,
    )
    assert isinstance(answer.choices[0].message.parsed, Person)

    class Share(BaseModel):
        part: float = Field(gt=0, le=0.5)
        owner: int = Field(ge=2**53 + 1, le=2**53 + 2)

    for seed in range(4):
        answer = client.chat.completions.parse(
            model=model,
            messages=[{"role": "user", "content": "Hi"}],
            response_format=Share,
            max_tokens=400,
            temperature=1.2,
            seed=seed,
        )
        assert isinstance(answer.choices[0].message.parsed, Share)


def test_a_discriminated_union_of_pydantic_is_enforced(server):
    from typing import Annotated, Literal

    from pydantic import BaseModel, Field

    class Cat(BaseModel, extra="forbid"):
        kind: Literal["cat"]
        lives: int = Field(ge=1, le=9)

    class Dog(BaseModel, extra="forbid"):
        kind: Literal["dog"]
        tricks: list[Literal["sit", "roll"]] = Field(max_length=2)

    class Owner(BaseModel, extra="forbid"):
        pet: Annotated[Cat | Dog, Field(discriminator="kind")]
        other: Annotated[Cat | Dog, Field(discriminator="kind")] | None

    schema = Owner.model_json_schema()
    assert "oneOf" in json.dumps(schema)
    for seed in range(4):
        body = CHAT | {"response_format": schema_format(schema), "seed": seed, "max_tokens": 400}
        text, reason = said(server.post("/v1/chat/completions", body))
        assert reason == "stop", text
        Owner.model_validate_json(text)


@pytest.mark.parametrize(
    ("schema", "valid"),
    [
        ({"const": "a <|end|> b"}, lambda value: value == "a <|end|> b"),
        ({"enum": ["<|end|>", "<|user|>"]}, lambda value: value in ("<|end|>", "<|user|>")),
        (
            {"type": "object", "properties": {"<|end|>": {"type": "boolean"}}, "required": ["<|end|>"]},
            lambda value: isinstance(value["<|end|>"], bool),
        ),
    ],
)
def test_a_text_that_spells_a_special_token_is_written_as_text(server, schema, valid):
    body = CHAT | {"response_format": schema_format(schema), "max_tokens": 300}
    text, reason = said(server.post("/v1/chat/completions", body))
    assert reason == "stop"
    assert valid(json.loads(text))


def test_a_choice_may_spell_a_special_token(server):
    body = COMPLETION | {"structured_outputs": {"choice": ["<|end|>", "<|assistant|>"]}}
    text, reason = said(server.post("/v1/completions", body))
    assert (text in ("<|end|>", "<|assistant|>"), reason) == (True, "stop")
