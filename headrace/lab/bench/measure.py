"""Running targets over a workload: one alone, or several in alternating rounds.

Rounds alternate because the speed of a machine drifts during a measurement (heat, other processes, caches). Targets
that take turns see the same drift.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from headrace.lab.bench.report import Run
from headrace.lab.bench.stats import FIGURES, Target, median, ratio, summarize, wrong_length
from headrace.lab.workload.work import Work


def measure(target: Target, work: Sequence[Work], slo: Mapping[str, float] | None = None) -> Run:
    """One run of one target. A response of another length than its work prescribes is an error."""
    records = [
        record
        if record.error
        else dataclasses.replace(record, error=wrong_length(each, record.output_tokens))
        for each, record in zip(work, target.run(work), strict=True)
    ]
    return Run(target.name, records, summarize(records, slo), target.facts())


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs per round, and each target's figures relative to the first target's.

    ``ratios[name]`` are those of the target ``name``: per figure, the median over rounds of the ratio within a round.
    """

    rounds: Sequence[Sequence[Run]]
    ratios: Mapping[str, Mapping[str, float]]

    def medians(self) -> dict[str, dict[str, float]]:
        """The median over rounds of each figure, by target and figure."""
        return {
            column[0].target: {
                figure.name: median([figure.read(run.summary) for run in column]) for figure in FIGURES
            }
            for column in zip(*self.rounds, strict=True)
        }

    def middle(self) -> list[Run]:
        """For each target the run whose throughput is the median (the lower one of two)."""
        runs = []
        for column in zip(*self.rounds, strict=True):
            ordered = sorted(column, key=lambda run: run.summary.output_tokens_per_second)
            runs.append(ordered[(len(ordered) - 1) // 2])
        return runs


def compare(
    targets: Sequence[Target],
    work: Sequence[Work] | Callable[[int], Sequence[Work]],
    rounds: int = 3,
    slo: Mapping[str, float] | None = None,
    finished: Callable[[int, Run], None] = lambda number, run: None,
    starting: Callable[[int, Target], None] = lambda number, target: None,
) -> Comparison:
    """Runs all targets in turn, ``rounds`` times, every second round in reverse order.

    ``work`` may be a function of the round's number: a prefix cache still holds the prompts of the last round.
    ``starting`` is called before each run, ``finished`` after it.

    Raises:
        ValueError: fewer than two targets, two targets of the same name, or no round.
    """
    names = [target.name for target in targets]
    if len(targets) < 2 or len(set(names)) < len(names) or rounds < 1:
        raise ValueError(
            f"compare needs at least one round and two targets with different names, got {names}"
        )
    done: list[list[Run]] = []
    for number in range(rounds):
        order = list(targets) if number % 2 == 0 else list(reversed(targets))
        drawn = work(number) if callable(work) else work
        runs = {}
        for target in order:
            starting(number, target)
            runs[target.name] = measure(target, drawn, slo)
            finished(number, runs[target.name])
        done.append([runs[name] for name in names])
    return Comparison(done, {name: _ratios(done, column) for column, name in enumerate(names) if column})


def _ratios(rounds: Sequence[Sequence[Run]], column: int) -> dict[str, float]:
    ratios = {}
    for figure in FIGURES:
        quotients = [
            ratio(figure.read(runs[column].summary), figure.read(runs[0].summary)) for runs in rounds
        ]
        known = [quotient for quotient in quotients if not math.isnan(quotient)]
        if known:
            ratios[figure.name] = median(known)
    return ratios
