"""Inputs of embedding and reranking models, and which of the waiting ones are computed together.

A batch is filled with one input from each tenant in turn, so that a tenant with thousands of inputs delays others only
by its share of a batch. Within a call, short inputs come first, so that a batch has inputs of similar length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

from headrace.core.request import FinishReason, RejectReason


class TokenRow(NamedTuple):
    """The tokens of one input. Those from ``second`` on belong to its second text; 0: there is one text."""

    tokens: tuple[int, ...]
    second: int = 0


JobT = TypeVar("JobT", bound=Hashable)


class InputQueue(Generic[JobT]):
    """The waiting inputs of calls, by tenant and call."""

    def __init__(self) -> None:
        self._tenants: deque[str] = deque()  # in the order of their turns
        self._calls: dict[str, deque[JobT]] = {}
        self._inputs: dict[JobT, deque[tuple[int, int]]] = {}  # (tokens, index), short ones first
        self.tokens = 0
        """Tokens of all waiting inputs."""

    def __bool__(self) -> bool:
        return bool(self._inputs)

    def __len__(self) -> int:
        return len(self._inputs)

    def add(self, call: JobT, tenant: str, lengths: Sequence[int]) -> None:
        """Queue the inputs of a call, of ``lengths`` tokens."""
        if not lengths:
            return
        if tenant not in self._calls:
            self._calls[tenant] = deque()
            self._tenants.append(tenant)
        self._calls[tenant].append(call)
        self._inputs[call] = deque(sorted((length, index) for index, length in enumerate(lengths)))
        self.tokens += sum(lengths)

    def remove(self, call: JobT) -> None:
        """Forget the inputs of a call that still wait."""
        waiting = self._inputs.pop(call, None)
        if waiting is None:
            return
        self.tokens -= sum(length for length, _ in waiting)
        for tenant, calls in self._calls.items():
            if call in calls:
                calls.remove(call)
                self._leave(tenant)
                return

    def take(self, limit_tokens: int) -> list[tuple[JobT, int]]:
        """Calls and indices of the inputs to compute next: of at most ``limit_tokens``, but at least one input."""
        taken: list[tuple[JobT, int]] = []
        used = 0
        while self._tenants:
            tenant = self._tenants[0]
            call = self._calls[tenant][0]
            waiting = self._inputs[call]
            length, index = waiting[0]
            if taken and used + length > limit_tokens:
                break
            waiting.popleft()
            taken.append((call, index))
            used += length
            self._tenants.rotate(-1)
            if not waiting:
                del self._inputs[call]
                self._calls[tenant].popleft()
                self._leave(tenant)
        self.tokens -= used
        return taken

    def _leave(self, tenant: str) -> None:
        if not self._calls[tenant]:
            del self._calls[tenant]
            self._tenants.remove(tenant)


# Events of embedding and reranking models, which the scheduler does not see; `core.events` has all others.


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
