"""The embedding and reranking models as ``/v1/models`` lists them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from headrace.api.errors import model_not_found
from headrace.service.embedding_models import PoolingModel


class PoolingCard:
    """A model's name and limit, for `operations.status`."""

    def __init__(self, model: PoolingModel, also_named: Sequence[str] = ()) -> None:
        self.name = model.name
        self.names = (model.name, *also_named)
        self.max_model_len = model.max_tokens
        self.created = int(time.time())
        self.card = {
            "id": model.name,
            "object": "model",
            "created": self.created,
            "owned_by": "headrace",
            "root": model.name,
            "parent": None,
            "max_model_len": model.max_tokens,
        }

    def check_name(self, asked: str | None) -> None:
        """Raise `ApiError` 404 unless ``asked`` names this model or is None."""
        if asked is not None and asked not in self.names:
            raise model_not_found(str(asked))
