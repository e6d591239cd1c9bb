"""What constrains an answer: its form, its calls, and the limit of its reasoning."""

import pytest

from headrace.api.compile.bodies import ChatBody
from headrace.api.compile.model import Dialect
from headrace.api.openai.tool_use import constrained, tool_constraint
from headrace.core.request import SamplingParams
from headrace.text.template import ChatTemplate
from tests.api.openai.test_chat import HI
from tests.api.tool_scenes import TOOL_TEMPLATE, WEATHER


@pytest.mark.parametrize(
    ("more", "prompt", "after"),
    [
        ({"tool_choice": "required"}, "[assistant] ", ""),
        ({"tool_choice": "required"}, "[assistant] <think>\n", "</think>"),
        ({"tool_choice": "auto"}, "[assistant] ", None),
        ({"tool_choice": "required", "tools": None}, "[assistant] ", None),
    ],
)
def test_a_constraint_holds_after_reasoning_that_the_prompt_has_opened(more, prompt, after):
    body = ChatBody.model_validate({"messages": HI, "tools": [WEATHER]} | more)
    found = tool_constraint(Dialect(ChatTemplate({"default": TOOL_TEMPLATE})), body, prompt)
    if after is None:
        assert found is None
    else:
        assert found.after == after
        assert found.tag["structures"][0]["begin"] == '<tool_call>\n{"name": "get_weather", "arguments": '


def test_formats_without_json_are_enforced_too():
    template = "<function_calls>{{ tools[0].function.name }}"
    body = ChatBody.model_validate({"messages": HI, "tools": [WEATHER], "tool_choice": "required"})
    found = tool_constraint(Dialect(ChatTemplate({"default": template})), body, "")
    (structure,) = found.tag["structures"]
    assert (structure["begin"], structure["python"]) == ("<function_calls>\nget_weather(", True)


def test_the_form_of_the_answer_holds_after_reasoning_that_the_prompt_has_opened():
    dialect = Dialect(ChatTemplate({"default": TOOL_TEMPLATE}))
    body = ChatBody.model_validate({"messages": HI, "thinking_token_budget": 7})
    form = SamplingParams(structured_outputs={"regex": "a"})
    assert constrained(form, dialect, body, "<think>").structured_outputs.after == "</think>"
    made = constrained(form, dialect, body, "<think></think>").structured_outputs
    assert (made.after, made.source, made.reasoning.tokens, made.reasoning.opened) == ("", "a", 7, False)
    free = constrained(SamplingParams(), dialect, body, "<think>").structured_outputs
    assert (free.kind, free.reasoning.opened) == ("text", True)
