"""Roofline of a sweep: the maximum output tokens per second at a device's peaks in a steady state.

```
 a step   n sequences generate a token each; n / output of them end, and as many prompts begin
 tokens   n x (1 + prompt / output), at most the chunk size, which bounds n
 bound    n / max(operations / peak rate, bytes / bandwidth)
```
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from headrace.lab.plan.roofline import Load, Replica
from headrace.lab.workload.work import Work


class Lengths(NamedTuple):
    """Mean tokens of a prompt and of an output."""

    prompt: float
    output: float


def lengths(work: Sequence[Work]) -> Lengths:
    """The mean lengths of work whose prompts are token ids."""
    count = len(work)
    return Lengths(
        sum(len(each.prompt) for each in work) / count, sum(each.max_tokens for each in work) / count
    )


def ideal(replica: Replica) -> Replica:
    """The same replica on a device that reaches its peaks and loses no time between steps."""
    device = replace(
        replica.device, efficiency_compute=1.0, efficiency_bandwidth=1.0, step_overhead_seconds=0.0
    )
    return replace(replica, device=device)


def tokens_per_second(replica: Replica, shape: Lengths, rows: int, chunk: int) -> float:
    """The bound for ``rows`` concurrent sequences and steps of at most ``chunk`` tokens."""
    prefill = shape.prompt / shape.output  # prompt tokens per generated token
    drawn = min(float(rows), chunk / (1 + prefill))
    context = shape.prompt + shape.output / 2
    ending = drawn / shape.output
    whole = max(1, round(drawn))
    load = Load(
        decodes=whole,
        prefill_tokens=round(drawn * prefill),
        contexts=drawn * context + drawn * prefill * shape.prompt / 2,
        read_tokens=drawn * context + ending * shape.prompt,
        samples=whole + round(ending),
    )
    return drawn / replica.step_seconds(load)
