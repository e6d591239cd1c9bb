"""What constrains an output, and how it is sampled."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import fields

import pytest
from pydantic import ValidationError

from headrace.api.compile.bodies import (
    AllowedChoice,
    CallRule,
    ChatBody,
    CompletionBody,
    NamedChoice,
    Tool,
    call_rule,
)
from headrace.api.compile.constrain import (
    bad_word_tokens,
    constraint_for_tools,
    output_constraint,
    sampling_params,
    stated_constraint,
)
from headrace.api.compile.encode import answer_length, truncated
from headrace.api.compile.model import Dialect, ServedModel
from headrace.api.compile.render import check_candidates, facts_of
from headrace.api.errors import ApiError
from headrace.core.constraint import Constraint, ConstraintKind, as_constraint
from headrace.core.request import InvalidParameter, SamplingParams
from headrace.text.parsing.catalogue import PLAIN_JSON, TOOL_FORMATS
from headrace.text.parsing.machine import Reading
from headrace.text.template import ChatTemplate
from tests.api.openai.test_chat import HI
from tests.api.tool_scenes import TIME, TOOL_TEMPLATE, WEATHER
from tests.doubles.sampling_fields import OTHER_SAMPLING
from tests.text.vocabularies import byte_level

TOOLS = [Tool.model_validate(WEATHER), Tool.model_validate(TIME)]


FORMATS = {each.name: each for each in (*TOOL_FORMATS, PLAIN_JSON)}


HERMES = FORMATS["hermes"]


NAMED = NamedChoice.model_validate({"type": "function", "function": {"name": "get_weather"}})


def strict(tool: dict) -> Tool:
    return Tool.model_validate({"type": "function", "function": tool["function"] | {"strict": True}})


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_free_choices_have_no_constraint(choice):
    assert constraint_for_tools(TOOLS, call_rule(choice), HERMES) is None
    assert constraint_for_tools([], call_rule(choice), HERMES) is None


def test_required_allows_any_tool_and_several_calls():
    tag = constraint_for_tools(TOOLS, CallRule("required"), HERMES)
    assert tag == {
        "structures": [
            {
                "begin": '<tool_call>\n{"name": "get_weather", "arguments": ',
                "schema": WEATHER["function"]["parameters"],
                "end": "}\n</tool_call>",
                "name": "get_weather",
                "path": "tools[0].function.parameters",
            },
            {
                "begin": '<tool_call>\n{"name": "get_time", "arguments": ',
                "schema": {"type": "object", "properties": {}, "additionalProperties": False},
                "end": "}\n</tool_call>",
                "name": "get_time",
                "path": "tools[1].function.parameters",
            },
        ],
        "triggers": ['<tool_call>\n{"name": "'],
        "required": True,
        "many": True,
    }
    assert not constraint_for_tools(TOOLS, CallRule("required"), HERMES, parallel=False)["many"]


def test_a_named_choice_allows_one_call_of_it():
    tag = constraint_for_tools(TOOLS, call_rule(NAMED), HERMES)
    assert [each["begin"] for each in tag["structures"]] == [
        '<tool_call>\n{"name": "get_weather", "arguments": '
    ]
    assert (tag["required"], tag["many"]) == (True, False)


def test_strict_tools_constrain_calls_inside_free_text():
    tag = constraint_for_tools([strict(WEATHER), TOOLS[1]], CallRule("auto"), HERMES)
    assert tag["triggers"] == ["<tool_call>"]
    assert "required" not in tag
    assert [each["schema"] for each in tag["structures"]] == [
        WEATHER["function"]["parameters"],
        {"type": "object"},
    ]
    # where a call is plain JSON, its first character tells it from text
    plain = constraint_for_tools([strict(WEATHER)], CallRule("auto"), FORMATS["llama3_json"])
    assert plain["text_unless"] == "{"
    assert constraint_for_tools([TOOLS[1]], CallRule("auto"), FORMATS["llama3_json"]) is None
    # which of several openings a text begins with, no first character tells
    assert constraint_for_tools([strict(WEATHER)], CallRule("auto"), FORMATS["gemma"]) is None


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_what_is_forced_is_read_as_a_call(name):
    tag = constraint_for_tools(TOOLS, CallRule("required"), FORMATS[name])
    assert all(each["begin"].startswith(tuple(tag["triggers"])) for each in tag["structures"])
    first, second = tag["structures"]
    paris, nothing = '{"city": "Paris"}', "{}"
    if "python" in first:
        paris, nothing = 'city="Paris"', ""
    elif mark := first.get("quote"):
        paris, nothing = f"city:{mark}Paris{mark}", ""
    text = first["begin"] + paris + first["end"]
    if tag["many"]:
        text += second["begin"] + nothing + second["end"]
    reader = Reading(FORMATS[name], None, schemas={"get_weather": {}, "get_time": {}}).open()
    piece = reader.push(text)
    assert [(call.name, json.loads(call.arguments)) for call in piece.calls] == [
        ("get_weather", {"city": "Paris"}),
        ("get_time", {}),
    ][: len(piece.calls)]
    assert len(piece.calls) == (2 if tag["many"] else 1)
    assert piece.content + reader.finish().content == ""


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_may_be_called(mode):
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "get_time"}}]}
    choice = AllowedChoice.model_validate({"type": "allowed_tools", "allowed_tools": allowed})
    tag = constraint_for_tools(TOOLS, call_rule(choice), HERMES)
    assert [(each["name"], each["path"]) for each in tag["structures"]] == [
        ("get_time", "tools[1].function.parameters")
    ]
    assert ("required" in tag, tag.get("many")) == ((True, True) if mode == "required" else (False, None))


def test_allowing_all_tools_is_no_constraint():
    rule = CallRule("auto", frozenset({"get_weather", "get_time"}))
    assert constraint_for_tools(TOOLS, rule, HERMES) is None


def constraint(more, *, opened=False, stated=None, template=TOOL_TEMPLATE):
    body = ChatBody.model_validate({"messages": HI} | more)
    dialect = Dialect(ChatTemplate({"default": template}))
    return output_constraint(body, facts_of(dialect, body), opened, stated)


@pytest.mark.parametrize(
    ("more", "opened", "after"),
    [
        ({"tool_choice": "required"}, False, ""),
        ({"tool_choice": "required"}, True, "</think>"),
        ({"tool_choice": "auto"}, False, None),
        ({"tool_choice": "required", "tools": None}, False, None),
    ],
)
def test_a_constraint_holds_after_reasoning_that_the_prompt_has_opened(more, opened, after):
    found = constraint({"tools": [WEATHER]} | more, opened=opened)
    if after is None:
        assert found is None
    else:
        assert found.after == after
        begin = json.loads(found.source)["structures"][0]["begin"]
        assert begin == '<tool_call>\n{"name": "get_weather", "arguments": '


def test_formats_without_json_are_enforced_too():
    template = "<function_calls>{{ tools[0].function.name }}"
    found = constraint({"tools": [WEATHER], "tool_choice": "required"}, template=template)
    (structure,) = json.loads(found.source)["structures"]
    assert (structure["begin"], structure["python"]) == ("<function_calls>\nget_weather(", True)


def test_the_form_of_the_answer_holds_after_reasoning_that_the_prompt_has_opened():
    form = as_constraint({"regex": "a"})
    limited = {"thinking_token_budget": 7}
    assert constraint(limited, opened=True, stated=form).after == "</think>"
    made = constraint(limited, stated=form)
    assert (made.after, made.source, made.reasoning.tokens, made.reasoning.opened) == ("", "a", 7, False)
    free = constraint(limited, opened=True)
    assert (free.kind, free.after, free.reasoning.opened) == ("text", "", True)


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return ServedModel("fox", byte_level(), ChatTemplate({}), 100, 400)


def params(model: ServedModel, **given) -> SamplingParams:
    body = CompletionBody(prompt="x", **given)
    bad_words = asyncio.run(bad_word_tokens(body.bad_words or [], model))
    stated = stated_constraint(body)
    return sampling_params(body, model, max_tokens=7, logprobs=None, constraint=stated, bad_words=bad_words)


def test_nothing_given_means_the_cores_defaults(model):
    assert params(model) == SamplingParams(max_tokens=7)


def test_every_field_reaches_the_core(model):
    given = OTHER_SAMPLING | {
        "logit_bias": {"7": -100, "8": 1.5},
        "allowed_token_ids": [1, 2],
        "bad_words": ["fox"],
        "stop": ["a", "b"],
        "stop_token_ids": [9],
    }
    made = sampling_params(
        CompletionBody(prompt="x", **given),
        model,
        max_tokens=7,
        logprobs=4,
        constraint=None,
        bad_words=((1,),),
    )
    default = SamplingParams()
    for field in fields(SamplingParams):
        if field.name == "structured_outputs":  # which does not go with ignore_eos
            continue
        assert getattr(made, field.name) != getattr(default, field.name), field.name
    assert made.logit_bias == ((7, -100), (8, 1.5))
    assert made.stop == ("a", "b")


def test_a_constraint_reaches_the_core(model):
    assert params(model, guided_regex="a+").structured_outputs == Constraint(ConstraintKind.REGEX, "a+")
    with pytest.raises(InvalidParameter, match="ignore_eos"):
        params(model, guided_regex="a+", ignore_eos=True)


@pytest.mark.parametrize("stop", ["x" * 1025, ["a", "x" * 1025]])
def test_a_stop_string_has_a_greatest_length(stop):
    CompletionBody(prompt="x", stop=["x" * 1024] * 64)
    with pytest.raises(ValidationError, match="at most 1024 characters, got 1025"):
        CompletionBody(prompt="x", stop=stop)


def test_a_single_stop_string_is_a_list_of_one(model):
    assert params(model, stop="END").stop == ("END",)


def test_a_bad_word_is_bad_at_the_beginning_and_after_a_space(model):
    encode = model.tokenizer.encode
    spelt = {tuple(encode("fox", False)), tuple(encode(" fox", False))}
    assert len(spelt) == 2
    assert set(params(model, bad_words=["fox"]).bad_words) == spelt


def test_many_bad_words_are_tokenized_beside_the_loop(model, monkeypatch):
    threads = []
    encode = model.tokenizer.encode_batch

    def noted(*given):
        threads.append(threading.current_thread())
        return encode(*given)

    monkeypatch.setattr(model.tokenizer, "encode_batch", noted)
    assert len(params(model, bad_words=["fox" * 40] * 20 + ["hen"]).bad_words) == 4
    params(model, bad_words=["fox"])
    assert threads[0] is not threading.main_thread()
    assert threads[1] is threading.main_thread()


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"stop_token_ids": [400]}, "stop_token_ids"),
        ({"allowed_token_ids": [0, 400]}, "allowed_token_ids"),
        ({"logit_bias": {"400": 1}}, "logit_bias"),
        ({"bad_words": [" "]}, "bad_words"),
    ],
)
def test_tokens_that_do_not_exist_are_refused(model, given, param):
    with pytest.raises(ApiError) as error:
        params(model, **given)
    assert error.value.param == param


def test_a_range_is_the_cores_own(model):
    with pytest.raises(InvalidParameter) as error:
        params(model, top_p=0)
    assert error.value.param == "top_p"


@pytest.mark.parametrize(
    ("keep", "answer", "kept"),
    [(None, 9, 200), (3, 9, 3), (500, 9, 200), (-1, 1, 99), (-1, 20, 80), (-1, 10**9, 1), (-1, -7, 99)],
)
def test_truncation_keeps_the_end_and_room_for_the_answer(model, keep, answer, kept):
    body = ChatBody(messages=[{"role": "user", "content": "x"}], truncate_prompt_tokens=keep)
    assert truncated(list(range(200)), body, model, answer) == list(range(200 - kept, 200))


def test_the_answers_length_is_what_was_asked_or_what_is_left():
    assert answer_length(10, 5, None, "max_tokens", 100) == 5
    assert answer_length(10, 90, None, "max_tokens", 100) == 90
    assert answer_length(10, None, None, "max_tokens", 100) == 90
    assert answer_length(10, None, 16, "max_tokens", 100) == 16
    assert answer_length(99, None, 16, "max_tokens", 100) == 1


@pytest.mark.parametrize(("prompt", "asked"), [(100, None), (100, 1), (10, 91)])
def test_what_does_not_fit_is_refused_with_the_numbers(prompt, asked):
    with pytest.raises(ApiError) as error:
        answer_length(prompt, asked, 16, "max_tokens", 100)
    assert error.value.code == "context_length_exceeded"
    for number in (100, prompt, asked or 1):
        assert str(number) in str(error.value)


@pytest.mark.parametrize("asked", [0, -2])
def test_an_answer_has_at_least_one_token(asked):
    with pytest.raises(ApiError) as error:
        answer_length(10, asked, None, "max_completion_tokens", 100)
    assert error.value.param == "max_completion_tokens"


def test_a_top_k_beyond_the_vocabulary_is_no_bound(model):
    assert params(model, top_k=10**40).top_k == model.vocab_size


@pytest.mark.parametrize(
    "bias", [{"9" * 5000: 1}, {"07": 1}, {"-1": 1}, {"²": 1}, {"": 1}, {"7": 10**400}, {"7": -(10**40)}]
)
def test_biases_that_no_machine_number_holds_are_refused(bias):
    with pytest.raises(ValidationError, match="logit_bias"):
        CompletionBody(prompt="x", logit_bias=bias)


@pytest.mark.parametrize(
    "given",
    [{"stop_token_ids": [1] * 2000}, {"bad_words": ["x"] * 2000}, {"bad_words": ["x" * 200]}],
    ids=lambda given: next(iter(given)),
)
def test_lists_that_every_step_would_pay_for_are_bounded(given):
    with pytest.raises(ValidationError, match="at most"):
        CompletionBody(prompt="x", **given)


def test_allowed_tokens_count_once(model):
    assert params(model, allowed_token_ids=[5, 6, 5]).allowed_token_ids == (5, 6)


def test_a_request_that_may_neither_end_nor_go_on_is_refused(model):
    (eos,) = model.tokenizer.eos_token_ids
    impossible = {"allowed_token_ids": [eos, 9], "stop_token_ids": [9], "min_tokens": 1}
    with pytest.raises(ApiError) as error:
        params(model, **impossible)
    assert (error.value.status, error.value.param) == (400, "allowed_token_ids")
    params(model, **impossible | {"min_tokens": 0})
    params(model, **impossible | {"ignore_eos": True})


def test_no_call_opens_more_sequences_than_a_call_may_have_prompts(model):
    body = CompletionBody(prompt=[[1]] * 100, best_of=100)
    with pytest.raises(ApiError) as error:
        check_candidates(body)
    assert error.value.param == "best_of"
