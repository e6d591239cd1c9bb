"""Input items in requests: messages, function calls, their outputs, and reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from headrace.api.responses.refusals import known_items
from headrace.api.tools.wire import MAX_ARGUMENT_CHARACTERS
from headrace.api.wire import FORM_MARK, Answered, Replayed

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


class AnswerContent(Answered, TextContent):
    """A part of an earlier response's text. A part of type ``refusal`` is one too: its text is in ``refusal``."""

    @model_validator(mode="before")
    @classmethod
    def _refusal_as_text(cls, value: Any) -> Any:
        if not isinstance(value, dict) or value.get("type") != "refusal" or "refusal" not in value:
            return value
        return {"type": "output_text", "text": value["refusal"]}


def _form(value: Any) -> str | None:
    if isinstance(value, str):
        return FORM_MARK + "text"
    return FORM_MARK + "list" if isinstance(value, list) else None


_TEXT_OR_PARTS = Discriminator(
    _form, custom_error_type="content_type", custom_error_message="must be a string or a list of parts"
)
TextOrParts = Annotated[
    Annotated[str, Tag(FORM_MARK + "text")] | Annotated[Sequence[TextContent], Tag(FORM_MARK + "list")],
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
        _form, custom_error_type="input_type", custom_error_message="must be a string or a list of items"
    ),
    BeforeValidator(known_items),
]
