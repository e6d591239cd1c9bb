"""The cost ledger: its CPU time per step and row, and conservation over many simulated requests.

python -m benchmarks.cost overhead
python -m benchmarks.cost conservation [--requests 100000]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median

from headrace.core.events import AdmitReason, Admitted, Arrived, Emitted, Stepped, StepRows
from headrace.core.plan import Row
from headrace.observe.cost.ledger import CostLedger
from headrace.observe.cost.prices import Pricing
from headrace.observe.metrics_page import MetricsPage
from headrace.observe.work import ModelWork, WorkMeter
from tests.lab.simulate.scenes import Fixed, fleet, run
from tests.property.test_cost_conservation import calls

COEFFICIENTS = (1e-3, 1e-5, 1e-4, 1e-8)
ROUNDS, STEPS = 7, 300


Fold = Callable[[Stepped, float], object]


def microseconds(fold: Fold, steps: Sequence[tuple[Stepped, float]]) -> float:
    """CPU time of folding one of the steps."""
    began = time.thread_time()
    for step, end in steps:
        fold(step, end)
    return 1e6 * (time.thread_time() - began) / len(steps)


def folds(rows: int) -> tuple[tuple[str, ...], dict[str, Fold]]:
    """Request ids, and the folds to measure: the ledger, the work of a step, and its tokens."""
    ledger = CostLedger(Pricing(1.0), lambda: COEFFICIENTS)
    work = WorkMeter(MetricsPage(), ledger, ModelWork(1, 1, 1, 1, 1), lambda: 0.0, slots=rows)
    ids = tuple(f"chatcmpl-{number:024x}" for number in range(rows))
    for each in ids:
        ledger.fold(Arrived(each, 100, "a", 0, 0.0), 0.0)
        ledger.fold(Admitted(each, AdmitReason.NEW, 0, 100), 0.0)
    emitted = [Emitted(each, (7,)) for each in ids]

    def tokens(step: Stepped, end: float) -> None:
        for each in emitted:
            ledger.fold(each, end)

    return ids, {"ledger": ledger.fold, "work": work.fold, "tokens": tokens}


def overhead() -> None:
    """Fold steps of several sizes that only decode, and print microseconds of CPU."""
    print("rows  ledger us/step  ledger us/row  work us/step  tokens us/step")
    for rows in (1, 16, 64, 256):
        ids, measured = folds(rows)
        plan = tuple(Row(slot, 1000, 1, (), True) for slot in range(rows))
        samples: dict[str, list[float]] = {name: [] for name in measured}
        now = 0.0
        for _ in range(ROUNDS):
            steps = []
            for _ in range(STEPS):
                work = StepRows(now, ids, plan)
                now += 0.01
                steps.append((Stepped(0, rows, 0, rows, rows, 0, 1, 2, 1, 1, work), now))
            for name, fold in measured.items():
                samples[name].append(microseconds(fold, steps))
        best = {name: median(values) for name, values in samples.items()}
        print(
            f"{rows:4}  {best['ledger']:14.1f}  {best['ledger'] / rows:13.2f}"
            f"  {best['work']:12.1f}  {best['tokens']:14.1f}"
        )


def conservation(requests: int) -> None:
    """Simulate requests with prefix hits, drafts, preemptions, a host tier and idle time; print the balance."""
    live = fleet(
        Fixed(0.01, 0.001, 0.0001),
        num_blocks=40,
        policy="fair",
        front=(0.001, 0.0001),
        draft_rate=0.8,
        host_blocks=40,
    )
    (replica,) = live.replicas
    times = replica.engine.times
    assert times is not None
    ledger = CostLedger(Pricing(1.0), lambda: times.coefficients)
    replica.watch(ledger)
    tally = run(live, calls(requests, 7), max_tokens=20)
    balance = ledger.balance()
    print(f"requests {requests:,}, steps {tally.step_count:,}, rows {tally.step_rows:,}")
    print(
        f"preemptions {tally.preemptions:,}, cached {sum(group.cached_tokens for group in tally.groups):,} tokens"
    )
    print(
        f"wall {balance.wall:,.3f} s = {balance.attributed:,.3f} + {balance.idle:,.3f} + {balance.overhead:,.3f}"
    )
    print(f"of which {ledger.draft_seconds:,.3f} s were drafting")
    print(f"relative error {balance.error:.2e}")


def main() -> None:
    """Run the measurement that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("overhead", "conservation"))
    parser.add_argument("--requests", type=int, default=100_000)
    given = parser.parse_args()
    if given.what == "overhead":
        overhead()
    else:
        conservation(given.requests)


if __name__ == "__main__":
    main()
