"""Proposals of tokens to verify, and the protocols of proposers, which make them, and of the drafter, which chooses.

```
 known tokens  ... the quick brown | fox jumps over         <- drafted positions of the row
 target draws                  fox   jumps  under           <- one token per position, by (seed, position)
 accepted                      fox   jumps  under           2 of 3 drafts, and the token after them
```
A draft is accepted while it equals the token that the target itself draws at its position. The text is therefore the
same with and without drafts, greedy and sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from headrace.core.prediction.step_times import StepTimes
from headrace.core.request import Request


class DraftRow(NamedTuple):
    """A decode row to draft for: all known ``tokens`` of its sequence, prompt first (read only).

    At most ``max_tokens`` may be proposed. The first ``in_flight`` tokens after the known ones have been drawn, but are
    not known yet. A proposal begins with them, and only the rest of it is verified. ``tokens_per_step`` is the mean
    number of tokens per step that the sequence has drawn so far.
    """

    request: Request
    tokens: list[int]
    max_tokens: int
    in_flight: int = 0
    tokens_per_step: float = 1.0


class Proposal(NamedTuple):
    """Tokens that may follow; ``confidences[i]`` is the probability that token ``i`` is accepted if all before are.

    ``source`` is the name of the proposer. ``cut`` says why the proposal is no longer, or why it is empty: a
    `core.drafting.draft_budget.Cut`.
    """

    tokens: tuple[int, ...]
    confidences: tuple[float, ...]
    source: str
    cut: str = ""


class StepLoad(NamedTuple):
    """The step without drafts: its rows, tokens and contexts as `StepTimes` counts them, the tokens left in its budget,
    and its number. ``times`` is None until enough steps have been observed. ``other_tokens_per_step`` are the
    `DraftRow.tokens_per_step` of the rows that are not drafted for.
    """

    rows: int
    tokens: int
    contexts: int
    budget: int
    times: StepTimes | None
    step: int = 0
    other_tokens_per_step: tuple[float, ...] = ()


class Proposer(Protocol):
    """Proposes tokens for decoding sequences. `propose` is the only call in which it sees their tokens.

    It may keep an index per request id, and drops it at `ended`.
    """

    name: str

    def propose(self, draft_rows: Sequence[DraftRow]) -> Sequence[Proposal | None]:
        """One proposal per row, of at most its ``max_tokens``; None if there is none."""
        ...

    def ended(self, request: Request, tokens: list[int]) -> None:
        """A request left the engine with these tokens, prompt first."""
        ...


class CostlyProposer(Proposer, Protocol):
    """A proposer whose proposals take time on the device: ``seconds``, all that it has spent in `propose`."""

    seconds: float


class Drafter(Protocol):
    """Chooses the drafts of a step: calls proposers, and cuts their proposals to the tokens that pay in this step."""

    @property
    def idle(self) -> bool:
        """Whether it has no proposal for any request now, so that `draft` need not be called."""
        ...

    @property
    def seconds(self) -> Mapping[str, float]:
        """The time that the last `draft` has spent in costly proposers, by request; empty if there was none.

        The cost ledger charges it to these requests alone.
        """
        ...

    def draft(self, draft_rows: Sequence[DraftRow], load: StepLoad) -> Sequence[Proposal | None]:
        """The tokens to verify for each row, or None."""
        ...

    def next_draft_step(self, request: Request) -> int:
        """The number of the next step at which `draft` may have a proposal for this request, after it had none."""
        ...

    def observed(self, rows: int, drawn: int, seconds: float, drafted: bool) -> None:
        """A step of ``rows`` decode rows and no others drew ``drawn`` tokens, and took ``seconds``, host work included.
        It must not raise.
        """
        ...

    def verified(self, request_id: str, proposal: Proposal, accepted: int) -> None:
        """The first ``accepted`` tokens of a verified proposal were accepted."""
        ...

    def ended(self, request: Request, tokens: list[int]) -> None:
        """A request left the engine with these tokens, prompt first."""
        ...
