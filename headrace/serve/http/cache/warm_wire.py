"""The body of ``POST /v1/cache/warm``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from headrace.serve.http.openai.chat_wire import Message
from headrace.serve.http.wire import Wire

MAX_REQUESTS = 10_000
MAX_PREFIXES = 100


class WarmRequest(Wire):
    """A call to be computed ahead: a line of a batch file, without its id."""

    custom_id: str | None = None
    method: Literal["POST"] | None = None
    url: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, Any]


class WarmPrefix(Wire):
    """The beginning of prompts that is to be kept computed: a text, or the first messages of conversations."""

    prompt: str | None = Field(None, min_length=1)
    messages: list[Message] | None = Field(None, min_length=1)
    cache_salt: str | None = Field(None, min_length=1, max_length=512, description="As in the calls to come.")
    user: str | None = Field(None, max_length=512, description="As in the calls to come.")
    retention: int = Field(
        80, ge=0, le=100, description="What is higher is evicted later; what nobody spoke for has 35."
    )


class WarmBody(Wire):
    """What to compute when there is time."""

    requests: list[WarmRequest] = Field(default=[], max_length=MAX_REQUESTS)
    prefixes: list[WarmPrefix] = Field(default=[], max_length=MAX_PREFIXES)
    from_history: bool = Field(False, description="Take the best of the recorded questions too.")
