"""Hold policies: conditions outside the engine that a waiting request needs before it may start."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Protocol

from headrace.core.adapters import ADAPTER_PREFIX, AdapterLost, Adapters
from headrace.core.constraint import FAILED_PREFIX, Constraint, UnusableConstraint
from headrace.core.events import SkipReason
from headrace.core.queueing.fair_queue import PolicyFailed
from headrace.core.request import Request
from headrace.core.sequence import Sequence

HOLD_SECONDS = 0.001
"""Polling interval while nothing runs and a waiting request is held."""

HOLDS = frozenset({SkipReason.GRAMMAR_COMPILING, SkipReason.ASKING_PEERS, SkipReason.ADAPTER_LOADING})
"""The reasons that end outside the engine, so that it must poll them."""


WAITS_FOR_CONTENT = frozenset({SkipReason.PREFIX_IN_FLIGHT, SkipReason.RESTORING, *HOLDS})
"""Reasons that do not count as being overtaken when other requests start first."""


class HoldPolicy(Protocol):
    """Why a request may not start yet; None: it may.

    Raises:
        UnusableConstraint, AdapterLost: it never may; the request fails with the message.
    """

    def hold(self, request: Request) -> SkipReason | None: ...


class Compiles(Protocol):
    """The required method of `core.ports.Grammars`."""

    def ready(self, constraint: Constraint) -> bool: ...


class NoHolds:
    """Every request may start at once."""

    def hold(self, request: Request) -> SkipReason | None:
        return None


class UntilCompiled:
    """A request with a constraint waits until its grammar has been compiled in the background."""

    def __init__(self, grammars: Compiles) -> None:
        self._grammars = grammars

    def hold(self, request: Request) -> SkipReason | None:
        constraint = request.params.structured_outputs
        if constraint is None or self._grammars.ready(constraint):
            return None
        return SkipReason.GRAMMAR_COMPILING


class UntilPlaced:
    """A request with an adapter waits until the adapter is on the device; ``used`` returns those of running requests.

    A request that waits only for an adapter to arrive is not overtaken. One for which there is no place is, so that a
    stream of requests with other adapters does not starve it.
    """

    def __init__(self, adapters: Adapters, used: Callable[[], Set[str]]) -> None:
        self._adapters = adapters
        self._used = used

    def hold(self, request: Request) -> SkipReason | None:
        return self._adapters.hold(request.adapter, self._used) if request.adapter else None


class Every:
    """Several hold policies; the first reason counts."""

    def __init__(self, *policies: HoldPolicy) -> None:
        self._policies = policies

    def hold(self, request: Request) -> SkipReason | None:
        for policy in self._policies:
            if (reason := policy.hold(request)) is not None:
                return reason
        return None


class NeverStarts(PolicyFailed):
    """The condition that a request waits for will not be met."""

    def __init__(self, sequence: Sequence, message: str) -> None:
        Exception.__init__(self, message)
        self.sequence = sequence


def ask_hold(policy: HoldPolicy, sequence: Sequence) -> SkipReason | None:
    """Why the sequence may not start yet; None: it may.

    Raises:
        PolicyFailed: it never may, or the policy failed.
    """
    try:
        return policy.hold(sequence.request)
    except UnusableConstraint as error:
        raise NeverStarts(sequence, f"{FAILED_PREFIX}{error}") from error
    except AdapterLost as error:
        raise NeverStarts(sequence, f"{ADAPTER_PREFIX}{error}") from error
    except Exception as error:
        raise PolicyFailed(sequence, "hold", error) from error
