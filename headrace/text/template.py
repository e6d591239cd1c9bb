"""The model's chat template: renders messages to the text of the prompt.

Templates come with models and, if the operator allows it, with requests. All run in jinja2's sandbox. A model's
template runs in the server's process within a small `Budget`, which templates of known models do not reach. What
exceeds it, and every template of a request, is rendered in a process of its own, with limits that hold inside one call
(`processes`).

It does not produce tokens: `Tokenizer.encode_prompt` encodes its output without adding special tokens, because
templates write special tokens themselves. Text of the request that spells one stays text (`content`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headrace.text.content import AddedTokens, Controls, PromptText, may_spell_control, texts
from headrace.text.processes import PROCESSES
from headrace.text.rendering import (
    Budget,
    BudgetExceeded,
    Job,
    TemplateError,
    compiled,
    render_job,
    variables_of,
)
from headrace.text.tokenizer import read_json

# A standard way to show tools, for a chat template that has none.
#
# The template gets a beginning, itself a template, that applies where a request has tools. It puts a description of the
# tools before the conversation, and writes earlier calls and their results as text, which any template renders. So such
# a model can call tools through the same parsers and grammars as others.
#
# Two forms are known. A model with ChatML's marks gets the prompt of Hermes, on which most of these models were
# trained: https://github.com/NousResearch/Hermes-Function-Calling. Others get calls as plain JSON, as in Llama 3.1.

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


__all__ = ["ChatTemplate", "NeedsProcess", "TemplateError", "given_template", "load_templates"]

ORDINARY_CHARACTERS = 4096
"""A model's template that exceeds the budget on less content than this is not tried in the server's process again."""


NO_TOKENS = AddedTokens()


class NeedsProcess(Exception):
    """The template must be rendered in a process of its own, which takes time, and the caller does not wait."""


class ChatTemplate:
    """Renders messages with a model's templates.

    Args:
        templates: jinja2 sources by name; ``default`` is used unless the call has tools and there is one named
            ``tool_use``. It may be empty: then `render` needs a template of its own.
        special_tokens: ``bos_token`` and others, which templates write themselves.
        added: the tokenizer's added tokens; text of a request that spells a control token of them stays text.

    Raises:
        TemplateError: one of the templates has a syntax error.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        added: AddedTokens = NO_TOKENS,
    ) -> None:
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens or {})
        self._added = added
        self._controls = {source: added.controls(source) for source in self._templates.values()}
        self._apart: set[str] = set()
        for source in self._templates.values():
            compiled(source)
        self._listing = {source for source in self._templates.values() if self._needs_lists(source)}

    @property
    def digest(self) -> str:
        """A digest of these templates, their special tokens, and what stays text."""
        described = json.dumps([self._templates, self._special_tokens, self._added], sort_keys=True)
        return hashlib.sha256(described.encode()).hexdigest()

    @property
    def templates(self) -> Mapping[str, str]:
        """The templates' texts by name."""
        return dict(self._templates)

    def with_source(self, name: str, source: str) -> ChatTemplate:
        """The same with another template.

        Raises:
            TemplateError: it has a syntax error.
        """
        return ChatTemplate(self._templates | {name: source}, self._special_tokens, self._added)

    @property
    def sources(self) -> tuple[str, ...]:
        """The templates' texts."""
        return tuple(self._templates.values())

    def _needs_lists(self, source: str) -> bool:
        """Whether a template for images shows texts only in lists of parts, never as strings."""
        if "image" not in source:
            return False
        shown = []
        for listed in (False, True):
            message = _with_parts(PROBE_MESSAGE, listed)
            own = self._special_tokens | {"add_generation_prompt": True, "tools": None, "documents": None}
            try:
                with Budget(len(PROBE)):
                    text = render_job(Job(source, [message], {}, own, Controls(), False)).text
            except (TemplateError, BudgetExceeded):
                text = ""
            shown.append(PROBE in text)
        return shown == [False, True]

    def variables(self, template: str | None = None) -> frozenset[str]:
        """The names that a template (the model's, or a source) reads and does not define itself."""
        if template is not None:
            return PROCESSES.variables(template)
        return frozenset(name for source in self.sources for name in variables_of(source))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        waits: bool = True,
        images: bool = False,
        **variables: Any,
    ) -> PromptText:
        """The prompt for ``messages``.

        Args:
            messages: as in the OpenAI API; content that is a list of text parts is joined by line breaks, unless the
                template needs lists.
            add_generation_prompt: end with the header of the assistant's answer.
            continue_final_message: end inside the last message, so that the answer continues it.
            template: a jinja2 source to use instead of the model's.
            waits: wait for another process, if the template needs one.
            images: lists of parts may have other parts, which the template gets as they are.
            **variables: ``tools``, ``documents`` and other variables of the template.

        Raises:
            TemplateError: there is no template; or it has a syntax error, rejects these messages, fails on them, or
                reaches a limit.
            NeedsProcess: the template needs another process and the caller does not wait.
        """
        if continue_final_message and add_generation_prompt:
            raise TemplateError("continue_final_message and add_generation_prompt cannot both be set")
        source = template if template is not None else self._choose(variables)
        own: dict[str, Any] = self._special_tokens | {"add_generation_prompt": add_generation_prompt}
        own |= {"tools": None, "documents": None}
        plain = [_with_plain_content(message, number, images) for number, message in enumerate(messages)]
        if source in self._listing:
            plain = [_with_parts(message, True) for message in plain]
        content = list(texts([plain, variables]))
        controls = self._controls[source] if template is None else self._added.controls(source)
        if not may_spell_control(content, controls, source):
            controls = Controls()
        job = Job(source, plain, variables, own, controls, continue_final_message)
        if template is None and source not in self._apart:
            size = sum(map(len, content))
            try:
                with Budget(size):
                    return render_job(job)
            except BudgetExceeded as error:
                if error.always or size <= ORDINARY_CHARACTERS:
                    self._apart.add(source)
        if not waits:
            raise NeedsProcess
        return PROCESSES.render(job)

    def _choose(self, variables: Mapping[str, Any]) -> str:
        name = "tool_use" if variables.get("tools") and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise TemplateError("the model has no chat template; pass one with --chat-template FILE")
        return self._templates[name]


def load_templates(folder: str | Path) -> dict[str, str]:
    """The chat templates of a model folder by name.

    They are read from ``chat_template.jinja`` and ``additional_chat_templates/NAME.jinja``. Otherwise they are read
    from the field ``chat_template`` of ``tokenizer_config.json`` (a source, or a list of named ones), or of
    ``chat_template.json``.

    Raises:
        TemplateError: one cannot be read, or is not a source.
    """
    folder = Path(folder)
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    found = {name: _read(path) for name, path in files.items() if path.is_file()}
    if "default" in found:
        return found
    for name in ("tokenizer_config.json", "chat_template.json"):
        value = read_json(folder / name).get("chat_template")
        if isinstance(value, str):
            return {"default": value} | found
        if value is not None:
            return _named(value, folder / name) | found
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"{path} cannot be read: {error}") from error


def _named(value: Any, path: Path) -> dict[str, str]:
    """The templates that a config lists, by name."""
    try:
        named = {entry["name"]: entry["template"] for entry in value}
    except (TypeError, KeyError):
        named = {"default": None}
    if not all(isinstance(text, str) for pair in named.items() for text in pair):
        raise TemplateError(
            f"{path}: chat_template must be a source, or a list of objects with name and template"
        )
    return named


def given_template(chat_template: str) -> str:
    """The source of ``--chat-template``, which is a file's path or a source.

    Raises:
        TemplateError: it is neither.
    """
    if "{" in chat_template or "\n" in chat_template:
        return chat_template
    try:
        return Path(chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"--chat-template {chat_template} cannot be read: {error}") from error


def _with_parts(message: Mapping[str, Any], listed: bool) -> dict[str, Any]:
    """The message, its text ``listed`` as the only part of its content."""
    content = message.get("content")
    if listed and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    return {**message, "content": content}


def _with_plain_content(message: Mapping[str, Any], number: int, images: bool) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, (list, tuple)):
        return dict(message)
    if images and any(part.get("type") != "text" for part in content):
        return {**message, "content": [dict(part) for part in content]}
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise TemplateError(f"messages[{number}].content: only parts of type text are supported")
        texts.append(text)
    return {**message, "content": "\n".join(texts)}
