"""Running targets over a workload: one alone, or several in alternating rounds.

Rounds alternate because a machine changes while it is measured (heat, neighbours, caches): two targets that
take turns see the same changes, two that run one after the other do not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from headrace.lab.bench.record import Target, wrong_length
from headrace.lab.bench.report import Run
from headrace.lab.bench.stats import Summary, median, summarize
from headrace.lab.workload import Work


def measure(target: Target, work: Sequence[Work], slo: Mapping[str, float] | None = None) -> Run:
    """One run of one target. An answer of another length than its work fixes is an error, whoever gave it."""
    records = [
        record
        if record.error
        else dataclasses.replace(record, error=wrong_length(each, record.output_tokens))
        for each, record in zip(work, target.run(work), strict=True)
    ]
    return Run(target.name, records, summarize(records, slo), target.facts())


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs per round, and the medians over rounds of each target's figures divided by the first target's.

    ``ratios[name]`` are of the target called ``name``; a ratio is the median of the per-round ratios, which
    is what alternation makes meaningful.
    """

    rounds: Sequence[Sequence[Run]]
    ratios: Mapping[str, Mapping[str, float]]

    def middle(self) -> list[Run]:
        """For each target the run whose throughput is the median (the lower one of two)."""
        runs = []
        for column in zip(*self.rounds, strict=True):
            ordered = sorted(column, key=lambda run: run.summary.output_tokens_per_second)
            runs.append(ordered[(len(ordered) - 1) // 2])
        return runs


FIGURES: Mapping[str, Callable[[Summary], float]] = {
    "output_tokens_per_second": lambda s: s.output_tokens_per_second,
    "requests_per_second": lambda s: s.requests_per_second,
    "ttft_p50": lambda s: s.ttft.p50,
    "ttft_p99": lambda s: s.ttft.p99,
    "tpot_p50": lambda s: s.tpot.p50,
    "itl_p99": lambda s: s.itl.p99,
    "e2e_p50": lambda s: s.e2e.p50,
    "e2e_p99": lambda s: s.e2e.p99,
}


def compare(
    targets: Sequence[Target],
    work: Sequence[Work] | Callable[[int], Sequence[Work]],
    rounds: int = 3,
    slo: Mapping[str, float] | None = None,
    told: Callable[[int, Run], None] = lambda number, run: None,
) -> Comparison:
    """All targets in turn, ``rounds`` times, every second round in reverse order.

    ``work`` may be a function of the round's number: a server that keeps prefixes knows the prompts of the round
    before. ``told`` hears of each run as it ends.

    Raises:
        ValueError: fewer than two targets, two of one name, or no round.
    """
    names = [target.name for target in targets]
    if len(targets) < 2 or len(set(names)) < len(names) or rounds < 1:
        raise ValueError(f"compare needs two or more targets of different names and a round, got {names}")
    done: list[list[Run]] = []
    for number in range(rounds):
        order = list(targets) if number % 2 == 0 else list(reversed(targets))
        drawn = work(number) if callable(work) else work
        runs = {}
        for target in order:
            runs[target.name] = measure(target, drawn, slo)
            told(number, runs[target.name])
        done.append([runs[name] for name in names])
    return Comparison(done, {name: _ratios(done, column) for column, name in enumerate(names) if column})


def _ratios(rounds: Sequence[Sequence[Run]], column: int) -> dict[str, float]:
    ratios = {}
    for figure, read in FIGURES.items():
        pairs = [(read(runs[0].summary), read(runs[column].summary)) for runs in rounds]
        quotients = [mine / base for base, mine in pairs if base > 0 and not math.isnan(mine)]
        ratios[figure] = median(quotients)
    return ratios
