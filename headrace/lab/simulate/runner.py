"""A runner that computes nothing: it returns given outputs, and the times at which steps would end.

As in a real engine, the scheduler knows only the request's ``max_tokens``; a shorter output ends with an
end-of-sequence token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from heapq import heappop, heappush
from itertools import chain, islice, repeat
from typing import Protocol

from headrace.core.plan import Arrival, Move, Row, StepOutput, StepPlan, Tier
from headrace.lab.forced_acceptance import ForcedAcceptance
from headrace.lab.simulate.device import Device
from headrace.lab.simulate.work import added_up, columns

EOS = -1
"""The end-of-sequence token; no synthesized token has this id."""

EOS_IDS = frozenset({EOS})

DISK_SECONDS = 1e-3
"""Seconds per block: 2 MiB (16 tokens of an 8-billion-parameter model) at 2 GB/s."""

_ENDED = repeat((EOS,))
_NOTHING: tuple[int, ...] = ()


class Pulls(Protocol):
    """Transfers of blocks from other replicas: ``pull`` returns when a block has arrived if its pull starts ``now``."""

    block_seconds: float

    def pull(self, block: int, now: float) -> float: ...


class SimulatedRunner:
    """`core.ports.Runner` in virtual time.

    ``answers`` has the output tokens of each open request; the last one is replaced by `EOS`. ``time`` is when the last
    call returned: a launch after the host has packed the step, a collect after the device has computed it. The
    caller's clock follows it. The device computes one step at a time; in parallel, a disk copies one block at a time in
    ``disk_seconds``, and blocks arrive from ``peers``. The drafting time of ``drafts`` is added to the step.
    """

    def __init__(
        self,
        device: Device,
        answers: Mapping[str, tuple[int, ...]],
        disk_seconds: float = DISK_SECONDS,
        drafts: ForcedAcceptance | None = None,
        peers: Pulls | None = None,
    ) -> None:
        self.time = 0.0
        self.busy_seconds = 0.0
        self._device = device
        self._answers = answers
        self._draws: dict[int, Iterator[tuple[int, ...]]] = {}
        self._free_at = 0.0
        self._drafts = drafts
        self._drafting = 0.0  # drafting seconds that steps already include
        self._launched: deque[tuple[float, StepOutput]] = deque()
        self._disk_seconds = disk_seconds
        self._copies: list[
            tuple[float, int, Arrival]
        ] = []  # heap of transfers from and to disk and peers: end, number, arrival
        self._begun = 0
        self._disk_free_at = 0.0
        self._peers = peers

    def launch(self, plan: StepPlan, now: float) -> None:
        draws = self._draws
        for entry in plan.entries:
            answer = self._answers[entry.request_id]
            drawn = len(entry.tokens) - entry.prompt_tokens
            draws[entry.slot] = chain(islice(zip(answer), drawn, len(answer) - 1), _ENDED)
        rows = columns(plan)
        if any(rows[5]):
            tokens = tuple([_drawn(draws[row.slot], row) if row.samples else _NOTHING for row in plan.rows])
        else:
            drawing = zip(rows[0], rows[4], strict=True)
            tokens = tuple([next(draws[slot]) if sample else _NOTHING for slot, sample in drawing])
        work = added_up(rows, plan.moves)
        seconds = self._device.seconds(work)
        if self._drafts is not None and self._drafts.seconds > self._drafting:
            seconds += self._drafts.seconds - self._drafting
            self._drafting = self._drafts.seconds
        self.busy_seconds += seconds
        self.time = now + self._device.host_seconds(work)
        began = max(self._free_at, self.time)
        self._free_at = began + seconds
        arrivals = self._copy(plan, began) if plan.moves or self._copies else ()
        self._launched.append((self._free_at, StepOutput(plan.step, tokens, arrivals=arrivals)))

    def collect(self) -> StepOutput:
        done, output = self._launched.popleft()
        self.time = max(self.time, done)
        return output

    def _copy(self, plan: StepPlan, began: float) -> tuple[Arrival, ...]:
        """Starts the plan's transfers from and to disk and peers; returns those that end with the step."""
        for move in plan.moves:
            if move.source_tier is Tier.PEER:
                if self._peers is None:
                    raise ValueError("the plan pulls a block, but the runner has no peers")
                self._under_way(self._peers.pull(move.source, began), move, self._peers.block_seconds)
            elif Tier.DISK in (move.source_tier, move.target_tier):
                self._disk_free_at = max(self._disk_free_at, began) + self._disk_seconds
                self._under_way(self._disk_free_at, move, self._disk_seconds)
        copies = self._copies
        if plan.waits and copies:
            self._free_at = max(self._free_at, copies[0][0])
        ended = []
        while copies and copies[0][0] <= self._free_at:
            ended.append(heappop(copies)[2])
        return tuple(ended)

    def _under_way(self, ends: float, move: Move, seconds: float) -> None:
        self._begun += 1
        heappush(self._copies, (ends, self._begun, Arrival(move, True, seconds)))


def _drawn(answer: Iterator[tuple[int, ...]], row: Row) -> tuple[int, ...]:
    """The next tokens of an output: one, and one more for each correct draft."""
    tokens: list[int] = []
    for draft in (*row.drafts, None):
        tokens += next(answer)
        if tokens[-1] != draft:
            break
    return tuple(tokens)
