"""What every dialect's endpoints that generate text are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headrace.serve.cache.lookup import CacheLookup
from headrace.serve.http.cache.question_recorder import QuestionRecorder
from headrace.serve.http.generation.call_notes import CallNotes
from headrace.serve.http.model import ServedModel


def no_headers(tenant: str) -> Mapping[str, str]:
    """No headers for any tenant."""
    return {}


@dataclass(frozen=True, slots=True)
class Serving:
    """One model, one way to its answers, and the limits of a request.

    ``max_body_bytes`` bounds what is read of a request, ``request_timeout`` (seconds) how long it may take. ``headers``
    are those that every answer to a tenant carries. ``recorder`` takes note of which prompts come again.
    """

    recall: CacheLookup
    model: ServedModel
    notes: CallNotes
    max_body_bytes: int
    request_timeout: float
    headers: Callable[[str], Mapping[str, str]] = no_headers
    recorder: QuestionRecorder | None = None
