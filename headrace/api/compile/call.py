"""One API call in progress: its prompts, its sequences in the engine, and the choices that they become.

It is the same for all dialects, streamed or not. Their writers (for example `ChatWriter`) turn it into JSON.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from headrace.api.compile.model import ServedModel
from headrace.api.compile.policies import UNKNOWN, About, SessionOf
from headrace.api.errors import aborted, of_finish
from headrace.core.events import Emitted, Finished, PromptScored
from headrace.core.images import ImageSpan
from headrace.core.plan import TokenLogprob, new_tuple
from headrace.core.request import FinishReason, Request, Retention, SamplingParams
from headrace.response_cache.query import LookupRequest
from headrace.service.answer import Answer, IndexedEvent
from headrace.text.parsing.machine import Reading
from headrace.text.stream import AFTER_CALL, Texts, TextStream

COST_FIELDS = ("cost", "cost_details")


def usage(
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int,
    reasoning_tokens: int = 0,
    accepted_prediction_tokens: int = 0,
    rejected_prediction_tokens: int = 0,
    image_tokens: int = 0,
) -> dict[str, Any]:
    """The object ``usage``; a prompt counts once, whatever its number of choices. Tokens of images are among those of
    the prompt.
    """
    images = {"image_tokens": image_tokens} if image_tokens else {}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens} | images,
        "completion_tokens_details": {
            "reasoning_tokens": reasoning_tokens,
            "accepted_prediction_tokens": accepted_prediction_tokens,
            "rejected_prediction_tokens": rejected_prediction_tokens,
        },
    }


def cost_of(used: Mapping[str, Any]) -> dict[str, Any]:
    """The cost fields of a call's usage, for dialects with their own token fields; empty if they were not requested."""
    return {name: used[name] for name in COST_FIELDS if name in used}


class Delta(NamedTuple):
    """What was added to an output.

    ``texts`` and ``logprobs`` have one entry per token (``logprobs`` is empty unless requested);
    ``offset`` is where the first of ``texts`` begins in the output, in characters. ``text`` is what may be
    sent: it lags behind ``texts`` while a character is incomplete or a stop string may have begun.
    """

    text: str
    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    offset: int
    logprobs: tuple[TokenLogprob, ...]


NOTHING = Delta("", (), (), 0, ())


class Choice:
    """An entry of ``choices``. ``finish_reason`` is None while it grows.

    ``complete`` says whether a text satisfies the request's constraint. An output that the client's stop string or
    stop token cuts off before that has the finish reason ``length``.
    """

    __slots__ = (
        *("index", "request", "finish_reason", "stop_reason", "output_tokens", "total_logprob"),
        *("reasoning_tokens", "_plain", "_stream", "_mute", "_complete", "_texts", "_gained", "_stopped"),
    )

    def __init__(
        self,
        index: int,
        request: Request,
        stream: Texts,
        mute: bool = False,
        complete: Callable[[str], bool] | None = None,
    ) -> None:
        self.index = index
        self.request = request
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.output_tokens = 0
        self.total_logprob = 0.0
        self.reasoning_tokens = 0  # set by the writer that parses the text
        self._stream = stream
        self._mute = mute  # only the prompt's log-probabilities are wanted
        self._complete = complete
        self._plain = stream if isinstance(stream, TextStream) and not mute and complete is None else None
        self._texts: list[str] = []  # the text so far, if `complete` needs it
        self._gained: list[Delta] = []
        self._stopped = False

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability per generated token; ``best_of`` ranks by it."""
        return self.total_logprob / max(1, self.output_tokens)

    @property
    def plain(self) -> bool:
        """Whether its tokens only add their text: nothing looks for an end in it."""
        return self._plain is not None and self._plain.plain

    @property
    def stopped_by_text(self) -> bool:
        """Whether its text ended it; the end of its request is then ignored."""
        return self._stopped

    def take(self, events: Sequence[Emitted | PromptScored | Finished]) -> bool:
        """Apply the events of one or several whole steps; return whether a stop string has just ended the output.

        A stop token's text is hidden unless ``include_stop_str_in_output`` is set. The token and the `Finished`
        event that names it come from the same step, so ``events`` has both.
        """
        ended = events[-1] if type(events[-1]) is Finished else None
        if self.finish_reason is not None:
            return False  # a stop string ended it; tokens computed since are not part of the output
        if len(events) == 1 and type(events[0]) is Emitted:
            _, tokens, logprobs = events[0]
            if tokens and not logprobs and not self._mute:  # the common case
                self._show(tokens, ())
                return self.finish_reason is not None
        else:
            emitted = [event for event in events if type(event) is Emitted]
            tokens = tuple([token for event in emitted for token in event.tokens])
            logprobs = tuple([entry for event in emitted for entry in event.logprobs])
        stop_token = None
        if ended is not None and ended.reason is FinishReason.STOP and tokens:
            stop_token = ended.stop_token
        before = self.output_tokens
        if tokens and not self._mute:
            hidden = stop_token is not None and not self.request.params.include_stop_str_in_output
            self._show(tokens[:-1] if hidden else tokens, logprobs)
            self.output_tokens += hidden and self.finish_reason is None
        if logprobs:
            self.total_logprob += sum([entry.logprob for entry in logprobs[: self.output_tokens - before]])
        if self.finish_reason is not None:
            return ended is None
        if ended is not None:
            self._end(ended, stop_token)
        return False

    def plain_text(self, tokens: tuple[int, ...]) -> str:
        """Apply tokens of an output that is `plain`; return their text, which `gained` does not have."""
        self.output_tokens += len(tokens)
        assert self._plain is not None
        return self._plain.push_plain(tokens)

    def gained(self) -> Delta | None:
        """Everything added since the last call, as one delta; None if nothing was."""
        gained = self._gained
        if len(gained) == 1:
            return gained.pop()
        if not gained:
            return None
        self._gained = []
        return Delta(
            "".join([delta.text for delta in gained]),
            tuple([token for delta in gained for token in delta.tokens]),
            tuple([text for delta in gained for text in delta.texts]),
            gained[0].offset,
            tuple([entry for delta in gained for entry in delta.logprobs]),
        )

    def _show(self, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> None:
        text, stopped, texts, offset = self._stream.push(tokens)
        used = len(texts)
        self.output_tokens += used
        self._gained.append(new_tuple(Delta, (text, tokens[:used], texts, offset, logprobs[:used])))
        self._record(text)
        if stopped is not None:
            self._stop(stopped)

    def _end(self, ended: Finished, stop_token: int | None) -> None:
        text, stopped, _, offset = self._stream.finish()
        if text and not self._mute:
            self._gained.append(Delta(text, (), (), offset, ()))
            self._record(text)
        if stopped is not None:
            self._stop(stopped)
            return
        if ended.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return  # an error ends the call
        self.finish_reason = "length" if ended.reason is FinishReason.LENGTH or self._mute else "stop"
        if stop_token in self.request.params.stop_token_ids:
            self.finish_reason, self.stop_reason = self._stopped_by_client(), stop_token

    def _stop(self, stopped: str) -> None:
        """The text ended the output: with a stop string, or with the only call that is allowed."""
        self._stopped = True
        called = stopped == AFTER_CALL
        self.finish_reason = "stop" if called else self._stopped_by_client()
        self.stop_reason = None if called else stopped

    def _record(self, text: str) -> None:
        if self._complete is not None:
            self._texts.append(text)

    def _stopped_by_client(self) -> str:
        """The finish reason of an output that the client's stop string or stop token has ended."""
        return "stop" if self._complete is None or self._complete("".join(self._texts)) else "length"


logger = logging.getLogger(__name__)


class Answers(Protocol):
    """What answers calls: `response_cache.lookup.CacheLookup`, or `BackgroundRequests`, which only fills the caches."""

    def now(self) -> float: ...

    async def open(
        self, lookups: Sequence[LookupRequest], /, interval: int = 1, paced: bool = False
    ) -> Answer: ...

    def close(self, answer: Answer, why: FinishReason = FinishReason.CANCELLED) -> None: ...

    def stop_sequence(self, answer: Answer, index: int) -> None: ...


class Lookups(Answers, Protocol):
    """What answers the calls of clients: `response_cache.lookup.CacheLookup`, here or in the process that has it."""

    def expect(self) -> None:
        """Announce a call whose body is being read."""
        ...


class Prompt(NamedTuple):
    """A prompt, which one or several choices answer.

    ``continues``: the output continues the prompt's text, so the leading space of its first word counts. ``mute``: only
    the prompt's log-probabilities are wanted. ``echo``: the prompt's text, if it is returned before the output.
    ``retention``: parts of the computed prompt that are retained longer. ``prediction``: the output that the client
    expects. ``reading``: how reasoning and tool calls are parsed (None: plain text). ``about``: for its explanation.
    ``images`` fill some of its positions.
    """

    tokens: tuple[int, ...]
    params: SamplingParams
    continues: bool
    mute: bool = False
    echo: str = ""
    retention: tuple[Retention, ...] = ()
    reading: Reading | None = None
    prediction: tuple[int, ...] = ()
    about: About = UNKNOWN
    images: tuple[ImageSpan, ...] = ()

    @property
    def call_format(self) -> str:
        """The format of the tool call that ends the output if only one call is allowed; otherwise empty."""
        reading = self.reading
        return "" if reading is None or reading.tools is None or reading.parallel else reading.tools.name

    @property
    def ends_by_text(self) -> bool:
        """Whether text, such as a stop string, can end the output."""
        return bool(self.params.stop or self.call_format)


class Prompted(NamedTuple):
    """What a sequence that is looked up comes from, for `api`; ``first`` is the first sequence of its prompt."""

    prompt: Prompt
    session: SessionOf | None
    first: bool


class Call:
    """Made by `submit`; `advance` it until `done`, then `close` it, whatever happens.

    ``model_name`` is the model's or adapter's name in answers, ``seconds`` the time limit that a timeout error reports.
    """

    def __init__(
        self,
        id: str,
        model: ServedModel,
        model_name: str,
        prompts: Sequence[Prompt],
        choices: Sequence[Choice],
        answers: Answers,
        answer: Answer,
        seconds: float,
        stream: bool = False,
        shows_cost: bool = False,
    ) -> None:
        self.id = id
        self.stream = stream
        self.shows_cost = shows_cost
        self.created = int(time.time())
        self.model = model
        self.model_name = model_name
        self.prompts = tuple(prompts)
        self.choices = tuple(choices)
        self.choices_per_prompt = len(self.choices) // len(self.prompts)
        self.prompt_scores: list[dict[int, TokenLogprob]] = [{} for _ in prompts]
        self._answers = answers
        self._answer = answer
        self._seconds = seconds
        self._aborted = False

    @property
    def cache_note(self) -> str:
        """The value of the header `X-Headrace-Cache`; empty without response caches."""
        return self._answer.note

    @property
    def prompt_headers(self) -> tuple[tuple[str, str], ...]:
        """Response headers that say what was done to the prompt."""
        return self.prompts[0].about.headers

    @property
    def first_token_at(self) -> float | None:
        """When the first token arrived, on the monotonic clock; None before."""
        return self._answer.first_token_at

    @property
    def finish_reasons(self) -> list[str]:
        """The finish reasons of the choices that have ended."""
        return [choice.finish_reason for choice in self.choices if choice.finish_reason is not None]

    @property
    def answer(self) -> Answer:
        """Its events."""
        return self._answer

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The ids of its sequences in the engine."""
        return tuple(choice.request.id for choice in self.choices)

    @property
    def tenant(self) -> str:
        """The tenant that the call is accounted to."""
        return self.choices[0].request.tenant

    @property
    def service_class(self) -> str:
        """The service class that it runs in."""
        return self.choices[0].request.service_class

    @property
    def settled(self) -> bool:
        """Whether every event of the call has arrived, read or not."""
        return self._answer.settled

    @property
    def done(self) -> bool:
        """Whether every event of the call has been read."""
        return self._answer.exhausted

    async def due(self) -> None:
        """Wait until `advance` returns at once."""
        await self._answer.due()

    async def advance(self) -> list[Choice]:
        """Wait for events and apply them; return the choices that changed.

        Raises:
            ApiError: a sequence ended with an error; the call is over.
        """
        await self._answer.due()
        return self.take()

    def take(self) -> list[Choice]:
        """Apply the events that have arrived; return the choices that changed. Errors as `advance`."""
        return self.apply(self._answer.take())

    def apply(self, received: Sequence[IndexedEvent]) -> list[Choice]:
        """Apply events that were taken from `answer`; return the choices that changed. Errors as `advance`."""
        if len(received) == 1:
            ((index, event),) = received
            return [self._apply(index, (event,))]
        by_choice: dict[int, list[Emitted | PromptScored | Finished]] = {}
        for index, event in received:
            by_choice.setdefault(index, []).append(event)
        return [self._apply(index, events) for index, events in by_choice.items()]

    def _apply(self, index: int, events: Sequence[Emitted | PromptScored | Finished]) -> Choice:
        choice = self.choices[index]
        if choice.take(events):
            self._answers.stop_sequence(self._answer, index)
        for event in events:
            if type(event) is Emitted:
                continue
            if type(event) is PromptScored:
                self._score_prompt(choice, event)
            elif type(event) is Finished:
                self._check(choice, event)
        return choice

    def close(self, why: FinishReason = FinishReason.CANCELLED) -> None:
        """Cancel the sequences that have not ended; without any, do nothing."""
        self._answers.close(self._answer, why)

    def abort(self) -> None:
        """Cancel the sequences that have not ended; `advance` then raises the error `aborted`."""
        self._aborted = True
        self.close()

    def usage(self) -> dict[str, Any]:
        """What the call has used so far, with its cost if the client asked for it."""
        return {**self.tokens(), **self.cost()} if self.shows_cost else self.tokens()

    def tokens(self) -> dict[str, Any]:
        """The tokens of the call so far, in the form of ``usage``. It only reads, so any thread may call it."""
        return usage(
            sum(len(prompt.tokens) for prompt in self.prompts),
            sum(choice.output_tokens for choice in self.choices),
            sum(self._answer.cached_tokens[:: self.choices_per_prompt]),
            sum(choice.reasoning_tokens for choice in self.choices),
            sum(predicted.accepted for predicted in self._answer.predicted),
            sum(predicted.rejected for predicted in self._answer.predicted),
            sum(span.length for prompt in self.prompts for span in prompt.images),
        )

    def cost(self) -> Mapping[str, Any]:
        """``cost`` and ``cost_details`` of the call so far; empty if the server has no prices."""
        price = self.model.cost
        return {} if price is None else price(choice.request.id for choice in self.choices)

    def prompt_of(self, choice: Choice) -> int:
        """The number of the prompt that a choice answers."""
        return choice.index // self.choices_per_prompt

    def _score_prompt(self, choice: Choice, event: PromptScored) -> None:
        scores = self.prompt_scores[self.prompt_of(choice)]
        for at, entry in enumerate(event.logprobs, event.start + 1):
            scores[at] = entry

    def _check(self, choice: Choice, finished: Finished) -> None:
        if finished.reason is FinishReason.FAILED:
            logger.error("request %s failed: %s", finished.request_id, finished.message)
        error = of_finish(finished, self._seconds, own_deadline=choice.request.deadline is not None)
        if self._aborted and finished.reason is FinishReason.CANCELLED:
            error = aborted()
        if error is not None and not choice.stopped_by_text:
            raise error
