"""Where and why a prompt missed the prefix cache, and how many tokens were computed again.

It uses counts and fingerprints. The part of the request at that token is a `Place`, found by code that has the text.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from headrace.core.block_keys import chained_keys
from headrace.core.images import ImageSpan, image_mark

# A bounded memory of the recent prompts of each tenant: fingerprints of their tokens, no tokens and no text.
#
#  tokens  ├── 32 tokens ──┼── 32 tokens ──┼── rest ─┤
#  keys      8 bytes each, a SHA-256 chain: equal keys mean equal prompts up to here
#  marks     1 byte for each token: finds the exact token within a segment, and text that has moved
#
# A prompt that continues another one of its scope replaces it, so a session takes the memory of its longest
# prompt. When the memory is full, the tenant that uses most loses its oldest prompt.

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


class PrefixCause(StrEnum):
    """Why the rest of a prompt was not in the prefix cache."""

    NOT_LOOKED_UP = "not_looked_up"
    WHOLE_PROMPT = "whole_prompt"
    CONTINUES = "continues"
    NEW = "new"
    SHORT = "short"
    SHORTER_THAN_BLOCK = "shorter_than_block"
    BLOCK_TAIL = "block_tail"
    EVICTED = "evicted"
    SALT_DIFFERS = "salt_differs"
    ADAPTER_DIFFERS = "adapter_differs"
    OTHER_TENANT = "other_tenant"
    MARKER_CHANGED = "marker_changed"
    TOOLS_REORDERED = "tools_reordered"
    TOOLS_CHANGED = "tools_changed"
    REASONING_DROPPED = "reasoning_dropped"
    ANSWER_CHANGED = "answer_changed"
    MARKER_MOVED = "marker_moved"
    IMAGE_CHANGED = "image_changed"
    TEXT_CHANGED = "text_changed"


class Place(NamedTuple):
    """The part of a request at one token of its prompt.

    ``section`` is ``tools``, ``messages[3]`` or the like, ``role`` that of the message. ``marker`` names a known
    per-request marker there. ``lacks_reasoning`` says that a message of the assistant stands there without reasoning,
    although the model reasons. ``begins`` says that the section begins there. ``rest`` tokens follow up to the end of
    the section. ``before`` and ``after`` are a few words of the prompt around the token.
    """

    section: str = ""
    role: str = ""
    marker: str = ""
    lacks_reasoning: bool = False
    begins: bool = False
    rest: int = 0
    before: str = ""
    after: str = ""


NOWHERE = Place()


class Departure(NamedTuple):
    """The result: the token ``at`` which a prompt left the cached prefix, the cause, and the earlier request that it
    was compared with. ``recomputed`` tokens had been computed before. ``other_tenant`` tokens at the beginning are
    equal to a prompt of another tenant, with which nothing is shared.
    """

    at: int
    cause: PrefixCause
    recomputed: int = 0
    compared_with: str = ""
    place: Place = NOWHERE
    other_tenant: int = 0


class Looked(NamedTuple):
    """A prompt that was looked up: its length, the ``cached`` tokens of it, digests of its tools.

    ``moves`` says that a marker has been moved to its last message. ``images`` are those of the prompt.
    """

    scope: Scope
    tokens: int
    cached: int
    block_size: int
    tools: tuple[int, ...] = ()
    moves: bool = False
    images: tuple[ImageSpan, ...] = ()


def departure(looked: Looked, matches: Matches, place: Callable[[int], Place]) -> Departure:
    """Where and why a prompt left the cached prefix. ``place`` is called only if text decides."""
    most, size, cached = looked.tokens - 1, looked.block_size, looked.cached
    own = matches.own
    known = own.tokens if own is not None else 0
    if cached >= most:
        return Departure(cached, PrefixCause.WHOLE_PROMPT, compared_with=_id(own))
    if own is not None and min(known, most) - cached >= size:
        return Departure(cached, PrefixCause.EVICTED, min(known, most) - cached, own.known.request_id)
    if looked.tokens < size:
        lost = max(0, min(known, most) - cached)
        return Departure(cached, PrefixCause.SHORTER_THAN_BLOCK, lost, _id(own))
    elsewhere = _elsewhere(looked, matches, max(known, cached))
    if elsewhere is not None:
        return elsewhere
    if own is None or max(known, own.moved) < size:
        return Departure(cached, PrefixCause.NEW)
    if known in (own.known.length, looked.tokens) or (cached > known and own.moved < size):
        return _continued(looked, own, place)
    return _changed(looked, own, place)


def _id(match: Match | None) -> str:
    return "" if match is None else match.known.request_id


def _elsewhere(looked: Looked, matches: Matches, known: int) -> Departure | None:
    """The prompt begins like one that it may not share blocks with, for longer than like any other."""
    other, foreign = matches.other_scope, matches.other_tenant
    most = looked.tokens - 1
    if other is not None and min(other.tokens, most) >= known + looked.block_size:
        adapter = other.known.scope.adapter != looked.scope.adapter
        cause = PrefixCause.ADAPTER_DIFFERS if adapter else PrefixCause.SALT_DIFFERS
        return Departure(looked.cached, cause, min(other.tokens, most) - known, other.known.request_id)
    if foreign is not None and min(foreign.tokens, most) >= max(known + looked.block_size, most // 2):
        tokens = min(foreign.tokens, most)
        return Departure(looked.cached, PrefixCause.OTHER_TENANT, tokens - known, other_tenant=tokens)
    return None


def _continued(looked: Looked, own: Match, place: Callable[[int], Place]) -> Departure:
    """The prompt continues an earlier one, with the answer to it or with a changed form of that answer."""
    cached, earlier = looked.cached, own.known
    tail = min(own.tokens, looked.tokens - 1) - cached
    if tail > 0:
        return Departure(cached, PrefixCause.BLOCK_TAIL, tail, earlier.request_id)
    lost = min(earlier.length + earlier.output_tokens, looked.tokens) - 1 - cached
    if lost >= looked.block_size and own.tokens == earlier.length:
        found = place(cached)
        if found.role == "assistant":
            dropped = found.lacks_reasoning
            cause = PrefixCause.REASONING_DROPPED if dropped else PrefixCause.ANSWER_CHANGED
            return Departure(cached, cause, min(lost, found.rest), earlier.request_id, found)
    return Departure(cached, PrefixCause.CONTINUES, compared_with=earlier.request_id)


def _changed(looked: Looked, own: Match, place: Callable[[int], Place]) -> Departure:
    """The prompt differs from an earlier one at a token before the end of both."""
    at, earlier = (
        max(own.tokens, looked.cached),
        own.known,
    )  # the cache may also hold the beginning of an old answer
    lost = max(0, min(own.moved + own.tokens, looked.tokens - 1) - looked.cached)
    if any(span.start <= at < span.end for span in looked.images):
        return Departure(at, PrefixCause.IMAGE_CHANGED, lost, earlier.request_id)
    found = place(at)
    return Departure(at, _cause(looked, earlier, found), lost, earlier.request_id, found)


def _cause(looked: Looked, earlier: Known, found: Place) -> PrefixCause:
    if looked.moves and found.begins:
        return PrefixCause.MARKER_MOVED
    if found.marker:
        return PrefixCause.MARKER_CHANGED
    if found.section == "tools" and looked.tools != earlier.tools:
        reordered = sorted(looked.tools) == sorted(earlier.tools)
        return PrefixCause.TOOLS_REORDERED if reordered else PrefixCause.TOOLS_CHANGED
    if found.role == "assistant" and found.lacks_reasoning:
        return PrefixCause.REASONING_DROPPED
    return PrefixCause.TEXT_CHANGED


EXPLANATIONS = {
    PrefixCause.NOT_LOOKED_UP: "The prefix cache was not looked up.",
    PrefixCause.SHORT: "The prompt is so short that it is not compared with earlier ones.",
    PrefixCause.WHOLE_PROMPT: "The whole prompt was cached, up to its last token, which is always computed.",
    PrefixCause.CONTINUES: "The prompt continues an earlier one; only the new tokens were computed.",
    PrefixCause.NEW: "No remembered request of this tenant begins like this one.",
    PrefixCause.SHORTER_THAN_BLOCK: "The prompt is shorter than one block of the KV cache.",
    PrefixCause.BLOCK_TAIL: "The last tokens of the known prefix fill only a part of a block that is not cached.",
    PrefixCause.EVICTED: "The tokens were computed before and are no longer cached: evicted or cleared.",
    PrefixCause.SALT_DIFFERS: "An earlier request with another cache_salt begins like this one.",
    PrefixCause.ADAPTER_DIFFERS: "An earlier request with another adapter begins like this one.",
    PrefixCause.OTHER_TENANT: "Only another tenant has sent this beginning; tenants never share blocks.",
    PrefixCause.MARKER_CHANGED: "A known per-request marker differs from the earlier request.",
    PrefixCause.TOOLS_REORDERED: "The tools are those of the earlier request in another order.",
    PrefixCause.TOOLS_CHANGED: "The tools differ from those of the earlier request.",
    PrefixCause.REASONING_DROPPED: "A message of the assistant has come back without its reasoning.",
    PrefixCause.ANSWER_CHANGED: "The earlier answer has come back in another form than it was generated.",
    PrefixCause.MARKER_MOVED: "Normalization had moved a marker to the end of the earlier request, which was here.",
    PrefixCause.IMAGE_CHANGED: "An image stands where the earlier request had another one, or none.",
    PrefixCause.TEXT_CHANGED: "The text differs from the earlier request.",
}
"""Each cause in words."""
