"""A drafter whose proposals are recorded: a replay has no tokens, so it cannot draft anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from headrace.core.drafting.proposal import DraftAsk, Drafter, Proposal, StepLoad
from headrace.core.request import Request
from headrace.observe.recording.moments import DraftedFor, Drafts

DIGITS = 4
"""Digits of a recorded confidence. The recorded engine uses the rounded number, so that its replay does too."""


class RecordedDrafter:
    """A `core.drafting.proposal.Drafter` that behaves like ``inner`` and remembers what it returned."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self._calls = 0
        self._drafts = Drafts(0, ())

    def draft(self, asks: Sequence[DraftAsk], load: StepLoad) -> Sequence[Proposal | None]:
        """See `Drafter.draft`."""
        before = self._seconds()
        with self._counted():
            proposals = [each and _rounded(each) for each in self.inner.draft(asks, load)]
        told = zip(asks, proposals, strict=False)
        self._drafts = Drafts(
            len(asks),
            tuple(DraftedFor(place, ask.request.id, each) for place, (ask, each) in enumerate(told) if each),
            self._seconds() - before if load.times is not None else 0.0,
        )
        return proposals

    def verified(self, request_id: str, proposal: Proposal, accepted: int) -> None:
        """See `Drafter.verified`."""
        with self._counted():
            self.inner.verified(request_id, proposal, accepted)

    def ended(self, request: Request, tokens: list[int]) -> None:
        """See `Drafter.ended`."""
        with self._counted():
            self.inner.ended(request, tokens)

    def take(self) -> Drafts | None:
        """What happened since the last call; None: nothing."""
        drafts, self._drafts, self._calls = self._drafts, Drafts(0, ()), 0
        return drafts if drafts.asks or drafts.failed else None

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._calls += 1
        try:
            yield
        except Exception as error:
            failed = (self._calls, type(error).__name__, str(error))
            self._drafts = self._drafts._replace(failed=failed)
            raise

    def _seconds(self) -> float:
        proposers = getattr(self.inner, "proposers", ())
        return float(sum(getattr(each, "seconds", 0.0) for each in proposers))


def _rounded(proposal: Proposal) -> Proposal:
    return proposal._replace(confidences=tuple(round(each, DIGITS) for each in proposal.confidences))
