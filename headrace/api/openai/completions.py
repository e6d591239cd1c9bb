"""``POST /v1/completions``: continues prompts as text, and writes the response in OpenAI's format."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import accumulate
from typing import Any

from headrace.api import structured
from headrace.api.errors import invalid
from headrace.api.generation.call import Answers, Call, Prompt, open_call
from headrace.api.generation.caller import Caller
from headrace.api.generation.choices import NOTHING, Choice, Delta
from headrace.api.generation.logprobs import completion_logprobs, prompt_entries, prompt_logprobs
from headrace.api.generation.sampling import (
    answer_length,
    check_length,
    check_stream,
    sampling_params,
    truncated,
)
from headrace.api.generation.writing import Writer, encode, encode_text
from headrace.api.model import INLINE_CHARACTERS, ServedModel
from headrace.api.openai.completions_wire import MAX_PROMPTS, CompletionBody
from headrace.core.plan import TokenLogprob
from headrace.core.request import SamplingParams

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this endpoint."""


async def open_completion(
    recall: Answers, model: ServedModel, body: CompletionBody, caller: Caller, request_timeout: float
) -> Call:
    """Tokenize and submit prompts.

    ``max_tokens`` 0 with ``echo`` asks only for the prompt's log-probabilities: one token is generated, not returned.

    Raises:
        ApiError: the request is invalid, or the server rejects it.
    """
    check_stream(body)
    _check_together(body)
    mute = bool(body.echo) and body.max_tokens == 0
    asked = 1 if mute else body.max_tokens
    params = _params(model, body)
    await structured.check(model, params, body)
    prompts, pieces = [], model.intake.pieces()
    for given, full in zip(body.prompts(), await _tokens(model, body), strict=True):
        tokens = truncated(full, body, model, DEFAULT_MAX_TOKENS if asked is None else asked)
        await pieces.turn()
        length = answer_length(
            len(tokens),
            asked,
            DEFAULT_MAX_TOKENS,
            "max_tokens",
            model.max_model_len,
            model.defaults.most_tokens,
        )
        echo = ""
        if body.echo:
            whole = isinstance(given, str) and len(tokens) == len(full)
            echo = str(given) if whole else model.tokenizer.decode(tokens)
        its_params = replace(params, max_tokens=length)
        prompts.append(Prompt(tuple(tokens), its_params, continues=True, mute=mute, echo=echo))
    return await open_call(
        recall,
        model,
        body,
        prompts,
        caller,
        id_prefix="cmpl-",
        choices_per_prompt=_candidates(body),
        request_timeout=request_timeout,
    )


class CompletionWriter(Writer):
    """Writes a call as a ``text_completion`` or its chunks."""

    object = "text_completion"
    chunk_object = "text_completion"

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
                inner += f',"prompt_token_ids":{encode(self._call.prompts[prompt].tokens)}'
            events.append(self._event(choice, inner))
        return b"".join(events)

    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        scores = "null" if self._logprobs is None else encode(self._scores(choice, delta))
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
        return completion_logprobs(model, [*entries, *delta.logprobs], offsets, top)


async def _tokens(model: ServedModel, body: CompletionBody) -> list[list[int]]:
    """The tokens of each prompt; the prompts are either all text or all token ids."""
    if body.suffix:
        return await _infilled(model, body, body.suffix)
    prompts = body.prompts()
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    for text in texts:
        check_length(text, body, model)
    if texts:
        return await model.encode_batch(texts, body.add_special_tokens is not False)
    given = [prompt for prompt in prompts if not isinstance(prompt, str)]
    pieces = model.intake.pieces()
    for tokens in given:
        model.check_tokens(tokens, "prompt")
        await pieces.turn()
    return given


async def _infilled(model: ServedModel, body: CompletionBody, suffix: str) -> list[list[int]]:
    """The tokens that ask for the text between each prompt and ``suffix``.

    Raises:
        ApiError: the tokenizer has no tokens for fill-in-the-middle, or another field contradicts ``suffix``.
    """
    if model.infill is None:
        message = "suffix: the tokenizer of this model has no tokens for fill-in-the-middle"
        raise invalid(message, "suffix", "unsupported_parameter")
    if body.echo:
        raise invalid("echo and suffix cannot be used together", "suffix")
    if body.truncate_prompt_tokens is not None:
        raise invalid("truncate_prompt_tokens and suffix cannot be used together", "suffix")
    prompts, special = body.prompts(), body.add_special_tokens is not False
    for prompt in prompts:
        if not isinstance(prompt, str):
            model.check_tokens(prompt, "prompt")
    make = model.infill.prompt
    if len(suffix) + sum(map(len, prompts)) <= INLINE_CHARACTERS:
        return [make(prompt, suffix, special) for prompt in prompts]
    return await asyncio.to_thread(lambda: [make(prompt, suffix, special) for prompt in prompts])


def _params(model: ServedModel, body: CompletionBody) -> SamplingParams:
    """The sampling parameters of every output, except its length.

    ``best_of`` ranks by log-probabilities, so they are computed even if the client did not ask for them. ``echo`` with
    ``logprobs`` asks for the prompt's too.
    """
    logprobs = body.logprobs
    if logprobs is None and _candidates(body) > (body.n or 1):
        logprobs = 0
    if body.echo and body.logprobs is not None:
        most = max(body.logprobs, body.prompt_logprobs or 0)
        body = body.model_copy(update={"prompt_logprobs": most})
    if body.suffix and model.infill is not None:
        ends = dict.fromkeys((*(body.stop_token_ids or ()), *model.infill.ends))
        body = body.model_copy(update={"stop_token_ids": list(ends)})
    return sampling_params(body, model, max_tokens=None, logprobs=logprobs)


def _candidates(body: CompletionBody) -> int:
    """Outputs generated per prompt, of which the best ``n`` are returned."""
    return max(body.n or 1, body.best_of or 1)


def _check_together(body: CompletionBody) -> None:
    n = body.n or 1
    if body.best_of is not None and body.best_of < n:
        raise invalid(f"best_of ({body.best_of}) must be at least n ({n})", "best_of")
    sequences = len(body.prompts()) * _candidates(body)
    if sequences > MAX_PROMPTS:
        param = "n" if n == _candidates(body) else "best_of"
        raise invalid(f"prompts times {param} must be at most {MAX_PROMPTS}, got {sequences}", param)
    if body.stream and _candidates(body) > n:
        raise invalid("best_of cannot be streamed: the best is known only at the end", "best_of")
    if body.stream and body.echo and body.logprobs is not None:
        raise invalid("logprobs of an echoed prompt cannot be streamed", "echo")
