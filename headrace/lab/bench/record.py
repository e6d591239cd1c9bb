"""What was seen of one request from outside, whatever served it; and what can serve a workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from headrace.lab.workload import Work


@dataclass(frozen=True, slots=True)
class Record:
    """One request's times, in seconds after the start of the run, and its token counts.

    ``arrived`` is when the request was due, so that a client that falls behind does not flatter the server;
    in a closed loop it is when it was sent. ``token_seconds`` are the times at which parts of the answer were
    available to the caller, first to last; a part may carry several tokens. ``error`` says why there is no
    whole answer. ``tenant`` and ``service_class`` are those of its `Work`. ``ended`` is when a stream said that the
    answer was at its end, by which its last token was there: an end token counts and has no part of its own.
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
        """Mean time per token after the first; None for answers of one token."""
        if self.output_tokens < 2 or not self.token_seconds:
            return None
        last = max(self.token_seconds[-1], self.ended or 0.0)
        return (last - self.token_seconds[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies: the times between two parts of the answer."""
        return [later - earlier for earlier, later in pairwise(self.token_seconds)]


def wrong_length(work: Work, output_tokens: int) -> str:
    """What is wrong with an answer's length; empty where the work leaves it to the model, or it is right."""
    if not work.ignore_eos or output_tokens == work.max_tokens:
        return ""
    return f"asked for exactly {work.max_tokens} tokens, got {output_tokens}"


class Target(Protocol):
    """Something that serves a workload: an engine in this process, a URL, another library.

    ``completed`` counts the requests of the current run that have ended; a progress bar reads it.
    """

    name: str
    completed: int

    def run(self, work: Sequence[Work]) -> list[Record]:
        """Serve all of it and say what was seen; requests that failed are told too."""
        ...

    def facts(self) -> dict[str, Any]:
        """What the target itself knows of the last run (KV waste, batch size ...), for the report."""
        ...

    def close(self) -> None: ...
