"""What proposers that compute have in common: their time is counted, and a failure costs drafts only."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from headrace.core.drafting.proposal import DraftAsk, Proposal

LEAST_CONFIDENCE = 0.3
"""A draft ends where the probability that all its tokens are accepted falls below this: the pass costs more then."""

MOST = 16
"""Default of the longest draft."""


class GuardedProposer:
    """A `core.drafting.proposal.CostlyProposer` that is disabled with one warning when its computing raises.

    ``warn`` receives that warning. ``seconds`` is the time of all proposals.
    """

    label: ClassVar[str]
    """What failed, for the warning."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._enabled = True
        self.seconds = 0.0

    def propose(self, asks: Sequence[DraftAsk]) -> Sequence[Proposal | None]:
        """See `Proposer.propose`; None also for rows whose tokens are not all computed yet."""
        if not self._enabled:
            return [None] * len(asks)
        began = time.perf_counter()
        try:
            with torch.inference_mode():
                return self._propose(asks)
        except Exception as error:
            self._disable(error)
            return [None] * len(asks)
        finally:
            self.seconds += time.perf_counter() - began

    def _disable(self, error: Exception) -> None:
        """The device, memory or the model failed: requests continue without these drafts."""
        self._enabled = False
        self._release()
        self._warn(f"the {self.label} failed ({error}); requests continue without its drafts")

    def _propose(self, asks: Sequence[DraftAsk]) -> Sequence[Proposal | None]:
        raise NotImplementedError

    def _release(self) -> None:
        """Let go of what is held for requests."""
