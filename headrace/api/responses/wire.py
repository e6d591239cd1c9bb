"""The body of ``POST /v1/responses``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from headrace.api.cache.wire import CacheDirectiveFields
from headrace.api.generation.fields import MAX_LOGPROBS, MetadataField, Stop, Temperature
from headrace.api.generation.scheduling_fields import SchedulingFields
from headrace.api.responses.input_wire import Id, Input
from headrace.api.responses.tools.wire import Choice, Tools
from headrace.api.structured import JsonObjectFormat, JsonSchema, TextFormat
from headrace.api.wire import FORM_MARK, Wire

ClientMetadata = Annotated[dict[str, str] | None, Field(max_length=64)]


class Reasoning(Wire):
    """How much the model reasons."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    max_tokens: int | None = Field(
        None,
        ge=0,
        lt=2**31,
        description="Maximum tokens of reasoning; then its end is forced. Default: no limit.",
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Accepted: the whole reasoning is returned in `content`, and `summary` is empty."
    )


class SchemaFormat(JsonSchema):
    """JSON that follows a schema."""

    type: Literal["json_schema"]


def _form_of_format(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return FORM_MARK + kind if isinstance(kind, str) else None


Format = Annotated[
    Annotated[TextFormat, Tag(FORM_MARK + "text")]
    | Annotated[JsonObjectFormat, Tag(FORM_MARK + "json_object")]
    | Annotated[SchemaFormat, Tag(FORM_MARK + "json_schema")],
    Discriminator(
        _form_of_format,
        custom_error_type="wrong_value",
        custom_error_message="must be an object whose type is text, json_object or json_schema",
    ),
]


class TextConfig(Wire):
    """The format of the output text."""

    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class ResponseStreamOptions(Wire):
    """Options of a stream."""

    include_obfuscation: Literal[False] | None = Field(None, description="Events are never padded.")


class ContextManagement(Wire):
    """When a conversation is compacted before it is answered."""

    type: Literal["compaction"]
    compact_threshold: int | None = Field(
        None,
        ge=1,
        lt=2**31,
        description="Compact if the prompt has more tokens than this. Default: 3/4 of the context.",
    )


class _PromptFields(Wire):
    """The fields that form a prompt, except the input."""

    model: str | None = Field(None, description="Name of the model. Default: the served model.")
    instructions: str | None = Field(None, description="A system message before the conversation.")
    previous_response_id: Id | None = Field(
        None, description="The stored response that this one continues: its input and output come first."
    )
    tools: Tools | None = Field(
        None,
        description="Functions that the model may call, at most 128, also in namespaces. Hosted tools are not offered.",
    )
    tool_choice: Choice | None = Field(
        None,
        description="`none`, `auto`, `required`, the function to call, or the allowed functions. Default auto.",
    )
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call. Default true.")
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None,
        description="`auto`: a conversation that is too long loses its oldest items. `disabled`: it is refused.",
    )


class ResponsesBody(SchedulingFields, _PromptFields):
    """A request for a response."""

    input: Input = Field(description="A text, or items: messages, function calls, their outputs, reasoning.")
    context_management: list[ContextManagement] | None = Field(
        None,
        max_length=1,
        description="Compact a conversation that is too long before answering it.",
    )
    store: bool | None = Field(None, description="Store the response. Default true.")
    background: bool | None = Field(None, description="Return at once and compute in the background.")
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: int | None = None
    temperature: Temperature = None
    top_p: float | None = None
    top_k: int | None = Field(None, description="0 or -1: no limit.")
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stop = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = Field(
        None, description="Log-probabilities of the text. Encrypted reasoning stays null."
    )
    user: str | None = Field(None, max_length=512)
    client_metadata: ClientMetadata = Field(None, description="The client's own notes. No effect.")
    cache_salt: str | None = Field(None, min_length=1, max_length=512)
    response_cache: CacheDirectiveFields | None = Field(
        None, description="Directives for the response caches."
    )
    prompt_cache_key: str | None = Field(None, max_length=512)
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    request_id: str | None = Field(None, pattern=r"^[A-Za-z0-9._:-]{1,128}$")
    metadata: MetadataField = Field(None, description="Stored with the response and returned with it.")

    @property
    def stored(self) -> bool:
        """Whether the response is stored for later requests."""
        return self.store is not False

    @property
    def logprobs(self) -> bool:
        """Whether the text's log-probabilities are requested."""
        return self.top_logprobs is not None or "message.output_text.logprobs" in (self.include or ())


class InputTokensBody(_PromptFields):
    """A request to count the tokens of a prompt."""

    input: Input | None = Field(None, description="A text, or items. Default: only earlier responses.")

    def response(self) -> ResponsesBody:
        """A request for a response with the same prompt."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return ResponsesBody.model_construct(_fields_set=self.model_fields_set, **given)
