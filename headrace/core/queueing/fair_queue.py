"""The fair queue of all waiting requests: classes by share, then tenants of a class by share, then the tenant's order.

The scheduler and its admission policy decide whether a sequence fits. First come, first served is this queue with one
class and one tenant. A `TenantQueue` has the waiting requests of one tenant in one class:

```
 timely: can still meet the TTFT target, ordered by latest start
   ──(not all can meet it)──>  late: ordered by rank; receives LATE_SHARE of the prefill work beside the timely ones
```
A sequence that ends while it waits is not searched for. It stays in its heap and is dropped when it is reached. All
such entries are swept out before they outnumber the waiting sequences.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from typing import Protocol

from headrace.core.sequence import Rank, Sequence, Status
from headrace.core.tenancy.fair_share import ClassAccount, ShareLedger, TenantAccount
from headrace.core.tenancy.kv_limits import KvUse
from headrace.core.tenancy.tenants import CLASSES

# Which requests are deferred when not all waiting ones can meet their TTFT target.
#
# Under overload, a queue served by latest start makes all requests start at the last moment, and many miss it.
# Deferring the longest prompts first lets the most other requests meet theirs (Moore, 1968, for due times in place of
# latest starts).


def requests_to_defer(queue: Iterable[Sequence], now: float) -> list[Sequence]:
    """The fewest sequences to defer so that all others start in time, one after the other.

    ``queue`` is ordered by latest start; each sequence takes its ``prompt_seconds``.
    """
    kept: list[tuple[float, int, Sequence]] = []
    deferred = []
    for number, sequence in enumerate(queue):
        late = now > sequence.latest_start
        heapq.heappush(kept, (-sequence.prompt_seconds, number, sequence))
        now += sequence.prompt_seconds
        if late:
            _, _, longest = heapq.heappop(kept)
            now -= longest.prompt_seconds
            deferred.append(longest)
    return deferred


SWEEP = 64
"""Ended sequences that a heap may hold in addition to as many as wait, because low ranks might never be reached."""

WINDOW = 32
"""Sequences among which a pick policy chooses: bounds the cost of a choice."""

LATE_SHARE = 1 / 16  # see docs/decisions/scheduling.md#requests-that-cannot-meet-their-deadline
"""Prefill work of late requests relative to that of timely ones. A late request that runs makes another one late, so
the share is small; without it, late requests would starve."""

LITTLE_SLACK_SECONDS = 0.25
"""The first request of a queue is not passed over when its latest start is within this many seconds."""


class PolicyFailed(Exception):
    """A policy raised or returned an invalid value for ``sequence``; that sequence alone fails."""

    def __init__(self, sequence: Sequence, policy: str, error: Exception) -> None:
        super().__init__(f"the {policy} policy failed: {type(error).__name__}: {error}")
        self.sequence = sequence


class PickPolicy(Protocol):
    """Chooses which of the first few sequences of a queue is next, by its index."""

    def pick(self, window: Many[Sequence]) -> int: ...


class Heap:
    """Waiting sequences by a key, lowest first. Its length counts only sequences that still wait."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, Sequence]] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """Waiting sequences, in no particular order."""
        return (sequence for _, sequence in self._heap if sequence.status is not Status.FINISHED)

    def push(self, key: Rank, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (key, sequence))
        self._length += 1

    def peek(self) -> Sequence | None:
        while self._heap and self._heap[0][1].status is Status.FINISHED:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence | None:
        sequence = self.peek()
        if sequence is not None:
            heapq.heappop(self._heap)
            self._length -= 1
        return sequence

    def take(self, count: int) -> list[tuple[Rank, Sequence]]:
        """Remove and return the first ``count`` waiting sequences with their keys."""
        heap, taken = self._heap, list[tuple[Rank, Sequence]]()
        while heap and len(taken) < count:
            entry = heapq.heappop(heap)
            if entry[1].status is not Status.FINISHED:
                taken.append(entry)
        self._length -= len(taken)
        return taken

    def put_back(self, taken: Iterable[tuple[Rank, Sequence]]) -> None:
        """Put sequences back at their places."""
        for entry in taken:
            heapq.heappush(self._heap, entry)
            self._length += 1

    def note_end(self) -> None:
        """A sequence of this heap has just entered ``FINISHED``."""
        self._length -= 1
        if len(self._heap) > 2 * self._length + SWEEP:
            self._heap = [entry for entry in self._heap if entry[1].status is not Status.FINISHED]
            heapq.heapify(self._heap)


class TenantQueue:
    """Earliest latest start first, while it can be met; requests that cannot meet it wait behind, with a share.

    A request that has missed its TTFT target gains nothing by running first, so requests that can still meet theirs
    go before it. This keeps goodput from collapsing under overload, where first come, first served makes all requests
    late. Without latency targets the order is rank alone. ``pick`` may prefer another one of the first `WINDOW` to
    the first one, but not more than ``max_passes`` times, and not when the first one has little slack.
    """

    def __init__(self, pick: PickPolicy | None = None, max_passes: int = 0) -> None:
        self._timely = Heap()
        self._late = Heap()
        self._separated_at = -math.inf  # when late requests were last separated from timely ones
        self._owed_seconds = 0.0  # prefill time owed to late requests
        self._pick = pick
        self._max_passes = max_passes

    def __len__(self) -> int:
        return len(self._timely) + len(self._late)

    def __iter__(self) -> Iterator[Sequence]:
        """Waiting sequences, in no particular order."""
        yield from self._timely
        yield from self._late

    def ahead_of(self, sequence: Sequence) -> list[Sequence]:
        """The sequences ahead of one of this queue, by their present places, in no particular order."""
        position = _position(sequence)
        return [each for each in self if _position(each) < position]

    def push(self, sequence: Sequence) -> None:
        """Add a sequence at its place."""
        if sequence.late:
            self._late.push(sequence.rank, sequence)
        else:
            self._timely.push((sequence.latest_start, *sequence.rank), sequence)

    def peek(self, now: float) -> Sequence | None:
        """The first sequence, which a pick policy may still pass over."""
        return self._next(now).peek()

    def pop(self, now: float) -> Sequence | None:
        """Remove and return the next sequence; ``now`` never goes back.

        Raises:
            PolicyFailed: the pick policy failed; no sequence was removed.
        """
        heap = self._next(now)
        first = heap.peek()
        if first is None or self._pick is None or len(heap) == 1:
            return heap.pop()
        if first.passes >= self._max_passes or first.latest_start - now < LITTLE_SLACK_SECONDS:
            return heap.pop()
        taken = heap.take(WINDOW)
        try:
            index = self._pick.pick([sequence for _, sequence in taken])
            if index < 0:
                raise IndexError(f"index {index} is outside 0 to {len(taken) - 1}")
            _, chosen = taken.pop(index)
        except Exception as error:
            raise PolicyFailed(first, "pick", error) from error
        finally:
            heap.put_back(taken)
        chosen.overtakes = None if chosen is first else first
        return chosen

    def pop_first(self, now: float) -> Sequence | None:
        """Remove and return the first sequence, which no pick policy may pass over."""
        return self._next(now).pop()

    def note_start(self, sequence: Sequence) -> None:
        """A sequence that was popped has started to run."""
        if sequence.overtakes is not None:
            sequence.overtakes.passes += 1
            sequence.overtakes = None
        if self._late and not sequence.late:
            self._owed_seconds += LATE_SHARE * sequence.prompt_seconds
        elif self._timely and sequence.late:
            self._owed_seconds -= sequence.prompt_seconds

    def note_end(self, sequence: Sequence) -> None:
        """A waiting sequence of this queue has just entered ``FINISHED``."""
        (self._late if sequence.late else self._timely).note_end()

    def _next(self, now: float) -> Heap:
        if self._separated_at < now:
            while self._defer_late(now):
                pass
            self._separated_at = now
        late = self._late.peek()
        if late is not None and (not self._timely or self._owed_seconds >= late.prompt_seconds):
            return self._late
        return self._timely

    def _defer_late(self, now: float) -> bool:
        """Move requests to the late heap so that the rest of the window can be in time; whether any moved."""
        first = self._timely.peek()
        if first is None or first.latest_start == math.inf:
            return False
        taken = self._timely.take(WINDOW)
        deferred = requests_to_defer([sequence for _, sequence in taken], now)
        for sequence in deferred:
            sequence.late = True
            self._late.push(sequence.rank, sequence)
        self._timely.put_back(entry for entry in taken if not entry[1].late)
        return bool(deferred)


def _position(sequence: Sequence) -> Rank:
    return (sequence.late, 0.0 if sequence.late else sequence.latest_start, *sequence.rank)


MAX_IMBALANCE = 1.25  # see docs/decisions/scheduling.md#slots-that-a-large-tenant-holds
"""A tenant is preempted for another one if it holds this many times as many slots, by their weights."""


def by_share(sequence: Sequence) -> Rank:
    """The order of sequences by service received: least served first."""
    account = sequence.account
    return (account.owner.virtual, account.virtual)


class _Tenant:
    """The queue of one tenant; ``queued`` while the heap of its class holds its one entry, ``aside`` while it has none
    because the tenant's KV bound holds its first sequence back.
    """

    __slots__ = ("account", "aside", "queue", "queued")

    def __init__(self, account: TenantAccount, queue: TenantQueue) -> None:
        self.account = account
        self.queue = queue
        self.queued = False
        self.aside = False


class _Class:
    """The tenants of one class. The heap orders them by the virtual time at which they were pushed, which only grows.

    Tenants with equal virtual time are served in the order in which they were pushed. Ordering them by name would
    starve some of them.
    """

    __slots__ = ("account", "heap", "number", "tenants", "waiting")

    def __init__(self, account: ClassAccount) -> None:
        self.account = account
        self.tenants: dict[str, _Tenant] = {}
        self.heap: list[tuple[float, int, str]] = []
        self.number = 0  # of the last entry
        self.waiting = 0

    def push(self, tenant: _Tenant) -> None:
        tenant.aside = False
        if not tenant.queued:
            tenant.queued = True
            heapq.heappush(self.heap, self._entry(tenant))

    def _entry(self, tenant: _Tenant) -> tuple[float, int, str]:
        self.number += 1
        return tenant.account.virtual, self.number, tenant.account.name

    def set_aside(self) -> None:
        """Take the tenant that is served next out of the heap, until its memory is given back or its queue changes."""
        tenant = self.tenants[heapq.heappop(self.heap)[2]]
        tenant.queued, tenant.aside = False, True
        tenant.account.kv.aside.append((self, tenant))

    def forget(self, tenant: _Tenant) -> None:
        """Forget a tenant that has no request and no entry in the heap."""
        if not tenant.account.live and not tenant.queued:
            del self.tenants[tenant.account.name]

    def next_queue(self) -> TenantQueue | None:
        """The queue of the least served tenant that has waiting requests."""
        while self.heap:
            virtual, _, name = self.heap[0]
            tenant = self.tenants.get(name)
            if tenant is None:
                heapq.heappop(self.heap)
            elif not tenant.queue:
                heapq.heappop(self.heap)
                tenant.queued = False
                self.forget(tenant)
            elif tenant.account.virtual > virtual:
                heapq.heapreplace(self.heap, self._entry(tenant))
            else:
                return tenant.queue
        return None


class FairQueue:
    """Sequences that wait for a slot.

    ``make_queue`` creates the queue of one tenant. With ``alike`` all requests share one account, so that only the
    order within the queue counts.
    """

    def __init__(
        self, ledger: ShareLedger, make_queue: Callable[[], TenantQueue], *, alike: bool = False
    ) -> None:
        self._ledger = ledger
        self._make_queue = make_queue
        self._alike = alike
        self._classes = {name: _Class(account) for name, account in ledger.classes.items()}
        self._waiting = 0
        self._held: list[Sequence] = []  # sequences that a KV bound has held back since they were last taken

    def __len__(self) -> int:
        return self._waiting

    def __iter__(self) -> Iterator[Sequence]:
        """Waiting sequences, in no particular order."""
        for each in self._classes.values():
            for tenant in each.tenants.values():
                yield from tenant.queue

    def tenant_queues(self) -> Iterator[tuple[TenantAccount, TenantQueue]]:
        """Each tenant's account in each class, and its queue."""
        for each in self._classes.values():
            for tenant in each.tenants.values():
                yield tenant.account, tenant.queue

    def knows(self, service_class: str) -> bool:
        """Whether there is a class of this name."""
        return self._alike or service_class in self._classes

    # -- coming and going --------------------------------------------------------------------------

    def enter(self, sequence: Sequence) -> None:
        """Add a new sequence: it gets its account and waits."""
        request = sequence.request
        names = ("default", "") if self._alike else (request.service_class, request.tenant)
        account = sequence.account = self._ledger.enter(*names)
        group = self._classes[account.owner.name]
        tenant = group.tenants.get(account.name)
        if tenant is None or not tenant.queue:
            self._ledger.lift(account, alone=not group.waiting)
        self.push(sequence)

    def push(self, sequence: Sequence) -> None:
        """Add a sequence at its place in its tenant's queue."""
        account = sequence.account
        group = self._classes[account.owner.name]
        tenant = group.tenants.get(account.name)
        if tenant is None:
            tenant = group.tenants[account.name] = _Tenant(account, self._make_queue())
        tenant.account = account  # a new one, if it comes back after a pause
        tenant.queue.push(sequence)
        group.push(tenant)
        self._free(account.kv)
        group.waiting += 1
        self._waiting += 1

    def started(self, sequence: Sequence) -> None:
        """A sequence that was popped has started to run."""
        account = sequence.account
        self._classes[account.owner.name].tenants[account.name].queue.note_start(sequence)
        account.kv.started(sequence)
        self._free(account.kv)

    def end(self, sequence: Sequence, waited: bool) -> None:
        """A sequence has just entered ``FINISHED``; whether it ``waited`` until then."""
        account = sequence.account
        group = self._classes[account.owner.name]
        account.kv.ended(sequence)
        self._free(account.kv)
        if waited:
            group.tenants[account.name].queue.note_end(sequence)
            group.waiting -= 1
            self._waiting -= 1
        self._ledger.leave(account)
        group.forget(group.tenants[account.name])

    # -- next sequence -----------------------------------------------------------------------------

    def peek(self, now: float) -> Sequence | None:
        """The sequence that is served next; None when none waits, or all are held back to fill a larger batch."""
        group = self._next_class(now)
        queue = self._next_queue(group, now) if group else None
        return queue.peek(now) if queue else None

    def pop(self, now: float) -> Sequence | None:
        """Remove and return the sequence that is served next.

        Raises:
            PolicyFailed: the order policy failed; no sequence was removed.
        """
        group = self._next_class(now)
        queue = self._next_queue(group, now) if group else None
        if group is None or queue is None:
            return None
        sequence = queue.pop(now)
        # A pick policy may have chosen one that a bound holds back, in place of the first, which no bound holds back.
        if sequence is not None and _is_held(sequence):
            queue.push(sequence)
            sequence = queue.pop_first(now)
        group.waiting -= 1
        self._waiting -= 1
        if sequence is not None:
            self._ledger.serve(sequence.account)
        return sequence

    def _next_class(self, now: float) -> _Class | None:
        best: _Class | None = None
        for group in self._classes.values():
            behind = best is None or group.account.virtual < best.account.virtual
            if group.waiting and behind and self._is_ready(group, now):
                best = group
        return best

    def _next_queue(self, group: _Class, now: float) -> TenantQueue | None:
        """The queue of the least served tenant whose first sequence no KV bound holds back."""
        if not self._ledger.bounded:
            return group.next_queue()
        self._resume()
        while (queue := group.next_queue()) is not None:
            head = queue.peek(now)
            if head is None or not head.account.kv.holds(head):
                return queue
            self._held.append(head)
            group.set_aside()
        return None

    def _free(self, kv: KvUse) -> None:
        if kv.aside:
            self._ledger.freed.append(kv)

    def _resume(self) -> None:
        """Let tenants be served again whose memory was given back. Waiting for it has earned them no more credit than
        other pauses.
        """
        for kv in self._ledger.freed:
            for group, tenant in kv.aside:
                if tenant.aside and group.tenants.get(tenant.account.name) is tenant:
                    self._ledger.lift(tenant.account, alone=not group.heap)
                    group.push(tenant)
            kv.aside.clear()
        self._ledger.freed.clear()

    def take_held(self) -> list[Sequence]:
        """The waiting sequences that a KV bound has held back since the last call."""
        held, self._held = self._held, []
        return [each for each in held if each.status in (Status.WAITING, Status.PREEMPTED)]

    def _is_ready(self, group: _Class, now: float) -> bool:
        terms = group.account.terms
        if terms.weight and self._ledger.bounded:
            queue = self._next_queue(group, now)
            head = queue.peek(now) if queue else None
            if head is None:
                return False
            if group.account.kv.exceeds(head.finish_length):
                self._held.append(head)
                return False
        if not terms.weight:
            return not self.foreground
        if not terms.gather_seconds or not any(
            other.account.live > other.waiting
            for other in self._classes.values()
            if other.account.terms.weight
        ):
            return True
        queue = self._next_queue(group, now)
        head = queue.peek(now) if queue else None
        return head is not None and now - head.request.arrived >= terms.gather_seconds

    # -- shares ------------------------------------------------------------------------------------

    @property
    def foreground(self) -> bool:
        """Whether any request is live that is not background work."""
        return any(each.account.live for each in self._classes.values() if each.account.terms.weight)

    def yielding(self, running: Many[Sequence]) -> list[Sequence]:
        """Running background sequences that must yield because other requests are live."""
        filling = any(
            each.account.live > each.waiting
            for each in self._classes.values()
            if not each.account.terms.weight
        )
        if not filling or not self.foreground:
            return []
        return [sequence for sequence in running if not sequence.account.owner.terms.weight]

    def is_behind(self, running: Sequence, now: float) -> bool:
        """Whether the next waiting sequence has been served less than a running one, by class or by tenant."""
        head = self.peek(now)
        if head is None:
            return False
        own, other = head.account, running.account
        if own.owner is not other.owner:
            return own.owner.virtual < other.owner.virtual
        return own.virtual < other.virtual

    def may_slow_decoding(self, sequence: Sequence) -> bool:
        """Whether this prompt may slow down others: another tenant holds too many slots, or a lower class is ahead."""
        own = sequence.account
        if any(_holds_too_much(other, own, 0) for other in own.owner.running if other is not own):
            return True
        level, virtual = own.owner.terms.level, own.owner.virtual
        return any(
            each.account.live and each.account.terms.level > level and each.account.virtual >= virtual
            for each in self._classes.values()
        )

    def is_owed(self, waiting: Sequence, running: Sequence) -> bool:
        """Whether a waiting sequence may preempt a running one.

        A running sequence of a lower class: as soon as the waiting one's class is not ahead in its share. One of the
        same class: when its tenant holds `MAX_IMBALANCE` times as many slots, by weight, as the waiting
        tenant would have then.
        """
        own, other = waiting.account, running.account
        if own.owner is not other.owner:
            return (
                own.owner.terms.level < other.owner.terms.level and own.owner.virtual <= other.owner.virtual
            )
        return own is not other and _holds_too_much(other, own, 1)


def _is_held(sequence: Sequence) -> bool:
    """Whether the KV bound of its tenant or of its class holds a sequence back."""
    kv, owner = sequence.account.kv, sequence.account.owner.kv
    return kv.holds(sequence) or owner.exceeds(sequence.finish_length)


def _holds_too_much(other: TenantAccount, own: TenantAccount, more: int) -> bool:
    return other.running * other.rate >= MAX_IMBALANCE * (own.running + more) * own.rate > 0.0


def single_queue() -> FairQueue:
    """One queue for all requests, ordered by rank alone."""
    return FairQueue(ShareLedger(CLASSES, {}), TenantQueue, alike=True)
