"""Limits the cost of a sandboxed template: loop turns, size of values, length of output, time.

The sandbox keeps a template from accessing the machine, but not from exhausting it. `Metered` is mixed into a jinja2
environment. A `Budget` entered around a rendering counts for it, on its thread only.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextvars import ContextVar, Token
from functools import wraps
from types import TracebackType
from typing import Any

from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import MAX_RANGE, SandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_TURNS = 200_000
MAX_CHARACTERS = 16_000_000
MAX_SECONDS = 5.0
MAX_BITS = 16_384
"""Size limit of an integer: Python does not print larger ones, and multiplying them blocks all threads."""


class BudgetExceeded(Exception):
    """A rendering exceeded one of its limits; the message names it."""


class Budget:
    """The remaining budget of one rendering.

    Args:
        turns: loop turns and macro calls.
        characters: limit of the whole output, and of any intermediate value.
        seconds: wall-clock time, checked in every turn and with every value.
    """

    def __init__(
        self, turns: int = MAX_TURNS, characters: int = MAX_CHARACTERS, seconds: float = MAX_SECONDS
    ) -> None:
        self._seconds = seconds
        self._until = time.monotonic() + seconds
        self._turns = self._max_turns = turns
        self._characters = self._max_characters = characters
        self._token: Token[Budget | None] | None = None

    def __enter__(self) -> Budget:
        self._token = _current.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._token is not None
        _current.reset(self._token)

    def turn(self) -> None:
        """Count one turn of a loop or call of a macro."""
        self._turns -= 1
        if self._turns < 0:
            raise BudgetExceeded(f"it takes more than {self._max_turns} turns of loops and macros")
        self._look_at_clock()

    def write(self, characters: int) -> None:
        """Count output."""
        self._characters -= characters
        if self._characters < 0:
            raise BudgetExceeded(f"it writes more than {self._max_characters} characters")

    def check(self, size: int) -> None:
        """Reject a single value of this size."""
        if size > self._max_characters:
            raise BudgetExceeded(f"it makes a value longer than {self._max_characters} characters")
        self._look_at_clock()

    def check_bits(self, bits: int) -> None:
        """Reject an integer with more than `MAX_BITS` bits."""
        if bits > MAX_BITS:
            raise BudgetExceeded(f"it makes a number of more than {MAX_BITS} bits")

    def _look_at_clock(self) -> None:
        if time.monotonic() > self._until:
            raise BudgetExceeded(f"it takes more than {self._seconds:g} seconds")


_current: ContextVar[Budget | None] = ContextVar("budget", default=None)


class Metered(SandboxedEnvironment):
    """A sandbox whose templates are counted and checked against the current `Budget`.

    Loop bodies and macros are compiled with a counter at their start. Operations that make long values from short
    ones are checked before they run; results of other operators, calls and filters afterwards.
    """

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def meter_filters(self) -> None:
        """Wrap all filters with checks, after the environment has registered them."""
        self.filters = {name: _checked(name, filter_) for name, filter_ in self.filters.items()}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _CheckValues().visit(tree)
        repeated: list[nodes.For | nodes.Macro | nodes.CallBlock] = []
        for kind in (nodes.For, nodes.Macro, nodes.CallBlock):
            repeated.extend(tree.find_all(kind))
        for node in repeated:
            node.body.insert(0, nodes.ExprStmt(_call("count_turn")).set_lineno(node.lineno))
        return tree

    def count_turn(self) -> None:
        """Called by compiled templates at the head of every loop body and macro."""
        if (budget := _current.get()) is not None:
            budget.turn()

    def check_text(self, value: Any) -> Any:
        """Called by compiled templates on their output, on operands of ``~``, and on list literals."""
        _check_text(value)
        return value

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        safe = super().wrap_str_format(value)
        if safe is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            _check_operation("format", (value.__self__, *args, *kwargs.values()))
            return safe(*args, **kwargs)

        return checked

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for value, count in ((left, right), (right, left)):
                _check_size(_length(value) * count if isinstance(count, int) else 0)
            if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() + right.bit_length())
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * right)
        elif operator == "%":
            _check_operation("format", (left, right))
        value = super().call_binop(context, operator, left, right)
        _check_size(_length(value))
        return value

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        # The names follow jinja2: a template may pass keywords called `self` and `context`.
        subject = getattr(__obj, "__self__", None)
        if isinstance(subject, str):
            _check_operation(__obj.__name__, (subject, *args, *kwargs.values()))
        value = super().call(__context, __obj, *args, **kwargs)
        _check_value(value)
        return value


class _CheckValues(NodeTransformer):
    """Adds a check to every ``~`` and each of its operands, and to all constructors of lists.

    Sixty turns of ``[x, x]`` make a small value that is practically impossible to compare, hash or print.
    """

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [_call("check_text", operand) for operand in node.nodes]
        return _call("check_text", node)

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("check_text", node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("check_text", node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("check_text", node) if node.ctx == "load" else node

    def visit_Name(self, node: nodes.Name) -> nodes.Node:  # noqa: N802
        gathered = node.ctx == "load" and node.name in ("varargs", "kwargs")  # a macro's arguments
        return _call("check_text", node) if gathered else node


def _call(method: str, *operands: nodes.Expr) -> nodes.Call:
    """A call of a method of the environment, as part of a template."""
    return nodes.Call(nodes.EnvironmentAttribute(method), list(operands), [], None, None)


def _checked(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(filter_)  # also copies the marks that tell jinja2 what to pass first
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_operation(name, (*args, *kwargs.values()))
        value = filter_(*args, **kwargs)
        _check_value(value)
        return value

    return checked


_PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "format", "format_map"})
# Filters that accept a long list and do not write it out as text.
_KEEPS_LISTS = frozenset(
    {"attr", "batch", "count", "d", "default", "dictsort", "first", "groupby", "items", "last", "length"}
    | {"list", "map", "max", "min", "random", "reject", "rejectattr", "reverse", "select", "selectattr"}
    | {"slice", "sort", "sum", "unique"}
)
_NUMBER = re.compile(r"\d+")


def _check_operation(name: str, operands: tuple[Any, ...]) -> None:
    """Check a filter or string method that can make a long text from short operands, before it runs."""
    texts = [operand for operand in operands if isinstance(operand, str)]
    if name in _PADDING:
        for operand in operands:
            _check_size(operand if isinstance(operand, int) else 0)
        for number in _NUMBER.findall(texts[0]) if "format" in name and texts else ():
            _check_size(int(number[:20]))
    elif name == "replace" and len(texts) >= 3:
        subject, old, new = texts[:3]
        _check_size(len(subject) + subject.count(old) * len(new))
    elif name == "join" and texts:
        rows = [operand for operand in operands if isinstance(operand, (list, tuple))]
        turns = len(rows[0]) if rows else len(texts[1]) if len(texts) > 1 else MAX_RANGE
        _check_size(len(texts[0]) * turns)
    elif name == "translate" and texts:
        _check_size(len(texts[0]) * max(map(_longest, operands[1:]), default=1))
    if name not in _KEEPS_LISTS:
        for operand in operands:
            _check_text(operand)


def _check_text(value: Any) -> None:
    """Reject a value that would be too long as text; lists may contain the same long text many times."""
    if (budget := _current.get()) is None:
        return
    size = 0
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            waiting += item.keys()
            waiting += item.values()
        elif isinstance(item, (list, tuple)):
            waiting += item
        size += 1 + (len(item) if isinstance(item, str) else 0)
        budget.check(size)


def _check_value(value: Any) -> None:
    """Check the result of a filter or a call."""
    if isinstance(value, int):
        _check_bits(value.bit_length())
    elif isinstance(value, (list, tuple, dict)):
        _check_text(value)
    else:
        _check_size(_length(value))


def _longest(table: Any) -> int:
    """The maximum number of characters by which a table for `str.translate` replaces one."""
    values = table.values() if isinstance(table, dict) else table if isinstance(table, (list, tuple)) else ()
    return max(map(_length, values), default=1)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple)) else 0


def _check_size(size: int) -> None:
    if (budget := _current.get()) is not None:
        budget.check(size)


def _check_bits(bits: int) -> None:
    if (budget := _current.get()) is not None:
        budget.check_bits(bits)
