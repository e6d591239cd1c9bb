"""Compiles constraints on background threads, with a bounded cache of compiled grammars.

```
 constraint --grammar (sources)--> llguidance matcher, its first mask computed --copy--> one per sequence (`matchers`)
                 |refused (sources, schemas)
                 `-> UnusableConstraint, cached too: the same schema is rejected at once the next time
```
Copies share the lexer, whose states are limited; a grammar whose lexer is used up is compiled again.
llguidance works without the interpreter lock. Its limits bound the time and memory of one grammar; ``entries`` and
``source_bytes`` bound the cache, and ``seconds`` is the timeout of a compilation.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from copy import copy
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from headrace.compute.grammar.rules import first_reason
from headrace.compute.grammar.sources import grammar
from headrace.core.constraint import Constraint, ConstraintKind, ReasoningLimit, UnusableConstraint

# The reasoning budget of one sequence: counts reasoning tokens, and forces the end marker at the limit.
#
#  before --begin marker--> inside, counted --limit--> the end marker's tokens, one by one --> before, or over
#                               `-- end marker, written by the model itself --------------------^
# Markers are found in the text, as in `text.parsing`, so the model's tokenization of markers does not matter. A forced
# marker uses the tokenizer's tokens.

MOST_DELAY = 3
"""Maximum number of tokens by which a forced marker is delayed until a multi-token character is complete."""


def spelt(marker: str, added: Mapping[str, int], tokenizer: LLTokenizer) -> tuple[int, ...]:
    """The tokens of a marker; ``added`` are the tokens outside the vocabulary's merges, by their text."""
    if not added:
        return _plain(marker, tokenizer)
    longest_first = sorted(added, key=len, reverse=True)
    tokens: list[int] = []
    for part in re.split("(" + "|".join(map(re.escape, longest_first)) + ")", marker):
        if part:
            tokens += [added[part]] if part in added else _plain(part, tokenizer)
    return tuple(tokens)


def _plain(text: str, tokenizer: LLTokenizer) -> tuple[int, ...]:
    tokens = tokenizer.tokenize_str(text)
    if tokenizer.decode_bytes(tokens) == text.encode():
        return tuple(tokens)
    return tuple(tokenizer.greedy_tokenize(text))  # the tokenizer adds a space before a text's first word


class _Where(Enum):
    BEFORE = auto()
    INSIDE = auto()
    OVER = auto()  # no reasoning can follow


class ReasoningCount:
    """Counts the reasoning of one sequence. ``forced`` is the token that must come next; None: any.

    ``added`` are the texts of tokens that the ``tokenizer`` may spell otherwise.
    """

    def __init__(
        self, limit: ReasoningLimit, marker: Sequence[int], tokenizer: LLTokenizer, added: Mapping[int, bytes]
    ) -> None:
        self._limit = limit
        self._marker = tuple(marker)
        self._tokenizer = tokenizer
        self._added = added
        self._begins = tuple(text.encode() for text in limit.begin)
        self._ends = tuple(text.encode() for text in limit.end)
        self._longest = max(map(len, (*self._begins, *self._ends)))
        self._where = _Where.BEFORE
        self._text = b""  # since the last marker, as far as another one may be in it
        self._used = 0
        self._pending: tuple[int, ...] = ()
        if limit.opened:
            self._begin(b"")

    @property
    def forced(self) -> int | None:
        return self._pending[0] if self._pending else None

    @property
    def pending(self) -> tuple[int, ...]:
        """All tokens that must come next."""
        return self._pending

    def consume(self, token: int) -> None:
        """The sequence has drawn ``token``."""
        if self._where is _Where.OVER:
            return
        if self._pending and token == self._pending[0]:
            self._pending = self._pending[1:]
            if not self._pending:
                self._end(b"")
            return
        self._text += self._spelling(token)
        if self._where is _Where.BEFORE:
            self._look_for_begin()
        else:
            self._used += 1
            self._look_for_end()

    def _spelling(self, token: int) -> bytes:
        if (text := self._added.get(token)) is not None:
            return text
        return self._tokenizer.decode_bytes([token]) if 0 <= token < self._tokenizer.vocab_size else b""

    def _look_for_begin(self) -> None:
        if self._limit.first:
            said = self._text.lstrip()
            marker = next((each for each in self._begins if said.startswith(each)), None)
            if marker is not None:
                self._begin(said[len(marker) :])
            elif said and not any(each.startswith(said) for each in self._begins):
                self._where = _Where.OVER
            return
        found = _first(self._text, self._begins)
        if found is None:
            self._text = self._text[-self._longest :]
        else:
            self._begin(self._text[found:])

    def _look_for_end(self) -> None:
        found = _first(self._text, self._ends)
        if found is not None:
            self._end(self._text[found:])
            return
        self._text = self._text[-self._longest :]
        self._force()

    def _begin(self, rest: bytes) -> None:
        self._where, self._text = _Where.INSIDE, rest
        self._look_for_end()

    def _end(self, rest: bytes) -> None:
        self._where = _Where.OVER if self._limit.first else _Where.BEFORE
        self._text, self._pending = rest, ()

    def _force(self) -> None:
        """Force the marker if the limit is reached, but not within a character."""
        over = self._used - self._limit.tokens
        whole = over >= MOST_DELAY or not _is_cut(self._text)
        self._pending = self._marker if over >= 0 and whole else ()


Renew = Callable[[LLMatcher, Sequence[int]], LLMatcher | None]
"""A compiled grammar in place of one whose lexer has failed on these tokens; None if it has not, or there is none."""


class SequenceMatcher:
    """The allowed tokens of one sequence: those of its ``grammar``, or the token forced by the reasoning limit.

    ``compiled`` is the grammar at its start, for `renew`; a copy that follows a draft has none.
    """

    def __init__(
        self,
        grammar: LLMatcher | None,
        reasoning: ReasoningCount | None = None,
        compiled: LLMatcher | None = None,
        renew: Renew | None = None,
    ) -> None:
        self.grammar = grammar
        self._reasoning = reasoning
        self._compiled = compiled
        self._renew = renew
        self._consumed: list[int] = []

    @property
    def forced(self) -> int | None:
        """The token forced by the reasoning limit; None if the grammar decides."""
        return None if self._reasoning is None else self._reasoning.forced

    @property
    def stopped(self) -> bool:
        """Whether only an end may follow."""
        return self.grammar is not None and self.forced is None and self.grammar.is_stopped()

    @property
    def error(self) -> str:
        """The grammar's error; empty if there is none."""
        return self.grammar.get_error() if self.grammar is not None and self.grammar.is_error() else ""

    def copy(self) -> SequenceMatcher:
        """A copy in the same state, for following a draft."""
        grammar = None if self.grammar is None else self.grammar.deep_copy()
        return SequenceMatcher(grammar, copy(self._reasoning))

    def allows(self, token: int) -> bool:
        """Whether ``token`` may come next."""
        if self.forced is not None:
            return token == self.forced
        return self.grammar is None or self.grammar.validate_tokens([token]) == 1

    def forced_run(self) -> Sequence[int]:
        """The tokens that must come next, as far as they are certain: an end marker's, or the grammar's."""
        if self._reasoning is not None and self._reasoning.pending:
            return self._reasoning.pending
        return () if self.grammar is None else self.grammar.compute_ff_tokens()

    def consume(self, tokens: Sequence[int]) -> bool:
        """Whether the grammar allows ``tokens``, which the sequence has drawn."""
        if self._reasoning is not None:
            for token in tokens:
                self._reasoning.consume(token)
        if not tokens or self.grammar is None:
            return True
        if self._renew is not None:
            self._consumed += tokens
        return bool(self.grammar.consume_tokens(list(tokens)))

    def renew(self) -> bool:
        """Whether the sequence can go on after an error, because its grammar has an unused lexer now."""
        if self._renew is None or self._compiled is None:
            return False
        compiled = self._renew(self._compiled, self._consumed)
        if compiled is None:
            return False
        self._compiled, self.grammar = compiled, compiled.deep_copy()
        return not self._consumed or bool(self.grammar.consume_tokens(self._consumed))


def _first(text: bytes, markers: Sequence[bytes]) -> int | None:
    """The end of the marker that ends first; None if there is no marker."""
    found = [at + len(marker) for marker in markers if (at := text.find(marker)) >= 0]
    return min(found, default=None)


def _is_cut(text: bytes) -> bool:
    """Whether ``text`` ends within a character of UTF-8."""
    for back, byte in enumerate(reversed(text[-3:]), start=1):
        if byte < 0x80:
            return False
        if byte >= 0xC0:
            return back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return False


THREADS = 2
"""Number of concurrent compilations, so that a slow one does not block all others."""

ENTRIES = 1024
SOURCE_BYTES = 16 << 20
"""Limits of the cache: number of compiled grammars, and total length of their sources. The memory of a grammar is a few
hundred times its source while its lexer is warm."""

COMPILE_SECONDS = 5.0
"""How long a request waits for its grammar."""

LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_items_in_row=2_000,
    max_lexer_states=50_000,
    max_grammar_size=250_000,
    verbose_errors=False,
)
"""About 20 ms of work for a grammar's lexer, 15 ms for a mask, and 100 MB for its states."""

RENEW_SECONDS = 0.5
"""How long masks wait for a grammar that is compiled again."""


@dataclass(slots=True)
class _Entry:
    matcher: Future[LLMatcher | None]
    size: int
    began: float = field(default_factory=time.monotonic)


class Compiler:
    """`core.ports.Grammars` over llguidance, for one tokenizer.

    Args:
        tokenizer: returns the content of ``tokenizer.json``; slow for a large vocabulary.
        vocab_size: number of token ids of the model; ids that the tokenizer does not have are never allowed.
        eos_token_ids: tokens that end an output, allowed where the grammar may end.
        entries, source_bytes, seconds: the limits.
    """

    def __init__(
        self,
        tokenizer: Callable[[], str],
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        entries: int = ENTRIES,
        source_bytes: int = SOURCE_BYTES,
        seconds: float = COMPILE_SECONDS,
    ) -> None:
        self.vocab_size = vocab_size
        self._describe = tokenizer
        self._special: dict[str, int] = {}
        self._plain: frozenset[str] = frozenset()
        self._spellings: dict[int, bytes] = {}
        self._added: dict[str, int] = {}
        self._hidden: dict[str, str] = {}
        self.ends = frozenset(token for token in eos_token_ids if token < vocab_size)
        self._entries = entries
        self._source_bytes = source_bytes
        self._seconds = seconds
        self._known: OrderedDict[bytes, _Entry] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="headrace-grammar")
        self._tokenizer: Future[LLTokenizer] | None = None

    @property
    def remembered(self) -> int:
        """Number of cached grammars, including those being compiled."""
        return len(self._known)

    def prepare(self) -> None:
        """Start reading the tokenizer on a thread, so that no request waits half a second for it."""
        self._read_tokenizer()

    def close(self) -> None:
        """End the threads after their current compilations."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -- core.ports.Grammars -----------------------------------------------------------------------

    def ready(self, constraint: Constraint) -> bool:
        """See `core.ports.Grammars`."""
        entry = self._entry(constraint)
        if not entry.matcher.done():
            if time.monotonic() - entry.began > self._seconds:
                raise self._too_long()
            return False
        _outcome(entry.matcher, 0.0)
        return True

    def check(self, constraint: Constraint) -> None:
        """See `core.ports.Grammars`."""
        self._compiled(constraint)

    def is_complete(self, constraint: Constraint, text: str) -> bool:
        """See `core.ports.Grammars`."""
        compiled = self._compiled(constraint)
        if compiled is None:
            return True
        tokenizer = self._read_tokenizer().result()
        spellings = [self._hidden_in(text)]  # with the tokens that it names
        if constraint.kind is not ConstraintKind.STRUCTURAL_TAG:  # in one, markers are never letters
            spellings.append(text)  # with letters alone, as within a string
        return any(self._accepts(constraint, compiled, tokenizer.tokenize_str(each)) for each in spellings)

    def _accepts(self, constraint: Constraint, compiled: LLMatcher, tokens: list[int]) -> bool:
        """Whether tokens satisfy a whole constraint."""
        matcher = compiled.deep_copy()
        if not matcher.consume_tokens(tokens):
            renewed = self._renewed(constraint, compiled, tokens)
            if renewed is None:
                return False
            matcher = renewed.deep_copy()
            if not matcher.consume_tokens(tokens):
                return False
        return bool(matcher.is_accepting())

    # -- for the engine's thread -------------------------------------------------------------------

    def matcher(self, constraint: Constraint) -> LLMatcher:
        """A new matcher at the grammar's start; the grammar is compiled now if it is not cached.

        Raises:
            UnusableConstraint: it cannot be compiled.
        """
        compiled = self._compiled(constraint)
        if compiled is None:
            raise UnusableConstraint("any text has no grammar")
        return compiled.deep_copy()

    def follow(self, constraint: Constraint) -> SequenceMatcher:
        """The matcher of one sequence: its grammar state, and the count of its reasoning tokens.

        Raises:
            UnusableConstraint: it cannot be compiled.
        """
        compiled, limit = self._compiled(constraint), constraint.reasoning
        reasoning = None
        if limit is not None:
            tokenizer = self._read_tokenizer().result()
            marker = spelt(limit.end[0], self._added, tokenizer)
            reasoning = ReasoningCount(limit, marker, tokenizer, self._spellings)
        if compiled is None:
            return SequenceMatcher(None, reasoning)
        return SequenceMatcher(compiled.deep_copy(), reasoning, compiled, partial(self._renewed, constraint))

    def _renewed(self, constraint: Constraint, worn: LLMatcher, consumed: Sequence[int]) -> LLMatcher | None:
        """The grammar, compiled again if the lexer of ``worn`` has failed; None if it has not, or if that takes long.

        All copies of a compiled grammar share its lexer. Each text adds states to it, and at its limits all copies
        fail for ever, so the grammar is compiled again.
        """
        probe = worn.deep_copy()
        probe.try_consume_tokens(list(consumed[:1]))
        if not probe.is_error():
            probe.compute_bitmask()
        if not str(probe.get_error()).startswith("lexer error"):
            return None
        self._forget(constraint, worn)
        try:
            return _outcome(self._entry(constraint).matcher, RENEW_SECONDS)
        except (UnusableConstraint, FutureTimeout):
            return None

    def _forget(self, constraint: Constraint, worn: LLMatcher) -> None:
        """Remove a compiled grammar from the cache, unless it has been compiled again already."""
        key = constraint.grammar.digest
        with self._lock:
            entry = self._known.get(key)
            if entry is None or not entry.matcher.done() or entry.matcher.exception() is not None:
                return
            if entry.matcher.result() is worn:
                self._size -= self._known.pop(key).size

    def _hidden_in(self, text: str) -> str:
        """A text in which what spells a special token is that token."""
        for special in sorted(self._hidden, key=len, reverse=True):
            text = text.replace(special, self._hidden[special])
        return text

    def _compiled(self, constraint: Constraint) -> LLMatcher | None:
        try:
            return _outcome(self._entry(constraint).matcher, self._seconds)
        except FutureTimeout:
            raise self._too_long() from None

    def _too_long(self) -> UnusableConstraint:
        return UnusableConstraint(f"compiling the grammar takes longer than {self._seconds:g} seconds")

    def _entry(self, constraint: Constraint) -> _Entry:
        constraint = constraint.grammar
        key = constraint.digest
        with self._lock:
            entry = self._known.get(key)
            if entry is not None:
                self._known.move_to_end(key)
                return entry
            entry = _Entry(self._threads.submit(self._compile, constraint), len(constraint.source))
            self._known[key] = entry
            self._size += entry.size
            while len(self._known) > self._entries or (
                self._size > self._source_bytes and len(self._known) > 1
            ):
                _, oldest = self._known.popitem(last=False)
                self._size -= oldest.size
            return entry

    def _read_tokenizer(self) -> Future[LLTokenizer]:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = Future()
                threading.Thread(
                    target=self._read, args=(self._tokenizer,), name="headrace-vocabulary", daemon=True
                ).start()
            return self._tokenizer

    def _read(self, into: Future[LLTokenizer]) -> None:
        try:
            source = self._describe()
            described = json.loads(source)
            size = max(self.vocab_size, len(described["model"]["vocab"]))
            added = described.get("added_tokens") or ()
            self._special = {each["content"]: each["id"] for each in added if _stands_alone(each)}
            self._plain = (
                frozenset(each["content"] for each in added if not each["special"]) & self._special.keys()
            )
            self._added = {each["content"]: each["id"] for each in added if each["id"] < self.vocab_size}
            self._hidden = _hidden_names(self._special)
            self._spellings = {token: text.encode() for text, token in self._special.items()}
            source = _with_names(described, self._hidden) if self._hidden else source
            try:
                made = LLTokenizer(source, n_vocab=size, eos_token=sorted(self.ends))
            except ValueError:  # added tokens lie beyond the model's rows
                made = LLTokenizer(source, eos_token=sorted(self.ends))
            into.set_result(made)
        except BaseException as error:
            problem = f"the model's tokenizer cannot be used for structured outputs: {error}"
            into.set_exception(UnusableConstraint(problem, server=True))

    def _compile(self, constraint: Constraint) -> LLMatcher | None:
        try:
            return self._made(constraint)
        except UnusableConstraint:
            raise
        except (
            BaseException
        ) as error:  # a panic of the library is not an Exception; only this request must fail
            raise UnusableConstraint(f"the {constraint.kind} cannot be compiled: {error}") from error

    def _made(self, constraint: Constraint) -> LLMatcher | None:
        tokenizer = self._read_tokenizer().result()
        if constraint.kind is ConstraintKind.TEXT:
            return None
        made = grammar(constraint, self._special, self._plain)
        matcher = LLMatcher(tokenizer, made, log_level=0, limits=LIMITS)
        if matcher.is_error():
            reason = first_reason(matcher.get_error())
            raise UnusableConstraint(f"the {constraint.kind} cannot be enforced: {reason}")
        matcher.compute_bitmask()  # warms the lexer for all copies; the first mask takes a millisecond
        if matcher.is_error():
            raise UnusableConstraint(first_reason(matcher.get_error()))
        return matcher


def _stands_alone(added: Mapping[str, Any]) -> bool:
    """Whether no text spells an added token in a grammar: if it is special, or looks so to the library.

    Qwen's ``<tool_call>`` and ``</think>`` are not special, for example. The library tokenizes text to them all the
    same, but no string of a grammar matches them.
    """
    text: str = added["content"]
    return bool(added["special"]) or (text.startswith("<") and text.endswith(">"))


def _hidden_names(special: Iterable[str]) -> dict[str, str]:
    """A secret spelling for each special token.

    A text that a grammar forces is tokenized. If it spelled a special token, it would become that token, which ends the
    output or which no text matches. Grammars refer to special tokens by id.
    """
    secret = f"\U000f0000{secrets.token_hex(8)}"
    return {text: f"{secret}{number}." for number, text in enumerate(sorted(special))}


def _with_names(described: dict[str, Any], hidden: Mapping[str, str]) -> str:
    """The source of a tokenizer whose tokens that stand alone are special ones with other spellings."""
    for each in described["added_tokens"]:
        if each["content"] in hidden:
            each |= {"content": hidden[each["content"]], "special": True}
    vocabulary = described["model"]["vocab"]
    if isinstance(vocabulary, dict):
        described["model"]["vocab"] = {hidden.get(text, text): id for text, id in vocabulary.items()}
    else:
        described["model"]["vocab"] = [[hidden.get(text, text), score] for text, score in vocabulary]
    return json.dumps(described)


def _outcome(matcher: Future[LLMatcher | None], seconds: float) -> LLMatcher | None:
    """The compiled matcher; raises a new error each time, since a raised exception accumulates its traceback."""
    try:
        return matcher.result(seconds)
    except UnusableConstraint as error:
        raise UnusableConstraint(str(error), server=error.server, path=error.path) from None
