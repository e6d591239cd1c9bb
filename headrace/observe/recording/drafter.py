"""A drafter whose proposals are recorded, since a replay has no tokens to draft from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from headrace.core.drafting.proposal import Drafter, DraftRow, Proposal, StepLoad
from headrace.core.request import Request
from headrace.observe.recording.moments import Drafts

DIGITS = 4
"""Digits of a recorded confidence. The recorded engine uses the rounded number, so that its replay does too."""


class RecordedDrafter:
    """A `core.drafting.proposal.Drafter` that behaves like ``inner`` and remembers what it returned."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self._calls = 0
        self._drafts = Drafts({})

    @property
    def seconds(self) -> Mapping[str, float]:
        """See `Drafter.seconds`."""
        return self.inner.seconds

    @property
    def idle(self) -> bool:
        """See `Drafter.idle`."""
        return self.inner.idle

    def draft(self, draft_rows: Sequence[DraftRow], load: StepLoad) -> Sequence[Proposal | None]:
        """See `Drafter.draft`."""
        with self._noted(0):
            drafts = self.inner.draft(draft_rows, load)
        if len(drafts) != len(draft_rows):
            return drafts  # the scheduler rejects it
        proposals = [
            each and _rounded(each, draft_row.max_tokens)
            for draft_row, each in zip(draft_rows, drafts, strict=True)
        ]
        self._drafts = Drafts(
            {
                draft_row.request.id: each
                for draft_row, each in zip(draft_rows, proposals, strict=True)
                if each
            },
            sum(self.seconds.values()) if load.times is not None else 0.0,
        )
        return proposals

    def next_draft_step(self, request: Request) -> int:
        """See `Drafter.next_draft_step`."""
        return self.inner.next_draft_step(request)

    def observed(self, rows: int, drawn: int, seconds: float, drafted: bool) -> None:
        """See `Drafter.observed`."""
        self.inner.observed(rows, drawn, seconds, drafted)

    def verified(self, request_id: str, proposal: Proposal, accepted: int) -> None:
        """See `Drafter.verified`."""
        self._calls += 1
        with self._noted(self._calls):
            self.inner.verified(request_id, proposal, accepted)

    def ended(self, request: Request, tokens: list[int]) -> None:
        """See `Drafter.ended`."""
        self._calls += 1
        with self._noted(self._calls):
            self.inner.ended(request, tokens)

    def take(self) -> Drafts | None:
        """The drafter's activity since the last call; None if there was none."""
        drafts, self._drafts, self._calls = self._drafts, Drafts({}), 0
        return drafts if any(drafts) else None

    @contextmanager
    def _noted(self, call: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            failed = (call, type(error).__name__, str(error))
            self._drafts = self._drafts._replace(failed=failed)
            raise


def _rounded(proposal: Proposal, most: int) -> Proposal:
    """The proposal with rounded confidences, cut to the ``most`` tokens that can be used."""
    confidences = tuple(round(each, DIGITS) for each in proposal.confidences[:most])
    return proposal._replace(tokens=proposal.tokens[:most], confidences=confidences)
