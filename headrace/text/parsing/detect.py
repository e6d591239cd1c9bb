"""Detects the format that a model writes from the text of its chat template, which shows the model how to call tools.

A template that contains a family's markers was written for it, so the parser of a known family needs no option.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import TypeVar

from headrace.text.parsing.catalogue import REASONING_FORMATS, TOOL_FORMATS
from headrace.text.parsing.formats import ReasoningFormat, ToolFormat

AUTO = "auto"

FormatT = TypeVar("FormatT", bound=ToolFormat | ReasoningFormat)


class UnknownParser(ValueError):
    """A name that is not in the catalogue; the message lists the names."""


def tool_format(name: str, template: str) -> ToolFormat | None:
    """The tool format with the name or alias ``name``. For ``auto`` the one that ``template`` shows, if it shows any.

    Raises:
        UnknownParser: there is no such format.
    """
    return _find(TOOL_FORMATS, name, template, "--tool-call-parser")


def reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    """The reasoning format with the name or alias ``name``. For ``auto`` the one that ``template`` shows, if any.

    Raises:
        UnknownParser: there is no such format.
    """
    return _find(REASONING_FORMATS, name, template, "--reasoning-parser")


def _find(formats: Iterable[FormatT], name: str, template: str, flag: str) -> FormatT | None:
    if name == AUTO:
        return next((each for each in formats if _shows(each, template)), None)
    found = next((each for each in formats if name in _names(each)), None)
    if found is None:
        names = ", ".join([AUTO, *sorted(chain.from_iterable(map(_names, formats)))])
        raise UnknownParser(f"{flag} {name}: there is no such parser; there are {names}")
    return found


def _names(each: ToolFormat | ReasoningFormat) -> tuple[str, ...]:
    return each.name, *each.aliases


def _shows(each: ToolFormat | ReasoningFormat, template: str) -> bool:
    return any(all(sign in template for sign in group) for group in each.signs)
