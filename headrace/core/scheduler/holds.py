"""What a waiting request waits for outside the engine before it may start."""

from __future__ import annotations

from typing import Protocol

from headrace.core.constraint import FAILED_PREFIX, Constraint, UnusableConstraint
from headrace.core.events import SkipReason
from headrace.core.queueing.tenant_queue import PolicyFailed
from headrace.core.request import Request
from headrace.core.sequence import Sequence

HOLD_SECONDS = 0.001
"""How long the engine rests before it asks again, where nothing runs and a waiting request is held."""

HOLDS = frozenset({SkipReason.GRAMMAR_COMPILING, SkipReason.ASKING_PEERS})
"""The reasons that end outside the engine: it must ask again, since no step of its own changes them."""


WAITS_FOR_CONTENT = frozenset({SkipReason.PREFIX_IN_FLIGHT, SkipReason.RESTORING, *HOLDS})
"""Reasons for which a request lets others pass of its own accord: they do not count as being overtaken."""


class HoldPolicy(Protocol):
    """Why a request may not start yet; None: it may.

    Raises:
        UnusableConstraint: it never may; the request fails with the message.
    """

    def hold(self, request: Request) -> SkipReason | None: ...


class Compiles(Protocol):
    """What is asked of `core.ports.Grammars` here."""

    def ready(self, constraint: Constraint) -> bool: ...


class NoHolds:
    """Every request may start at once."""

    def hold(self, request: Request) -> SkipReason | None:
        return None


class UntilCompiled:
    """A request with a constraint waits until its grammar has been compiled, which goes on beside the loop."""

    def __init__(self, grammars: Compiles) -> None:
        self._grammars = grammars

    def hold(self, request: Request) -> SkipReason | None:
        constraint = request.params.structured_outputs
        if constraint is None or self._grammars.ready(constraint):
            return None
        return SkipReason.GRAMMAR_COMPILING


class NeverStarts(PolicyFailed):
    """What a request waits for will not come."""

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
    except Exception as error:
        raise PolicyFailed(sequence, "hold", error) from error
