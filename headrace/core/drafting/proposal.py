"""Proposals of tokens to verify, as values, and the ports of those who make and choose them.

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


class DraftAsk(NamedTuple):
    """A sequence that decodes: all its known ``tokens``, prompt first (read only), and the ``most`` to propose.

    The first ``ahead`` tokens after the known ones have been drawn, but are not known yet. A proposal begins with them,
    and only the rest of it is verified. ``pace`` is the number of tokens that it has drawn per step so far.
    """

    request: Request
    tokens: list[int]
    most: int
    ahead: int = 0
    pace: float = 1.0


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
    and its number. ``times`` is None until enough steps have been observed. ``paces`` are the
    `DraftAsk.pace` of the rows that are not asked for.
    """

    rows: int
    tokens: int
    contexts: int
    budget: int
    times: StepTimes | None
    step: int = 0
    paces: tuple[float, ...] = ()


class Proposer(Protocol):
    """Proposes tokens for decoding sequences; it sees them by `propose` alone, in the order of their growth.

    It may keep an index per request id, and drops it at `ended`.
    """

    name: str

    def propose(self, asks: Sequence[DraftAsk]) -> Sequence[Proposal | None]:
        """One proposal for each ask, or None where it has nothing; at most ``most`` tokens each."""
        ...

    def ended(self, request: Request, tokens: list[int]) -> None:
        """A request left the engine with these tokens, prompt first."""
        ...


class CostlyProposer(Proposer, Protocol):
    """A proposer whose proposals take time on the device: ``seconds``, all that it has spent in `propose`."""

    seconds: float


class Drafter(Protocol):
    """Chooses what is verified: asks proposers, and cuts their proposals to what pays in this step."""

    @property
    def idle(self) -> bool:
        """Whether it can propose nothing for any request now, so that it need not be asked."""
        ...

    @property
    def seconds(self) -> Mapping[str, float]:
        """The time that the last `draft` has spent in costly proposers, by request; empty if there was none.

        The cost ledger charges it to these requests alone.
        """
        ...

    def draft(self, asks: Sequence[DraftAsk], load: StepLoad) -> Sequence[Proposal | None]:
        """The tokens to verify for each ask, or None."""
        ...

    def asked_from(self, request: Request) -> int:
        """The number of the first step at which asking again for this request is of use; it has just been asked for."""
        ...

    def observed(self, rows: int, drawn: int, seconds: float, drafted: bool) -> None:
        """A step of ``rows`` decode rows and no others drew ``drawn`` tokens, and took ``seconds`` with all work of the
        host. It must not raise.
        """
        ...

    def verified(self, request_id: str, proposal: Proposal, accepted: int) -> None:
        """The first ``accepted`` tokens of a verified proposal were accepted."""
        ...

    def ended(self, request: Request, tokens: list[int]) -> None:
        """A request left the engine with these tokens, prompt first."""
        ...
