"""A standard way to show tools, for a chat template that has none.

The template gets a beginning, itself a template, that applies where a request has tools. It puts a description of the
tools before the conversation, and writes earlier calls and their results as text, which any template renders. So such a
model can call tools through the same parsers and grammars as others.

Two forms are known. A model with ChatML's marks gets the prompt of Hermes, on which most of these models were trained:
https://github.com/NousResearch/Hermes-Function-Calling. Others get calls as plain JSON, as in Llama 3.1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from headrace.text.template import ChatTemplate, TemplateError

PROBE = "headrace_probe"
"""The name of the tool by which a prompt is found to show tools."""

PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": PROBE,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"probe_key": {"type": "string", "description": "A value."}},
            "required": ["probe_key"],
        },
    },
}
PROBE_MESSAGE = {"role": "user", "content": "Hi"}

_CHATML = "<|im_start|>"


class _Form(NamedTuple):
    """How tools, calls and results are written: ``head``, a line for each tool, ``foot``; ``call`` is an expression."""

    head: str
    foot: str
    call: str
    result: tuple[str, str]


FORMS = {
    "hermes": _Form(
        "# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\nYou are provided with"
        " function signatures within <tools></tools> XML tags:\\n<tools>",
        "\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within"
        ' <tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>, "arguments":'
        " <args-json-object>}\\n</tool_call>",
        """'<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' ~ (call.function.arguments | tojson)
        ~ '}\\n</tool_call>'""",
        ("<tool_response>\\n", "\\n</tool_response>"),
    ),
    "llama3_json": _Form(
        "You may call one of the following functions. To call it, respond only with a JSON object in the format"
        ' {"name": function name, "parameters": dictionary of argument name and its value}. Do not use variables.'
        " If no function is needed, answer the user in plain text.\\n\\nFunctions:",
        "",
        """'{"name": "' ~ call.function.name ~ '", "parameters": ' ~ (call.function.arguments | tojson) ~ '}'""",
        ("Result of the function: ", ""),
    ),
}
"""By the names of their formats in the catalogue of parsers."""

# Results of tools become messages of the user. Those that follow each other become one message, since many templates
# demand that user and assistant alternate.
_BEGINNING = """\
{%- if tools %}
{%- set made = namespace(prompt='HEAD', messages=[], results='') %}
{%- for tool in tools %}{% set made.prompt = made.prompt ~ '\\n' ~ (tool | tojson) %}{% endfor %}
{%- set made.prompt = made.prompt ~ 'FOOT' %}
{%- PLACE %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- set made.results = made.results ~ ('\\n' if made.results else '') ~ 'BEFORE' ~ (message.content or '') ~ 'AFTER' %}
{%- if loop.last or loop.nextitem.role != 'tool' %}
{%- set made.messages = made.messages + [{'role': 'user', 'content': made.results}] %}
{%- set made.results = '' %}
{%- endif %}
{%- elif message.role in ('system', 'developer') and loop.first %}
{%- set made.messages = made.messages + [{'role': 'system', 'content': message.content ~ '\\n\\n' ~ made.prompt}] %}
{%- elif message.tool_calls %}
{%- set calls = namespace(text=message.content or '') %}
{%- for call in message.tool_calls %}
{%- set calls.text = calls.text ~ ('\\n' if calls.text else '') ~ CALL %}
{%- endfor %}
{%- set made.messages = made.messages + [{'role': 'assistant', 'content': calls.text}] %}
{%- else %}
{%- set made.messages = made.messages + [message] %}
{%- endif %}
{%- endfor %}
{%- set messages = made.messages %}
{%- endif %}{{ '' }}"""

_OWN_MESSAGE = """\
if messages[0].role not in ('system', 'developer') %}
{%- set made.messages = [{'role': 'system', 'content': made.prompt}] %}
{%- endif"""
"""The description is the system message, or the end of the one that the conversation has."""

_IN_THE_FIRST = """\
if messages[0].role not in ('system', 'developer') %}
{%- set made.messages = [{'role': 'user', 'content': made.prompt ~ '\\n\\n' ~ messages[0].content}] %}
{%- set messages = messages[1:] %}
{%- endif"""
"""The description begins the user's first message, for templates that refuse a system message."""


def with_tools(template: ChatTemplate, parser: str) -> ChatTemplate:
    """``template``, with a standard way to show tools if it has none of its own.

    Args:
        template: the model's.
        parser: the format of calls, or ``auto``; for one without a standard prompt the template stays as it is.
    """
    source = template.templates.get("default")
    if source is None or shows_tools(template):
        return template
    form = FORMS.get(parser if parser != "auto" else "hermes" if _CHATML in source else "llama3_json")
    if form is None:
        return template
    for place in (_OWN_MESSAGE, _IN_THE_FIRST):
        made = template.with_source("tool_use", _beginning(form, place) + source)
        if shows_tools(made):
            return made
    return template


def shows_tools(template: ChatTemplate) -> bool:
    """Whether a model's template shows tools to it."""
    try:
        prompt = template.render([PROBE_MESSAGE], tools=[PROBE_TOOL])
    except TemplateError:
        return False
    return PROBE in prompt.text


def _beginning(form: _Form, place: str) -> str:
    before, after = form.result
    parts = {
        "HEAD": form.head,
        "FOOT": form.foot,
        "PLACE": place,
        "CALL": form.call,
        "BEFORE": before,
        "AFTER": after,
    }
    text = _BEGINNING
    for name, part in parts.items():
        text = text.replace(name, part)
    return text
