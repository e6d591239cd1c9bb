"""Where a token of a prompt belongs, and what an explanation says of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.api.compile.bodies import Conversation, Message
from headrace.api.compile.markers import chosen
from headrace.api.compile.model import Dialect
from headrace.api.compile.outline import Outline
from headrace.api.compile.policies import PromptPolicy, Rules
from headrace.api.compile.render import facts_of, plain_messages
from headrace.core.tenancy.tenants import Tenants, TenantTerms
from headrace.text.template import ChatTemplate
from tests.api.tool_scenes import TIME, TOOL_TEMPLATE, WEATHER
from tests.text.vocabularies import byte_level

CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}


BODY = Conversation.model_validate(
    {
        "messages": [
            {"role": "system", "content": "Be brief.\nToday's date: 2026-11-25"},
            {"role": "user", "content": "How is Rome? 日本"},
            {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "I must look."},
            {"role": "tool", "tool_call_id": "c1", "content": "Sunny."},
            {"role": "assistant", "content": "It is sunny."},
            {"role": "user", "content": "Thanks."},
        ],
        "tools": [WEATHER],
    }
)


DIALECT = Dialect(ChatTemplate({"default": TOOL_TEMPLATE}))


TOKENIZER = byte_level()


def rendered(body=BODY):
    return (
        ChatTemplate({"default": TOOL_TEMPLATE})
        .render(
            plain_messages(DIALECT, body, facts_of(DIALECT, body)),
            add_generation_prompt=True,
            tools=[tool.plain() for tool in body.tools] if body.tools else None,
        )
        .text
    )


def place(needle, offset=0, text=None):
    text = text or rendered()
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    at = text.index(needle) + offset
    token = next(n for n in range(len(tokens)) if len(TOKENIZER.decode(tokens[: n + 1], False)) > at)
    return Outline(text, BODY, DIALECT.reasoning(None), TOKENIZER).place(tokens, token)


@pytest.mark.parametrize(
    ("needle", "section", "role"),
    [
        ("get_weather", "tools", ""),
        ("The weather now.", "tools", ""),
        ("Be brief", "system", "system"),
        ("Rome?", "messages[1]", "user"),
        ("I must look", "messages[2]", "assistant"),
        ("Sunny", "messages[3]", "tool"),
        ("It is sunny", "messages[4]", "assistant"),
        ("Thanks", "messages[5]", "user"),
    ],
)
def test_a_token_belongs_to_a_section(needle, section, role):
    found = place(needle)
    assert (found.section, found.role) == (section, role)
    assert found.after.startswith(needle[:3]) or needle[:3] in found.before[-4:] + found.after[:6]


def test_the_end_of_the_prompt_opens_the_answer():
    text = rendered()
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    assert Outline(text, BODY, None, TOKENIZER).place(tokens, len(tokens)).section == "answer"


def test_reasoning_is_missed_where_the_model_reasons():
    assert not place("I must look").lacks_reasoning
    assert place("It is sunny").lacks_reasoning
    assert not place("Thanks").lacks_reasoning
    text = rendered()
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    assert not Outline(text, BODY, None, TOKENIZER).place(tokens, len(tokens) - 40).lacks_reasoning


def test_a_marker_is_named():
    assert place("2026-11-25").marker == "current_date"
    assert place("Be brief").marker == ""


def test_a_place_within_a_character_is_the_character():
    text = rendered()
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    outline = Outline(text, BODY, None, TOKENIZER)
    sections = [outline.place(tokens, at).section for at in range(len(tokens) + 1)]
    order = ["tools", "system", *(f"messages[{n}]" for n in range(1, 6)), "answer"]
    assert list(dict.fromkeys(sections)) == order
    assert sections == sorted(sections, key=order.index)


def test_text_that_spells_a_special_token_is_found_like_other_text():
    body = BODY.model_copy(update={"messages": [BODY.messages[0], Message(role="user", content="a</s>b")]})
    template = ChatTemplate({"default": TOOL_TEMPLATE}, added=TOKENIZER.added)
    prompt = template.render(plain_messages(DIALECT, body, facts_of(DIALECT, body)))
    tokens = TOKENIZER.encode_prompt(prompt)
    assert TOKENIZER.eos_token_id not in tokens
    outline = Outline(prompt.text, body, None, TOKENIZER)
    found = [outline.place(tokens, at).section for at in range(len(tokens))]
    assert list(dict.fromkeys(found)) == ["system", "messages[1]", "answer"]


def test_a_truncated_prompt_is_found_from_its_end():
    text = rendered()
    tokens = TOKENIZER.encode(text, add_special_tokens=False)[-30:]
    assert Outline(text, BODY, None, TOKENIZER).place(tokens, 29).section in ("messages[5]", "answer")


def test_tokens_of_another_text_have_no_section():
    tokens = TOKENIZER.encode("Something else.", add_special_tokens=False)
    assert Outline(rendered(), BODY, None, TOKENIZER).place(tokens, 2).section == "prompt"


def test_the_rest_of_a_section_is_counted_in_tokens():
    found = place("It is sunny")
    assert 1 <= found.rest <= len("It is sunny.") + 2


RULES = "You are an agent. Read a file before you edit it. Keep the style of the code. " * 3


OWN = Rules(tenants=Tenants({"own": TenantTerms(normalize=frozenset({"billing_header"}))}))


def blocks(nonce):
    return [f"x-anthropic-billing-header: cch={nonce};", RULES]


def chat(nonce, **more):
    parts = [{"type": "text", "text": text} for text in blocks(nonce)]
    messages = [{"role": "system", "content": parts}, {"role": "user", "content": "Hi"}]
    return "/v1/chat/completions", {"messages": messages, "max_tokens": 4} | more


def messages(nonce):
    system = [{"type": "text", "text": text} for text in blocks(nonce)]
    body = {"system": system, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    return "/v1/messages", body


def responses(nonce):
    body = {"instructions": "\n".join(blocks(nonce)), "input": "Hi", "max_output_tokens": 4, "store": False}
    return "/v1/responses", body


def ask(house, call, **headers):
    path, body = call
    answer = house.client.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    reported = house.client.get(f"/v1/requests/{answer.json()['id']}").json()
    return answer, reported["prefix"]


@pytest.fixture
def options():
    return {"template": TOOL_TEMPLATE, "max_model_len": 2048, "num_blocks": 2048}


@pytest.mark.parametrize("dialect", [chat, messages, responses])
def test_a_nonce_is_named_in_every_dialect(house, dialect):
    ask(house, dialect("aaaa"))
    answer, prefix = ask(house, dialect("zzzz"))
    assert (prefix["cause"], prefix["marker"], prefix["section"]) == (
        "marker_changed",
        "billing_header",
        "system",
    )
    assert prefix["recomputed_tokens"] > 0.5 * prefix["prompt_tokens"]
    assert "X-Headrace-Normalized" not in answer.headers
    assert "text" not in prefix


@pytest.mark.parametrize("dialect", [chat, messages, responses])
def test_normalization_removes_it_in_every_dialect(house, dialect):
    house.model.prompts = replace(house.model.prompts, normalize=chosen(["all"]))
    ask(house, dialect("aaaa"))
    answer, prefix = ask(house, dialect("zzzz"))
    assert answer.headers["X-Headrace-Normalized"] == "billing_header=removed"
    assert prefix["normalized"] == [{"marker": "billing_header", "action": "removed", "times": 1}]
    assert prefix["cause"] == "whole_prompt"
    assert prefix["cached_tokens"] == prefix["prompt_tokens"] - 1


def test_a_stream_says_what_was_done(house):
    house.model.rules = OWN
    path, body = chat("aaaa", stream=True)
    answer = house.client.post(path, json=body, headers={"X-Tenant-Id": "own"})
    assert answer.headers["X-Headrace-Normalized"] == "billing_header=removed"


def test_a_tenant_may_have_its_own_markers(house):
    house.model.rules = OWN
    ask(house, chat("aaaa"), **{"X-Tenant-Id": "own"})
    assert ask(house, chat("zzzz"), **{"X-Tenant-Id": "own"})[1]["cause"] == "whole_prompt"
    ask(house, chat("aaaa"), **{"X-Tenant-Id": "other"})
    assert ask(house, chat("zzzz"), **{"X-Tenant-Id": "other"})[1]["cause"] == "marker_changed"


def test_tokens_are_counted_as_they_are_computed(house):
    house.model.rules = OWN
    path, body = messages("aaaa")
    del body["max_tokens"]
    counted = [
        house.client.post(f"{path}/count_tokens", json=body, headers={"X-Tenant-Id": who}).json()
        for who in ("own", "other")
    ]
    assert counted[0]["input_tokens"] < counted[1]["input_tokens"] - 20
    _, prefix = ask(house, messages("aaaa"), **{"X-Tenant-Id": "own"})
    assert prefix["prompt_tokens"] == counted[0]["input_tokens"]


def test_reordered_tools_are_named(house):
    ask(house, chat("aaaa", tools=[WEATHER, TIME], tool_choice="none"))
    _, prefix = ask(house, chat("aaaa", tools=[TIME, WEATHER], tool_choice="none"))
    assert (prefix["cause"], prefix["section"]) == ("tools_reordered", "tools")
    _, prefix = ask(
        house, chat("aaaa", tools=[TIME | {"function": {"name": "get_tide"}}], tool_choice="none")
    )
    assert prefix["cause"] == "tools_changed"


@pytest.mark.parametrize(
    "options", [{"template": TOOL_TEMPLATE, "max_model_len": 2048, "num_blocks": 2048, "show_text": True}]
)
def test_words_around_the_place_are_shown_where_that_is_allowed(house):
    ask(house, chat("aaaa"))
    _, prefix = ask(house, chat("zzzz"))
    assert prefix["text"]["before"].endswith("x-anthropic-billing-header: cch=")
    assert prefix["text"]["after"].startswith("zzzz")


def test_only_the_first_of_several_answers_is_explained(house):
    path, body = chat("aaaa", n=2)
    answer = house.client.post(path, json=body).json()
    reported = house.client.get(f"/v1/requests/{answer['id']}").json()["sequences"]
    assert ["prefix" in each for each in reported] == [True, False]


def test_a_completion_is_explained_without_sections(house):
    for text in ("One " * 40, "One " * 30 + "two " * 10):
        answer = house.client.post("/v1/completions", json={"prompt": text, "max_tokens": 3}).json()
    prefix = house.client.get(f"/v1/requests/{answer['id']}").json()["prefix"]
    assert (prefix["cause"], prefix["section"]) == ("text_changed", None)


def test_a_request_whose_id_is_in_use_takes_no_place_of_another(house):
    """The open request may be another tenant's: its explanation would tell of this one's prompt."""
    entered, open_routes = [], house.service._routes
    house.model.prompts = PromptPolicy(enter=lambda request, *about: entered.append(request.id))
    body = {"prompt": "hi", "max_tokens": 1, "request_id": "mine"}
    open_routes["cmpl-mine"] = None
    assert house.client.post("/v1/completions", json=body).status_code == 400
    del open_routes["cmpl-mine"]
    assert entered == []
    assert house.client.post("/v1/completions", json=body | {"n": 2}).status_code == 200
    assert entered == ["cmpl-mine-0"]
