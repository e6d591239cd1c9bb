"""Text of a request that spells a control token, such as ``<|im_end|>`` in a user's message, stays text.

```
 content          "a <|im_end|> b"           what the client sent
 protect          "a \\U000f0000 b"            one private-use character for each spelling, while the template renders
 restore          "a <|im_end|> b", (2, 12)   the prompt, and where it spells a control token that is text
 encode_prompt    ["a", " <", "|", "im", …]   the tokenizer looks for control tokens everywhere else
```
Control tokens are the tokenizer's special tokens, and those of its other added tokens that the template writes
(``<｜User｜>`` and ``</tool_response>`` are not special in the tokenizers of their models). The content of an
assistant's message keeps the marks of reasoning and tool calls that its model writes as text, unless they are special.

A template reads protected text as if it were not: `SeeingEnvironment` restores what is compared, searched, split or cut
and protects the result. So the prompt's text is the same as without protection.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import SandboxedEnvironment
from jinja2.visitor import NodeTransformer

from headrace.text.parsing.catalogue import REASONING_FORMATS, TOOL_FORMATS

if TYPE_CHECKING:
    import tokenizers

_PRIVATE = re.compile("[\U000f0000-\U0010fffd]")
_FIRST, _LAST = 0xF0000, 0xFFFFD
_ANSWERED: frozenset[str] = frozenset().union(
    *(each.markers() for each in REASONING_FORMATS), *(each.markers() for each in TOOL_FORMATS)
)
"""Marks that models write in their answers."""


class PromptText(NamedTuple):
    """A rendered prompt.

    ``quoted`` are the ranges that spell a control token and are text nevertheless. At an empty range, content ends with
    the beginning of a spelling that the text after it would complete.
    """

    text: str
    quoted: tuple[tuple[int, int], ...] = ()


class Controls(NamedTuple):
    """Spellings of control tokens. ``answered`` are those that the assistant's content may have."""

    spellings: tuple[str, ...] = ()
    answered: tuple[str, ...] = ()


class AddedTokens(NamedTuple):
    """The added tokens of a tokenizer that can be control tokens: its special ones, and others that look like marks."""

    special: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> AddedTokens:
        """Those of a tokenizer of the library."""
        added = backend.get_added_tokens_decoder().values()
        special = [token.content for token in added if token.special and not token.content.isspace()]
        marks = [token.content for token in added if not token.special and _is_mark(token.content)]
        return cls(tuple(filter(None, special)), tuple(marks))

    def controls(self, source: str) -> Controls:
        """The control tokens of a template."""
        written = tuple(mark for mark in self.marks if mark in source)
        return Controls((*self.special, *written), tuple(mark for mark in written if mark in _ANSWERED))


def _is_mark(text: str) -> bool:
    """Whether an added token is a mark like ``<think>``, and not a word or a run of spaces."""
    ends = text[:1] + text[-1:]
    return len(text) > 2 and not any(c.isalnum() or c.isspace() for c in ends) and any(map(str.isalpha, text))


_CHANGES = re.compile(
    r"\b(?:capitalize|casefold|lower|partition|replace|rpartition|rsplit|split|striptags|swapcase|title|translate|upper)\b"
)
"""What makes a template able to join parts of content to a control token that the content does not spell."""


@lru_cache(maxsize=64)
def _changes(source: str) -> bool:
    """Whether a template changes text."""
    return _CHANGES.search(source) is not None


def may_spell_control(values: Iterable[str], controls: Controls, source: str) -> bool:
    """Whether one of ``values`` may become a control token in a template.

    It spells one, or ends with the beginning of one. Where the template changes text, the first character of one is
    enough.
    """
    if not controls.spellings:
        return False
    spelling = _spelling(controls.spellings)
    if _changes(source):
        return any(not spelling.first.isdisjoint(value) for value in values)
    return any(spelling.pattern.search(value) or spelling.is_cut(value) for value in values)


def texts(value: Any) -> Iterator[str]:
    """All strings in a value of lists and objects, keys included."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            waiting += item.keys()
            waiting += item.values()
        elif isinstance(item, (list, tuple)):
            waiting += item


class _Spelling:
    """Finds some spellings in text, the longest first, as tokenizers do."""

    def __init__(self, spellings: tuple[str, ...]) -> None:
        self.pattern = spelling_pattern(spellings)
        self._beginnings = frozenset(text[:end] for text in spellings for end in range(1, len(text)))
        self.first = frozenset(text[0] for text in spellings)
        self.longest = max(map(len, self._beginnings), default=0)

    def is_cut(self, text: str) -> bool:
        """Whether ``text`` ends with the beginning of a spelling, which what follows it could complete."""
        tail = text[-self.longest :] if self.longest else ""
        if self.first.isdisjoint(tail):
            return False
        return any(tail[at:] in self._beginnings for at in range(len(tail)))


@lru_cache(maxsize=64)
def _spelling(spellings: tuple[str, ...]) -> _Spelling:
    return _Spelling(spellings)


@lru_cache(maxsize=64)
def spelling_pattern(spellings: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern for the longest of ``spellings`` at a place. Common beginnings are compared once: models have hundreds
    of tokens that begin with ``<|reserved_``, and an HTML page has thousands of ``<``.
    """
    return re.compile(_tree(sorted({text for text in spellings if text})) or "(?!)")


def _tree(ordered: list[str]) -> str:
    if len(ordered) < 2:
        return "".join(map(re.escape, ordered))
    groups: dict[str, list[str]] = {}
    for text in filter(None, ordered):
        groups.setdefault(text[0], []).append(text[1:])
    branches = [re.escape(first) + _tree(rest) for first, rest in groups.items()]
    if len(branches) == 1 and ordered[0]:
        return branches[0]
    return f"(?:{'|'.join(branches)})" + ("" if ordered[0] else "?")


class Content:
    """The protected content of one rendering.

    Args:
        controls: what is protected.
        used: all text of the request; its private-use characters are not used for protection.

    Raises:
        ValueError: the text uses all private-use characters.
    """

    def __init__(self, controls: Controls, used: Iterable[str]) -> None:
        taken = {character for text in used for character in _PRIVATE.findall(text)}
        self._free = (chr(code) for code in range(_FIRST, _LAST) if chr(code) not in taken)
        self._all = _spelling(controls.spellings)
        kept = frozenset(controls.answered)
        self._said = _spelling(tuple(text for text in controls.spellings if text not in kept))
        self._stand_ins: dict[str, str] = {}
        self._meaning: dict[str, str] = {}
        self._cut = self._next("")

    def protect(self, value: Any) -> Any:
        """``value`` with all its strings protected."""
        return self._protected(value, self._all)

    def protect_messages(self, messages: Iterable[Mapping[str, Any]]) -> list[Any]:
        """The messages, protected."""
        return [
            {
                self.protect(key): self._protected(
                    value,
                    self._said if message.get("role") == "assistant" and key == "content" else self._all,
                )
                for key, value in message.items()
            }
            for message in messages
        ]

    def spells(self, value: Any) -> bool:
        """Whether ``value`` contains a control token that is not protected."""
        return any(self._all.pattern.search(text) for text in texts(value))

    def restore(self, value: Any) -> Any:
        """``value`` with its strings as the client sent them."""
        return _mapped(value, lambda text: self._restored(text).text)

    def finish(self, text: str) -> PromptText:
        """The rendered text, restored."""
        restored = self._restored(text)
        quoted = [
            (start, end) for start, end in restored.quoted if start < end or self._joins(restored.text, end)
        ]
        return PromptText(restored.text, tuple(quoted))

    def _joins(self, text: str, at: int) -> bool:
        """Whether a control token is spelled across a place."""
        near = self._all.pattern.finditer(text, max(0, at - self._all.longest), at + self._all.longest)
        return any(found.start() < at < found.end() for found in near)

    def _protected(self, value: Any, spelling: _Spelling) -> Any:
        def protected(text: str) -> str:
            text = spelling.pattern.sub(lambda found: self._stand_in(found[0]), text)
            return text + self._cut if spelling.is_cut(text) else text

        return _mapped(value, protected)

    def _stand_in(self, spelled: str) -> str:
        if spelled not in self._stand_ins:
            self._stand_ins[spelled] = self._next(spelled)
        return self._stand_ins[spelled]

    def _next(self, meaning: str) -> str:
        character = next(self._free, "")
        if not character:
            raise ValueError("the messages use all private-use characters of Unicode")
        self._meaning[character] = meaning
        return character

    def _restored(self, text: str) -> PromptText:
        pieces: list[str] = []
        quoted: list[tuple[int, int]] = []
        begun = length = 0
        for found in _PRIVATE.finditer(text):
            meaning = self._meaning.get(found[0])
            if meaning is None:
                continue
            pieces += (text[begun : found.start()], meaning)
            length += found.start() - begun
            quoted.append((length, length + len(meaning)))
            length += len(meaning)
            begun = found.end()
        return PromptText("".join([*pieces, text[begun:]]), tuple(quoted)) if begun else PromptText(text)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        changed = change(value)
        return changed if type(value) is str else type(value)(changed)  # jinja2's Markup stays that
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_mapped(item, change) for item in value]
    return tuple([_mapped(item, change) for item in value]) if isinstance(value, tuple) else value


current: ContextVar[Content] = ContextVar("content")
"""The content of the rendering on this thread."""


class SeeingEnvironment(SandboxedEnvironment):
    """A sandbox whose templates read protected content as the client sent it. Content must be set in `current`.

    What a template writes itself is not content. So an operation on text that contains the template's own control
    tokens does not restore anything, and finds protected ones nowhere.
    """

    def see_filters(self) -> None:
        """Wrap all filters and tests, after the environment has registered them."""
        self.filters = {name: _seeing(name, each) for name, each in self.filters.items()}
        self.tests = {name: _testing(each) for name, each in self.tests.items()}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _SeeOperands().visit(tree)
        return tree

    def written(self, value: Any) -> Any:
        """Called by compiled templates on what they write or concatenate: a list is written as Python does."""
        if not isinstance(value, (list, tuple, Mapping)):
            return value
        content = current.get()
        return str(value) if content.spells(value) else content.protect(str(content.restore(value)))

    def seen(self, value: Any) -> Any:
        """Called by compiled templates on what they compare."""
        return current.get().restore(value)

    def cut(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """Called by compiled templates for slices."""
        return _seen("slice", lambda each: each[start:stop:step], value)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(obj, str) and isinstance(argument, int):
            return _seen("item", super().getitem, obj, argument)
        return super().getitem(obj, argument)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        # The names follow jinja2: a template may pass keywords called `self` and `context`.
        subject, call = getattr(__obj, "__self__", None), super().call
        if not isinstance(subject, str):
            return call(__context, __obj, *args, **kwargs)
        name = __obj.__name__
        return _seen(
            name, lambda text, *rest: call(__context, getattr(text, name), *rest, **kwargs), subject, *args
        )


_GATHERS = frozenset({"format", "format_map", "join", "default", "d", "safe", "attr"})
"""Operations that put texts together, or return them as they are."""


def _seen(name: str, operation: Callable[..., Any], subject: Any, *args: Any) -> Any:
    """The result of an operation on the text that the client sent, protected again."""
    content = current.get()
    inserts = args[1:2] if name == "replace" else ()
    if name in _GATHERS or content.spells(subject) or content.spells(inserts):
        return operation(subject, *args)
    return content.protect(operation(content.restore(subject), *(content.restore(each) for each in args)))


def _seeing(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    passed_first = 1 if hasattr(filter_, "jinja_pass_arg") else 0

    @wraps(filter_)  # also copies the marks that tell jinja2 what to pass first
    def seeing(*args: Any, **kwargs: Any) -> Any:
        first, rest = args[:passed_first], args[passed_first:]
        if not rest or not (isinstance(rest[0], str) or name in ("tojson", "string")):
            return filter_(*args, **kwargs)
        return _seen(name, lambda *seen: filter_(*first, *seen, **kwargs), *rest)

    return seeing


def _testing(test: Any) -> Any:
    @wraps(test)
    def seeing(*args: Any, **kwargs: Any) -> Any:
        content = current.get()
        return test(*[content.restore(each) if isinstance(each, str) else each for each in args], **kwargs)

    return seeing


class _SeeOperands(NodeTransformer):
    """Makes templates call the environment for comparisons, concatenations and slices."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [call_of("written", operand) for operand in node.nodes]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.expr = call_of("seen", node.expr)
        for operand in node.ops:
            operand.expr = call_of("seen", operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = (node.arg.start, node.arg.stop, node.arg.step)
        return call_of("cut", node.node, *(each or nodes.Const(None) for each in bounds))


def call_of(method: str, *operands: nodes.Expr) -> nodes.Call:
    """A call of a method of the environment, as part of a template."""
    return nodes.Call(nodes.EnvironmentAttribute(method), list(operands), [], None, None)
