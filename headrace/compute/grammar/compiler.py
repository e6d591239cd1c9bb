"""Compiles constraints on background threads, with a bounded cache of compiled grammars.

```
 constraint --grammar (sources)--> llguidance matcher, its first mask computed --copy--> one per sequence (`matchers`)
                 |refused (sources, schemas)
                 `-> UnusableConstraint, cached too: the same schema is rejected at once the next time
```
llguidance works without the interpreter lock. Its limits bound the time and memory of one grammar; ``entries`` and
``source_bytes`` bound the cache, and ``seconds`` is the timeout of a compilation.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from headrace.compute.grammar.reasoning import ReasoningCount, SequenceMatcher, spelt
from headrace.compute.grammar.refusals import first_reason
from headrace.compute.grammar.sources import grammar
from headrace.core.constraint import Constraint, ConstraintKind, UnusableConstraint

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
        matcher = compiled.deep_copy()
        tokens = self._read_tokenizer().result().tokenize_str(self._hidden_in(text))
        return bool(matcher.consume_tokens(tokens)) and bool(matcher.is_accepting())

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
        grammar = None if compiled is None else compiled.deep_copy()
        if limit is None:
            return SequenceMatcher(grammar)
        tokenizer = self._read_tokenizer().result()
        marker = spelt(limit.end[0], self._added, tokenizer)
        return SequenceMatcher(grammar, ReasoningCount(limit, marker, tokenizer))

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
            self._special = {each["content"]: each["id"] for each in added if each["special"]}
            self._added = {each["content"]: each["id"] for each in added if each["id"] < self.vocab_size}
            self._hidden = _hidden_names(self._special)
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
        made = grammar(constraint, self._special)
        matcher = LLMatcher(tokenizer, made, log_level=0, limits=LIMITS)
        if matcher.is_error():
            reason = first_reason(matcher.get_error())
            raise UnusableConstraint(f"the {constraint.kind} cannot be enforced: {reason}")
        matcher.compute_bitmask()  # warms the lexer for all copies; the first mask takes a millisecond
        if matcher.is_error():
            raise UnusableConstraint(first_reason(matcher.get_error()))
        return matcher


def _hidden_names(special: Iterable[str]) -> dict[str, str]:
    """A secret spelling for each special token.

    A text that a grammar forces is tokenized. If it spelled a special token, it would become that token, which ends the
    output or which no text matches. Grammars refer to special tokens by id.
    """
    secret = f"\U000f0000{secrets.token_hex(8)}"
    return {text: f"{secret}{number}." for number, text in enumerate(sorted(special))}


def _with_names(described: dict[str, Any], hidden: Mapping[str, str]) -> str:
    """The source of a tokenizer whose special tokens have other spellings."""
    for each in described["added_tokens"]:
        each["content"] = hidden.get(each["content"], each["content"])
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
