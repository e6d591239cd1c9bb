"""A drafter that returns recorded proposals. A trace has the number of drafted tokens, not the tokens themselves."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.drafting.proposal import DraftRow, Proposal, StepLoad
from headrace.core.request import Request
from headrace.observe.recording.moments import Drafts

NOTHING = Drafts({})


class RecordedDrafts:
    """A `core.drafting.proposal.Drafter`; `begin` sets the proposals of the next step."""

    def __init__(self) -> None:
        self._drafts = NOTHING
        self._calls = 0
        self.seconds: dict[str, float] = {}
        """Empty: a replay spends no time on drafting."""

    @property
    def idle(self) -> bool:
        """Whether nothing was drafted in the recorded step."""
        return not any(self._drafts)

    def begin(self, drafts: Drafts | None) -> None:
        """Sets the recorded drafts of the next step."""
        self._drafts = drafts or NOTHING
        self._calls = 0

    def draft(self, draft_rows: Sequence[DraftRow], load: StepLoad) -> Sequence[Proposal | None]:
        """See `Drafter.draft`."""
        self._fail(0)
        drafts = self._drafts
        if drafts.seconds and load.times is not None:
            load.times.exclude(drafts.seconds)
        return [drafts.proposals.get(draft_row.request.id) for draft_row in draft_rows]

    def next_draft_step(self, request: Request) -> int:
        """See `Drafter.next_draft_step`: every request is asked, and has no proposal where none was recorded."""
        return 0

    def observed(self, rows: int, drawn: int, seconds: float, drafted: bool) -> None:
        """See `Drafter.observed`: ignored, because the proposals are recorded."""

    def verified(self, request_id: str, proposal: Proposal, accepted: int) -> None:
        """See `Drafter.verified`."""
        self._count()

    def ended(self, request: Request, tokens: list[int]) -> None:
        """See `Drafter.ended`."""
        self._count()

    def _count(self) -> None:
        self._calls += 1
        self._fail(self._calls)

    def _fail(self, call: int) -> None:
        failed = self._drafts.failed
        if failed is not None and failed[0] == call:
            raise type(failed[1], (Exception,), {})(failed[2])
