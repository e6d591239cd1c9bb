"""One completion in progress: collects tokens, converts them to text, and searches for stop strings."""

from __future__ import annotations

from headrace.core.events import Emitted, Finished, PromptScored
from headrace.core.ports import Grammars
from headrace.core.request import FinishReason, Request
from headrace.llm.outputs import CompletionDelta, RequestOutput
from headrace.text.stream import TextStream, TextStreams


class PendingAnswer:
    """The completion of one request, which is written into its `RequestOutput` as it grows.

    Text is made at every step if it is ``streamed`` or if there are stop strings, otherwise at the end.
    ``continues``: the completion continues the prompt's text instead of beginning a new one.
    """

    def __init__(
        self,
        request: Request,
        output: RequestOutput,
        place: tuple[int, int],
        streams: TextStreams,
        grammars: Grammars,
        *,
        continues: bool,
        streamed: bool,
    ) -> None:
        params = request.params
        self.request = request
        self.output = output
        self._grammars = grammars
        self._prompt_index, self._index = place
        self._first = self._index == 0
        self._answer = output.outputs[self._index]
        self._watch = streamed or bool(params.stop)
        self._params = params
        ends = frozenset[int]() if params.ignore_eos else request.eos_token_ids
        self._ends = ends.union(params.stop_token_ids)
        self._stream: TextStream = streams.open(
            prompt=request.tokens if continues else (),
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )
        self._shown_text = 0  # characters (and below, tokens and logprobs) in earlier deltas
        self._shown_tokens = 0
        self._shown_logprobs = 0

    def emit(self, event: Emitted, now: float) -> bool:
        """Add tokens; return whether a stop string has just ended the completion."""
        answer = self._answer
        if answer.stop_reason is not None:
            return False  # sampled before the engine knew of the stop string
        used = len(event.tokens)
        if self._watch:
            delta = self._stream.push(self._visible(list(event.tokens)))
            answer.text += delta.text
            answer.stop_reason = delta.stopped
            if delta.stopped is not None:  # later tokens of the same step are not part of the completion
                used = len(delta.texts)
        answer.token_ids += event.tokens[:used]
        answer.logprobs += event.logprobs[:used]
        if self._first:
            self.output.metrics.token_times += [now] * used
        return answer.stop_reason is not None

    def score(self, event: PromptScored) -> None:
        """Add log-probabilities of the prompt."""
        self.output.prompt_logprobs += event.logprobs if self._first else ()

    def admit(self, cached_tokens: int, now: float) -> None:
        """Record that the request has started to run for the first time."""
        metrics = self.output.metrics
        if self._first and not metrics.admitted:
            metrics.admitted = now
            metrics.cached_tokens = cached_tokens

    def finish(self, event: Finished, now: float) -> None:
        """Close the completion."""
        answer = self._answer
        if event.reason in (FinishReason.REJECTED, FinishReason.FAILED, FinishReason.TIMEOUT):
            answer.error = event.message or str(event.reason)
        stopped_by_string = answer.stop_reason is not None
        answer.finish_reason = str(FinishReason.STOP if stopped_by_string else event.reason)
        if not stopped_by_string:
            if not self._watch:
                answer.text = self._stream.push(self._visible(answer.token_ids)).text
            answer.text += self._stream.finish().text
            if event.stop_token in self._params.stop_token_ids:
                answer.stop_reason = event.stop_token
        constraint = self._params.structured_outputs
        if (
            constraint is not None and answer.stop_reason is not None
        ):  # ended by the request's own stop string or token
            whole = self._grammars.is_complete(constraint, answer.text)
            answer.finish_reason = str(FinishReason.STOP if whole else FinishReason.LENGTH)
        if self._first:
            self.output.metrics.finished = now

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the completion so far."""
        return len(self._answer.token_ids)

    def delta(self) -> CompletionDelta:
        """The delta since the last call."""
        answer = self._answer
        delta = CompletionDelta(
            self._prompt_index,
            self._index,
            answer.text[self._shown_text :],
            tuple(answer.token_ids[self._shown_tokens :]),
            tuple(answer.logprobs[self._shown_logprobs :]),
            answer.finish_reason,
            self.output,
        )
        self._shown_text = len(answer.text)
        self._shown_tokens = len(answer.token_ids)
        self._shown_logprobs = len(answer.logprobs)
        return delta

    def _visible(self, tokens: list[int]) -> list[int]:
        """The tokens without a final stop token, unless ``include_stop_str_in_output`` is set."""
        hidden = tokens[-1:] and tokens[-1] in self._ends
        return tokens[:-1] if hidden and not self._params.include_stop_str_in_output else tokens
