"""A drafter that returns recorded proposals. Their tokens are not in a trace; only their number matters in a replay."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.drafting.proposal import DraftAsk, Proposal, StepLoad
from headrace.core.request import Request
from headrace.observe.recording.moments import Drafts

NOTHING = Drafts({})


class RecordedDrafts:
    """A `core.drafting.proposal.Drafter`; `begin` says what it returns up to the end of the next step."""

    def __init__(self) -> None:
        self._drafts = NOTHING
        self._calls = 0
        self.seconds: dict[str, float] = {}
        """Nothing is computed, and nothing charged."""

    def begin(self, drafts: Drafts | None) -> None:
        """The next step of the recording is replayed."""
        self._drafts = drafts or NOTHING
        self._calls = 0

    def draft(self, asks: Sequence[DraftAsk], load: StepLoad) -> Sequence[Proposal | None]:
        """See `Drafter.draft`."""
        self._count()
        drafts = self._drafts
        if drafts.seconds and load.times is not None:
            load.times.exclude(drafts.seconds)
        return [drafts.proposals.get(ask.request.id) for ask in asks]

    def verified(self, request_id: str, proposal: Proposal, accepted: int) -> None:
        """See `Drafter.verified`."""
        self._count()

    def ended(self, request: Request, tokens: list[int]) -> None:
        """See `Drafter.ended`."""
        self._count()

    def _count(self) -> None:
        self._calls += 1
        if self._drafts.failed is not None and self._drafts.failed[0] == self._calls:
            _, kind, message = self._drafts.failed
            raise type(kind, (Exception,), {})(message)
