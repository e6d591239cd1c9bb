"""A bounded memory of the recent prompts of each tenant: fingerprints of their tokens, no tokens and no text.

```
 tokens  ├── 32 tokens ──┼── 32 tokens ──┼── rest ─┤
 keys      8 bytes each, a SHA-256 chain: equal keys mean equal prompts up to here
 marks     1 byte for each token: finds the exact token within a segment, and text that has moved
```
A prompt that continues another one of its scope replaces it, so a session takes the memory of its longest prompt. When
the memory is full, the tenant that uses most loses its oldest prompt.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from headrace.core.block_keys import chained_keys
from headrace.core.images import image_mark

SEGMENT = 32
"""Tokens of one key; independent of the block size of the KV cache."""

KEY_BYTES = 8
MAX_PROMPTS = 64
"""Prompts that are compared with a new one, and that one scope remembers."""

NEAR = 8
"""A match that is shorter than the longest by less counts as equally long."""

MAX_CANDIDATES = 4
"""Equally long matches whose rest is compared too."""

ENOUGH = 0.8
"""Share of the rest that makes further comparisons unnecessary."""

PROMPT_BYTES = 400
"""What a prompt takes beside its fingerprint."""

_ENDS = b"".join(re.escape(bytes([i])) for i in range(0, 256, 16))
_CHUNK = re.compile(b"[^" + _ENDS + b"]*[" + _ENDS + b"]|[^" + _ENDS + b"]+")
"""Cuts marks after certain ones, so that equal text is cut equally wherever it stands."""


class Scope(NamedTuple):
    """Requests that may share blocks: of one tenant, salt and adapter."""

    tenant: str
    salt: str
    adapter: str


class Fingerprint(NamedTuple):
    """What is remembered of the tokens of a prompt."""

    keys: bytes
    marks: bytes


def fingerprint(contents: Sequence[int]) -> Fingerprint:
    """The fingerprint of a prompt, with images in it (`core.images.contents`)."""
    keys = b"".join([key[:KEY_BYTES] for key in chained_keys(b"", contents, SEGMENT)])
    try:
        marks = array("q", contents).tobytes()[::8]
    except OverflowError:
        marks = bytes([each & 255 if each >= 0 else image_mark(each) for each in contents])
    return Fingerprint(keys, marks)


class Known:
    """A prompt in the memory. ``output_tokens`` are those of its answer, 0 until it has ended."""

    __slots__ = ("output_tokens", "print", "request_id", "scope", "tools")

    def __init__(self, request_id: str, scope: Scope, print: Fingerprint, tools: tuple[int, ...]) -> None:
        self.request_id = request_id
        self.scope = scope
        self.print = print
        self.tools = tools
        self.output_tokens = 0

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return len(self.print.marks)

    @property
    def bytes(self) -> int:
        """Memory that it takes, about."""
        return PROMPT_BYTES + len(self.print.keys) + len(self.print.marks)


class Match(NamedTuple):
    """The remembered prompt with the longest common prefix of ``tokens``; ``moved`` tokens after it are equal too."""

    known: Known
    tokens: int
    moved: int


class Matches(NamedTuple):
    """The longest matches of a prompt: in its own scope, in others of its tenant, and of other tenants."""

    own: Match | None
    other_scope: Match | None
    other_tenant: Match | None


def common_tokens(one: Fingerprint, other: Fingerprint) -> int:
    """The length of the common prefix of two prompts."""
    low, high = 0, min(len(one.keys), len(other.keys)) // KEY_BYTES
    if one.keys[:KEY_BYTES] != other.keys[:KEY_BYTES]:
        high = 0
    while low < high:  # keys are chained: where one is equal, all before it are
        middle = (low + high + 1) // 2
        end = middle * KEY_BYTES
        if one.keys[end - KEY_BYTES : end] == other.keys[end - KEY_BYTES : end]:
            low = middle
        else:
            high = middle - 1
    start = low * SEGMENT
    mine, its = one.marks[start : start + SEGMENT], other.marks[start : start + SEGMENT]
    for at, (a, b) in enumerate(zip(mine, its, strict=False)):
        if a != b:
            return start + at
    return start + min(len(mine), len(its))


def moved_tokens(one: Fingerprint, others: Sequence[Fingerprint], start: int) -> list[int]:
    """Tokens of ``one`` after ``start`` that stand somewhere after ``start`` in each of ``others`` too, about.

    A chunk counts if it and the next one follow each other there too: a single one may be too short to say much. Once
    one of ``others`` has nearly all of it, no further one is looked at.
    """
    mine = list(pairwise(_CHUNK.findall(one.marks[start:])))
    found = []
    for other in others:
        known = set(pairwise(_CHUNK.findall(other.marks[start:])))
        found.append(sum(len(pair[0]) for pair in mine if pair in known))
        if found[-1] > ENOUGH * (len(one.marks) - start):
            break
    return found


class PromptMemory:
    """The recent prompts, in at most ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._scopes: dict[Scope, OrderedDict[str, Known]] = {}
        self._by_tenant: dict[str, dict[Scope, None]] = {}
        self._by_start: dict[bytes, OrderedDict[str, Known]] = {}
        self._by_id: dict[str, Known] = {}
        self._sizes: dict[str, int] = {}
        self.bytes = 0
        """Memory in use, about."""

    def __len__(self) -> int:
        return len(self._by_id)

    def compare(self, scope: Scope, print: Fingerprint) -> Matches:
        """The longest matches of a prompt."""
        own = self._best(print, self._newest(self._scopes.get(scope, {}).values()))
        others = [each for each in self._by_tenant.get(scope.tenant, ()) if each != scope]
        elsewhere = [known for each in others[-MAX_PROMPTS:] for known in self._scopes[each].values()]
        start: Mapping[str, Known] = self._by_start.get(print.keys[:KEY_BYTES], {})
        foreign = [known for known in start.values() if known.scope.tenant != scope.tenant]
        return Matches(
            own,
            self._best(print, self._newest(elsewhere)),
            self._best(print, self._newest(foreign)),
        )

    def add(self, request_id: str, scope: Scope, print: Fingerprint, tools: tuple[int, ...] = ()) -> None:
        """Remember a prompt in place of those of its scope that it continues. ``tools`` are digests of its tools."""
        self.forget(request_id)
        continued = [
            known
            for known in self._scopes.get(scope, OrderedDict()).values()
            if print.marks.startswith(known.print.marks) and print.keys.startswith(known.print.keys)
        ]
        for known in continued:
            self.forget(known.request_id)
        known = Known(request_id, scope, print, tools)
        prompts = self._scopes.setdefault(scope, OrderedDict())
        prompts[request_id] = known
        scopes = self._by_tenant.setdefault(scope.tenant, {})
        scopes.pop(scope, None)  # the scopes of a tenant stand in the order of their last use
        scopes[scope] = None
        self._by_start.setdefault(print.keys[:KEY_BYTES], OrderedDict())[request_id] = known
        self._by_id[request_id] = known
        self._sizes[scope.tenant] = self._sizes.get(scope.tenant, 0) + known.bytes
        self.bytes += known.bytes
        if len(prompts) > MAX_PROMPTS:
            self.forget(next(iter(prompts)))
        while self.bytes > self._max_bytes and self._by_id:
            self._forget_oldest(max(self._sizes, key=self._sizes.__getitem__))

    def ended(self, request_id: str, output_tokens: int) -> None:
        """The request of a prompt has ended; without output, its prompt may not have been computed."""
        known = self._by_id.get(request_id)
        if known is not None and output_tokens:
            known.output_tokens = output_tokens
        elif known is not None:
            self.forget(request_id)

    def forget(self, request_id: str) -> None:
        """Drop the prompt of a request, if it is remembered."""
        known = self._by_id.pop(request_id, None)
        if known is None:
            return
        scope, start = known.scope, known.print.keys[:KEY_BYTES]
        del self._scopes[scope][request_id]
        if not self._scopes[scope]:
            del self._scopes[scope]
            del self._by_tenant[scope.tenant][scope]
            if not self._by_tenant[scope.tenant]:
                del self._by_tenant[scope.tenant]
        del self._by_start[start][request_id]
        if not self._by_start[start]:
            del self._by_start[start]
        self.bytes -= known.bytes
        self._sizes[scope.tenant] -= known.bytes
        if not self._sizes[scope.tenant]:
            del self._sizes[scope.tenant]

    def _forget_oldest(self, tenant: str) -> None:
        scope = next(iter(self._by_tenant[tenant]))
        self.forget(next(iter(self._scopes[scope])))

    def _newest(self, prompts: Iterable[Known]) -> list[Known]:
        return list(prompts)[-MAX_PROMPTS:][::-1]

    def _best(self, print: Fingerprint, prompts: Sequence[Known]) -> Match | None:
        """The longest match. Of those that are hardly shorter, the one that has most of the rest, then the newest: by
        chance, the first token of a changed text may be that of an unrelated prompt.
        """
        if not prompts:
            return None
        lengths = [common_tokens(print, known.print) for known in prompts]
        longest = max(lengths)
        for known, length in zip(prompts, lengths, strict=True):
            if length == longest and longest in (known.length, len(print.marks)):
                return Match(known, longest, 0)
        near = [known for known, length in zip(prompts, lengths, strict=True) if length + NEAR > longest]
        moved = moved_tokens(print, [known.print for known in near[:MAX_CANDIDATES]], longest)
        most = max(range(len(moved)), key=moved.__getitem__)
        return Match(near[most], longest, moved[most])
