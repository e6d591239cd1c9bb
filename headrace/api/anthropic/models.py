"""The served model in Anthropic's format."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Protocol


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


def listing(model: NamedModel) -> dict[str, Any]:
    """``GET /v1/models``: the only page."""
    cards = [card(model, name) for name in model.names]
    return {"data": cards, "has_more": False, "first_id": model.names[0], "last_id": model.names[-1]}
