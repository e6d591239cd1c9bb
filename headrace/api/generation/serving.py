"""The model, the caches and the limits that all endpoints for text generation share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headrace.api.cache.question_recorder import QuestionRecorder
from headrace.api.generation.call_notes import CallNotes
from headrace.api.model import ServedModel
from headrace.response_cache.lookup import CacheLookup


def no_headers(tenant: str) -> Mapping[str, str]:
    """No headers for any tenant."""
    return {}


@dataclass(frozen=True, slots=True)
class Serving:
    """One model with its caches, and the limits of a request.

    ``max_body_bytes`` limits a request's body, ``request_timeout`` (seconds) its duration. ``headers`` returns the
    headers of every response to a tenant. ``recorder`` records repeated prompts in the history.
    """

    recall: CacheLookup
    model: ServedModel
    notes: CallNotes
    max_body_bytes: int
    request_timeout: float
    headers: Callable[[str], Mapping[str, str]] = no_headers
    recorder: QuestionRecorder | None = None
