"""Conservation: what requests, idle time and overhead have taken adds up to the wall clock, whatever happens."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from headrace.core.events import Event, Finished, Preempted, Stepped
from headrace.core.knobs import Knobs
from headrace.core.prediction.step_times import StepTimes
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.lab.workload.work import Call, Span
from headrace.observe.cost.ledger import CostLedger
from headrace.observe.cost.prices import Pricing
from headrace.testing.engines import hashing_engine
from headrace.testing.hashing_runner import VOCAB
from tests.lab.simulate.scenes import Fixed, fleet, run

LAW = 1e-3
"""The law's bound. Sums of floats come much closer, and so must these tests."""

EXACT = 1e-9


def close(ledger: CostLedger, wall: float) -> None:
    balance = ledger.balance()
    assert balance.wall == pytest.approx(wall, rel=EXACT)
    assert balance.attributed + balance.idle + balance.overhead == pytest.approx(wall, rel=EXACT)
    assert balance.error < EXACT < LAW
    assert min(balance.attributed, balance.idle, balance.overhead) >= 0.0


class Life:
    """A core over a tiny pool whose requests come, are cancelled, fail and expire; steps take any time."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.began = self.now = rng.random() * 100
        times = StepTimes()
        self.engine, self.runner = hashing_engine(
            num_blocks=rng.randint(16, 40),
            block_size=4,
            max_num_seqs=rng.randint(2, 8),
            max_model_len=64,
            overlap=rng.choice([0, 0, 1, 2]),
            knobs=Knobs(batched_tokens=rng.randint(4, 48)),
            times=times,
            host_blocks=rng.choice([0, 8]),
            disk_blocks=0,
        )
        if not self.engine.overlap:
            self.runner.interrupts = lambda plan: rng.random() < 0.1
        self.ledger = CostLedger(Pricing(0.01), lambda: times.coefficients, began=self.now)
        self.seen: Counter[type[Event]] = Counter()
        self.ends: Counter[FinishReason] = Counter()
        self.ids: list[str] = []
        self.last = self.now

    def step(self) -> None:
        events = self.engine.step(self.now)
        self.now += self.rng.choice([0.001, 0.01, self.rng.random()])
        for event in events:
            self.seen[type(event)] += 1
            if isinstance(event, Finished):
                self.ends[event.reason] += 1
            if isinstance(event, Stepped):
                self.last = self.now
            self.ledger.fold(event, self.now)

    def live(self, requests: int) -> None:
        rng = self.rng
        for number in range(requests):
            prefix = tuple(range(8 * rng.randint(0, 3)))
            tokens = (*(token % VOCAB for token in prefix), rng.randrange(VOCAB))
            request = Request(
                f"r{number}",
                tokens,
                SamplingParams(max_tokens=rng.randint(1, 30), ignore_eos=True),
                arrived=self.now - rng.random() * 0.1,
                tenant=rng.choice("abc"),
                service_class=rng.choice(["default", "flex"]),
                deadline=self.now + rng.random() * 9 if rng.random() < 0.1 else None,
                seed=number,
            )
            self.ids.append(request.id)
            if rng.random() < 0.05:
                self.runner.poison.add(request.id)
            self.engine.submit(request, self.now)
            for _ in range(rng.randint(0, 6)):
                self.step()
            if rng.random() < 0.1:
                self.engine.cancel(rng.choice(self.ids[-5:]), FinishReason.CANCELLED, self.now)
            if rng.random() < 0.1:
                self.drain()
                self.now += 10 * rng.random()
        self.drain()

    def drain(self) -> None:
        while (due := self.engine.wake_at(self.now)) is not None:
            self.now = max(self.now, due)
            self.step()


def test_whatever_happens_to_requests() -> None:
    seen: Counter[type[Event]] = Counter()
    ends: Counter[FinishReason] = Counter()
    for seed in range(12):
        life = Life(seed)
        life.live(60)
        seen += life.seen
        ends += life.ends
        balance = life.ledger.balance()
        close(life.ledger, life.last - life.began)
        spent = math.fsum(life.ledger.cost(each).device_seconds for each in life.ids)
        assert spent == pytest.approx(balance.attributed, rel=EXACT)
        costs = math.fsum(life.ledger.cost(each).total for each in life.ids)
        assert costs == pytest.approx(0.01 * balance.attributed, rel=EXACT)
        assert balance.idle > 0.0
    assert seen[Preempted] > 25
    assert {FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.FAILED, FinishReason.TIMEOUT} <= set(
        ends
    )


def calls(count: int, seed: int) -> list[Call]:
    """Calls of three tenants, half of them with a shared prefix, in bursts with rests between them."""
    rng, now, made = random.Random(seed), 0.0, []
    for number in range(count):
        now += rng.expovariate(20.0) if number % 500 else 30.0
        prefix = Span(rng.randint(0, 4), 0, 16) if rng.random() < 0.5 else Span(1000 + number, 0, 16)
        own = Span(1_000_000 + number, 0, rng.randint(1, 24))
        spans = (prefix, own)
        tokens = sum(each.length for each in spans)
        made.append(Call(now, tokens, rng.randint(1, 20), rng.choice("abc"), "default", spans))
    return made


@pytest.mark.parametrize(("overlap", "count"), [(0, 600), (1, 400)])
def test_a_simulated_day(overlap: int, count: int) -> None:
    """Tens of thousands of rows with prefix hits, preemptions and idle time."""
    live = fleet(
        Fixed(0.01, 0.001, 0.0001),
        num_blocks=40,
        overlap=overlap,
        policy="fair",
        front=(0.001, 0.0001),
        draft_rate=0.8,
        host_blocks=40,
    )
    (replica,) = live.replicas
    times = replica.engine.times
    assert times is not None
    ledger = CostLedger(Pricing(1.0), lambda: times.coefficients)
    ends: list[float] = []

    class Ends:
        def fold(self, event: Event, now: float) -> None:
            if isinstance(event, Stepped):
                ends.append(now)

    replica.watch(ledger)
    replica.watch(Ends())
    tally = run(live, calls(count, 7), max_tokens=20)
    assert tally.step_rows > 3 * count
    assert tally.preemptions > 10
    assert sum(group.cached_tokens for group in tally.groups) > count
    close(ledger, ends[-1])
    assert ledger.balance().idle > 0.1 * ends[-1]
    assert 0.0 < ledger.draft_seconds < ledger.balance().attributed
