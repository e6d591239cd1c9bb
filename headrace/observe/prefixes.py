"""Explains where each prompt missed the prefix cache, and counts recomputed tokens by cause.

The HTTP layer enters a prompt after it has submitted the request. The event `Admitted` has the number of cached tokens;
only then is the prompt compared with earlier ones, so that no request waits for it. Prompts are stored as fingerprints.
Text of a prompt is stored only if ``show_text`` is set.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from headrace.core.events import AdmitReason, Admitted, Event, Finished, Spared
from headrace.core.images import contents
from headrace.core.memory.departure import (
    EXPLANATIONS,
    NOWHERE,
    Departure,
    Fingerprint,
    Looked,
    Place,
    PrefixCause,
    PromptMemory,
    Scope,
    departure,
    fingerprint,
)
from headrace.core.request import Request
from headrace.observe.metrics_page import MetricsPage

logger = logging.getLogger(__name__)

MOST_WAITING = 10_000
"""Maximum number of prompts waiting for admission; beyond it, the oldest ones are not explained."""

MOST_EXPLAINED = 1_000
"""Maximum number of stored explanations, the same as of finished requests."""


MOVED_TO_END = "moved_to_last_message"
"""The normalization after which the end of a prompt is not repeated by later turns."""


class Entered(NamedTuple):
    """A prompt that has been submitted.

    ``place`` describes the part of the request at a token, which for a ``long`` text takes milliseconds. ``tools`` are
    digests of its tools, ``normalized`` the normalizations of its text.
    """

    request: Request
    place: Callable[[int], Place]
    tools: tuple[int, ...] = ()
    normalized: tuple[dict[str, Any], ...] = ()
    long: bool = False


LONG_TOKENS = 65_536
"""Prompts above this length are hashed on another thread; so many take about 4 ms."""

Beside = Callable[[Callable[[], Any]], asyncio.Future[Any]]
"""Calls a function on another thread."""


def _place(entered: Entered, at: int) -> Place:
    try:
        return entered.place(at)
    except Exception:  # a text that cannot be searched must not keep events from other watchers
        logger.exception("the place in a prompt was not found")
        return NOWHERE


class _Explained(NamedTuple):
    found: Departure
    prompt_tokens: int
    cached_tokens: int
    normalized: tuple[dict[str, Any], ...]


class PrefixBook:
    """A `core.ports.Watcher` that explains prompts; ``enter`` them before the events of their requests are folded.

    Args:
        memory: the prompts of earlier requests.
        block_size: tokens of a block of the KV cache.
        page: where the counter is written.
        caching: whether prefix caching is enabled.
        show_text: whether explanations quote the request's own prompt.
        least_tokens: minimum length of a prompt to be compared; for shorter ones the overhead is not worthwhile.
        beside: hashes and searches long prompts on another thread; without it, this is done at once.
    """

    fold_tokens = None

    def __init__(
        self,
        memory: PromptMemory,
        block_size: int,
        page: MetricsPage,
        *,
        caching: bool = True,
        show_text: bool = False,
        least_tokens: int = 0,
        beside: Beside | None = None,
    ) -> None:
        self._beside = beside
        self._searched: dict[str, asyncio.Future[Any]] = {}
        self._hashed: dict[str, int] = {}
        self._least_tokens = least_tokens
        self._memory = memory
        self._block_size = block_size
        self._caching = caching
        self._show_text = show_text
        self._waiting: OrderedDict[str, Entered] = OrderedDict()
        self._explained: OrderedDict[str, _Explained] = OrderedDict()
        self._recomputed = page.counter(
            "prefix_recomputed_tokens",
            "Prompt tokens computed again although an earlier request had computed them, by cause.",
            ["cause"],
        )

    def enter(
        self,
        request: Request,
        place: Callable[[int], Place] = lambda at: NOWHERE,
        tools: Sequence[int] = (),
        normalized: Sequence[dict[str, Any]] = (),
        long: bool = False,
    ) -> None:
        """Register the prompt of a submitted request."""
        self._waiting[request.id] = Entered(request, place, tuple(tools), tuple(normalized), long)
        if len(self._waiting) > MOST_WAITING:
            self._waiting.popitem(last=False)

    def fold(self, event: Event, now: float) -> None:
        if isinstance(event, Admitted):
            if event.reason is AdmitReason.NEW:
                self._admitted(event)
        elif isinstance(event, Finished):
            self._waiting.pop(event.request_id, None)
            if event.request_id in self._hashed:
                self._hashed[event.request_id] = event.output_tokens
            else:
                self._memory.ended(event.request_id, event.output_tokens)
        elif isinstance(event, Spared):
            self._waiting.pop(event.request_id, None)

    def _admitted(self, event: Admitted) -> None:
        entered = self._waiting.pop(event.request_id, None)
        if entered is None:
            return
        request = entered.request
        cached = min(event.cached_tokens, len(request.tokens))
        if not self._caching or request.params.prompt_logprobs is not None:
            self._found(entered, cached, Departure(0, PrefixCause.NOT_LOOKED_UP))
        elif len(request.tokens) < self._least_tokens:
            self._found(entered, cached, Departure(0, PrefixCause.SHORT))
        elif self._beside is None or len(request.tokens) <= LONG_TOKENS:
            self._search(entered, cached, fingerprint(contents(request.tokens, request.images)))
        else:
            self._hashed[request.id] = 0
            work = self._beside(lambda: fingerprint(contents(request.tokens, request.images)))
            self._searched[request.id] = work
            work.add_done_callback(partial(self._hash_ended, entered, cached))

    def _hash_ended(self, entered: Entered, cached: int, work: asyncio.Future[Fingerprint]) -> None:
        request_id = entered.request.id
        del self._searched[request_id]
        output_tokens = self._hashed.pop(request_id)
        if not work.cancelled():
            self._search(entered, cached, work.result())
            self._memory.ended(request_id, output_tokens)

    def _search(self, entered: Entered, cached: int, print: Fingerprint) -> None:
        find = self._compared(entered, cached, print)
        if not entered.long or self._beside is None:
            self._found(entered, cached, find())
            return
        search = self._searched[entered.request.id] = self._beside(find)
        search.add_done_callback(partial(self._ended, entered, cached))

    def _ended(self, entered: Entered, cached: int, search: asyncio.Future[Departure]) -> None:
        del self._searched[entered.request.id]
        if not search.cancelled():
            self._found(entered, cached, search.result())

    def _found(self, entered: Entered, cached: int, found: Departure) -> None:
        request = entered.request
        if found.recomputed:
            self._recomputed.of(found.cause.value).value += found.recomputed
        shown = found if self._show_text else found._replace(place=found.place._replace(before="", after=""))
        self._explained[request.id] = _Explained(shown, len(request.tokens), cached, entered.normalized)
        if len(self._explained) > MOST_EXPLAINED:
            self._explained.popitem(last=False)

    def _compared(self, entered: Entered, cached: int, print: Fingerprint) -> Callable[[], Departure]:
        """Compare a prompt with earlier ones, now; the function that is returned finds the departure in its text."""
        request = entered.request
        scope = Scope(request.tenant, request.salt, request.adapter)
        moves = any(each["action"] == MOVED_TO_END for each in entered.normalized)
        sizes = len(request.tokens), cached, self._block_size
        looked = Looked(scope, *sizes, entered.tools, moves, request.images)
        matches = self._memory.compare(scope, print)
        self._memory.add(request.id, scope, print, entered.tools)
        return partial(departure, looked, matches, partial(_place, entered))

    async def settled(self, request_id: str) -> None:
        """Wait until the prompt of a request that has been admitted has been hashed and searched."""
        while (work := self._searched.get(request_id)) is not None:
            await asyncio.wait([work])

    def explain(self, request_id: str, all_tenants: bool = False) -> dict[str, Any] | None:
        """Where the prompt of a request missed the prefix cache, as plain values for JSON; None if not known.

        A common prefix with a prompt of another tenant is shown only with ``all_tenants``.
        """
        explained = self._explained.get(request_id)
        if explained is None:
            return None
        found = explained.found
        if found.cause is PrefixCause.OTHER_TENANT and not all_tenants:
            found = Departure(found.at, PrefixCause.NEW)
        place = found.place
        shown: dict[str, Any] = {
            "cause": found.cause.value,
            "why": EXPLANATIONS[found.cause],
            "left_at_token": found.at,
            "prompt_tokens": explained.prompt_tokens,
            "cached_tokens": explained.cached_tokens,
            "recomputed_tokens": found.recomputed,
            "compared_with": found.compared_with or None,
            "section": place.section or None,
            "marker": place.marker or None,
            "normalized": list(explained.normalized),
        }
        if place.before or place.after:
            shown["text"] = {"before": place.before, "after": place.after}
        return shown
