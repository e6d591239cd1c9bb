"""The object ``usage`` of a response, in OpenAI's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COST_FIELDS = ("cost", "cost_details")


def usage(
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int,
    reasoning_tokens: int = 0,
    accepted_prediction_tokens: int = 0,
    rejected_prediction_tokens: int = 0,
) -> dict[str, Any]:
    """The object ``usage``; a prompt counts once, whatever its number of choices."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning_tokens,
            "accepted_prediction_tokens": accepted_prediction_tokens,
            "rejected_prediction_tokens": rejected_prediction_tokens,
        },
    }


def cost_of(used: Mapping[str, Any]) -> dict[str, Any]:
    """The cost fields of a call's usage, for dialects with their own token fields; empty if they were not requested."""
    return {name: used[name] for name in COST_FIELDS if name in used}
