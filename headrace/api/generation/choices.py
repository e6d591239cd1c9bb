"""The output of one sequence while it grows: converts tokens to text, and ends it at a stop string.

It uses the events of one request and its text stream, no JSON and no sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from headrace.core.events import Emitted, Finished, PromptScored
from headrace.core.plan import TokenLogprob
from headrace.core.request import FinishReason, Request
from headrace.text.stream import AFTER_CALL, Texts


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
        self._texts: list[str] = []  # the text so far, if `complete` needs it
        self._gained: list[Delta] = []
        self._stopped = False

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability per generated token; ``best_of`` ranks by it."""
        return self.total_logprob / max(1, self.output_tokens)

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

    def gained(self) -> Delta | None:
        """Everything added since the last call, as one delta; None if nothing was."""
        gained, self._gained = self._gained, []
        if len(gained) <= 1:
            return gained[0] if gained else None
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
        self._gained.append(Delta(text, tokens[:used], texts, offset, logprobs[:used]))
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
