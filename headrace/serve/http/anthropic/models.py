"""The served model in Anthropic's format."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Protocol


class NamedModel(Protocol):
    """What is shown of a model."""

    @property
    def name(self) -> str: ...

    @property
    def created(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...


def card(model: NamedModel) -> dict[str, Any]:
    """``GET /v1/models/{model}``."""
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": model.max_model_len - 1,
        "max_tokens": model.max_model_len - 1,
    }


def listing(model: NamedModel) -> dict[str, Any]:
    """``GET /v1/models``: the only page."""
    return {"data": [card(model)], "has_more": False, "first_id": model.name, "last_id": model.name}
