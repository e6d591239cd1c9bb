"""Rules of a grammar under construction: alternatives of terminals, rules and repeats, written as Lark at the end.

Only what can be part of a whole text is written: an alternative with a rule that derives no text is left out, and what
the start does not reach. A terminal that matches nothing must not be added (`matches_nothing`). So every token that the
grammar allows has a continuation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple, TypeAlias

from llguidance import LLMatcher, LLTokenizer

from headrace.core.constraint import UnusableConstraint

# Error messages of llguidance, as one line for a client.


def first_reason(error: str) -> str:
    """The reason in an error, without the excerpt of the source."""
    if error.startswith("NoExtension"):
        return "no text satisfies it"
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    why = next((line for line in lines if line.startswith("error: ")), lines[0] if lines else "unknown")
    return why.removeprefix("error: ")[:300]


MAX_RULES = 20_000


class Repeat(NamedTuple):
    """``symbols`` from ``least`` to ``most`` times (None: any number of times)."""

    symbols: tuple[Symbol, ...]
    least: int
    most: int | None


Symbol: TypeAlias = str | int | Repeat
"""The name of a terminal or JSON of llguidance, the number of a rule, or a repeat."""

Alternative = tuple[Symbol, ...]


class Rules:
    """Rules whose names begin with ``prefix``."""

    def __init__(self, prefix: str) -> None:
        self.alternatives: list[list[Alternative]] = []
        self._prefix = prefix
        self._terminals: dict[str, str] = {}

    def new(self, *alternatives: Alternative) -> int:
        """A rule; its number."""
        if len(self.alternatives) >= MAX_RULES:
            raise UnusableConstraint(f"the schema has more than {MAX_RULES} combinations of its parts")
        self.alternatives.append(list(alternatives))
        return len(self.alternatives) - 1

    def terminal(self, expression: str) -> str:
        """The name of a terminal."""
        name = f"{self._prefix.upper()}_{len(self._terminals)}"
        return self._terminals.setdefault(expression, name)

    def productive(self) -> set[int]:
        """The rules that derive a text."""
        found: set[int] = set()
        users: dict[int, list[int]] = {}
        for number, alternatives in enumerate(self.alternatives):
            for used in {each for alternative in alternatives for each in _needed(alternative)}:
                users.setdefault(used, []).append(number)
        waiting = list(range(len(self.alternatives)))
        while waiting:
            number = waiting.pop()
            if number not in found and any(_possible(each, found) for each in self.alternatives[number]):
                found.add(number)
                waiting += users.get(number, ())
        return found

    def circular(self) -> int | None:
        """A rule that is an alternative of itself, by way of others or not; None if there is none."""
        done: set[int] = set()
        for first in range(len(self.alternatives)):
            path, waiting = dict[int, None](), [(first, False)]
            while waiting:
                number, left = waiting.pop()
                if left:
                    path.popitem()
                    done.add(number)
                elif number in path:
                    return number
                elif number not in done:
                    path[number] = None
                    waiting.append((number, True))
                    options = (each[0] for each in self.alternatives[number] if len(each) == 1)
                    waiting += [(each, False) for each in options if isinstance(each, int)]
        return None

    def lines(self, start: int, productive: set[int]) -> list[str]:
        """The rules that ``start`` reaches, and their terminals, as lines of Lark."""
        lines, used, waiting, seen = [], dict[str, None](), [start], {start}
        while waiting:
            number = waiting.pop()
            kept = [
                tuple(_reduced(each, productive))
                for each in self.alternatives[number]
                if _possible(each, productive)
            ]
            for symbol in (inner for each in kept for inner in _flat(each)):
                if isinstance(symbol, str):
                    used[symbol] = None
                elif symbol not in seen:
                    seen.add(symbol)
                    waiting.append(symbol)
            lines.append(f"{self.name(number)}: " + " | ".join(self._text(each) for each in kept))
        named = {name: expression for expression, name in self._terminals.items()}
        return lines + [f"{name}: {named[name]}" for name in used if name in named]

    def name(self, number: int) -> str:
        """The name of a rule."""
        return f"{self._prefix}_{number}"

    def _text(self, alternative: Alternative) -> str:
        return " ".join(self._symbol(each) for each in alternative) or '""'

    def _symbol(self, symbol: Symbol) -> str:
        if isinstance(symbol, str):
            return symbol
        if isinstance(symbol, int):
            return self.name(symbol)
        most = "" if symbol.most is None else symbol.most
        return f"({self._text(symbol.symbols)}){{{symbol.least},{most}}}"


def _needed(alternative: Alternative) -> Iterator[int]:
    for symbol in alternative:
        if isinstance(symbol, int):
            yield symbol
        elif isinstance(symbol, Repeat) and symbol.least:
            yield from _needed(symbol.symbols)


def _possible(alternative: Alternative, productive: set[int]) -> bool:
    return all(each in productive for each in _needed(alternative))


def _reduced(alternative: Alternative, productive: set[int]) -> Iterator[Symbol]:
    """An alternative without repeats of what derives no text."""
    return (
        each for each in alternative if not isinstance(each, Repeat) or _possible(each.symbols, productive)
    )


def _flat(alternative: Alternative) -> Iterator[str | int]:
    for symbol in alternative:
        if isinstance(symbol, Repeat):
            yield from _flat(symbol.symbols)
        else:
            yield symbol


@cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")


def matches_nothing(expression: str) -> bool:
    """Whether no text matches a terminal.

    Raises:
        UnusableConstraint: the expression is wrong or too large.
    """
    return _matcher(expression) is None


def matches(expression: str, texts: Iterable[str]) -> set[str]:
    """Those of ``texts`` that a terminal matches.

    Raises:
        UnusableConstraint: the expression is wrong or too large.
    """
    matcher, found = _matcher(expression), set[str]()
    if matcher is None:
        return found
    for text in texts:
        copy, tokens = matcher.deep_copy(), list(text.encode())
        if copy.try_consume_tokens(tokens) == len(tokens) and copy.is_accepting():
            found.add(text)
    return found


def _matcher(expression: str) -> LLMatcher | None:
    made = LLMatcher.grammar_from_lark(f"start: T\nT: {expression}")
    matcher = LLMatcher(_bytes(), made, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    error = str(matcher.get_error() or "")
    if error.startswith("NoExtension"):
        return None
    if error:
        raise UnusableConstraint(first_reason(error))
    return matcher


def all_of(expressions: Sequence[str]) -> str:
    """The intersection of terminals."""
    return " & ".join(f"({each})" for each in expressions) if len(expressions) > 1 else expressions[0]
