"""Renders one chat template: the sandbox, its filters, and what a rendering needs. It runs in the server's process, and
in those of `processes`, which import nothing heavy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.text.budget import Budget, BudgetExceeded, Metered, bounded
from headrace.text.content import Content, Controls, PromptText, SeeingEnvironment, current, texts

MAX_INDENT = 32
MAX_REASON = 1_000
"""Maximum characters of an error that a template raises."""
# Marks the end of the last message while rendering, to find it in the prompt. A space follows: where the
# template trims that space, it would have trimmed the end of the message too.
_END = "\u2063END-OF-CONTINUED-MESSAGE\u2063"
_PLAIN_LAYOUT = re.compile(r"(?:[^%]|%-?[A-Za-z%]){0,100}")


class TemplateError(ValueError):
    """A chat template that cannot be compiled, or that failed on these messages."""


class Job(NamedTuple):
    """One rendering: a template, the ``messages``, the ``variables`` that the request sets, and the template's ``own``.

    ``controls`` are protected in messages and variables; none if nothing spells one. ``continues``: the prompt ends
    inside the last message.
    """

    source: str
    messages: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]
    own: Mapping[str, Any]
    controls: Controls = Controls()
    continues: bool = False


def render_job(job: Job) -> PromptText:
    """The prompt of a job.

    Raises:
        TemplateError: the template has a syntax error, rejects these messages, or fails on them.
        BudgetExceeded: it exceeds the current budget.
    """
    if not job.controls.spellings:
        return PromptText(_render(compiled(job.source), job, job.messages, job.variables))
    try:
        content = Content(job.controls, texts([*job.messages, job.variables]))
    except ValueError as error:
        raise TemplateError(str(error)) from error
    entered = current.set(content)
    try:
        variables = content.protect(dict(job.variables))
        text = _render(compiled(job.source, True), job, content.protect_messages(job.messages), variables)
    finally:
        current.reset(entered)
    return content.finish(text)


def variables_of(source: str) -> list[str]:
    """The names that a template reads and does not define itself.

    Raises:
        TemplateError: it has a syntax error.
    """
    compiled(source)  # names what is wrong
    return sorted(jinja2.meta.find_undeclared_variables(_ENVIRONMENT.parse(source)))


def _render(
    template: jinja2.Template, job: Job, messages: Sequence[Any], variables: Mapping[str, Any]
) -> str:
    """Every failure becomes a `TemplateError`."""
    if job.continues:
        messages = [*messages[:-1], _marked(messages[-1] if messages else {})]
    try:
        text = template.render(dict(job.own) | dict(variables) | {"messages": messages})
        text.encode()  # an expression can contain a lone surrogate
    except (BudgetExceeded, MemoryError):
        raise
    except jinja2.UndefinedError as error:
        why = (error.message or "")[:MAX_REASON]
        raise TemplateError(f"the chat template uses something undefined: {why}") from error
    except jinja2.TemplateError as error:
        raise TemplateError(
            (error.message or "the chat template rejected these messages")[:MAX_REASON]
        ) from error
    except Exception as error:  # a template can raise anything its expressions can
        why = f"{type(error).__name__}: {error}"[:MAX_REASON]
        raise TemplateError(f"the chat template failed: {why}") from error
    return _cut_at_mark(text) if job.continues else text


def _marked(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, str):
        raise TemplateError("continue_final_message needs a last message with text content")
    return {**message, "content": content + _END + " "}


def _cut_at_mark(text: str) -> str:
    end = text.rfind(_END)
    if end < 0:
        raise TemplateError("continue_final_message: the chat template leaves out the last message")
    return text[:end] if text.startswith(" ", end + len(_END)) else text[:end].rstrip()


@lru_cache(maxsize=32)
def compiled(source: str, seeing: bool = False) -> jinja2.Template:
    """The template, compiled. ``seeing``: for content that spells control tokens.

    Raises:
        TemplateError: it has a syntax error.
    """
    try:
        with (
            Budget()
        ):  # jinja2 computes constant expressions while it compiles, but none that exceeds a budget
            return (_SEEING if seeing else _ENVIRONMENT).from_string(source)
    except jinja2.TemplateSyntaxError as error:
        where = f"in line {error.lineno}"
        raise TemplateError(f"the chat template has a syntax error {where}: {error.message}") from error
    except Exception as error:  # jinja2 and Python's parser raise many types
        raise TemplateError(f"the chat template cannot be compiled: {error}") from error


class _Generation(jinja2.ext.Extension):
    """Accepts ``{% generation %}``, which marks an assistant's text for training and renders as its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(Metered, ImmutableSandboxedEnvironment):
    """The sandbox for chat templates."""


class _SeeingEnvironment(Metered, SeeingEnvironment, ImmutableSandboxedEnvironment):
    """The sandbox for templates over protected content."""

    def check_output(self, value: Any) -> Any:
        return self.written(super().check_output(value))

    def cut(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        return self.check_value(super().cut(value, start, stop, step))


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    bounded("strftime_now", isinstance(layout, str) and _PLAIN_LAYOUT.fullmatch(layout) is not None)
    return datetime.now().strftime(layout)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it; jinja2's own filter escapes for HTML."""
    if isinstance(indent, int) and indent > MAX_INDENT:
        raise jinja2.TemplateError(f"tojson: indent must be at most {MAX_INDENT}")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _equip(environment: _Environment | _SeeingEnvironment) -> None:
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    del environment.globals["lipsum"]  # can write for minutes in one call
    environment.finalize = environment.check_output


_EXTENSIONS = (_Generation, jinja2.ext.loopcontrols)
_ENVIRONMENT = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=_EXTENSIONS)
_SEEING = _SeeingEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=_EXTENSIONS)
_equip(_ENVIRONMENT)
_equip(_SEEING)
_SEEING.see_filters()
_ENVIRONMENT.meter_filters()
_SEEING.meter_filters()
