"""The body of ``POST /v1/completions``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, SkipValidation

from headrace.api.generation.fields import MAX_CHOICES, MAX_LOGPROBS, Generation
from headrace.api.wire import wrong_type, wrong_value

MAX_PROMPTS = 2048
_FORMS = "a string, a list of strings, a list of token ids, or a list of lists of token ids"


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int}


def _prompt(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise wrong_type(_FORMS)
    if not value:
        raise wrong_value("must not be empty")
    if isinstance(value, str) or _is_tokens(value):
        return value
    if not (all(isinstance(x, str) for x in value) or all(map(_is_tokens, value))):
        raise wrong_type(_FORMS)
    if len(value) > MAX_PROMPTS:
        raise wrong_value(f"must have at most {MAX_PROMPTS} prompts, got {len(value)}")
    if not all(value):
        raise wrong_value("must not be empty")
    return value


class CompletionBody(Generation):
    """A request to continue one or several texts."""

    prompt: Annotated[SkipValidation[str | list[str] | list[int] | list[list[int]]], BeforeValidator(_prompt)]
    best_of: int | None = Field(
        None, ge=1, le=MAX_CHOICES, description="Generate this many, return the best n."
    )
    echo: bool | None = Field(None, description="Return the prompt before the completion.")
    suffix: str | None = Field(
        None, description="The text after the completion, for models with tokens for fill-in-the-middle."
    )
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one, as text or as tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)
