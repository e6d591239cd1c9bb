"""Options of embeddings, reranking and scores: their models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field


@dataclass(frozen=True, slots=True)
class EmbeddingOptions:
    """The models of `/v1/embeddings`, `/v1/rerank` and `/v1/score`, which are computed between the engine's steps."""

    embedding_model: Annotated[
        str | None,
        Field(
            description="Model of /v1/embeddings: a folder or Hugging Face name of an encoder, or of a decoder, "
            "which may be MODEL itself (default: none)."
        ),
    ] = None
    rerank_model: Annotated[
        str | None,
        Field(
            description="Cross-encoder of /v1/rerank and /v1/score (default: none; they compare embeddings)."
        ),
    ] = None
