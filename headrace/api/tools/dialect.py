"""Finds out by rendering what a chat template supports, and selects the parsers for its outputs.

Templates do not declare whether they support tools, and in which form they expect the arguments of earlier calls. So a
small conversation is rendered once per template, and the result is inspected.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from headrace.text.parsing.catalogue import AUTO, reasoning_format, tool_format
from headrace.text.parsing.formats import ReasoningFormat, ToolFormat
from headrace.text.processes import TemplateStopped
from headrace.text.rendering import TemplateError
from headrace.text.template import PROBE, PROBE_MESSAGE, PROBE_TOOL, ChatTemplate

_KEY, _VALUE = "probe_key", "probe_value"


class Dialect:
    """The capabilities of a model's own template, and of templates in requests.

    Args:
        template: the model's template.
        tool_parser, reasoning_parser: names of formats, or ``auto``.

    Raises:
        UnknownParser: there is no such format.
    """

    def __init__(self, template: ChatTemplate, tool_parser: str = AUTO, reasoning_parser: str = AUTO) -> None:
        self._template = template
        self._tool_parser, self._reasoning_parser = tool_parser, reasoning_parser
        self.tools = lru_cache(maxsize=32)(self._tools)
        self.reasoning = lru_cache(maxsize=32)(self._reasoning)
        self.knows_tools = lru_cache(maxsize=32)(self._knows_tools)
        self.arguments_are_text = lru_cache(maxsize=32)(self._arguments_are_text)
        self.takes_several_calls = lru_cache(maxsize=32)(self._takes_several_calls)
        self.variables = lru_cache(maxsize=32)(template.variables)
        self.tools(None), self.reasoning(None), self.variables(None)
        self.knows_tools(None), self.takes_several_calls(None)  # now, since a probe may wait for a process

    def _tools(self, source: str | None) -> ToolFormat | None:
        """The format of calls in outputs of the template ``source`` (None: the model's own)."""
        return tool_format(self._tool_parser, self._text(source))

    def _reasoning(self, source: str | None) -> ReasoningFormat | None:
        """The format of reasoning in outputs of the template ``source``."""
        return reasoning_format(self._reasoning_parser, self._text(source))

    def _text(self, source: str | None) -> str:
        return "\n".join(self._template.sources) if source is None else source

    def _knows_tools(self, source: str | None) -> bool:
        """Whether the template shows tools to the model."""
        return PROBE in self._try(source, [PROBE_MESSAGE], [PROBE_TOOL])

    def _arguments_are_text(self, source: str | None) -> bool:
        """Whether the template expects the arguments of earlier calls as JSON text instead of an object."""
        if _KEY in self._try(source, _called({_KEY: _VALUE})):
            return False
        return _KEY in self._try(source, _called(f'{{"{_KEY}": "{_VALUE}"}}'))

    def _takes_several_calls(self, source: str | None) -> bool:
        """Whether the template accepts a message with more than one call; Llama 3's templates do not."""
        arguments: object = {_KEY: _VALUE}
        if self.arguments_are_text(source):
            arguments = f'{{"{_KEY}": "{_VALUE}"}}'
        return self._try(source, _called(arguments, arguments)).count(_KEY) > 1

    def _try(
        self,
        source: str | None,
        messages: list[Mapping[str, Any]],
        tools: list[Mapping[str, Any]] | None = None,
    ) -> str:
        try:
            return self._template.render(messages, template=source, tools=tools).text
        except TemplateStopped:
            if source is not None:
                raise
            return ""
        except TemplateError:
            return ""


def _called(*arguments: object) -> list[Mapping[str, Any]]:
    """A conversation with calls."""
    calls = [
        {"id": f"abcdefgh{number}", "type": "function", "function": {"name": "f", "arguments": each}}
        for number, each in enumerate(arguments)
    ]
    return [PROBE_MESSAGE, {"role": "assistant", "content": "", "tool_calls": calls}]
