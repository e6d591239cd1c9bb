"""Measurements of one request from the client's side, and the interface of targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from headrace.lab.workload.work import Work


@dataclass(frozen=True, slots=True)
class Record:
    """One request's times, in seconds after the start of the run, and its token counts.

    ``arrived`` is when the request was due, so that a slow client does not make the server look better; in a closed
    loop it is when the request was sent. ``token_seconds`` are the times of the chunks with output, in order; a chunk
    may carry several tokens. ``error`` says why the response is incomplete. ``ended`` is when the stream reported its
    end: an end token counts as a token but has no chunk of its own.
    """

    id: str
    arrived: float
    finished: float
    token_seconds: tuple[float, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str = ""
    error: str = ""
    tenant: str = "default"
    service_class: str = "default"
    ended: float | None = None

    @property
    def ttft(self) -> float | None:
        """Time to first token, from arrival."""
        return self.token_seconds[0] - self.arrived if self.token_seconds else None

    @property
    def e2e(self) -> float:
        """Time from arrival to the end."""
        return self.finished - self.arrived

    @property
    def tpot(self) -> float | None:
        """Mean time per token after the first; None for outputs of one token."""
        if self.output_tokens < 2 or not self.token_seconds:
            return None
        last = max(self.token_seconds[-1], self.ended or 0.0)
        return (last - self.token_seconds[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies: the times between two chunks with output."""
        return [later - earlier for earlier, later in pairwise(self.token_seconds)]


def wrong_length(work: Work, output_tokens: int) -> str:
    """The error message for an output of the wrong length; empty if the length is right or not prescribed."""
    if not work.ignore_eos or output_tokens == work.max_tokens:
        return ""
    return f"expected exactly {work.max_tokens} tokens, got {output_tokens}"


class Target(Protocol):
    """Something that serves a workload: an engine in this process, a URL, another library.

    ``completed`` counts the requests of the current run that have ended; a progress bar reads it.
    """

    name: str

    @property
    def completed(self) -> int: ...

    def run(self, work: Sequence[Work]) -> list[Record]:
        """Serve all requests and return their records, including those of failed requests."""
        ...

    def facts(self) -> dict[str, Any]:
        """Figures that the target reports about its last run, such as KV waste or batch size."""
        ...

    def close(self) -> None: ...
