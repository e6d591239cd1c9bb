"""An engine in this process as a target: the loop of `core.engine`, driven as fast as possible.

A token's time is the end of the step that committed it, so TTFT and inter-token latency are exact. Prompts are encoded
before the clock starts and outputs are not decoded, so the result is the speed of the engine itself.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from headrace.core.events import Emitted, Event, Finished, Stepped
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.lab.bench.stats import Record
from headrace.lab.workload.work import Prompt, Work


class KvWaste:
    """Share of held KV memory that contains no token: the slots of each step, weighted by the time until the next step.

    Paging exists to reduce it (Kwon et al., SOSP 2023, section 2): contiguous allocation wastes most of what it
    reserves, paging at most the end of the last block of each sequence.

    A shared block counts once, however many sequences hold it. Idle time does not count, because no slot is held then.
    """

    def __init__(self) -> None:
        self._last: Stepped | None = None
        self._since = 0.0
        self._allocated = 0.0
        self._filled = 0.0
        self.peak_blocks = 0

    def fold(self, event: Event, now: float) -> None:
        if type(event) is not Stepped:
            return
        if self._last is not None:
            spent = now - self._since
            self._allocated += self._last.slots_allocated * spent
            self._filled += self._last.slots_filled * spent
        self._last, self._since = event, now
        self.peak_blocks = max(self.peak_blocks, event.blocks_held)

    @property
    def share(self) -> float:
        """Share of allocated slots that are unused, 0 to 1; 0 before the second step."""
        return 1.0 - self._filled / self._allocated if self._allocated else 0.0


DELIVERED = (FinishReason.STOP, FinishReason.LENGTH)


class Loop(Protocol):
    """The methods of `core.engine.Engine` that a target needs."""

    def submit(self, request: Request, now: float) -> None: ...

    def step(self, now: float) -> list[Event]: ...

    def wake_at(self, now: float) -> float | None: ...


class EngineTarget:
    """A `stats.Target` around an engine.

    ``encode`` turns a prompt into token ids. ``before`` is called before every run and should clear the prefix cache.
    ``close`` is called at the end. ``concurrency`` limits the open requests; if all
    requests are due at the start, this is a closed loop, and a request's arrival is the time when it is sent. ``clock``
    and ``sleep`` may be those of virtual time. ``kernels`` names what computes, for the report.
    """

    def __init__(
        self,
        name: str,
        loop: Loop,
        encode: Callable[[Prompt], tuple[int, ...]],
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        before: Callable[[], None] = lambda: None,
        close: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        concurrency: int | None = None,
        kernels: str = "",
    ) -> None:
        self.name = name
        self.completed = 0
        self._loop = loop
        self._encode = encode
        self._eos = eos_token_ids
        self._before = before
        self._close = close
        self._clock = clock
        self._sleep = sleep
        self._concurrency = concurrency
        self._kernels = {"kernels": kernels} if kernels else {}
        self._runs = 0
        self._waste = KvWaste()

    def run(self, work: Sequence[Work]) -> list[Record]:
        self._before()
        self.completed = 0
        self._runs += 1
        self._waste = KvWaste()
        due = deque(sorted((self._request(each) for each in work), key=lambda request: request.arrived))
        records = self._drive(due, self._clock())
        return [records[self._id(each)] for each in work]

    def facts(self) -> dict[str, Any]:
        waste = {"kv_waste_percent": 100.0 * self._waste.share, "kv_blocks_peak": self._waste.peak_blocks}
        return self._kernels | waste

    def close(self) -> None:
        self._close()

    def _id(self, work: Work) -> str:
        return f"{self.name}-{self._runs}-{work.id}"

    def _request(self, work: Work) -> Request:
        params = SamplingParams(
            temperature=work.temperature, max_tokens=work.max_tokens, ignore_eos=work.ignore_eos
        )
        return Request(
            self._id(work),
            self._encode(work.prompt),
            params,
            work.arrival,
            tenant=work.tenant,
            service_class=work.service_class,
            eos_token_ids=self._eos,
        )

    def _drive(self, due: deque[Request], began: float) -> dict[str, Record]:
        """Runs the loop until every request has ended. Seconds in records count from ``began``."""
        records: dict[str, Record] = {}
        open_: dict[str, tuple[Request, list[float]]] = {}
        most = len(due) if self._concurrency is None else self._concurrency
        closed = self._concurrency is not None and all(request.arrived == 0.0 for request in due)
        while due or open_:
            now = self._clock()
            while due and len(open_) < most and began + due[0].arrived <= now:
                request = due.popleft()
                if closed:
                    request = dataclasses.replace(request, arrived=now - began)
                open_[request.id] = (request, [])
                # The engine's clock is absolute: with an arrival of 0, its whole uptime would count as waiting time.
                self._loop.submit(dataclasses.replace(request, arrived=began + request.arrived), now)
            events = self._loop.step(now)
            after = self._clock()
            for event in events:
                self._waste.fold(event, after)
                if type(event) is Emitted:
                    open_[event.request_id][1].append(after - began)
                elif type(event) is Finished:
                    request, times = open_.pop(event.request_id)
                    records[event.request_id] = _record(event, request, times, after - began)
                    self.completed += 1
            self._rest(due[0].arrived if due and len(open_) < most else None, bool(open_), began)
        return records

    def _rest(self, arrival: float | None, busy: bool, began: float) -> None:
        """Sleeps until the next ``arrival`` or wake-up."""
        now = self._clock()
        wake = self._loop.wake_at(now) if busy else None
        if arrival is not None:
            next_due = began + arrival
            wake = next_due if wake is None else min(wake, next_due)
        elif wake is None and busy:
            raise RuntimeError(f"{self.name} went idle while requests were open")
        if wake is not None and wake > now:
            self._sleep(wake - now)


def _record(event: Finished, request: Request, times: list[float], finished: float) -> Record:
    delivered = event.reason in DELIVERED
    return Record(
        id=event.request_id,
        arrived=request.arrived,
        finished=finished,
        token_seconds=tuple(times),
        prompt_tokens=event.prompt_tokens,
        output_tokens=event.output_tokens,
        cached_tokens=event.cached_tokens,
        finish_reason=event.reason.value,
        error="" if delivered else event.message or event.reason.value,
        tenant=request.tenant,
        service_class=request.service_class,
    )
