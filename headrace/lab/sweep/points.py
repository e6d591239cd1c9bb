"""The points of a sweep: figures of each trial as medians over its rounds, with memory and roofline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from headrace.lab.bench.report import Run
from headrace.lab.bench.stats import Spread, median
from headrace.lab.sweep.trials import Axis, Trial


class Sizes(NamedTuple):
    """Bytes of an engine: weights, activations of its largest step, and one KV block."""

    weight_bytes: int
    workspace_bytes: int
    block_bytes: int


class Point(NamedTuple):
    """The figures of one trial: medians over ``rounds``, in tokens per second and seconds; memory in bytes.

    ``slowest`` and ``fastest`` are the range of the throughput over rounds. ``memory_bytes`` is None if the sizes are
    unknown; ``roofline`` (output tokens per second) is None if the device's peaks are unknown.
    """

    trial: Trial
    rounds: int
    requests: int
    failed: int
    tokens_per_second: float
    slowest: float
    fastest: float
    ttft_p50: float
    tpot_p50: float
    itl_p99: float
    e2e_p50: float
    kv_blocks: int
    memory_bytes: int | None
    roofline: float | None


def point(trial: Trial, runs: Sequence[Run], sizes: Sizes | None, roofline: float | None) -> Point:
    """The figures of a trial that has run at least once."""
    summaries = [run.summary for run in runs]
    speeds = [each.output_tokens_per_second for each in summaries]
    blocks = max(int(run.facts.get("kv_blocks_peak", 0)) for run in runs)

    def middle(read: Callable[[Spread], float], name: str) -> float:
        return median([read(getattr(each, name)) for each in summaries])

    return Point(
        trial,
        len(runs),
        sum(each.requests for each in summaries),
        sum(each.failed for each in summaries),
        median(speeds),
        min(speeds),
        max(speeds),
        middle(lambda each: each.p50, "ttft"),
        middle(lambda each: each.p50, "tpot"),
        middle(lambda each: each.p99, "itl"),
        middle(lambda each: each.p50, "e2e"),
        blocks,
        None if sizes is None else sizes.weight_bytes + sizes.workspace_bytes + blocks * sizes.block_bytes,
        roofline,
    )


def lines(points: Sequence[Point]) -> Mapping[Axis, Mapping[str, list[Point]]]:
    """The points by axis and policy, in the order of their values."""
    found: dict[Axis, dict[str, list[Point]]] = {}
    for axis in Axis:
        for each in sorted(points, key=lambda each: (each.trial.policy, each.trial.value)):
            if each.trial.axis is axis:
                found.setdefault(axis, {}).setdefault(each.trial.policy, []).append(each)
    return found
