"""The two bodies that are compiled: a conversation, and texts to continue. Those of other dialects become the first."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    PrivateAttr,
    SkipValidation,
    Tag,
    model_validator,
)

from headrace.api.compile.fields import MAX_CHOICES, MAX_LOGPROBS, Generation, Inert, Sampling, Shown, Tokens
from headrace.api.wire import (
    FORM_MARK,
    Answered,
    NotYet,
    Replayed,
    Wire,
    either,
    is_token_ids,
    not_empty,
    wrong_type,
    wrong_value,
)

MAX_TOOLS = 128
MAX_ARGUMENT_CHARACTERS = 1_000_000
_NAME = re.compile("[a-zA-Z0-9_-]{1,128}")


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise wrong_value("must be 1 to 128 letters, digits, underscores or hyphens")
    return value


def check_parameters(value: Any) -> Any:
    """The schema of the arguments: of type object, or None for no arguments."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise wrong_type("a JSON schema of type object")
    if value.get("type", "object") != "object":
        raise wrong_value(f"must be a JSON schema of type object, got type {value['type']!r:.200}"[:200])
    properties = value.get("properties", {})
    if not isinstance(properties, dict):
        raise wrong_value("has properties that are no object")
    for name, schema in properties.items():
        if not isinstance(schema, dict | bool):
            raise wrong_value(f"has the property {name!r:.200}, whose schema is no object"[:200])
    required = value.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise wrong_value("has a field required that is no list of names")
    return value


FunctionLabel = Annotated[str, AfterValidator(_name)]


class Function(Wire):
    """A function that the model may call."""

    name: FunctionLabel
    description: str | None = None
    parameters: Annotated[SkipValidation[dict[str, Any] | None], BeforeValidator(check_parameters)] = Field(
        None, description="A JSON schema of type object."
    )
    strict: bool | None = Field(None, description="Arguments must follow the schema.")


class Tool(Wire):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """The tool as chat templates expect it."""
        function: dict[str, Any] = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        function["parameters"] = self.function.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


class FunctionName(Wire):
    """Names a function."""

    name: str


class NamedChoice(Wire):
    """The function that must be called."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Wire):
    """The functions that may be called, of those in ``tools``."""

    mode: Literal["auto", "required"]
    tools: list[NamedChoice] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedChoice(Wire):
    """Only some of the tools may be called; the prompt still shows all of them."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def mode_or(named: type[Wire], allowed: type[Wire]) -> Discriminator:
    """Distinguishes a choice that is a mode (a string), that names a function, or that allows some of them."""

    def form(value: Any) -> str | None:
        if isinstance(value, str):
            return FORM_MARK + "mode"
        if isinstance(value, allowed) or (isinstance(value, dict) and value.get("type") == "allowed_tools"):
            return FORM_MARK + "allowed"
        return FORM_MARK + "named" if isinstance(value, dict | named) else None

    message = "must be a string or an object that names a function"
    return Discriminator(form, custom_error_type="choice_type", custom_error_message=message)


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(FORM_MARK + "mode")]
    | Annotated[NamedChoice, Tag(FORM_MARK + "named")]
    | Annotated[AllowedChoice, Tag(FORM_MARK + "allowed")],
    mode_or(NamedChoice, AllowedChoice),
]


class CallRule(NamedTuple):
    """What a choice says about calls: whether there may or must be any (``mode``), and of which functions.

    ``names`` is None if all may be called. ``one``: the call is that of a named function.
    """

    mode: str
    names: frozenset[str] | None = None
    one: bool = False

    @property
    def forced(self) -> bool:
        """Whether the output must be a call."""
        return self.mode == "required"

    def allows(self, name: str) -> bool:
        """Whether this function may be called."""
        return self.names is None or name in self.names


def call_rule(choice: str | NamedChoice | AllowedChoice | None) -> CallRule:
    """The rule of a ``tool_choice``."""
    if isinstance(choice, NamedChoice):
        return CallRule("required", frozenset({choice.function.name}), one=True)
    if isinstance(choice, AllowedChoice):
        allowed = choice.allowed_tools
        return CallRule(allowed.mode, frozenset(tool.function.name for tool in allowed.tools))
    return CallRule(choice or "auto")


class CalledFunction(Answered):
    """A function and the arguments that it was called with, as JSON text."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: Annotated[str, Field(max_length=MAX_ARGUMENT_CHARACTERS)]


class CalledTool(Answered):
    """A call in an earlier message of the assistant."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(None, description="Accepted because streams have it. No effect.")


def _different(tools: list[Tool] | None) -> list[Tool] | None:
    names = [tool.function.name for tool in tools or ()]
    twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
    if twice is not None:
        raise wrong_value(f"has two functions with the name {twice!r:.200}")
    return tools


Tools = Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS), AfterValidator(_different)]

MAX_TEMPLATE_CHARACTERS = 65_536
"""Compile time grows with a template's length and has no other limit; at this length it is about a second."""


class CacheMark(Wire):
    """Anthropic's ``cache_control``: retain the computed prompt up to here."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def seconds(self) -> float:
        return 3600.0 if self.ttl == "1h" else 300.0


class TextPart(Replayed):
    """A piece of a message's text."""

    type: Literal["text"]
    text: str
    cache_control: CacheMark | None = None

    def plain(self, image: Mapping[str, Any]) -> dict[str, Any]:
        """The part as chat templates expect it."""
        return {"type": self.type, "text": self.text}


class AnswerPart(Answered, TextPart):
    """A piece of an earlier answer's text. A part of type ``refusal`` is one too: its text is in ``refusal``."""

    role: Literal["assistant"] | None = Field(
        None, description="Accepted because some clients repeat the message's fields. No effect."
    )

    @model_validator(mode="before")
    @classmethod
    def _refusal_as_text(cls, value: Any) -> Any:
        if not isinstance(value, dict) or value.get("type") != "refusal" or "refusal" not in value:
            return value
        return {"type": "text", "text": value["refusal"]}


ImageSource = Annotated[
    str, Field(description="A data URL with base64, or a URL of a host that the server may fetch from.")
]
ImageDetail = Annotated[
    Literal["auto", "low", "high", "original"] | None,
    Field(description="`low`: at most 512 pixels on the longer side. Default auto, the whole image."),
]


class ImageUrl(Wire):
    """Where an image is, or the image itself."""

    url: ImageSource
    detail: ImageDetail = None


class ImagePart(Replayed):
    """An image, in the place that it has among texts."""

    type: Literal["image_url"]
    image_url: ImageUrl
    cache_control: CacheMark | None = None
    _place: tuple[str, str] | None = PrivateAttr(None)

    @classmethod
    def at(cls, place: str, field: str, url: str, detail: str | None = None) -> ImagePart:
        """The part for an image that a request of another dialect has in the ``field`` of what is at ``place``."""
        part = cls.model_validate({"type": "image_url", "image_url": {"url": url, "detail": detail}})
        part._place = place, field
        return part

    @property
    def place(self) -> tuple[str, str] | None:
        """Where the client's request has the image, and in which field of it; None: where the chat request has it."""
        return self._place

    def plain(self, image: Mapping[str, Any]) -> dict[str, Any]:
        """``image``, which stands for it in chat templates."""
        return dict(image)

    @property
    def text(self) -> str:
        """An image has none."""
        return ""


def _form_of_content(value: Any) -> str | None:
    if isinstance(value, str):
        return FORM_MARK + "text"
    return FORM_MARK + "parts" if isinstance(value, list) else None


Part = Annotated[
    Annotated[TextPart, Tag(FORM_MARK + "text")] | Annotated[ImagePart, Tag(FORM_MARK + "image")],
    either("type", "image_url", "image", "text"),
]


TurnContent = Annotated[
    Annotated[str, Tag(FORM_MARK + "text")] | Annotated[Sequence[Part], Tag(FORM_MARK + "parts")],
    Discriminator(
        _form_of_content,
        custom_error_type="content_type",
        custom_error_message="must be a string or a list of content parts",
    ),
]


Content = Annotated[
    Annotated[str, Tag(FORM_MARK + "text")] | Annotated[Sequence[TextPart], Tag(FORM_MARK + "parts")],
    Discriminator(
        _form_of_content,
        custom_error_type="content_type",
        custom_error_message="must be a string or a list of content parts",
    ),
]


IMAGE: Mapping[str, Any] = {"type": "image"}
"""An image as almost all chat templates expect it."""


class Message(Replayed):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TurnContent | None = Field(
        None, description="Optional only for the assistant, in a message with tool calls or reasoning."
    )
    name: str | None = None
    cache_control: CacheMark | None = Field(
        None,
        description="Retain the computed prompt up to here for `ttl`; parts of the content may have it too.",
    )
    tool_calls: list[CalledTool] | None = Field(None, description="The assistant's tool calls.")
    tool_call_id: str | None = Field(None, description="Role tool: id of the call whose result this is.")
    reasoning_content: str | None = Field(None, description="The assistant's reasoning.")
    reasoning: str | None = Field(None, description="Another name of `reasoning_content`.")

    def plain(self, image: Mapping[str, Any] = IMAGE) -> dict[str, Any]:
        """The message as chat templates expect it; they call the role ``developer`` ``system``.

        ``image`` stands for each image.
        """
        without: dict[str, Any] = {
            "cache_control": True,
            "refusal": True,
            "tool_calls": {"__all__": {"index"}},
        }
        if isinstance(self.content, str | None):
            message = self.model_dump(exclude_none=True, exclude=without)
            message.setdefault("content", "")
        else:
            parts = [part.plain(image) for part in self.content]
            message = self.model_dump(exclude_none=True, exclude=without | {"content": True})
            message = {"role": message.pop("role"), "content": parts} | message
        if not self.tool_calls:  # some templates treat an empty list as a call
            message.pop("tool_calls", None)
        if thought := self.thought():
            message |= {"reasoning_content": thought, "reasoning": thought}
        return message | {"role": "system"} if self.role == "developer" else message

    def images(self) -> list[tuple[int, ImagePart]]:
        """The images, each with its index in the content."""
        parts = () if isinstance(self.content, str) else self.content or ()
        return [(at, part) for at, part in enumerate(parts) if isinstance(part, ImagePart)]

    def mark(self) -> CacheMark | None:
        """The mark with the longest ``ttl`` of the message and its parts; it covers the message to its end."""
        parts = () if isinstance(self.content, str) else self.content or ()
        marks = [self.cache_control, *[part.cache_control for part in parts]]
        return max(filter(None, marks), key=lambda mark: mark.seconds, default=None)

    def text(self) -> str:
        """The message's text; parts are joined as chat templates join them."""
        return (
            self.content if isinstance(self.content, str) else "\n".join(p.text for p in self.content or ())
        )

    def thought(self) -> str:
        """The message's reasoning."""
        return self.reasoning_content or self.reasoning or ""


AnswerContent = Annotated[
    Annotated[str, Tag(FORM_MARK + "text")] | Annotated[Sequence[AnswerPart], Tag(FORM_MARK + "parts")],
    Discriminator(
        _form_of_content,
        custom_error_type="content_type",
        custom_error_message="must be a string or a list of content parts",
    ),
]


class AnswerMessage(Answered, Message):
    """A turn of the assistant. What a client added to an earlier answer has no effect, such as ``parsed``."""

    role: Literal["assistant"]
    content: AnswerContent | None = Field(None, description="Optional with tool calls or reasoning.")
    refusal: str | None = Field(None, description="A refusal; the message's text if `content` is null.")

    @model_validator(mode="before")
    @classmethod
    def _refusal_as_content(cls, value: Any) -> Any:
        if not isinstance(value, dict) or value.get("content") is not None:
            return value
        refusal = value.get("refusal")
        return value | {"content": refusal} if isinstance(refusal, str) else value


AnyMessage = Annotated[
    Annotated[AnswerMessage, Tag(FORM_MARK + "answer")] | Annotated[Message, Tag(FORM_MARK + "message")],
    either("role", "assistant", "answer", "message"),
]


class Prediction(Wire):
    """What the client expects most of the answer to be, for example a file that is to be edited."""

    type: Literal["content"]
    content: Content

    def text(self) -> str:
        """The expected text; parts follow each other without a separator."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class Conversation(Wire):
    """Messages and how they become a prompt."""

    messages: Tokens[Annotated[list[AnyMessage], AfterValidator(not_empty)]]
    add_generation_prompt: Tokens[bool | None] = Field(
        None, description="Open the assistant's turn. Default true."
    )
    # Also in the key itself, because of the space before the first word.
    continue_final_message: Tokens[bool | None] = Field(
        None, description="Continue the last message in its turn."
    )
    chat_template: Tokens[str | None] = Field(
        None, max_length=MAX_TEMPLATE_CHARACTERS, description="A Jinja template in place of the model's."
    )
    chat_template_kwargs: Tokens[dict[str, Any] | None] = Field(
        None, description="Variables for the template."
    )
    # Also decide how an output is parsed; a replay parses it again.
    tools: Tokens[Tools] = Field(None, description="Functions that the model may call; at most 128.")
    reasoning_effort: Tokens[Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None] = Field(
        None, description="Sets the chat template's switch for reasoning."
    )


class ChatBody(Generation, Conversation):
    """A request for the next turn of a conversation."""

    max_completion_tokens: Sampling[int | None] = None
    logprobs: Sampling[bool | None] = None
    top_logprobs: Sampling[int | None] = Field(None, ge=0, le=MAX_LOGPROBS)
    # A required call is a grammar.
    tool_choice: Sampling[ToolChoice | None] = Field(
        None,
        description="`none`, `auto`, `required`, the function to call, or the allowed functions. Default auto.",
    )
    # Whether that grammar, or the output, allows several calls.
    parallel_tool_calls: Sampling[bool | None] = Field(
        None, description="false: at most one call. Default true."
    )
    # A part of the constraint.
    thinking_token_budget: Sampling[int | None] = Field(
        None,
        ge=0,
        lt=2**31,
        description="Maximum tokens of reasoning; then its end is forced. Default: no limit.",
    )
    include_reasoning: Shown[bool | None] = Field(
        None, description="false: leave the reasoning out. Default true."
    )
    prediction: Inert[Prediction | None] = Field(
        None, description="The expected output: matching parts are generated faster. Not with tools."
    )

    @property
    def alternatives(self) -> int | None:
        """The number of alternatives per token that are requested; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


MAX_PROMPTS = 2048
_FORMS = "a string, a list of strings, a list of token ids, or a list of lists of token ids"


def _prompt(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise wrong_type(_FORMS)
    if not value:
        raise wrong_value("must not be empty")
    if isinstance(value, str) or is_token_ids(value):
        return value
    if not (all(isinstance(x, str) for x in value) or all(map(is_token_ids, value))):
        raise wrong_type(_FORMS)
    if len(value) > MAX_PROMPTS:
        raise wrong_value(f"must have at most {MAX_PROMPTS} prompts, got {len(value)}")
    if not all(value):
        raise wrong_value("must not be empty")
    return value


class CompletionBody(Generation):
    """A request to continue one or several texts."""

    prompt: Tokens[
        Annotated[SkipValidation[str | list[str] | list[int] | list[list[int]]], BeforeValidator(_prompt)]
    ]
    # Requests logprobs; the choice among candidates is made again.
    best_of: Sampling[int | None] = Field(
        None, ge=1, le=MAX_CHOICES, description="Generate this many, return the best n."
    )
    echo: Shown[bool | None] = Field(None, description="Return the prompt before the completion.")
    suffix: Tokens[str | None] = Field(
        None, description="The text after the completion, for models with tokens for fill-in-the-middle."
    )
    logprobs: Sampling[int | None] = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def candidates(self) -> int:
        """Outputs generated per prompt, of which the best ``n`` are returned."""
        return max(self.n or 1, self.best_of or 1)

    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one, as text or as tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


# Known fields that are not supported: refused by name, never ignored. Each has its neutral values, which are accepted
# because many clients always send the field with its default. A field that becomes supported moves to its body.

_ANYWHERE: dict[str, tuple[object, ...]] = {
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1.0, 1),
    "early_stopping": (False,),
    "spaces_between_special_tokens": (True,),
    "repetition_detection": (),
    "store": (False,),
    "safety_identifier": (),
}

CHAT: NotYet = _ANYWHERE | {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "verbosity": ("medium",),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "moderation": (),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "echo": (False,),
    "best_of": (1,),
}

COMPLETIONS: NotYet = _ANYWHERE | {
    "thinking_token_budget": (),
    "prompt_embeds": (),
}

TOKENIZE: NotYet = {"mm_processor_kwargs": ({},)}

DETOKENIZE: NotYet = {}
