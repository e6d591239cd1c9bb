"""The body of ``POST /v1/responses``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from headrace.serve.http.cache.wire import CacheDirectiveFields
from headrace.serve.http.generation.fields import MAX_LOGPROBS, MetadataField, Stop, Temperature
from headrace.serve.http.generation.scheduling_fields import SchedulingFields
from headrace.serve.http.responses.input_wire import Id, Input
from headrace.serve.http.responses.refusals import known_choice, known_tools
from headrace.serve.http.structured import JsonObjectFormat, JsonSchema, TextFormat
from headrace.serve.http.tools.wire import MAX_TOOLS, Function, mode_or
from headrace.serve.http.wire import FORM_MARK, Wire, wrong_value


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]


class FunctionChoice(Wire):
    """The function that must be called."""

    type: Literal["function"]
    name: str


Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(FORM_MARK + "mode")]
    | Annotated[FunctionChoice, Tag(FORM_MARK + "named")],
    mode_or(FunctionChoice),
    BeforeValidator(known_choice),
]


def _different(tools: list[FunctionTool]) -> list[FunctionTool]:
    names = [tool.name for tool in tools]
    twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
    if twice is not None:
        raise wrong_value(f"has two functions with the name {twice!r}")
    return tools


Tools = Annotated[
    list[FunctionTool],
    Field(max_length=MAX_TOOLS),
    AfterValidator(_different),
    BeforeValidator(known_tools),
]


class Reasoning(Wire):
    """How much the model reasons."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    max_tokens: int | None = Field(
        None,
        ge=0,
        lt=2**31,
        description="Tokens of reasoning after which its end is forced. Default: no limit.",
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Accepted: the whole reasoning is returned in `content`, and `summary` is empty."
    )


class SchemaFormat(JsonSchema):
    """JSON of a schema."""

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
    """What the text of the answer must look like."""

    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class ResponseStreamOptions(Wire):
    """What a stream carries beside the answer."""

    include_obfuscation: Literal[False] | None = Field(None, description="Events are never padded.")


class _PromptFields(Wire):
    """What a prompt is made of, beside the input."""

    model: str | None = Field(None, description="The served model; the only one if left out.")
    instructions: str | None = Field(None, description="A system message before the conversation.")
    previous_response_id: Id | None = Field(
        None, description="The stored response that this one continues: its input and output come first."
    )
    tools: Tools | None = Field(None, description="Functions that the model may call; at most 128.")
    tool_choice: Choice | None = Field(
        None, description="`none`, `auto`, `required`, or the function to call. Default auto."
    )
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call. Default true.")
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    truncation: Literal["disabled"] | None = Field(None, description="A prompt that is too long is refused.")


class ResponsesBody(SchedulingFields, _PromptFields):
    """A request for a response."""

    input: Input = Field(description="A text, or items: messages, function calls, their outputs, reasoning.")
    store: bool | None = Field(None, description="Store the response. Default true.")
    background: bool | None = Field(None, description="Return at once and compute in the background.")
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: int | None = None
    temperature: Temperature = None
    top_p: float | None = None
    top_k: int | None = Field(None, description="0 or -1: no bound.")
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
    cache_salt: str | None = Field(None, min_length=1, max_length=512)
    response_cache: CacheDirectiveFields | None = Field(
        None, description="What is asked of the response caches."
    )
    prompt_cache_key: str | None = Field(None, max_length=512)
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    request_id: str | None = Field(None, pattern=r"^[A-Za-z0-9._:-]{1,128}$")
    metadata: MetadataField = Field(None, description="Stored with the response and returned with it.")

    @property
    def stored(self) -> bool:
        """Whether the response is kept for later requests."""
        return self.store is not False

    @property
    def logprobs(self) -> bool:
        """Whether the text's log-probabilities are asked for."""
        return self.top_logprobs is not None or "message.output_text.logprobs" in (self.include or ())


class InputTokensBody(_PromptFields):
    """A request to count the tokens of a prompt."""

    input: Input | None = Field(None, description="A text, or items; nothing: of earlier responses alone.")

    def response(self) -> ResponsesBody:
        """A request for a response with the same prompt."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return ResponsesBody.model_construct(_fields_set=self.model_fields_set, **given)
