"""Writes calls in OpenAI's format: chat and text completions, whole or as server-sent events.

A stream writes a chunk per step and request, thousands of times a second. So the constant parts are encoded once per
choice, and a chunk only joins byte strings.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from itertools import accumulate
from typing import Any, ClassVar

from headrace.api.compile.bodies import ChatBody, CompletionBody
from headrace.api.compile.call import NOTHING, Call, Choice, Delta
from headrace.api.compile.fields import Generation
from headrace.api.errors import ApiError
from headrace.api.logprobs import chat_logprobs, completion_logprobs, prompt_entries, prompt_logprobs
from headrace.api.replies import DONE, encode, encode_lines, encode_text, error_event, written
from headrace.core.plan import TokenLogprob
from headrace.text.parsing.machine import MessagePiece


@cache
def _joined(*parts: bytes) -> bytes:
    """These bytes as one object for all streams, which stays in the processor's caches."""
    return b"".join(parts)


class Writer(ABC):
    """Writes one call in the form of chat and completions, whole or as a stream of server-sent events."""

    object: ClassVar[str]
    chunk_object: ClassVar[str]
    text_chunk: ClassVar[tuple[bytes, bytes]]
    """What is before and behind the text in a chunk that has nothing else."""

    def __init__(self, call: Call, body: Generation) -> None:
        self._call = call
        self._token_ids = bool(body.return_token_ids)
        self._by_id = bool(body.return_tokens_as_token_ids)
        self._asked = body.kv_transfer_params
        options = body.stream_options
        self._include_usage = options is not None and options.include_usage
        self._continuous_usage = (
            self._include_usage and options is not None and options.continuous_usage_stats
        )
        self._tail = b"]}\n\n" if not self._include_usage else b'],"usage":null}\n\n'
        self._head: dict[str, Any] = {
            "id": call.id,
            "object": self.object,
            "created": call.created,
            "model": call.model_name,
            "system_fingerprint": call.model.fingerprint,
        }
        if body.service_tier is not None:
            self._head["service_tier"] = call.service_class
        self._stream_head = encode(self._head | {"object": self.chunk_object})[:-1]
        self._choice_heads = [
            f'data: {self._stream_head},"choices":[{{"index":{choice.index},'.encode()
            for choice in call.choices
        ]

    @property
    @abstractmethod
    def writes_tokens(self) -> bool:
        """Whether a step is written even if it adds no text."""

    def around_text(self, choice: Choice) -> tuple[bytes, bytes] | None:
        """What is before and behind the JSON string of a text in each `chunk`; None if a chunk has more than a text."""
        if self.writes_tokens or self._continuous_usage:
            return None
        before, after = self.text_chunk
        return self._choice_heads[choice.index] + before, _joined(after, b"}", self._tail)

    @abstractmethod
    def opening(self) -> bytes:
        """The beginning of a stream."""

    @abstractmethod
    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        """What a step adds to a choice."""

    @abstractmethod
    def ending(self, choice: Choice) -> bytes:
        """The chunk with a choice's finish reason."""

    @abstractmethod
    def choices(self) -> list[dict[str, Any]]:
        """The ``choices`` of a whole response, once all have ended."""

    def closing(self) -> bytes:
        """The chunk with the usage of the whole call, if it was requested, and the end of the stream."""
        usage = b""
        if self._include_usage:
            usage = (
                f'data: {self._stream_head},"choices":[],"usage":{encode(self._call.usage())}}}\n\n'.encode()
            )
        return usage + DONE

    def failure(self, error: ApiError) -> bytes:
        """An error after the first byte, and the end of the stream."""
        return error_event(error.body())

    def whole(self) -> bytes:
        """The whole answer."""
        return written(self._head | {"choices": self.choices(), "usage": self._call.usage()} | self._extra())

    def _extra(self) -> dict[str, Any]:
        """Further fields of a whole response."""
        return self._call.model.sharing.answer(self._asked)

    def _event(self, choice: Choice, inner: str) -> bytes:
        """The chunk of one choice, whose object ends with ``inner``."""
        tail = self._tail
        if self._continuous_usage:
            tail = f'],"usage":{encode(self._call.usage())}}}\n\n'.encode()
        return b"".join((self._choice_heads[choice.index], inner.encode(), b"}", tail))


class ChatWriter(Writer):
    """Writes a call as a ``chat.completion`` or its chunks."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    text_chunk = b'"delta":{"content":', b'},"logprobs":null,"finish_reason":null'

    def __init__(self, call: Call, body: ChatBody) -> None:
        super().__init__(call, body)
        self._top = body.alternatives
        self._prompt_top = body.prompt_logprobs
        reading = call.prompts[0].reading
        self._forced = reading is not None and reading.forced
        self._readers = [] if reading is None else [reading.open() for _ in call.choices]

    @property
    def writes_tokens(self) -> bool:
        return self._top is not None or self._token_ids or bool(self._readers)

    def opening(self) -> bytes:
        inner = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        if self._token_ids:
            inner += f',"prompt_token_ids":{encode_lines(self._call.prompts[0].tokens)}'
        return b"".join([self._event(choice, inner) for choice in self._call.choices])

    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        scores = (
            "null"
            if self._top is None
            else encode_lines(chat_logprobs(self._call.model, delta.logprobs, self._top, self._by_id))
        )
        if self._readers:
            piece = self._read(choice, delta)
            if not piece and self._top is None and not self._token_ids:
                return b""
            message = encode_lines(delta_of(piece))
        else:
            message = f'{{"content":{encode_text(delta.text)}}}'
        inner = f'"delta":{message},"logprobs":{scores},"finish_reason":null'
        if self._token_ids:
            inner += f',"token_ids":{encode(delta.tokens)}'
        return self._event(choice, inner)

    def ending(self, choice: Choice) -> bytes:
        rest = self._readers[choice.index].finish() if self._readers else None
        held = b""
        if rest:
            held = self._event(
                choice, f'"delta":{encode_lines(delta_of(rest))},"logprobs":null,"finish_reason":null'
            )
        return held + self._event(
            choice,
            f'"delta":{{}},"logprobs":null,"finish_reason":"{self._finish_reason(choice)}",'
            f'"stop_reason":{encode(choice.stop_reason)}',
        )

    def _read(self, choice: Choice, delta: Delta) -> MessagePiece:
        """What ``delta`` adds to the message, once reasoning and tool calls are parsed."""
        reader = self._readers[choice.index]
        piece = reader.push(delta.text, delta.texts)
        choice.reasoning_tokens = reader.reasoning_tokens
        return piece

    def _finish_reason(self, choice: Choice) -> str | None:
        called = bool(self._readers) and self._readers[choice.index].calls > 0
        return "tool_calls" if called and choice.finish_reason == "stop" else choice.finish_reason

    def choices(self) -> list[dict[str, Any]]:
        shown = []
        for choice in self._call.choices:
            delta = choice.gained() or NOTHING
            scores = (
                None
                if self._top is None
                else chat_logprobs(self._call.model, delta.logprobs, self._top, self._by_id)
            )
            message: dict[str, Any] = {"role": "assistant", "content": delta.text, "refusal": None}
            if self._readers:
                piece = self._read(choice, delta)
                message = message_of([piece, self._readers[choice.index].finish()], self._forced)
            shown.append(
                {
                    "index": choice.index,
                    "message": message,
                    "logprobs": scores,
                    "finish_reason": self._finish_reason(choice),
                    "stop_reason": choice.stop_reason,
                }
                | ({"token_ids": delta.tokens} if self._token_ids else {})
            )
        return shown

    def _extra(self) -> dict[str, Any]:
        prompt = self._call.prompts[0]
        extra = super()._extra() | ({"prompt_token_ids": prompt.tokens} if self._token_ids else {})
        if self._prompt_top is not None:
            entries = prompt_entries(prompt.tokens, self._call.prompt_scores[0])
            extra["prompt_logprobs"] = prompt_logprobs(self._call.model, entries, self._prompt_top)
        return extra


def delta_of(piece: MessagePiece) -> dict[str, Any]:
    """The ``delta`` of a chunk. Reasoning has both field names that OpenAI-compatible servers use."""
    delta: dict[str, Any] = {}
    if piece.reasoning:
        delta |= {"reasoning_content": piece.reasoning, "reasoning": piece.reasoning}
    if piece.content:
        delta["content"] = piece.content
    if piece.calls:
        delta["tool_calls"] = [
            {"index": call.index, "function": {"arguments": call.arguments}}
            if call.name is None
            else {
                "index": call.index,
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in piece.calls
        ]
    return delta


def message_of(pieces: list[MessagePiece], forced: bool = False) -> dict[str, Any]:
    """The ``message`` of a whole response; ``forced``: it has calls, or was cut off before the first."""
    content = "".join([piece.content for piece in pieces])
    reasoning = "".join([piece.reasoning for piece in pieces])
    calls: list[dict[str, Any]] = []
    for call in (call for piece in pieces for call in piece.calls):
        if call.name is not None:
            calls.append(
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
            )
        calls[-1]["function"]["arguments"] += call.arguments
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message |= {"reasoning_content": reasoning, "reasoning": reasoning}
    if calls:
        message["tool_calls"] = calls
    if not content and (reasoning or calls or forced):
        message["content"] = None
    return message


class CompletionWriter(Writer):
    """Writes a call as a ``text_completion`` or its chunks."""

    object = "text_completion"
    chunk_object = "text_completion"
    text_chunk = b'"text":', b',"logprobs":null,"finish_reason":null'

    def __init__(self, call: Call, body: CompletionBody) -> None:
        super().__init__(call, body)
        self._n = body.n or 1
        self._echo = bool(body.echo)
        self._logprobs = body.logprobs
        self._prompt_top = body.prompt_logprobs

    @property
    def writes_tokens(self) -> bool:
        return self._logprobs is not None or self._token_ids

    def opening(self) -> bytes:
        events = []
        for choice in self._call.choices if self._echo or self._token_ids else ():
            prompt = self._call.prompt_of(choice)
            text = self._call.prompts[prompt].echo
            inner = f'"text":{encode_text(text)},"logprobs":null,"finish_reason":null'
            if self._token_ids:
                inner += f',"prompt_token_ids":{encode_lines(self._call.prompts[prompt].tokens)}'
            events.append(self._event(choice, inner))
        return b"".join(events)

    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        scores = "null" if self._logprobs is None else encode_lines(self._scores(choice, delta))
        inner = f'"text":{encode_text(delta.text)},"logprobs":{scores},"finish_reason":null'
        if self._token_ids:
            inner += f',"token_ids":{encode(delta.tokens)}'
        return self._event(choice, inner)

    def ending(self, choice: Choice) -> bytes:
        return self._event(
            choice,
            f'"text":"","logprobs":null,"finish_reason":"{choice.finish_reason}",'
            f'"stop_reason":{encode(choice.stop_reason)}',
        )

    def choices(self) -> list[dict[str, Any]]:
        of_each = self._call.choices_per_prompt
        shown: list[dict[str, Any]] = []
        for first in range(0, len(self._call.choices), of_each):
            candidates = self._call.choices[first : first + of_each]
            if of_each > self._n:
                candidates = tuple(sorted(candidates, key=lambda c: c.mean_logprob, reverse=True)[: self._n])
            for choice in candidates:
                shown.append({"index": len(shown)} | self._choice(choice))
        return shown

    def _choice(self, choice: Choice) -> dict[str, Any]:
        number = self._call.prompt_of(choice)
        prompt = self._call.prompts[number]
        delta = choice.gained() or NOTHING
        shown: dict[str, Any] = {
            "text": prompt.echo + delta.text,
            "logprobs": None if self._logprobs is None else self._scores(choice, delta),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._prompt_top is not None:
            entries = prompt_entries(prompt.tokens, self._call.prompt_scores[number])
            shown["prompt_logprobs"] = prompt_logprobs(self._call.model, entries, self._prompt_top)
        if self._token_ids:
            shown |= {"prompt_token_ids": prompt.tokens, "token_ids": delta.tokens}
        return shown

    def _scores(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """The tokens' log-probabilities; with ``echo``, the prompt's tokens come first."""
        model, top = self._call.model, self._logprobs or 0
        entries: list[TokenLogprob] = []
        offsets: list[int] = []
        begin = delta.offset
        if self._echo:
            number = self._call.prompt_of(choice)
            entries = prompt_entries(self._call.prompts[number].tokens, self._call.prompt_scores[number])
            # Decoded together: the first token loses its space mark, and byte tokens join into characters.
            texts = model.streams.open().push([entry.token for entry in entries]).texts
            offsets = list(accumulate(map(len, texts), initial=0))[:-1]
            begin += len(self._call.prompts[number].echo)
        offsets += list(accumulate(map(len, delta.texts), initial=begin))[: len(delta.logprobs)]
        return completion_logprobs(model, [*entries, *delta.logprobs], offsets, top, self._by_id)
