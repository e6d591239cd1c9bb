"""What constrains an answer: its form, its calls, and the limit of its reasoning."""

import json

import pytest

from headrace.api.compile.bodies import ChatBody
from headrace.api.compile.constrain import output_constraint
from headrace.api.compile.draft import facts_of
from headrace.api.compile.model import Dialect
from headrace.core.constraint import as_constraint
from headrace.text.template import ChatTemplate
from tests.api.openai.test_chat import HI
from tests.api.tool_scenes import TOOL_TEMPLATE, WEATHER


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
