"""Single-flight: one computation that several equal requests read, each from the beginning.

A computation belongs to no connection: it is cancelled only when the last client has disconnected. No reader waits for
another, because each has its own queue of references to the common output. The computation finds stop strings itself,
so that the cached response ends at the same place for every reader.

`lookup.Computations` has all of them. The life of one:

 1 `followed`: a request joins one that is running, if there is one of at least its priority.
 2 `make`: otherwise one begins, where an unfinished response stopped if one is stored; `register` lets others join.
 3 `join`: a reader gets everything from the beginning, then each event.
 4 `tell`: events of the engine go to all readers. A failure, or the deadline of the first request, ends only that
   request; the others get a second attempt.
 5 The end goes to the caches, then to the readers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import StrEnum

from headrace.core.events import Emitted, Finished, PromptScored
from headrace.core.plan import TokenLogprob
from headrace.core.request import FinishReason, Request
from headrace.core.tenancy.tenants import CLASSES, DEFAULT
from headrace.response_cache.partial import UnfinishedAnswer
from headrace.response_cache.query import CacheQuery
from headrace.response_cache.rules.entry import Entry, Pulse
from headrace.service.answer import Answer, Predicted
from headrace.text.stream import Texts

_LEVELS = {each.name: each.level for each in CLASSES}

logger = logging.getLogger(__name__)

RETRYABLE = (FinishReason.FAILED, FinishReason.TIMEOUT, FinishReason.UNREACHABLE)
"""Finish reasons that concern one request or one attempt: other readers may still get a response."""


class Computation:
    """A `service.service.Listener` that passes events on to its readers.

    Args:
        query: the query that is computed.
        request: the request that the engine runs for it; the response does not depend on its id.
        versions: the current versions of its tags.
        stops: finds the stop strings of the request; None if it has none.
        clock: seconds.
        ended: called once, with the computation and its end, before its readers receive it.
        again: called when computing failed or the first request's deadline passed. Returns whether it has called
            `restart` for the remaining readers.
    """

    def __init__(
        self,
        query: CacheQuery,
        request: Request,
        versions: tuple[tuple[str, int], ...],
        stops: Texts | None,
        clock: Callable[[], float],
        ended: Callable[[Computation, Finished], None],
        again: Callable[[Computation], bool],
    ) -> None:
        self.query = query
        self.requests: tuple[Request, ...] = (request,)
        self.cached_tokens = [0]
        self.predicted = [Predicted()]
        self.versions = versions
        self.began = clock()
        self.alone = False  # computed for the cache, with or without readers
        self.attempts = 1
        self.resumed: UnfinishedAnswer | None = None
        self.end: Finished | None = None
        self.seconds = 0.0  # duration, once it has ended
        # Flat lists, because Python's garbage collection would walk over a tuple per token.
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._pulse_seconds: list[float] = []
        self._pulse_tokens: list[int] = []
        self._whole: Emitted | None = None
        self._readers: list[tuple[Answer, int]] = []
        self._stops = stops
        self._ends = frozenset[int]() if stops is None else _hidden_ends(request)
        self._clock = clock
        self._ended = ended
        self._again = again
        self._when_over: list[Callable[[], None]] = []

    @property
    def rank(self) -> tuple[int, int]:
        """Its order in the queue; lower runs sooner."""
        return rank(self.requests[0])

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.end is not None

    @property
    def deserted(self) -> bool:
        """Whether it has no reader."""
        return not self._readers

    @property
    def each_step(self) -> bool:
        """Whether one of its readers needs the events of every step."""
        return any(answer.each_step for answer, _ in self._readers)

    @property
    def followers(self) -> list[Request]:
        """The requests that joined it."""
        own = self.query.request
        return [answer.requests[i] for answer, i in self._readers if answer.requests[i] is not own]

    @property
    def tokens(self) -> tuple[int, ...]:
        """The output so far."""
        return tuple(self._tokens)

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """The logprobs of the output's tokens, if they were requested."""
        return tuple(self._logprobs)

    @property
    def pulses(self) -> tuple[Pulse, ...]:
        """The number and the time of the tokens of each step."""
        return tuple(map(Pulse, self._pulse_seconds, self._pulse_tokens))

    def join(self, answer: Answer, index: int) -> None:
        """Send all events to ``answer`` as its sequence ``index``, from the beginning of the output."""
        self._count_cached(answer, index)
        if answer.each_step and self._tokens:
            answer.tell(index, self._so_far())
        if self.end is None:
            self._readers.append((answer, index))
        else:
            self._tell_end(answer, index, self.end)

    def leave(self, answer: Answer, index: int) -> bool:
        """Send no more events to ``answer`` for its sequence ``index``; returns whether it was a reader."""
        reads = (answer, index) in self._readers
        if reads:
            self._readers.remove((answer, index))
        return reads

    def when_over(self, call: Callable[[], None]) -> None:
        """Call ``call`` when the computation ends, for whatever reason."""
        self._when_over.append(call)

    def resume(self, beginning: UnfinishedAnswer) -> None:
        """Begin where an earlier computation of the same response stopped; before any reader joins."""
        request = self.requests[0]
        self.resumed = beginning
        self.requests = (replace(request, answered=beginning.tokens),)
        self.began -= beginning.seconds
        self._extend(Emitted(request.id, beginning.tokens))

    def restart(self) -> None:
        """Prepare a second attempt in ``requests``, which continues where the first one stopped."""
        again = replace(
            self.requests[0],
            id=f"{self.query.request.id}~{self.attempts}",
            deadline=self.deadline(),
            answered=self.tokens,
        )
        self.attempts += 1
        self.requests = (again,)

    def deadline(self) -> float | None:
        """The latest deadline of its readers; None if one has no deadline."""
        deadlines = [answer.requests[index].deadline for answer, index in self._readers]
        known = [deadline for deadline in deadlines if deadline is not None]
        return max(known) if len(known) == len(deadlines) and known else None

    def tell(self, index: int, event: Emitted | PromptScored | Finished) -> None:
        """Handle an event of the engine; events after the end are ignored."""
        if self.end is not None:
            return  # a stop string ended it, which the engine did not know yet
        if type(event) is Finished:
            if event.reason in RETRYABLE:
                self._tell_first(event)
                if self._again(self):
                    return  # the events of the second attempt follow
            self._end(event)
        elif type(event) is Emitted:
            try:
                self._extend(event)
            except Exception:
                logger.exception("the text of %s could not be followed", self.requests[0].id)
                self._end(self._finished(FinishReason.FAILED))

    def _tell_first(self, finished: Finished) -> None:
        """Send the end of the first attempt to the request that began it, if it still reads."""
        for answer, index in tuple(self._readers):
            if answer.requests[index] is self.query.request:
                self.leave(answer, index)
                answer.tell(index, finished)

    def _extend(self, event: Emitted) -> None:
        # Tokens after a stop string are cut off before any reader gets them.
        used, stopped = len(event.tokens), False
        if self._stops is not None:
            used, stopped = self._watch(self._stops, event.tokens)
            if used < len(event.tokens):
                event = Emitted(event.request_id, event.tokens[:used], event.logprobs[:used])
        # Stored for the cache, and for readers that join later or wait for the end.
        self._tokens += event.tokens
        self._logprobs += event.logprobs
        self._pulse_seconds.append(self._clock() - self.began)
        self._pulse_tokens.append(used)
        for answer, index in self._readers:
            if answer.each_step:
                self._count_cached(answer, index)
                answer.tell(index, event)
        if stopped:
            self._end(self._finished(FinishReason.STOP))

    def _watch(self, stops: Texts, tokens: tuple[int, ...]) -> tuple[int, bool]:
        """The number of ``tokens`` that belong to the response, and whether a stop string ends it there.

        The text of a stop token is not searched, unless ``include_stop_str_in_output`` is set.
        """
        hidden = tokens[-1:] if tokens[-1] in self._ends else ()
        delta = stops.push(tokens[: len(tokens) - len(hidden)])
        if delta.stopped is not None:
            return len(delta.texts), True
        return len(tokens), False

    def _finished(self, reason: FinishReason) -> Finished:
        request = self.requests[0]
        return Finished(request.id, reason, len(request.tokens), len(self.tokens), self.cached_tokens[0])

    def _count_cached(self, answer: Answer, index: int) -> None:
        """Set the cached prompt tokens: the engine's count for the first request, the whole prompt for others.

        Counts of drafts go to the first request, too.
        """
        request = answer.requests[index]
        leads = request is self.query.request
        answer.cached_tokens[index] = self.cached_tokens[0] if leads else len(request.tokens)
        answer.predicted[index] = self.predicted[0] if leads else Predicted()

    def _tell_end(self, answer: Answer, index: int, finished: Finished) -> None:
        if not answer.each_step and self._tokens:
            self._whole = self._whole or self._so_far()  # one event for all readers
            answer.tell(index, self._whole)
        answer.tell(index, finished)

    def _so_far(self) -> Emitted:
        return Emitted(self.requests[0].id, self.tokens, self.logprobs)

    def _end(self, finished: Finished) -> None:
        self.end = finished
        self.seconds = self._clock() - self.began
        self._ended(self, finished)  # before the readers: their next request finds the response
        for answer, index in self._readers:
            self._count_cached(answer, index)
            self._tell_end(answer, index, finished)
        self._readers = []
        calls = self._when_over
        self._when_over = []  # avoids a reference cycle, as the calls may refer to the computation
        for call in calls:
            call()


def rank(request: Request) -> tuple[int, int]:
    """The order of ``request`` in the queue by class and priority; lower runs sooner."""
    return _LEVELS.get(request.service_class, DEFAULT.level), request.priority


def _hidden_ends(request: Request) -> frozenset[int]:
    """Tokens that end the response and whose text is not part of it."""
    params = request.params
    if params.include_stop_str_in_output:
        return frozenset()
    eos = frozenset[int]() if params.ignore_eos else request.eos_token_ids
    return eos.union(params.stop_token_ids)


TOKENS_AT_ONCE = 32
"""Tokens per chunk of a replay at immediate pace: still a stream, with little overhead."""


class Pace(StrEnum):
    """The speed at which a cached response is streamed."""

    IMMEDIATE = "immediate"
    ORIGINAL = "original"


def tell_whole(answer: Answer, index: int, entry: Entry) -> None:
    """Send all of ``entry`` at once, to a reader that waits for the end."""
    request = answer.requests[index]
    answer.cached_tokens[index] = len(request.tokens)
    if entry.tokens:
        answer.tell(index, Emitted(request.id, entry.tokens, entry.logprobs))
    answer.tell(index, _end(request, entry))


async def tell_paced(answer: Answer, index: int, entry: Entry, pace: Pace) -> None:
    """Send ``entry`` in chunks, to a reader that streams them."""
    request = answer.requests[index]
    answer.cached_tokens[index] = len(request.tokens)
    began = asyncio.get_running_loop().time()
    for after, start, end in _pieces(entry, pace):
        await asyncio.sleep(max(0.0, began + after - asyncio.get_running_loop().time()))
        answer.tell(index, Emitted(request.id, entry.tokens[start:end], entry.logprobs[start:end]))
    answer.tell(index, _end(request, entry))


def _pieces(entry: Entry, pace: Pace) -> Iterator[tuple[float, int, int]]:
    """Chunks: seconds since the beginning, and the range of tokens to send."""
    if pace is Pace.ORIGINAL and entry.pulses:
        start = 0
        for pulse in entry.pulses:
            yield pulse.seconds, start, start + pulse.tokens
            start += pulse.tokens
    else:
        for start in range(0, len(entry.tokens), TOKENS_AT_ONCE):
            yield 0.0, start, min(start + TOKENS_AT_ONCE, len(entry.tokens))


def _end(request: Request, entry: Entry) -> Finished:
    prompt = len(request.tokens)
    return Finished(request.id, entry.reason, prompt, len(entry.tokens), prompt, stop_token=entry.stop_token)
