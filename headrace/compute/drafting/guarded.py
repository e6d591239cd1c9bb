"""The common base of proposers with a model: measures their time, and disables drafts on failure."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from headrace.core.drafting.proposal import DraftRow, Proposal

LEAST_CONFIDENCE = 0.3  # see docs/decisions/speculative-decoding.md#drafting-for-sampled-requests
"""A draft ends when the probability that all its tokens are accepted falls below this: a further pass does not pay."""

MOST = 16
"""Default maximum length of a draft."""


class GuardedProposer:
    """A `core.drafting.proposal.CostlyProposer` that is disabled with one warning when it raises an error.

    ``warn`` receives that warning. ``seconds`` is the total time of all proposals.
    """

    label: ClassVar[str]
    """Name of the proposer in the warning."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._enabled = True
        self.seconds = 0.0

    def propose(self, draft_rows: Sequence[DraftRow]) -> Sequence[Proposal | None]:
        """See `Proposer.propose`; None also for rows whose tokens are not all computed yet."""
        if not self._enabled:
            return [None] * len(draft_rows)
        began = time.perf_counter()
        try:
            with torch.inference_mode():
                return self._propose(draft_rows)
        except Exception as error:
            self._disable(error)
            return [None] * len(draft_rows)
        finally:
            self.seconds += time.perf_counter() - began

    def _disable(self, error: Exception) -> None:
        """Disable the proposer after an error; requests continue without its drafts."""
        self._enabled = False
        self._release()
        self._warn(f"the {self.label} failed ({error}); requests continue without its drafts")

    def _propose(self, draft_rows: Sequence[DraftRow]) -> Sequence[Proposal | None]:
        raise NotImplementedError

    def _release(self) -> None:
        """Release the resources of all requests."""
