"""``POST /v1/completions``: continues prompts as text, and writes the response in OpenAI's format."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from headrace.api.caller import Caller
from headrace.api.compile.bodies import MAX_PROMPTS, CompletionBody
from headrace.api.compile.call import Answers, Call, Prompt
from headrace.api.compile.model import INLINE_CHARACTERS, ServedModel
from headrace.api.compile.submit import open_call
from headrace.api.errors import invalid
from headrace.api.generation.sampling import (
    answer_length,
    check_length,
    check_stream,
    sampling_params,
    truncated,
)
from headrace.api.structured import check_constraint
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
    await check_constraint(model, params, body)
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
