"""One call of a trace: its arrival, lengths and tenant, without any text.

Content is given by reference: a `Span` is a range of a stream of tokens. Two calls with the same span share its tokens;
`lab.workload.synthesis` generates them.
"""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """Tokens ``[start, start + length)`` of a stream; equal streams have equal tokens, others differ."""

    stream: int
    start: int
    length: int


class Call(NamedTuple):
    """A call of a language model.

    ``arrival`` is in seconds after the first call. ``content`` are the prompt's spans, which add up to
    ``prompt_tokens``; empty if nothing is shared. ``answer`` is the span of the output, which later turns may contain.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    tenant: str = "default"
    service_class: str = "default"
    content: tuple[Span, ...] = ()
    answer: Span | None = None
