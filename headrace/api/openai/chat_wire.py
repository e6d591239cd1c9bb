"""The body of ``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from headrace.api.generation.fields import MAX_LOGPROBS, Generation
from headrace.api.tools.wire import CalledTool, ToolChoice, Tools
from headrace.api.wire import FORM_MARK, Answered, Replayed, Wire, wrong_value

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


def _form_of_content(value: Any) -> str | None:
    if isinstance(value, str):
        return FORM_MARK + "text"
    return FORM_MARK + "parts" if isinstance(value, list) else None


Content = Annotated[
    Annotated[str, Tag(FORM_MARK + "text")] | Annotated[Sequence[TextPart], Tag(FORM_MARK + "parts")],
    Discriminator(
        _form_of_content,
        custom_error_type="content_type",
        custom_error_message="must be a string or a list of content parts",
    ),
]


class Message(Replayed):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = Field(
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

    def plain(self) -> dict[str, Any]:
        """The message as chat templates expect it; they call the role ``developer`` ``system``."""
        without: dict[str, Any] = {
            "cache_control": True,
            "refusal": True,
            "tool_calls": {"__all__": {"index"}},
        }
        message = self.model_dump(exclude_none=True, exclude=without)
        if self.content is None:
            message["content"] = ""
        elif not isinstance(self.content, str):
            message["content"] = [{"type": part.type, "text": part.text} for part in self.content]
        if not self.tool_calls:  # some templates treat an empty list as a call
            message.pop("tool_calls", None)
        if thought := self.thought():
            message |= {"reasoning_content": thought, "reasoning": thought}
        return message | {"role": "system"} if self.role == "developer" else message

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


def _turn(value: Any) -> str:
    role = value.get("role") if isinstance(value, dict) else getattr(value, "role", None)
    return FORM_MARK + ("answer" if role == "assistant" else "message")


AnyMessage = Annotated[
    Annotated[AnswerMessage, Tag(FORM_MARK + "answer")] | Annotated[Message, Tag(FORM_MARK + "message")],
    Discriminator(_turn),
]


def _not_empty(messages: list[Message]) -> list[Message]:
    if not messages:
        raise wrong_value("must not be empty")
    return messages


class Prediction(Wire):
    """What the client expects most of the answer to be, for example a file that is to be edited."""

    type: Literal["content"]
    content: Content

    def text(self) -> str:
        """The expected text; parts follow each other without a separator."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class Conversation(Wire):
    """Messages and how they become a prompt."""

    messages: Annotated[list[AnyMessage], AfterValidator(_not_empty)]
    add_generation_prompt: bool | None = Field(None, description="Open the assistant's turn. Default true.")
    continue_final_message: bool | None = Field(None, description="Continue the last message in its turn.")
    chat_template: str | None = Field(
        None, max_length=MAX_TEMPLATE_CHARACTERS, description="A Jinja template in place of the model's."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the template.")
    tools: Tools = Field(None, description="Functions that the model may call; at most 128.")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None, description="Sets the chat template's switch for reasoning."
    )


class ChatBody(Generation, Conversation):
    """A request for the next turn of a conversation."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tool_choice: ToolChoice | None = Field(
        None,
        description="`none`, `auto`, `required`, the function to call, or the allowed functions. Default auto.",
    )
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call. Default true.")
    thinking_token_budget: int | None = Field(
        None,
        ge=0,
        lt=2**31,
        description="Maximum tokens of reasoning; then its end is forced. Default: no limit.",
    )
    include_reasoning: bool | None = Field(None, description="false: leave the reasoning out. Default true.")
    prediction: Prediction | None = Field(
        None, description="The expected output: matching parts are generated faster. Not with tools."
    )
