"""One computation and all who read it: its answer so far is a log that each reads from the beginning.

It belongs to nobody's connection. Who hangs up leaves; the computation ends with the last of them. Nobody waits for
anybody: each reader has its own queue of references into the one log. It finds stop strings itself, so that what is
kept ends where the answer ends, whoever reads it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from headrace.core.cache.partial.unfinished_answers import UnfinishedAnswer
from headrace.core.cache.response.entry import Pulse
from headrace.core.cache.response.query import CacheQuery
from headrace.core.events import Emitted, Finished, PromptScored
from headrace.core.plan import TokenLogprob
from headrace.core.request import FinishReason, Request
from headrace.core.tenancy.classes import CLASSES, DEFAULT
from headrace.serve.service import Answer
from headrace.serve.text.stream import TextStream

_LEVELS = {each.name: each.level for each in CLASSES}

logger = logging.getLogger(__name__)

RETRYABLE = (FinishReason.FAILED, FinishReason.TIMEOUT, FinishReason.UNREACHABLE)
"""Ends that are one caller's misfortune or one attempt's: the others may still get their answer."""


class SingleFlight:
    """A `serve.service.Listener` that passes on what it hears.

    Args:
        ask: what is computed.
        request: under which id; the answer is the same whatever its id.
        versions: of its tags, taken now.
        stops: finds the stop strings of the request; None where it has none.
        clock: seconds, of any origin.
        ended: called once, with the flight and its end, before its readers are told.
        again: asked when computing has failed or its first caller's time is too short; whether it has been started
            anew, by `restart`, for those who still wait.
    """

    def __init__(
        self,
        ask: CacheQuery,
        request: Request,
        versions: tuple[tuple[str, int], ...],
        stops: TextStream | None,
        clock: Callable[[], float],
        ended: Callable[[SingleFlight, Finished], None],
        again: Callable[[SingleFlight], bool],
    ) -> None:
        self.ask = ask
        self.requests: tuple[Request, ...] = (request,)
        self.cached_tokens = [0]
        self.versions = versions
        self.began = clock()
        self.alone = False  # computed for the cache, with or without readers
        self.attempts = 1
        self.resumed: UnfinishedAnswer | None = None
        self.end: Finished | None = None
        self.seconds = 0.0  # that it took, once it is over
        # Flat, as they grow with every token: Python's search for garbage walks over all tuples and events there are.
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
        """How soon it is computed; lower is sooner."""
        return rank(self.requests[0])

    @property
    def over(self) -> bool:
        """Whether its end has been heard."""
        return self.end is not None

    @property
    def deserted(self) -> bool:
        """Whether nobody reads it."""
        return not self._readers

    @property
    def each_step(self) -> bool:
        """Whether one of its readers wants to hear of every step."""
        return any(answer.each_step for answer, _ in self._readers)

    @property
    def followers(self) -> list[Request]:
        """The requests that read it and did not begin it."""
        own = self.ask.request
        return [answer.requests[i] for answer, i in self._readers if answer.requests[i] is not own]

    @property
    def tokens(self) -> tuple[int, ...]:
        """The answer so far."""
        return tuple(self._tokens)

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """The scores of the answer's tokens, where they were asked for."""
        return tuple(self._logprobs)

    @property
    def pulses(self) -> tuple[Pulse, ...]:
        """When how many of the tokens came."""
        return tuple(map(Pulse, self._pulse_seconds, self._pulse_tokens))

    def join(self, answer: Answer, index: int) -> None:
        """From now on ``answer`` hears all of it, what has been said included, about its sequence ``index``."""
        self._count_cached(answer, index)
        if answer.each_step and self._tokens:
            answer.tell(index, self._so_far())
        if self.end is None:
            self._readers.append((answer, index))
        else:
            self._tell_end(answer, index, self.end)

    def leave(self, answer: Answer, index: int) -> bool:
        """``answer`` hears nothing more about its sequence ``index``; whether it still did."""
        reads = (answer, index) in self._readers
        if reads:
            self._readers.remove((answer, index))
        return reads

    def when_over(self, call: Callable[[], None]) -> None:
        """Have ``call`` called when it is over, however it ends."""
        self._when_over.append(call)

    def resume(self, beginning: UnfinishedAnswer) -> None:
        """Begin where an earlier computation of the same answer ended; before anybody has joined."""
        request = self.requests[0]
        self.resumed = beginning
        self.requests = (replace(request, answered=beginning.tokens),)
        self.began -= beginning.seconds
        self._extend(Emitted(request.id, beginning.tokens))

    def restart(self) -> None:
        """Have a second attempt ready in ``requests``, which goes on where the first one ended."""
        again = replace(
            self.requests[0],
            id=f"{self.ask.request.id}~{self.attempts}",
            deadline=self.deadline(),
            answered=self.tokens,
        )
        self.attempts += 1
        self.requests = (again,)

    def deadline(self) -> float | None:
        """When the last of its readers gives up; None if one never does."""
        deadlines = [answer.requests[index].deadline for answer, index in self._readers]
        known = [deadline for deadline in deadlines if deadline is not None]
        return max(known) if len(known) == len(deadlines) and known else None

    def tell(self, index: int, event: Emitted | PromptScored | Finished) -> None:
        """Take what the engine says; the end comes once, whoever says it first."""
        if self.end is not None:
            return
        if type(event) is Finished:
            if event.reason in RETRYABLE:
                self._tell_first(event)
                if self._again(self):
                    return
            self._end(event)
        elif type(event) is Emitted:
            try:
                self._extend(event)
            except Exception:
                logger.exception("the text of %s could not be followed", self.requests[0].id)
                self._end(self._finished(FinishReason.FAILED))

    def _tell_first(self, finished: Finished) -> None:
        """Whoever began it hears how his attempt has ended, if he still reads."""
        for answer, index in tuple(self._readers):
            if answer.requests[index] is self.ask.request:
                self.leave(answer, index)
                answer.tell(index, finished)

    def _extend(self, event: Emitted) -> None:
        used, stopped = len(event.tokens), False
        if self._stops is not None:
            used, stopped = self._watch(self._stops, event.tokens)
            if used < len(event.tokens):
                event = Emitted(event.request_id, event.tokens[:used], event.logprobs[:used])
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

    def _watch(self, stops: TextStream, tokens: tuple[int, ...]) -> tuple[int, bool]:
        """How many of ``tokens`` belong to the answer, and whether a stop string ends it with them.

        A token that ends the answer by itself has no text in it, unless it was asked for.
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
        """Of the prompt, the first caller was spared what the engine says, the others all of it."""
        request = answer.requests[index]
        leads = request is self.ask.request
        answer.cached_tokens[index] = self.cached_tokens[0] if leads else len(request.tokens)

    def _tell_end(self, answer: Answer, index: int, finished: Finished) -> None:
        if not answer.each_step and self._tokens:
            self._whole = self._whole or self._so_far()  # one event for all who read it
            answer.tell(index, self._whole)
        answer.tell(index, finished)

    def _so_far(self) -> Emitted:
        return Emitted(self.requests[0].id, self.tokens, self.logprobs)

    def _end(self, finished: Finished) -> None:
        self.end = finished
        self.seconds = self._clock() - self.began
        self._ended(self, finished)
        for answer, index in self._readers:
            self._count_cached(answer, index)
            self._tell_end(answer, index, finished)
        self._readers = []
        calls = self._when_over
        self._when_over = []  # who waited may hold the flight: no circle is left behind
        for call in calls:
            call()


def rank(request: Request) -> tuple[int, int]:
    """How soon ``request`` is computed beside others, as far as that can be said; lower is sooner."""
    return _LEVELS.get(request.service_class, DEFAULT.level), request.priority


def _hidden_ends(request: Request) -> frozenset[int]:
    """Tokens that end the answer and whose text is not part of it."""
    params = request.params
    if params.include_stop_str_in_output:
        return frozenset()
    eos = frozenset[int]() if params.ignore_eos else request.eos_token_ids
    return eos.union(params.stop_token_ids)
