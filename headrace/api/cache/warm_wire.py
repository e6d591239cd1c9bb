"""The body of ``POST /v1/cache/warm``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from headrace.api.compile.bodies import AnyMessage
from headrace.api.wire import Wire

MAX_REQUESTS = 10_000
MAX_PREFIXES = 100


class WarmRequest(Wire):
    """A request to compute ahead, in the format of a batch file's line."""

    custom_id: str | None = None
    method: Literal["POST"] | None = None
    url: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, Any]


class WarmPrefix(Wire):
    """A prompt prefix to keep in the prefix cache: a text, or the first messages of conversations."""

    prompt: str | None = Field(None, min_length=1)
    messages: list[AnyMessage] | None = Field(None, min_length=1)
    cache_salt: str | None = Field(
        None, min_length=1, max_length=512, description="The `cache_salt` of the later requests."
    )
    user: str | None = Field(None, max_length=512, description="The `user` of the later requests.")
    retention: int = Field(
        80,
        ge=0,
        le=100,
        description="Retention priority; blocks with a higher one are evicted later. Blocks without one have 35.",
    )


class WarmBody(Wire):
    """What to compute in idle time."""

    requests: list[WarmRequest] = Field(default=[], max_length=MAX_REQUESTS)
    prefixes: list[WarmPrefix] = Field(default=[], max_length=MAX_PREFIXES)
    from_history: bool = Field(
        False, description="Also compute the best candidates of the request history (admin keys only)."
    )
