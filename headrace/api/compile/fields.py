"""The request fields that the dialects share, and the kind of each: how it enters the cache key, or why it does not.

The kind stands on the field: ``top_p: Sampling[float | None] = None``. A sampling field that `SamplingParams` has under
the same name needs nothing else here: `constrain` hands it over, `SamplingParams` checks its range, and the cache key
contains it. A request that sets a field without a kind is not cached.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, SkipValidation

from headrace.api.errors import invalid
from headrace.api.wire import Wire, wrong_type, wrong_value
from headrace.core.constraint import MAX_CHOICES as MAX_STRINGS
from headrace.response_cache.rules.cacheability import NO_DIRECTIVES, CacheDirectives


class Way(StrEnum):
    """How a field enters the cache key, or why it does not."""

    TOKENS = "tokens"  # changes the prompt's tokens
    SAMPLING = "sampling"  # enters the sampling parameters or the seed
    SCOPE = "scope"  # separates tenants, users and salts
    SHOWN = "shown"  # changes only how a response is written
    CONTROL = "control"  # a cache directive
    INERT = "inert"  # cannot change the response


ValueT = TypeVar("ValueT")

Tokens = Annotated[ValueT, Way.TOKENS]
Sampling = Annotated[ValueT, Way.SAMPLING]
Scope = Annotated[ValueT, Way.SCOPE]
Shown = Annotated[ValueT, Way.SHOWN]
Control = Annotated[ValueT, Way.CONTROL]
Inert = Annotated[ValueT, Way.INERT]


@cache
def ways(form: type[Wire]) -> Mapping[str, Way]:
    """The kinds of the fields of a body, by name, without those that have none."""
    found = {
        name: [way for way in field.metadata if isinstance(way, Way)]
        for name, field in form.model_fields.items()
    }
    return {name: kinds[0] for name, kinds in found.items() if kinds}


MAX_TTL_SECONDS = 30 * 86400
MAX_TAGS = 16
MAX_SAMPLES = 64

Seconds = Annotated[float, Field(ge=0, le=MAX_TTL_SECONDS)]


class CacheDirectiveFields(Wire):
    """The object ``response_cache``."""

    no_store: bool = Field(False, description="Neither look up a cached response nor store this one.")
    no_cache: bool = Field(False, description="Compute the response, and store it.")
    only_if_cached: bool = Field(False, description="Never compute; status 504 if no response is cached.")
    ttl: Annotated[float, Field(gt=0, le=MAX_TTL_SECONDS)] | None = Field(
        None, description="Seconds until this response expires in the cache."
    )
    max_age: Seconds | None = Field(None, description="Maximum age in seconds of a cached response.")
    stale_while_revalidate: Seconds = Field(
        0.0,
        description="Seconds after its expiry in which a cached response is served while a new one is computed.",
    )
    samples: int | None = Field(
        None,
        ge=2,
        le=MAX_SAMPLES,
        description="Without a seed: number of responses to store; one of them is served at random.",
    )
    tags: list[Annotated[str, Field(min_length=1, max_length=128)]] = Field(
        default=[], max_length=MAX_TAGS, description="Tags by which this response can be invalidated."
    )


_DIRECTIVE = re.compile(r'(?:[^,"]+|"[^"]*")+')
"""The text between two commas outside quotation marks. It takes linear time on any header."""


def control(fields: CacheDirectiveFields | None, header: str | None) -> CacheDirectives:
    """The directives of the field and the header together; the field takes precedence.

    Raises:
        ApiError: a directive is known but not supported, or its number is missing.
    """
    directives = _directives(header) if header else {}
    if not directives and fields is None:
        return NO_DIRECTIVES
    given = (fields or CacheDirectiveFields.model_validate({})).model_dump(exclude_none=True)
    given["tags"] = tuple(dict.fromkeys(given["tags"]))
    for name in ("no_store", "no_cache", "only_if_cached"):
        given[name] = given[name] or directives.get(name, False)
    if "max_age" in directives:
        given.setdefault("max_age", directives["max_age"])
    if "max_stale" in directives and not given["stale_while_revalidate"]:
        given["stale_while_revalidate"] = directives["max_stale"]
    if given["no_cache"] and given["only_if_cached"]:
        raise invalid("no_cache and only_if_cached contradict each other", "response_cache")
    return CacheDirectives(**given)


def _directives(header: str) -> dict[str, Any]:
    """The known directives of a request's ``Cache-Control``; unknown ones are ignored, as RFC 9111 demands."""
    directives: dict[str, Any] = {}
    for text in _DIRECTIVE.findall(header):
        name, _, value = text.strip().partition("=")
        directive = name.lower()
        if directive in ("no-store", "no-cache", "only-if-cached"):
            directives[directive.replace("-", "_")] = True
        elif directive in ("max-age", "max-stale"):
            directives[directive.replace("-", "_")] = _seconds(directive, value.strip('"'))
        elif directive == "min-fresh":
            raise invalid(
                "Cache-Control: min-fresh is not supported", "Cache-Control", "unsupported_parameter"
            )
    if directives.get("max_age") == 0.0:  # browsers send this for "reload"
        directives["no_cache"] = True
    return directives


def _seconds(directive: str, value: str) -> float:
    if not value and directive == "max-stale":
        return float(MAX_TTL_SECONDS)  # RFC 9111: of any age
    if not value.isascii() or not value.isdigit():
        raise invalid(f"Cache-Control: {directive} needs a number of seconds", "Cache-Control")
    return float(min(int(value[:12]), MAX_TTL_SECONDS))


MAX_MS = 86_400_000
MAX_RETENTIONS = 16


class SloBody(Wire):
    """Latency targets. They order the queue, and misses are counted; a miss does not end the request."""

    ttft_ms: float | None = Field(None, gt=0, le=MAX_MS, description="Time to first token (TTFT), in ms.")
    tpot_ms: float | None = Field(
        None, gt=0, le=MAX_MS, description="Mean time per output token after the first (TPOT), in ms."
    )


NO_TARGETS = SloBody(ttft_ms=None, tpot_ms=None)


class RetentionBody(Wire):
    """How long the KV blocks of prompt tokens ``[start, end)`` stay cached."""

    start: int = Field(0, ge=0)
    end: int | None = Field(None, ge=1, description="Default: the prompt's end.")
    priority: int = Field(ge=0, le=100, description="Higher is evicted later; other blocks have 35.")
    ttl_seconds: float | None = Field(
        None, gt=0, le=MAX_MS / 1000, description="Seconds until the priority is 35 again. Default: no limit."
    )


class AgentHint(Wire):
    """What a client knows about its session."""

    ttl_seconds: float | None = Field(
        None,
        gt=0,
        le=MAX_MS / 1000,
        description="How long the session's prompt stays cached after its last use. Default 300.",
    )
    release: bool | None = Field(
        None, description="true: the session ends with this request, and its prompt is retained no longer."
    )


class SessionFields(Wire):
    """The session of a call; its prompt is retained between its turns."""

    session_id: Inert[str | None] = Field(
        None,
        min_length=1,
        max_length=256,
        pattern=r"^[^\x00]*$",
        description="Names a session: its newest prompt stays cached and replaces the one before it. The header "
        "X-Session-Id means the same.",
    )
    agent_hint: Inert[AgentHint | None] = Field(
        None, description="How long the session's prompt is retained. It needs a session."
    )


class SchedulingFields(SessionFields):
    """The fields of every call that generates."""

    priority: Inert[int | None] = Field(
        None,
        ge=-(2**31),
        lt=2**31,
        description="Lower runs sooner, within the class. Without service_tier its sign names the class: "
        "negative priority, positive flex.",
    )
    service_tier: Inert[Literal["auto", "default", "flex", "priority"] | None] = Field(
        None, description="The class whose share of the machine the request uses."
    )
    slo: Inert[SloBody | None] = Field(
        None, description="Latency targets of this request (default: those of its class)."
    )
    deadline_ms: Inert[int | None] = Field(
        None, ge=1, le=MAX_MS, description="Ends with 408 when it passes, or at once if it cannot be met."
    )
    retention: Inert[list[RetentionBody] | None] = Field(
        None, max_length=MAX_RETENTIONS, description="How long ranges of the prompt's tokens stay cached."
    )


class KVTransferParams(Wire):
    """Whether the prompt is computed here for another server, or was computed there for this one."""

    do_remote_decode: bool = Field(
        False, description="Another server pulls the prompt's KV blocks and decodes."
    )
    do_remote_prefill: bool = Field(False, description="Pull the prompt's KV blocks from remote_host.")
    remote_prefill_runs: bool = Field(
        False, description="With do_remote_prefill: pull the blocks while remote_host computes the prompt."
    )
    remote_engine_id: str | None = Field(
        None, max_length=256, description="Informative: blocks have global names."
    )
    remote_block_ids: list[int] | None = Field(
        None, max_length=0, description="Always empty: blocks are found by the content of the prompt."
    )
    remote_host: str | None = Field(None, max_length=256, description="One of this server's peers.")
    remote_port: int | None = Field(None, ge=1, le=65_535)
    tp_size: int | None = Field(None, ge=1, le=1, description="Ranks of the other server.")


class JsonSchema(Wire):
    """A schema as OpenAI sends it."""

    name: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = Field(
        None, description="The schema is always enforced; one that cannot be enforced is refused."
    )


class TextFormat(Wire):
    """No constraint."""

    type: Literal["text"]


class JsonObjectFormat(Wire):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Wire):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class StructuralTagFormat(Wire):
    """Free text in which a trigger string begins a structure that follows a schema (vLLM)."""

    type: Literal["structural_tag"]
    structures: list[dict[str, Any]]
    triggers: list[str]


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat, Field(discriminator="type")
]


class StructuredOutputs(Wire):
    """vLLM's constraints on the output: exactly one field must be set."""

    json_: dict[str, Any] | bool | str | None = Field(None, alias="json", description="A JSON schema.")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = Field(None, description=f"The output is one of these, at most {MAX_STRINGS}.")
    grammar: str | None = Field(None, description="A context-free grammar in Lark or GBNF.")
    structural_tag: dict[str, Any] | str | None = None
    whitespace_pattern: str | None = Field(
        None, description="Regular expression for the white space between JSON tokens."
    )


class StructuredBody(Wire):
    """The fields of a call that ask for structured output."""

    response_format: Sampling[ResponseFormat | None] = None
    structured_outputs: Sampling[StructuredOutputs | None] = None
    guided_json: Sampling[dict[str, Any] | bool | str | None] = Field(
        None, description="Alias of structured_outputs.json."
    )
    guided_regex: Sampling[str | None] = Field(None, description="Alias of structured_outputs.regex.")
    guided_choice: Sampling[list[str] | None] = Field(None, description="Alias of structured_outputs.choice.")
    guided_grammar: Sampling[str | None] = Field(None, description="Alias of structured_outputs.grammar.")

    @property
    def constraining(self) -> list[str]:
        """The names of the fields that are set and constrain the output; more than one is an error."""
        asked = [name for name in StructuredBody.model_fields if getattr(self, name) is not None]
        if isinstance(self.response_format, TextFormat):
            asked.remove("response_format")
        if self.structured_outputs is not None and not self.structured_outputs.model_dump(exclude_none=True):
            asked.remove("structured_outputs")
        return asked


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


class SamplingFields(Wire):
    """Sampling fields that OpenAI's APIs share, and those that have the same name in all of them."""

    temperature: Sampling[Temperature] = Field(
        None, description=f"From 0 (greedy) to {MAX_TEMPERATURE}. Default 1."
    )
    top_p: Sampling[float | None] = None
    top_k: Sampling[int | None] = Field(None, description="0 or -1: no limit.")
    min_p: Sampling[float | None] = None
    seed: Sampling[int | None] = Field(None, ge=-(2**63), lt=2**63)
    presence_penalty: Sampling[float | None] = None
    frequency_penalty: Sampling[float | None] = None
    repetition_penalty: Sampling[float | None] = None
    stop: Sampling[Stop] = Field(
        None, description=f"At most {MAX_STOPS} strings of at most {MAX_STOP_CHARACTERS} characters each."
    )


class Generation(SamplingFields, StructuredBody, SchedulingFields):
    """Fields of every call that generates text."""

    model: Scope[str | None] = Field(None, description="Name of the model. Default: the served model.")
    # Each choice has its own seed and its own key.
    n: Shown[int | None] = Field(None, ge=1, le=MAX_CHOICES, description="Answers per prompt.")
    max_tokens: Sampling[int | None] = Field(
        None, description="-1: as many as the context leaves after the prompt."
    )
    min_tokens: Sampling[int | None] = None
    stop_token_ids: Sampling[list[TokenId] | None] = Field(None, max_length=MAX_STOP_TOKEN_IDS)
    include_stop_str_in_output: Sampling[bool | None] = None
    ignore_eos: Sampling[bool | None] = None
    logit_bias: Sampling[Annotated[SkipValidation[dict[str, float] | None], BeforeValidator(_biases)]] = None
    allowed_token_ids: Sampling[list[TokenId] | None] = None
    bad_words: Sampling[list[Annotated[str, Field(max_length=MAX_BAD_WORD_CHARACTERS)]] | None] = Field(
        None, max_length=MAX_BAD_WORDS
    )
    prompt_logprobs: Sampling[int | None] = Field(None, ge=0, le=MAX_LOGPROBS)
    skip_special_tokens: Sampling[bool | None] = None
    truncate_prompt_tokens: Tokens[int | None] = Field(
        None,
        ge=-1,
        description="Keep only this many tokens of the prompt, its last ones; -1: as many as fit.",
    )
    truncation_side: Tokens[Literal["left", "right"] | None] = Field(
        None,
        description="With truncate_prompt_tokens: where tokens are dropped. Default left, the prompt's beginning.",
    )
    add_special_tokens: Tokens[bool | None] = None
    stream: Shown[bool | None] = None
    stream_options: Shown[StreamOptions | None] = None
    user: Scope[str | None] = Field(None, max_length=512)
    cache_salt: Scope[str | None] = Field(
        None, min_length=1, max_length=512, description="Only requests with the same salt share prefixes."
    )
    response_cache: Control[CacheDirectiveFields | None] = Field(
        None, description="Directives for the response caches; `Cache-Control` can express some of them."
    )
    prompt_cache_key: Inert[str | None] = Field(
        None,
        max_length=512,
        description="Groups requests with a common prefix: waiting ones of the same key run together.",
    )
    prompt_cache_retention: Inert[Literal["in_memory", "in-memory", "24h"] | None] = Field(
        None, description="24h: retain the computed prompt longer than others for 24 hours."
    )
    # A cached response needs no blocks of another server.
    kv_transfer_params: Inert[KVTransferParams | None] = Field(
        None, description="Compute the prompt's KV blocks for another server, or pull them from one."
    )
    return_token_ids: Shown[bool | None] = None
    return_tokens_as_token_ids: Shown[bool | None] = Field(
        None,
        description="Log-probabilities name tokens `token_id:7`, not by their text, which two tokens may share.",
    )
    include_cost: Shown[bool | None] = Field(None, description="Add `cost` and `cost_details` to `usage`.")
    request_id: Inert[str | None] = Field(None, pattern=r"^[A-Za-z0-9._:-]{1,128}$")
    metadata: Inert[MetadataField] = Field(None, description="Returned by GET /v1/requests/{id}.")
