"""Simulated execution: a runner that computes nothing, the work of its steps, and the time that they take.

The runner returns given outputs, and the times at which steps would end. As in a real engine, the scheduler knows only
the request's ``max_tokens``; a shorter output ends with an end-of-sequence token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import chain, islice, repeat
from typing import Any, NamedTuple, Protocol

from headrace.core.plan import Arrival, Move, Row, StepOutput, StepPlan, Tier
from headrace.core.request import NO_SLO, Request, SamplingParams, Slo
from headrace.lab.forced_acceptance import ForcedAcceptance
from headrace.lab.plan.roofline import Load, Replica
from headrace.lab.workload.work import Call, Synthesis, Work

_NO_ROWS: tuple[tuple[int, ...], ...] = ((),) * 6
_DEVICE, _ACROSS = {Tier.DEVICE}, {Tier.DEVICE, Tier.HOST}
_STATES = {Tier.SLOT, Tier.CHECKPOINT}


class StepWork(NamedTuple):
    """The work of one step.

    ``tokens`` are the computed positions, ``contexts`` the sum over them of the positions that each attends to,
    ``read_tokens`` the positions whose keys and values are read (once per row), and ``samples`` the sampled tokens,
    including one per draft. ``copies`` are blocks copied on the device, ``transfers`` blocks copied from or to the
    host. Copies from and to the disk run in parallel and are not part of a step. ``states`` are copies of the recurrent
    states of a sequence, to or from a checkpoint.
    """

    rows: int
    tokens: int
    contexts: int
    read_tokens: int
    samples: int
    copies: int = 0
    transfers: int = 0
    states: int = 0


def columns(plan: StepPlan) -> Sequence[tuple[Any, ...]]:
    """A plan's rows as columns, in the order of the fields of `Row`."""
    return tuple(zip(*plan.rows, strict=True)) or _NO_ROWS


def work_of(plan: StepPlan) -> StepWork:
    """The sums of a plan."""
    return added_up(columns(plan), plan.moves)


def added_up(rows: Sequence[tuple[Any, ...]], moves: Iterable[Move]) -> StepWork:
    """The sums of rows given as `columns`, and of moves; fast, because every simulated step needs them."""
    _, starts, lengths, _, samples, drafts = rows
    tokens: int = sum(lengths)
    contexts = read = tokens + sum(starts)
    if tokens > len(lengths):
        for start, length in zip(starts, lengths, strict=True):
            if length > 1:
                contexts += (length - 1) * start + length * (length - 1) // 2
    copies = transfers = states = 0
    for move in moves:
        ends = {move.source_tier, move.target_tier}
        copies += ends == _DEVICE
        transfers += ends == _ACROSS
        states += ends == _STATES
    drawn = sum(samples) + sum(map(len, drafts))
    return StepWork(len(lengths), tokens, contexts, read, drawn, copies, transfers, states)


class Device(Protocol):
    """Seconds of a step: a roofline, or a fit to measured steps.

    ``host_seconds`` is the host's part (planning and packing), which may overlap with the previous step; ``seconds``
    is the device's part.
    """

    def seconds(self, work: StepWork) -> float: ...

    def host_seconds(self, work: StepWork) -> float: ...


class Roofline:
    """A `Device` from a model's shape and a device's peaks; moves of blocks and states do not overlap with computation.

    ``row_seconds`` is the host's time per row: slots, block tables, and the host's part of sampling.
    """

    def __init__(self, replica: Replica, block_size: int, row_seconds: float = 2e-6) -> None:
        self._replica = replica
        self._row_seconds = row_seconds
        block_bytes = block_size * replica.kv_bytes_per_token
        bandwidth = replica.device.reached_bandwidth * replica.degree
        self._copy_seconds = 2 * block_bytes / bandwidth
        self._state_seconds = 2 * replica.shape.state_bytes / bandwidth
        self._transfer_seconds = block_bytes / (replica.device.host_bandwidth * replica.degree)

    def seconds(self, work: StepWork) -> float:
        moving = work.copies * self._copy_seconds + work.transfers * self._transfer_seconds
        moving += work.states * self._state_seconds
        rows = work.rows
        if not rows:
            return moving
        load = Load(rows, work.tokens - rows, work.contexts, work.read_tokens, work.samples, rows)
        return self._replica.step_seconds(load) + moving

    def host_seconds(self, work: StepWork) -> float:
        return work.rows * self._row_seconds


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


class SimulatedRequest(NamedTuple):
    """A request and its output tokens; the last one ends the output."""

    request: Request
    answer: tuple[int, ...]


def from_calls(
    calls: Iterable[Call], synthesis: Synthesis, max_tokens: int | None = None, slo: Slo = NO_SLO
) -> Iterator[SimulatedRequest]:
    """Requests from the calls of a trace, all with ``max_tokens`` (None: up to the context limit) and ``slo``."""
    params = SamplingParams(max_tokens=max_tokens)
    for number, call in enumerate(calls):
        request = Request(
            f"r{number}",
            synthesis.prompt(call),
            params,
            arrived=call.arrival,
            tenant=call.tenant,
            service_class=call.service_class,
            slo=slo,
            salt=call.tenant,
            eos_token_ids=EOS_IDS,
        )
        yield SimulatedRequest(request, synthesis.answer(call))


def from_work(work: Iterable[Work], start: float = 0.0) -> Iterator[SimulatedRequest]:
    """Requests from work with prompts of token ids, arriving after ``start``. Outputs have exactly ``max_tokens``, and
    the engine knows this (``ignore_eos``)."""
    for each in work:
        if not isinstance(each.prompt, tuple) or not isinstance(each.prompt[0], int):
            raise ValueError(f"{each.id}: only prompts of token ids can be simulated")
        params = SamplingParams(max_tokens=each.max_tokens, ignore_eos=True)
        tokens: tuple[int, ...] = each.prompt
        yield SimulatedRequest(Request(each.id, tokens, params, start + each.arrival), (0,) * each.max_tokens)


class Front:
    """A server's HTTP side as a single worker with a queue.

    A request reaches the engine after ``request_seconds`` plus ``token_seconds`` per prompt token; during a step, when
    threads are awake, ``busy_seconds`` replace ``request_seconds``. Each chunk of a response takes ``event_seconds``. A
    request that arrives during a step delays the step's end by ``stall_seconds``, because both need the interpreter. A
    request that finds the server idle delays the step after its first token by ``wake_seconds`` (threads, caches,
    response headers). The next request can be read after ``stall_seconds`` if these are not 0: the rest of a request's
    time is waiting. ``free_at`` is when all work is done; calls must be in order of time.
    """

    def __init__(
        self,
        request_seconds: float = 0.0,
        event_seconds: float = 0.0,
        stall_seconds: float = 0.0,
        token_seconds: float = 0.0,
        wake_seconds: float = 0.0,
        busy_seconds: float | None = None,
    ) -> None:
        self.request_seconds = request_seconds
        self.event_seconds = event_seconds
        self.stall_seconds = stall_seconds
        self.token_seconds = token_seconds
        self.wake_seconds = wake_seconds
        self.busy_seconds = request_seconds if busy_seconds is None else busy_seconds
        self.free_at = self._read_at = 0.0

    def take(self, now: float, tokens: int, stepping: bool) -> float:
        """When a request that arrives ``now`` reaches the engine. ``tokens`` is its prompt length, and ``stepping``
        says whether a step is running.
        """
        seconds = self.busy_seconds if stepping else self.request_seconds
        seconds += tokens * self.token_seconds
        began = max(self.free_at, now)
        self.free_at = began + min(seconds, self.stall_seconds or seconds)
        self._read_at = max(self._read_at, began + seconds)
        return self._read_at
