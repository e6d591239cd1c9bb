"""Requests for tests: short ones, and a mixed crowd that competes for memory."""

from __future__ import annotations

import random
from typing import Any

from headrace.core.request import Request, SamplingParams


def make_request(
    id: str, tokens: int | tuple[int, ...] = 4, *, max_tokens: int | None = 4, **fields: Any
) -> Request:
    """A request with any ``fields`` of `Request`.

    If ``tokens`` is a number, the prompt has that length and shares no prefix with the prompt of another id.
    """
    if isinstance(tokens, int):
        first = 1000 + sum(ord(letter) << (8 * i) for i, letter in enumerate(id))
        tokens = (first, *range(1, tokens))
    params = fields.pop("params", None) or SamplingParams(max_tokens=max_tokens)
    return Request(id=id, tokens=tokens, params=params, **fields)


def make_crowd(count: int = 24) -> list[Request]:
    """Requests of two tenants and all classes, some with a common prefix; equal counts give equal crowds."""
    rng = random.Random(7)
    shared = tuple(range(9))
    return [
        make_request(
            f"r{i}",
            shared[: rng.randint(1, 9)] + tuple(rng.randrange(50) for _ in range(rng.randint(1, 12))),
            max_tokens=rng.randint(1, 14),
            priority=rng.randint(-2, 2),
            tenant=rng.choice("ab"),
            service_class=rng.choice(["priority", "default", "flex", "background"]),
        )
        for i in range(count)
    ]
