"""Events of embedding and reranking models, which the scheduler does not see; `core.events` has all others."""

from __future__ import annotations

from typing import NamedTuple

from headrace.core.request import FinishReason, RejectReason


class SlicedCall(NamedTuple):
    """A call with inputs in a batch: so many ``tokens`` of the batch are its."""

    request_id: str
    tenant: str
    tokens: int


class EmbeddingSlice(NamedTuple):
    """The engine thread has computed a part of a batch of these calls, between two steps; times are the engine's."""

    began: float
    ended: float
    calls: tuple[SlicedCall, ...]


class Embedded(NamedTuple):
    """A call to an embedding or reranking model has ended; the scheduler has not seen it.

    ``task`` is ``embed``, ``rerank`` or ``score``. ``computed_tokens`` of its ``tokens`` were computed. ``rejected`` is
    set if it was rejected at admission.
    """

    request_id: str
    tenant: str
    task: str
    inputs: int
    tokens: int
    computed_tokens: int
    seconds: float
    reason: FinishReason
    rejected: RejectReason | None = None
