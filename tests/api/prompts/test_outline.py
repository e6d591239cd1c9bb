import pytest

from headrace.api.compile.bodies import Conversation, Message
from headrace.api.compile.draft import facts_of
from headrace.api.compile.model import Dialect
from headrace.api.compile.outline import Outline
from headrace.api.compile.render import plain_messages
from headrace.text.template import ChatTemplate
from tests.api.tool_scenes import TOOL_TEMPLATE, WEATHER
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
