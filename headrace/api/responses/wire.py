"""The body of ``POST /v1/responses``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from headrace.api.compile.bodies import (
    MAX_ARGUMENT_CHARACTERS,
    MAX_TOOLS,
    Function,
    FunctionLabel,
    ImageDetail,
    ImageSource,
    mode_or,
)
from headrace.api.compile.fields import (
    MAX_LOGPROBS,
    CacheDirectiveFields,
    JsonObjectFormat,
    JsonSchema,
    MetadataField,
    SamplingFields,
    SchedulingFields,
    TextFormat,
)
from headrace.api.errors import not_supported
from headrace.api.wire import FORM_MARK, Answered, NotYet, Replayed, Wire, either, wrong_value

RESPONSES: NotYet = {
    "access_programs": (),
    "background_options": (),
    "conversation": (),
    "image": (),
    "max_tool_calls": (),
    "moderation": (),
    "prompt": (),
    "prompt_cache_options": (),
    "safety_identifier": (),
}
"""Each field with its neutral values, which are accepted; so is ``null``."""


INPUT_TOKENS: NotYet = {"conversation": (), "personality": (), "prompt": ()}
"""The same for ``POST /v1/responses/input_tokens``."""


ITEM_TYPES = frozenset(
    ("message", "function_call", "function_call_output", "reasoning", "compaction", "item_reference")
)


TEXT_PARTS = frozenset({"input_text", "output_text", "text"})
INPUT_PARTS = TEXT_PARTS | {"input_image"}
ANSWER_PARTS = TEXT_PARTS | {"refusal"}
OUTPUT_PARTS = frozenset({"input_text", "input_image"})
TOOL_TYPES = frozenset({"function", "namespace", "web_search", "web_search_preview", "image_generation"})
"""The hosted tools among them are not offered to the model: coding agents send them always, and work without them."""


def known_items(value: Any) -> Any:
    """``value``, if it is no list of input items with unsupported types; other errors are left to validation.

    Raises:
        ApiError: an item, or a part of one, has a type that is not supported.
    """
    if not isinstance(value, list):
        return value
    for at, item in enumerate(value):
        if not isinstance(item, dict):
            continue
        path = f"input[{at}]"
        _check(item, ITEM_TYPES, path, "An item")
        texts = ANSWER_PARTS if item.get("role") == "assistant" else INPUT_PARTS
        for field, parts in (("content", texts), ("output", OUTPUT_PARTS)):
            if item.get("type") != "reasoning" and isinstance(item.get(field), list):
                _check_all(item[field], parts, f"{path}.{field}", "Content")
    return value


def known_tools(value: Any) -> Any:
    """``value``, a list of tools; raise `ApiError` for tools of unsupported types."""
    if isinstance(value, list):
        _check_all(value, TOOL_TYPES, "tools", "A tool")
        for at, tool in enumerate(value):
            if isinstance(tool, dict) and isinstance(tool.get("tools"), list):
                _check_all(tool["tools"], frozenset({"function"}), f"tools[{at}].tools", "A tool")
    return value


def known_choice(value: Any) -> Any:
    """``value``, a ``tool_choice``; raise `ApiError` for an unsupported type."""
    if isinstance(value, dict):
        _check(value, frozenset({"function", "allowed_tools"}), "tool_choice", "A tool_choice")
        if isinstance(value.get("tools"), list):
            _check_all(value["tools"], frozenset({"function"}), "tool_choice.tools", "An allowed tool")
    return value


def _check_all(values: Iterable[Any], known: frozenset[str], path: str, what: str) -> None:
    for at, each in enumerate(values):
        if isinstance(each, dict):
            _check(each, known, f"{path}[{at}]", what)


def _check(value: dict[str, Any], known: frozenset[str], path: str, what: str) -> None:
    kind = value.get("type")
    if kind == "input_image" and value.get("file_id") is not None:
        raise not_supported(f"{path}.file_id")
    if isinstance(kind, str) and kind not in known:
        raise not_supported(f"{path}.type", f"{what} of type {kind[:64]!r}")


SEPARATOR = "__"


class Spelling(NamedTuple):
    """A function's name and namespace, as the client sent them."""

    name: str
    namespace: str | None = None

    @property
    def flat(self) -> str:
        """The name that the model sees."""
        return self.name if self.namespace is None else f"{self.namespace}{SEPARATOR}{self.name}"

    def fields(self) -> dict[str, str]:
        """The fields of a ``function_call`` item."""
        return {"name": self.name} | ({} if self.namespace is None else {"namespace": self.namespace})


def spelling_of(flat: str, spellings: Mapping[str, Spelling]) -> Spelling:
    """The client's name and namespace for the function ``flat``; without an entry in ``spellings``, just the name."""
    return spellings.get(flat) or Spelling(flat)


MAX_NAME = 128
"""Maximum characters of the name that the model sees, with its namespace."""


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]


class NamespaceTool(Wire):
    """Functions under one name; their calls have it in the field ``namespace``."""

    type: Literal["namespace"]
    name: FunctionLabel
    description: str | None = Field(None, description="Accepted; the model sees only the functions'.")
    tools: list[FunctionTool] = Field(max_length=MAX_TOOLS)


class HostedTool(Wire):
    """A tool that OpenAI runs. It is not offered to the model, and the response's ``tools`` do not list it."""

    model_config = ConfigDict(extra="allow")

    type: Literal["web_search", "web_search_preview", "image_generation"]


def _form(value: Any) -> str | None:
    kind = (value.get("type") or "function") if isinstance(value, dict) else getattr(value, "type", None)
    if kind in ("function", "namespace"):
        return f"{FORM_MARK}{kind}"
    return FORM_MARK + "hosted" if isinstance(kind, str) else None


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag(FORM_MARK + "function")]
    | Annotated[NamespaceTool, Tag(FORM_MARK + "namespace")]
    | Annotated[HostedTool, Tag(FORM_MARK + "hosted")],
    Discriminator(_form, custom_error_type="tool_type", custom_error_message="must be a tool"),
]


def offered(tools: Iterable[ResponseTool]) -> Iterator[tuple[Spelling, FunctionTool]]:
    """The functions that the model may call, with the client's names for them."""
    for tool in tools:
        if isinstance(tool, FunctionTool):
            yield Spelling(tool.name), tool
        elif isinstance(tool, NamespaceTool):
            for each in tool.tools:
                yield Spelling(each.name, tool.name), each


def _different(tools: Sequence[ResponseTool]) -> Sequence[ResponseTool]:
    names = [spelling.flat for spelling, _ in offered(tools)]
    if len(names) > MAX_TOOLS:
        raise wrong_value(f"has {len(names)} functions; at most {MAX_TOOLS} are possible")
    twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
    if twice is not None:
        raise wrong_value(f"has two functions with the name {twice!r:.200}")
    long = next((name for name in names if len(name) > MAX_NAME), None)
    if long is not None:
        raise wrong_value(
            f"has a function whose name is longer than {MAX_NAME} characters with its namespace"
        )
    return tools


Tools = Annotated[
    list[ResponseTool],
    Field(max_length=MAX_TOOLS),
    AfterValidator(_different),
    BeforeValidator(known_tools),
]


class FunctionChoice(Wire):
    """The function that must be called."""

    type: Literal["function"]
    name: str


class AllowedFunctions(Wire):
    """Only these functions may be called; the prompt still shows all tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(min_length=1, max_length=MAX_TOOLS)]


Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(FORM_MARK + "mode")]
    | Annotated[FunctionChoice, Tag(FORM_MARK + "named")]
    | Annotated[AllowedFunctions, Tag(FORM_MARK + "allowed")],
    mode_or(FunctionChoice, AllowedFunctions),
    BeforeValidator(known_choice),
]


def path_of(tools: Iterable[ResponseTool], number: int) -> str:
    """Where the request has the function that is the ``number``-th of those `offered`."""
    paths: list[str] = []
    for at, tool in enumerate(tools):
        if isinstance(tool, FunctionTool):
            paths.append(f"tools[{at}]")
        elif isinstance(tool, NamespaceTool):
            paths += [f"tools[{at}].tools[{inner}]" for inner in range(len(tool.tools))]
    return paths[number]


Status = Literal["in_progress", "completed", "incomplete"]

Id = Annotated[str, Field(min_length=1, max_length=256)]

MAX_ITEMS = 10_000
MAX_COMPACTION_CHARACTERS = 1_000_000


class TextContent(Replayed):
    """A part of a message's text. Other fields that a response has in it are accepted and have no effect."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class ImageContent(Replayed):
    """An image in a message or in the output of a function."""

    type: Literal["input_image"]
    image_url: ImageSource
    detail: ImageDetail = None


class AnswerContent(Answered, TextContent):
    """A part of an earlier response's text. A part of type ``refusal`` is one too: its text is in ``refusal``."""

    @model_validator(mode="before")
    @classmethod
    def _refusal_as_text(cls, value: Any) -> Any:
        if not isinstance(value, dict) or value.get("type") != "refusal" or "refusal" not in value:
            return value
        return {"type": "output_text", "text": value["refusal"]}


def _form_of_parts(value: Any) -> str | None:
    if isinstance(value, str):
        return FORM_MARK + "text"
    return FORM_MARK + "list" if isinstance(value, list) else None


_TEXT_OR_PARTS = Discriminator(
    _form_of_parts,
    custom_error_type="content_type",
    custom_error_message="must be a string or a list of parts",
)


InputPart = Annotated[
    Annotated[TextContent, Tag(FORM_MARK + "text")] | Annotated[ImageContent, Tag(FORM_MARK + "image")],
    either("type", "input_image", "image", "text"),
]


TextOrParts = Annotated[
    Annotated[str, Tag(FORM_MARK + "text")] | Annotated[Sequence[InputPart], Tag(FORM_MARK + "list")],
    _TEXT_OR_PARTS,
]


AnswerText = Annotated[
    Annotated[str, Tag(FORM_MARK + "text")] | Annotated[Sequence[AnswerContent], Tag(FORM_MARK + "list")],
    _TEXT_OR_PARTS,
]


class MessageItem(Replayed):
    """A turn of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOrParts
    id: Id | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = Field(
        None, description="Accepted and stored; chat templates do not use it."
    )


class AnswerItem(Answered, MessageItem):
    """A message of an earlier response."""

    role: Literal["assistant"]
    content: AnswerText


class FunctionCallItem(Answered):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: Id
    name: Id
    namespace: Id | None = None
    arguments: Annotated[str, Field(max_length=MAX_ARGUMENT_CHARACTERS)]
    id: Id | None = None
    status: Status | None = None


class FunctionCallOutputItem(Replayed):
    """The output of a function call."""

    type: Literal["function_call_output"]
    call_id: Id
    output: TextOrParts
    id: Id | None = None
    status: Status | None = None


class ReasoningPart(Answered):
    """A piece of reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Answered):
    """The model's reasoning before the item that follows."""

    type: Literal["reasoning"]
    summary: list[ReasoningPart] | None = None
    content: list[ReasoningPart] | None = None
    encrypted_content: None = Field(None, description="Always null: reasoning is plain text in `content`.")
    id: Id | None = None
    status: Status | None = None


class ItemReference(Replayed):
    """An item of a stored response, by its id."""

    type: Literal["item_reference"] | None = None
    id: Id


class CompactionItem(Answered):
    """The item that ``POST /v1/responses/compact`` returned."""

    type: Literal["compaction"]
    encrypted_content: Annotated[str, Field(min_length=1, max_length=MAX_COMPACTION_CHARACTERS)]
    id: Id | None = None


def _kind(value: Any) -> str | None:
    if isinstance(value, dict):
        kind = value.get("type") or ("item_reference" if value.keys() <= {"id", "type"} else "message")
        if kind == "message" and value.get("role") == "assistant":
            kind = "answer"
        return FORM_MARK + kind if isinstance(kind, str) else None
    return None


Item = Annotated[
    Annotated[AnswerItem, Tag(FORM_MARK + "answer")]
    | Annotated[MessageItem, Tag(FORM_MARK + "message")]
    | Annotated[FunctionCallItem, Tag(FORM_MARK + "function_call")]
    | Annotated[FunctionCallOutputItem, Tag(FORM_MARK + "function_call_output")]
    | Annotated[ReasoningItem, Tag(FORM_MARK + "reasoning")]
    | Annotated[CompactionItem, Tag(FORM_MARK + "compaction")]
    | Annotated[ItemReference, Tag(FORM_MARK + "item_reference")],
    Discriminator(_kind, custom_error_type="item_type", custom_error_message="must be an input item"),
]


Input = Annotated[
    Annotated[str, Tag(FORM_MARK + "text")]
    | Annotated[list[Item], Field(max_length=MAX_ITEMS), Tag(FORM_MARK + "list")],
    Discriminator(
        _form_of_parts,
        custom_error_type="input_type",
        custom_error_message="must be a string or a list of items",
    ),
    BeforeValidator(known_items),
]


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
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the template.")
    truncation: Literal["auto", "disabled"] | None = Field(
        None,
        description="`auto`: a conversation that is too long loses its oldest items. `disabled`: it is refused.",
    )


class ResponsesBody(SamplingFields, SchedulingFields, _PromptFields):
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
