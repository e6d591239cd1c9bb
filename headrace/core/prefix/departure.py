"""Where and why a prompt missed the prefix cache, and how many tokens were computed again.

It uses counts and fingerprints. The part of the request at that token is a `Place`, found by code that has the text.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from headrace.core.images import ImageSpan
from headrace.core.prefix.prompt_memory import Known, Match, Matches, Scope


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
