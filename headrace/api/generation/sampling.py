"""Request fields to `SamplingParams`: fills in defaults and checks token ids against the vocabulary.

`SamplingParams` checks ranges; its `InvalidParameter` names the field and becomes a 400.
"""

from __future__ import annotations

from typing import TypeVar

from headrace.api.compile.fields import Generation
from headrace.api.compile.model import ServedModel
from headrace.api.errors import context_length_exceeded, invalid, prompt_too_long, text_too_long
from headrace.api.structured import constraint
from headrace.core.request import SamplingParams

UNLIMITED = -1
"""As ``max_tokens``: all that the context leaves after the prompt."""


def sampling_params(
    body: Generation, model: ServedModel, *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """How to sample one output; each endpoint has its own fields for ``max_tokens`` and ``logprobs``.

    Raises:
        ApiError: a token id does not exist, or the constraint is invalid.
        InvalidParameter: a value is outside its range.
    """
    allowed = None if body.allowed_token_ids is None else tuple(dict.fromkeys(body.allowed_token_ids))
    biases = tuple((int(token), bias) for token, bias in (body.logit_bias or {}).items())
    stop_token_ids = tuple(body.stop_token_ids or ())
    model.check_tokens(stop_token_ids, "stop_token_ids")
    model.check_tokens(allowed or (), "allowed_token_ids")
    model.check_tokens([token for token, _ in biases], "logit_bias")
    ends = {*stop_token_ids, *(() if body.ignore_eos else model.tokenizer.eos_token_ids)}
    if allowed and body.min_tokens and ends.issuperset(allowed):
        message = (
            "allowed_token_ids leaves nothing to choose from before min_tokens: each of them ends the answer"
        )
        raise invalid(message, "allowed_token_ids")
    defaults = model.defaults.params
    return SamplingParams(
        temperature=_or(body.temperature, defaults.temperature),
        top_p=_or(body.top_p, defaults.top_p),
        top_k=min(_or(body.top_k, defaults.top_k), model.vocab_size),  # beyond it, no bound
        min_p=_or(body.min_p, defaults.min_p),
        seed=body.seed,
        repetition_penalty=_or(body.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        logit_bias=biases,
        allowed_token_ids=allowed,
        bad_words=_bad_words(body.bad_words or [], model),
        max_tokens=max_tokens,
        min_tokens=_or(body.min_tokens, 0),
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stop_token_ids=stop_token_ids,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        skip_special_tokens=body.skip_special_tokens is not False,
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        structured_outputs=constraint(body),
    )


def check_stream(body: Generation) -> None:
    """Raise `ApiError` 400 if fields contradict each other about streaming."""
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options needs stream to be true", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs cannot be streamed", "prompt_logprobs")
    asked = body.kv_transfer_params
    if asked is not None and asked.do_remote_decode and body.stream:
        raise invalid("kv_transfer_params.do_remote_decode cannot be streamed", "kv_transfer_params")


def check_length(text: str, body: Generation, model: ServedModel, *, shorten: bool = False) -> None:
    """Raise `ApiError` 400 for a text that cannot fit into the context; only its tokens show that others do not.

    ``shorten``: in the words that Anthropic's clients look for.
    """
    fewest, limit = model.tokenizer.fewest(text), model.max_model_len
    if fewest > limit and body.truncate_prompt_tokens is None:
        raise prompt_too_long(fewest, limit) if shorten else text_too_long(fewest, limit)


def truncated(tokens: list[int], body: Generation, model: ServedModel, answer: int) -> list[int]:
    """The last ``truncate_prompt_tokens`` tokens of a prompt; -1: as many as leave room for ``answer`` tokens."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return tokens
    if keep == 0:
        raise invalid("truncate_prompt_tokens must be at least 1, or -1", "truncate_prompt_tokens")
    return tokens[-(max(1, model.max_model_len - max(1, answer)) if keep == -1 else keep) :]


def answer_length(
    prompt: int, asked: int | None, default: int | None, param: str, limit: int, most: int | None = None
) -> int:
    """The maximum output tokens for a prompt of ``prompt`` tokens.

    ``asked`` is the value of the field ``param``; if it is None, ``default`` applies. `UNLIMITED`, and a ``default`` of
    None, mean all that the context leaves. The result is at most ``most``, if that is given.

    Raises:
        ApiError: prompt and output together exceed ``limit``.
    """
    room = limit - prompt
    if asked is None or asked == UNLIMITED:
        if room < 1:
            raise context_length_exceeded(prompt, 1, limit, None)
        length = room if default is None or asked == UNLIMITED else min(default, room)
        return length if most is None else min(length, most)
    if asked < 1:
        raise invalid(
            f"{param} must be at least 1, or -1 for all that the context leaves, got {asked}", param
        )
    if asked > room:
        raise context_length_exceeded(prompt, asked, limit, param)
    return asked if most is None else min(asked, most)


def room_for_answer(prompt: int, limit: int) -> int:
    """The tokens that the context leaves for the output of a prompt of ``prompt`` tokens.

    Raises:
        ApiError: it leaves none.
    """
    if prompt >= limit:
        raise prompt_too_long(prompt, limit)
    return limit - prompt


ValueT = TypeVar("ValueT", int, float)


def _or(value: ValueT | None, default: ValueT) -> ValueT:
    return default if value is None else value


def _bad_words(words: list[str], model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word, at the beginning of a text and after a space."""
    tokenized: dict[tuple[int, ...], None] = {}
    for word in words:
        if not word.strip():
            raise invalid("bad_words must not contain an empty word", "bad_words")
        for text in (word, " " + word.lstrip()):
            tokenized[tuple(model.tokenizer.encode(text, add_special_tokens=False))] = None
    return tuple(tokenized)
