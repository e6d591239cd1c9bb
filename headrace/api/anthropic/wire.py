"""Anthropic's formats: bodies of ``POST /v1/messages`` and ``/v1/messages/count_tokens``, errors, the model card."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, MutableMapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Protocol

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, SkipValidation, Tag
from starlette.datastructures import Headers
from starlette.responses import Response

from headrace.api.auth.access import route_path
from headrace.api.compile.bodies import MAX_TOOLS, CacheMark, check_parameters
from headrace.api.compile.fields import (
    MAX_MS,
    MAX_RETENTIONS,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    CacheDirectiveFields,
    RetentionBody,
    SessionFields,
    SloBody,
)
from headrace.api.errors import DEADLINE, ApiError, not_supported
from headrace.api.wire import (
    FORM_MARK,
    Answered,
    NotYet,
    Replayed,
    Wire,
    either,
    not_empty,
    without,
    wrong_type,
    wrong_value,
)

MESSAGES: NotYet = {
    "container": (),
    "context_management": (
        {"edits": []},
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    ),
    "diagnostics": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
    "thread": (),
    "user_profile_id": (),
    "workspace_id": (),
}
"""Fields of a request, with their neutral values."""


TOOL: NotYet = {
    "allowed_callers": (["direct"], []),
    "defer_loading": (False,),
    "input_examples": ([],),
}
"""Fields of a tool, with their neutral values."""


BLOCKS = (
    *("document", "search_result", "container_upload", "tool_reference"),
    *("server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result"),
    *("bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "tool_search_tool_result"),
    *("mcp_tool_use", "mcp_tool_result", "compaction", "browser_state"),
)
"""Kinds of content blocks."""


def refuse(body: Mapping[str, Any]) -> dict[str, Any]:
    """``body`` without unsupported fields that have a neutral value.

    Raises:
        ApiError: it uses something that is not supported.
    """
    if body.get("thread") is not None:
        raise thread_unsupported()
    kept = without(body, MESSAGES, "")
    tools = kept.get("tools")
    if isinstance(tools, list):
        kept["tools"] = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools)]
    messages = kept.get("messages")
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            _blocks(message.get("content"), f"messages[{number}].content", images=True)
    _blocks(kept.get("system"), "system", images=False)
    return kept


def thread_unsupported() -> ApiError:
    """400: the client wants the server to store the conversation.

    The details of this error make Anthropic's clients send the whole conversation.
    """
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    message = "thread is not supported yet: send the whole conversation"
    return ApiError(400, message, param="thread", code="unsupported_parameter", details=details)


def _tool(tool: object, path: str) -> object:
    if not isinstance(tool, dict):
        return tool
    kind = tool.get("type")
    if isinstance(kind, str) and kind != "custom":
        raise not_supported(f"{path}.type", f"{path}.type: a tool of type {kind[:80]!r}")
    return without(tool, TOOL, f"{path}.")


def _blocks(content: object, path: str, *, images: bool) -> None:
    for number, block in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(block, dict):
            continue
        where = f"{path}[{number}]"
        source = block.get("source")
        if (
            block.get("type") == "image"
            and images
            and isinstance(source, dict)
            and source.get("type") == "file"
        ):
            raise not_supported(f"{where}.source.type", f"{where}.source: a source of type 'file'")
        if block.get("type") in BLOCKS or (block.get("type") == "image" and not images):
            raise not_supported(f"{where}.type", f"{where}: content of type {block['type']!r:.200}")
        if block.get("type") == "tool_result":
            _blocks(block.get("content"), f"{where}.content", images=images)


MIN_BUDGET = 1024
"""The smallest budget of thinking tokens that Anthropic's API accepts."""


_TOOL_NAME = re.compile("[a-zA-Z0-9_-]{1,128}")


def _form(value: Any) -> str | None:
    """The form of a field that is text or a list of blocks."""
    if isinstance(value, str):
        return FORM_MARK + "text"
    return FORM_MARK + "blocks" if isinstance(value, list) else None


def _kind(*kinds: str) -> Discriminator:
    """Distinguishes blocks by their ``type``."""

    def kind(value: Any) -> str | None:
        found = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return FORM_MARK + found if isinstance(found, str) and found in kinds else None

    return Discriminator(
        kind,
        custom_error_type="block_type",
        custom_error_message=f"must be an object whose type is {' or '.join(kinds)}",
    )


_TEXT_OR_BLOCKS = Discriminator(
    _form,
    custom_error_type="content_type",
    custom_error_message="must be a string or a list of content blocks",
)


class TextBlock(Replayed):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: CacheMark | None = None
    citations: list[Any] | None = Field(
        default=None, max_length=0, description="Not supported: null or empty."
    )


class EncodedImage(Wire):
    """An image in base64."""

    type: Literal["base64"]
    media_type: Literal["image/png", "image/jpeg", "image/webp", "image/gif"]
    data: str

    def place(self) -> tuple[str, str]:
        """The field that has the image, and the image as a URL."""
        return "source.data", f"data:{self.media_type};base64,{self.data}"


class LinkedImage(Wire):
    """An image at a URL."""

    type: Literal["url"]
    url: str = Field(description="A URL of a host that the server may fetch from.")

    def place(self) -> tuple[str, str]:
        """As that of `EncodedImage`."""
        return "source.url", self.url


class ImageBlock(Replayed):
    """An image."""

    type: Literal["image"]
    source: Annotated[
        Annotated[EncodedImage, Tag(FORM_MARK + "base64")] | Annotated[LinkedImage, Tag(FORM_MARK + "url")],
        _kind("base64", "url"),
    ]
    cache_control: CacheMark | None = None


Texts = Annotated[
    Annotated[str, Tag(FORM_MARK + "text")] | Annotated[list[TextBlock], Tag(FORM_MARK + "blocks")],
    _TEXT_OR_BLOCKS,
]


Results = Annotated[
    Annotated[str, Tag(FORM_MARK + "text")]
    | Annotated[
        list[
            Annotated[
                Annotated[TextBlock, Tag(FORM_MARK + "text")]
                | Annotated[ImageBlock, Tag(FORM_MARK + "image")],
                _kind("text", "image"),
            ]
        ],
        Tag(FORM_MARK + "blocks"),
    ],
    _TEXT_OR_BLOCKS,
]


class ThinkingBlock(Answered):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str = Field("", description="Accepted and not checked.")


class DirectCaller(Answered):
    """Marks a tool call that the model itself made."""

    type: Literal["direct"]


class ToolUseBlock(Answered):
    """A call in an earlier answer."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1, max_length=256)]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    input: dict[str, Any]
    caller: DirectCaller | None = None
    cache_control: CacheMark | None = None


class ToolResultBlock(Replayed):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1, max_length=256)]
    content: Results | None = None
    is_error: bool | None = Field(None, description="true: the model sees the result as an error.")
    cache_control: CacheMark | None = None


class AnswerBlock(Answered, TextBlock):
    """Text of an earlier answer."""


class RedactedThinkingBlock(Answered):
    """Encrypted reasoning of an earlier answer, which only the server that made it can read. No effect."""

    type: Literal["redacted_thinking"]
    data: str


_KINDS = ("text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result")
_OTHERS = (
    Annotated[ImageBlock, Tag(FORM_MARK + "image")]
    | Annotated[ThinkingBlock, Tag(FORM_MARK + "thinking")]
    | Annotated[RedactedThinkingBlock, Tag(FORM_MARK + "redacted_thinking")]
    | Annotated[ToolUseBlock, Tag(FORM_MARK + "tool_use")]
    | Annotated[ToolResultBlock, Tag(FORM_MARK + "tool_result")]
)


Block = Annotated[Annotated[TextBlock, Tag(FORM_MARK + "text")] | _OTHERS, _kind(*_KINDS)]

BlockOfAnswer = Annotated[Annotated[AnswerBlock, Tag(FORM_MARK + "text")] | _OTHERS, _kind(*_KINDS)]


class InputMessage(Replayed):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[str, Tag(FORM_MARK + "text")] | Annotated[Sequence[Block], Tag(FORM_MARK + "blocks")],
        _TEXT_OR_BLOCKS,
    ]


class AnswerTurn(Answered, InputMessage):
    """An earlier answer."""

    role: Literal["assistant"]
    content: Annotated[
        Annotated[str, Tag(FORM_MARK + "text")]
        | Annotated[Sequence[BlockOfAnswer], Tag(FORM_MARK + "blocks")],
        _TEXT_OR_BLOCKS,
    ]


Turn = Annotated[
    Annotated[AnswerTurn, Tag(FORM_MARK + "answer")] | Annotated[InputMessage, Tag(FORM_MARK + "message")],
    either("role", "assistant", "answer", "message"),
]


def _tool_name(value: str) -> str:
    if not _TOOL_NAME.fullmatch(value):
        raise wrong_value("must be 1 to 128 letters, digits, underscores or hyphens")
    return value


def _schema(value: Any) -> Any:
    if value is None:
        raise wrong_type("a JSON schema of type object")
    return check_parameters(value)


class ToolBody(Wire):
    """A tool that the model may call."""

    type: Literal["custom"] | None = None
    name: Annotated[str, AfterValidator(_tool_name)]
    description: str | None = None
    input_schema: Annotated[SkipValidation[dict[str, Any]], BeforeValidator(_schema)] = Field(
        description="A JSON schema of type object."
    )
    strict: bool | None = Field(None, description="The input must follow the schema.")
    cache_control: CacheMark | None = None
    eager_input_streaming: bool | None = Field(None, description="Inputs are always streamed as they come.")


class AnyChoice(Wire):
    """The model decides (``auto``), must call some tool (``any``), or must not call one (``none``)."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = Field(None, description="true: at most one call.")


class NamedToolChoice(Wire):
    """The model must call this tool."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


def _choice(value: Any) -> str | None:
    found = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if found in ("auto", "any", "none"):
        return FORM_MARK + "mode"
    return FORM_MARK + "tool" if found == "tool" else None


Choice = Annotated[
    Annotated[AnyChoice, Tag(FORM_MARK + "mode")] | Annotated[NamedToolChoice, Tag(FORM_MARK + "tool")],
    Discriminator(
        _choice,
        custom_error_type="choice_type",
        custom_error_message="must be an object whose type is auto, any, tool or none",
    ),
]


class Thinking(Wire):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(
        None,
        description=f"Maximum tokens of reasoning, then its end is forced: at least {MIN_BUDGET}, below max_tokens.",
    )
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="omitted: the response has no thinking blocks."
    )


class JsonOutput(Wire):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Wire):
    """The format of the output, and the effort of reasoning."""

    format: JsonOutput | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="Passed to chat templates that have the variable `reasoning_effort`."
    )


class Metadata(Wire):
    """Describes the request."""

    user_id: str | None = Field(None, max_length=512, description="Same as OpenAI's `user`.")


def _different(tools: list[ToolBody]) -> list[ToolBody]:
    names = [tool.name for tool in tools]
    twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
    if twice is not None:
        raise wrong_value(f"has two tools with the name {twice!r:.200}")
    return tools


class CountBody(Wire):
    """A conversation whose tokens are counted."""

    model: str | None = Field(None, description="Name of the model. Default: the served model.")
    messages: Annotated[list[Turn], AfterValidator(not_empty)]
    system: Texts | None = Field(None, description="Instructions before the conversation.")
    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS), AfterValidator(_different)] | None = Field(
        None, description=f"Tools that the model may call; at most {MAX_TOOLS}."
    )
    tool_choice: Choice | None = Field(None, description="Default auto.")
    thinking: Thinking | None = Field(
        None, description="Sets the chat template's switch for reasoning. Default disabled."
    )
    output_config: OutputConfig | None = None
    cache_control: CacheMark | None = Field(
        None, description="Retain the whole computed prompt for `ttl`; blocks and tools may have it too."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the template.")


def _range(low: float, high: float) -> AfterValidator:
    def check(value: float) -> float:
        if not low <= value <= high:
            raise wrong_value(f"must be between {low:g} and {high:g}, got {value:g}")
        return value

    return AfterValidator(check)


def _stop(value: str) -> str:
    if not value:
        raise wrong_value("must not be empty")
    return value


StopSequence = Annotated[str, Field(max_length=MAX_STOP_CHARACTERS), AfterValidator(_stop)]


class MessagesBody(CountBody, SessionFields):
    """A request for the next turn of a conversation."""

    max_tokens: int = Field(ge=1, description="Reduced to what the context leaves after the prompt.")
    stream: bool | None = None
    stop_sequences: list[StopSequence] | None = Field(None, max_length=MAX_STOPS)
    temperature: Annotated[float, _range(0, 1)] | None = Field(None, description="From 0 to 1. Default 1.")
    top_p: Annotated[float, _range(0, 1)] | None = None
    top_k: int | None = Field(None, ge=0, lt=2**31, description="0: no limit.")
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only", "default", "flex", "priority"] | None = Field(
        None, description="standard_only means default; the others are this server's classes."
    )
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    cache_salt: str | None = Field(
        None, min_length=1, max_length=512, description="Only requests with the same salt share prefixes."
    )
    response_cache: CacheDirectiveFields | None = Field(
        None, description="Directives for the response cache."
    )
    prompt_cache_key: str | None = Field(None, max_length=512)
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    slo: SloBody | None = None
    deadline_ms: int | None = Field(None, ge=1, le=MAX_MS)
    retention: list[RetentionBody] | None = Field(None, max_length=MAX_RETENTIONS)
    request_id: str | None = Field(None, pattern=r"^[A-Za-z0-9._:-]{1,128}$")


SPEAKS = "anthropic-version"
"""The header that identifies Anthropic's clients on routes that both APIs have."""


_STATUSES = {408: 504, 503: 529}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    408: "timeout_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def speaks_anthropic(scope: MutableMapping[str, Any], headers: Headers) -> bool:
    """Whether a request belongs to Anthropic's API: by its path, or by the header ``anthropic-version``."""
    path = route_path(scope["path"], scope.get("root_path", ""))
    return path == "/v1/messages" or path.startswith("/v1/messages/") or SPEAKS in headers


def error_body(error: ApiError, request_id: str | None = None) -> tuple[int, bytes]:
    """The status and the JSON of an error."""
    own_deadline = error.status == 408 and error.param == DEADLINE  # the client's deadline, not the server's
    status = 408 if own_deadline else _STATUSES.get(error.status, error.status)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    if error.status == 504:  # nothing is cached, and the client forbade computing
        kind = "not_found_error"
    inner: dict[str, Any] = {"type": kind, "message": str(error)}
    if error.details is not None:
        inner["details"] = error.details
    shown: dict[str, Any] = {"type": "error", "error": inner}
    return status, json.dumps(shown | ({"request_id": request_id} if request_id else {})).encode()


def error_response(error: ApiError, request_id: str) -> Response:
    """The error as an HTTP response."""
    status, body = error_body(error, request_id)
    return Response(body, status, error.headers, media_type="application/json")


class NamedModel(Protocol):
    """What is shown of a model."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def created(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...


def card(model: NamedModel, name: str) -> dict[str, Any]:
    """``GET /v1/models/{model}`` under one of its names."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": model.max_model_len - 1,
        "max_tokens": model.max_model_len - 1,
    }


def listing(models: Sequence[NamedModel]) -> dict[str, Any]:
    """``GET /v1/models``: the only page."""
    cards = [card(model, name) for model in models for name in model.names]
    return {"data": cards, "has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
