"""Renders one chat template: the sandbox, its filters, and what a rendering needs. It runs in the server's process, and
in those of `processes`, which import nothing heavy.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar, Token
from datetime import datetime
from functools import lru_cache, wraps
from types import TracebackType
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment
from jinja2.visitor import NodeTransformer

from headrace.text.content import Content, Controls, PromptText, SeeingEnvironment, call_of, current, texts

# The budget of templates that run in the server's own process: what they may do there, and how much of it.
#
# The sandbox keeps a template from accessing the machine, but not from exhausting it, and one call inside C can hold
# the interpreter's lock for minutes. So a template only runs here while each of its operations takes time and memory in
# proportion to its operands, and all together stay below a `Budget`. Anything else raises `BudgetExceeded`, and the
# template is rendered in a process of its own (`processes`). Without a budget, as in that process, everything is
# allowed.

MAX_TURNS = 50_000
MAX_CHARACTERS = 1_000_000
"""Characters that a template may process beside those of its content."""
CONTENT_TIMES = 32
"""How often a template may process its content."""
MAX_SECONDS = 0.1
CLOCK_CHECKS = 8
"""The clock is read once in so many checks: reading it takes as long as some of them."""
MAX_BITS = 1_024
MAX_ARGUMENT = 256
"""Maximum length of what is searched for: some searches take the product of both lengths."""
MAX_PRODUCT = 16_000_000
"""Maximum product of those lengths: some 10 ms."""
MAX_PARTS = 100_000
"""Maximum parts into which one operation divides a text, and characters if it may divide it at each."""
CONTENT_AT_ONCE = 2
"""How often its content may be a part of one value."""

METHODS = frozenset(
    {
        "capitalize",
        "count",
        "endswith",
        "find",
        "index",
        "isalnum",
        "isalpha",
        "isascii",
        "isdecimal",
        "isdigit",
    }
    | {
        "islower",
        "isnumeric",
        "isspace",
        "istitle",
        "isupper",
        "lower",
        "lstrip",
        "partition",
        "removeprefix",
    }
    | {"removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines"}
    | {"startswith", "strip", "swapcase", "title", "upper"}
    | {"get", "items", "keys", "values"}  # of objects
)
FILTERS = frozenset(
    {
        "abs",
        "capitalize",
        "count",
        "d",
        "default",
        "dictsort",
        "e",
        "escape",
        "first",
        "float",
        "int",
        "items",
    }
    | {
        "join",
        "last",
        "length",
        "list",
        "lower",
        "map",
        "reject",
        "rejectattr",
        "replace",
        "reverse",
    }
    | {"safe", "select", "selectattr", "string", "title", "tojson", "trim", "upper"}
)


class BudgetExceeded(Exception):
    """A template did, or would do, more than its budget allows. ``always``: it will in every rendering."""

    def __init__(self, what: str, always: bool = False) -> None:
        super().__init__(what)
        self.always = always


class Budget:
    """The remaining budget of one rendering, on its thread.

    Args:
        content: characters of the content that the template renders.
        turns: loop turns and macro calls.
        characters: of all values that operations take or make, beside those of the content.
        seconds: CPU time of the thread, checked every few turns and values.
    """

    def __init__(
        self,
        content: int = 0,
        turns: int = MAX_TURNS,
        characters: int = MAX_CHARACTERS,
        seconds: float = MAX_SECONDS,
    ) -> None:
        self._until = time.thread_time() + seconds
        self._checks = 0
        self._turns = turns
        self._characters = characters + CONTENT_TIMES * content
        self._largest = characters + CONTENT_AT_ONCE * content
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
            raise BudgetExceeded("turns of loops and macros")
        self._look_at_clock()

    def spend(self, size: int) -> None:
        """Count the size of a value."""
        self._characters -= size
        if self._characters < 0 or size > self._largest:
            raise BudgetExceeded("characters")
        self._look_at_clock()

    def spend_all(self, value: Any) -> None:
        """Count the length of a value as text, about; lists may contain the same long text many times."""
        size = seen = 0
        waiting = [value]
        while waiting and size <= self._characters:
            item = waiting.pop()
            seen += 1
            if not seen % 1024:
                self._look_at_clock()
            if isinstance(item, dict):
                waiting += item.keys()
                waiting += item.values()
            elif isinstance(item, (list, tuple)):
                waiting += item
            size += 1 + (len(item) if isinstance(item, str) else 0)
        self.spend(size)

    def _look_at_clock(self) -> None:
        self._checks += 1
        if not self._checks % CLOCK_CHECKS and time.thread_time() > self._until:
            raise BudgetExceeded("seconds")


_current: ContextVar[Budget | None] = ContextVar("budget", default=None)


def bounded(what: str, allowed: bool) -> None:
    """Refuse an operation within a budget, unless it is ``allowed``."""
    if not allowed and _current.get() is not None:
        raise BudgetExceeded(what, always=True)


_CHECKS = frozenset({"check_output", "check_value", "count_turn"})


class Metered(SandboxedEnvironment):
    """A sandbox whose templates are counted and checked against the current `Budget`.

    Loop bodies and macros are compiled with a counter at their start. The sizes of operands are counted before an
    operation runs, the sizes of results afterwards.
    """

    intercepted_binops = frozenset({"*", "**", "%", "+", "-", "/", "//"})

    def meter_filters(self) -> None:
        """Wrap all filters and tests with checks, after the environment has registered them."""
        self.filters = {name: _checked(name, filter_) for name, filter_ in self.filters.items()}
        self.tests = {name: _ticking(test) for name, test in self.tests.items()}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _CheckValues().visit(tree)
        repeated: list[nodes.For | nodes.Macro | nodes.CallBlock] = []
        for kind in (nodes.For, nodes.Macro, nodes.CallBlock):
            repeated.extend(tree.find_all(kind))
        for node in repeated:
            node.body.insert(0, nodes.ExprStmt(call_of("count_turn")).set_lineno(node.lineno))
        for loop in tree.find_all(nodes.For):
            if isinstance(loop.test, nodes.Expr):
                loop.test = call_of("check_value", loop.test)
        return tree

    def count_turn(self) -> None:
        """Called by compiled templates at the head of every loop body and macro."""
        if (budget := _current.get()) is not None:
            budget.turn()

    def check_value(self, value: Any) -> Any:
        """Called by compiled templates on values that are made or found without a call."""
        _spend(value)
        return value

    def check_output(self, value: Any) -> Any:
        """Called by compiled templates on their output."""
        return self.check_value(value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        safe = super().wrap_str_format(value)
        if safe is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            bounded("formatting", False)
            return safe(*args, **kwargs)

        return checked

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        bounded("**", operator != "**")
        bounded("formatting", operator != "%" or not isinstance(left, (str, bytes)))
        _check_integers(left, right)
        if operator == "*":
            for value, count in ((left, right), (right, left)):
                if isinstance(count, int) and isinstance(value, (str, list, tuple)):
                    _spend_size(len(value) * max(count, 0))
        value = super().call_binop(context, operator, left, right)
        _spend(value)
        return value

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        # The names follow jinja2: a template may pass keywords called `self` and `context`.
        subject = getattr(__obj, "__self__", None)
        if (
            subject is __self and __obj.__name__ in _CHECKS
        ):  # written by `_parse`, so the sandbox need not look
            value = __obj(*args)
            _spend(value)
            return value
        if isinstance(subject, (str, bytes, int, float, list, tuple, dict)):
            _check_operation(
                f".{__obj.__name__}", __obj.__name__ in METHODS, (subject, *args, *kwargs.values())
            )
            value = super().call(__context, __obj, *args, **kwargs)
            _spend_shallow(value)
            return value
        value = super().call(__context, __obj, *args, **kwargs)
        _spend(value)
        return value


class _CheckValues(NodeTransformer):
    """Adds a check to every ``~`` and each of its operands, to ``in`` and slices, and to all constructors of lists.

    Sixty turns of ``[x, x]`` make a small value that is practically impossible to compare, hash or print.
    """

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [call_of("check_value", operand) for operand in node.nodes]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        searches = any(operand.op in ("in", "notin") for operand in node.ops)
        return call_of("check_value", node) if searches else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return call_of("check_value", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return call_of("check_value", node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return call_of("check_value", node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return call_of("check_value", node) if node.ctx == "load" else node

    def visit_Name(self, node: nodes.Name) -> nodes.Node:  # noqa: N802
        gathered = node.ctx == "load" and node.name in ("varargs", "kwargs")  # a macro's arguments
        return call_of("check_value", node) if gathered else node


def _checked(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    skipped = 1 if hasattr(filter_, "jinja_pass_arg") else 0

    @wraps(filter_)  # also copies the marks that tell jinja2 what to pass first
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_operation(f"|{name}", name in FILTERS, (*args[skipped:], *kwargs.values()))
        value = filter_(*args, **kwargs)
        _spend_shallow(value)
        return value

    return checked


def _ticking(test: Any) -> Any:
    @wraps(test)
    def ticking(*args: Any, **kwargs: Any) -> Any:
        _spend_size(0)
        return test(*args, **kwargs)

    return ticking


def _check_operation(name: str, allowed: bool, operands: tuple[Any, ...]) -> None:
    """Check a filter or a method before it runs."""
    if _current.get() is None:
        return
    bounded(name, allowed)
    subject, *others = operands or ("",)
    for each in others:
        bounded(f"a long argument of {name}", not isinstance(each, str) or len(each) <= MAX_ARGUMENT)
    if name in _WRITES:
        _spend(subject)
    else:
        _spend_shallow(subject)
    if isinstance(subject, str):
        _check_text(name.lstrip(".|"), subject, others)
    if name in (".replace", "|replace") and all(isinstance(each, str) for each in (subject, *others[:2])):
        _spend_size(subject.count(others[0]) * len(others[1]))
    elif name == "|join":
        bounded("|join of a generator", isinstance(subject, (str, list, tuple)))
        _spend_size(len(subject) * sum(len(each) for each in others if isinstance(each, str)))


_FROM_THE_END = frozenset({"rfind", "rindex", "rpartition", "rsplit"})
"""Searches that take the product of both lengths."""
_OF_SETS = frozenset({"lstrip", "rstrip", "strip", "trim"})
"""Operations that look for each character of the text in their argument."""
_DIVIDES = frozenset({"list", "rsplit", "split", "splitlines", "title"})
"""Operations that make many parts of a text."""


def _check_text(name: str, text: str, others: Sequence[Any]) -> None:
    """Refuse an operation on a text that would take long in one call."""
    sought = max((len(each) for each in others if isinstance(each, str)), default=0)
    if name in _FROM_THE_END | _OF_SETS and len(text) * sought > MAX_PRODUCT:
        raise BudgetExceeded("a search")
    if name in _DIVIDES and len(text) > MAX_PARTS:
        at = others[0] if others and isinstance(others[0], str) else ""
        if not at or text.count(at) > MAX_PARTS:
            raise BudgetExceeded("parts of a text")


def _check_integers(*operands: Any) -> None:
    """Refuse integers that are slow to multiply and divide."""
    if any(isinstance(each, int) and each.bit_length() > MAX_BITS for each in operands):
        bounded("large integers", _current.get() is None)


_WRITES = frozenset({"|join", "|string", "|tojson"})
"""Operations that write all of a list or object."""


def _spend_shallow(value: Any) -> None:
    """Count a value whose elements existed before."""
    if isinstance(value, (dict, list, tuple)):
        _spend_size(len(value))
    else:
        _spend(value)


def _spend(value: Any) -> None:
    """Count a value with all that it contains, and refuse integers that are slow to multiply and print."""
    if (budget := _current.get()) is None:
        return
    if isinstance(value, str):
        budget.spend(len(value))
    elif isinstance(value, (dict, list, tuple)):
        budget.spend_all(value)
    elif isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise BudgetExceeded("large integers")
    else:
        budget.spend(0)


def _spend_size(size: int) -> None:
    if (budget := _current.get()) is not None:
        budget.spend(size)


MAX_INDENT = 32
MAX_SOURCE = 1 << 20
"""Maximum characters of a template; the longest published ones have 30,000."""
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
    if len(source) > MAX_SOURCE:
        raise TemplateError(f"the chat template has {len(source)} characters, and the limit is {MAX_SOURCE}")
    try:
        with (
            Budget()
        ):  # jinja2 computes constant expressions while it compiles, but none that exceeds a budget
            return (_SEEING if seeing else _ENVIRONMENT).from_string(source)
    except jinja2.TemplateSyntaxError as error:
        why = f"in line {error.lineno}: {error.message}"[:MAX_REASON]
        raise TemplateError(f"the chat template has a syntax error {why}") from error
    except Exception as error:  # jinja2 and Python's parser raise many types
        raise TemplateError(f"the chat template cannot be compiled: {str(error)[:MAX_REASON]}") from error


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
