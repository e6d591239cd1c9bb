"""One request of a workload; each target converts it to its own kind of request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeGuard


class Message(NamedTuple):
    """One turn of a chat."""

    role: str
    content: str


Prompt = str | tuple[int, ...] | tuple[Message, ...]
"""Plain text, token ids, or a chat."""


@dataclass(frozen=True, slots=True)
class Work:
    """A prompt, the maximum length of its output, and its arrival.

    ``arrival`` is in seconds after the start of the run. ``ignore_eos`` makes the output exactly ``max_tokens`` long.
    ``expect`` is a label for the role of the request in its workload (``short``, ``long``, ``intruder`` ...).
    """

    id: str
    prompt: Prompt
    max_tokens: int
    arrival: float = 0.0
    ignore_eos: bool = False
    temperature: float = 0.0
    expect: str = ""
    tenant: str = "default"
    service_class: str = "default"


def is_chat(prompt: Prompt) -> TypeGuard[tuple[Message, ...]]:
    """Whether a prompt is a chat, which needs the chat endpoint."""
    return not isinstance(prompt, str) and isinstance(prompt[0], Message)
