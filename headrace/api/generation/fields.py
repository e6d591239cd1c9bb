"""The request fields that chat and completions share (OpenAI's, then vLLM's).

Ranges of sampling parameters are not repeated here: `core.request.SamplingParams` checks them. Fields that are not
supported yet are in `unsupported`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SkipValidation

from headrace.api.cache.wire import CacheDirectiveFields
from headrace.api.generation.kv_fields import KVTransferParams
from headrace.api.generation.scheduling_fields import SchedulingFields
from headrace.api.structured import StructuredBody
from headrace.api.wire import Wire, wrong_type, wrong_value

MAX_CHOICES = 128
MAX_TEMPERATURE = 2
MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARACTERS = 128
MAX_METADATA = 16


def _texts(value: Any) -> Any:
    """A string or a list of strings; one message for both forms."""
    if value is None:
        return None
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise wrong_type("a string or a list of strings")
    if len(texts) > MAX_STOPS:
        raise wrong_value(f"must have at most {MAX_STOPS} strings, got {len(texts)}")
    longest = max(map(len, texts), default=0)
    if longest > MAX_STOP_CHARACTERS:
        raise wrong_value(f"must have strings of at most {MAX_STOP_CHARACTERS} characters, got {longest}")
    return value


def _biases(value: Any) -> Any:
    """An object from token ids, written as strings as JSON must, to numbers."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise wrong_type("an object from token ids to numbers")
    if len(value) > MAX_BIASES:
        raise wrong_value(f"must have at most {MAX_BIASES} entries, got {len(value)}")
    for token, bias in value.items():
        if not _TOKEN_ID.fullmatch(token):
            raise wrong_value(f"has the key {token[:40]!r}, which is no token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise wrong_type("an object from token ids to numbers")
        if isinstance(bias, int) and bias.bit_length() > _BITS:
            raise wrong_value(f"has a bias of more than {_BITS} bits")
    return value


MAX_BIASES = 8192
"""Maximum entries of ``logit_bias``; ``allowed_token_ids`` names many tokens at less cost."""

_TOKEN_ID = re.compile("0|[1-9][0-9]{0,17}")
_BITS = 64


def _temperature(value: float | None) -> float | None:
    """OpenAI's range; above 2 the model's distribution is nearly uniform noise."""
    if value is not None and not 0 <= value <= MAX_TEMPERATURE:
        raise wrong_value(f"must be between 0 and {MAX_TEMPERATURE}, got {value:g}")
    return value


def _metadata(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise wrong_type("an object from strings to strings")
    if len(value) > MAX_METADATA or any(len(k) > 64 or len(v) > 512 for k, v in value.items()):
        raise wrong_value(f"must have at most {MAX_METADATA} keys of 64 characters, with values of 512")
    return value


TokenId = Annotated[int, Field(ge=0)]
Temperature = Annotated[float | None, AfterValidator(_temperature)]
Stop = Annotated[SkipValidation[str | list[str] | None], BeforeValidator(_texts)]
MetadataField = Annotated[SkipValidation[dict[str, str] | None], BeforeValidator(_metadata)]


class StreamOptions(Wire):
    """Options of a stream."""

    include_usage: bool = Field(False, description="Send a last chunk with the usage of the whole call.")
    continuous_usage_stats: bool = Field(
        False, description="With include_usage: send the usage so far with every chunk."
    )
    include_obfuscation: Literal[False] | None = Field(None, description="Chunks are never padded.")


class Generation(StructuredBody, SchedulingFields):
    """Fields of every call that generates text."""

    model: str | None = Field(None, description="Name of the model. Default: the served model.")
    temperature: Temperature = Field(None, description=f"From 0 (greedy) to {MAX_TEMPERATURE}. Default 1.")
    top_p: float | None = None
    top_k: int | None = Field(None, description="0 or -1: no limit.")
    min_p: float | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES, description="Answers per prompt.")
    max_tokens: int | None = Field(None, description="-1: as many as the context leaves after the prompt.")
    min_tokens: int | None = None
    stop: Stop = Field(
        None, description=f"At most {MAX_STOPS} strings of at most {MAX_STOP_CHARACTERS} characters each."
    )
    stop_token_ids: list[TokenId] | None = Field(None, max_length=MAX_STOP_TOKEN_IDS)
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[SkipValidation[dict[str, float] | None], BeforeValidator(_biases)] = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[Annotated[str, Field(max_length=MAX_BAD_WORD_CHARACTERS)]] | None = Field(
        None, max_length=MAX_BAD_WORDS
    )
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="Keep only this many tokens from the prompt's end; -1: as many as fit."
    )
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=512)
    cache_salt: str | None = Field(
        None, min_length=1, max_length=512, description="Only requests with the same salt share prefixes."
    )
    response_cache: CacheDirectiveFields | None = Field(
        None, description="Directives for the response caches; `Cache-Control` can express some of them."
    )
    prompt_cache_key: str | None = Field(
        None,
        max_length=512,
        description="Groups requests with a common prefix: waiting ones of the same key run together.",
    )
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = Field(
        None, description="24h: retain the computed prompt longer than others for 24 hours."
    )
    kv_transfer_params: KVTransferParams | None = Field(
        None, description="Compute the prompt's KV blocks for another server, or pull them from one."
    )
    return_token_ids: bool | None = None
    include_cost: bool | None = Field(None, description="Add `cost` and `cost_details` to `usage`.")
    request_id: str | None = Field(None, pattern=r"^[A-Za-z0-9._:-]{1,128}$")
    metadata: MetadataField = Field(None, description="Returned by GET /v1/requests/{id}.")
