"""Workloads by name, for the command line, scripts and reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headrace.lab.workload.arrivals import arriving, poisson
from headrace.lab.workload.chats import high_variance_chats
from headrace.lab.workload.files import jsonl
from headrace.lab.workload.synthesis import Synthesis, replayed
from headrace.lab.workload.tokens import (
    VOCABULARY,
    fixed_lengths,
    high_variance,
    log_normal_lengths,
    shared_prefix,
)
from headrace.lab.workload.traces import BadTrace, read_trace
from headrace.lab.workload.work import Work


class BadDataset(ValueError):
    """An unknown dataset, or a dataset without its file."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """The parameters of a workload; equal values give equal workloads.

    ``input_len`` and ``output_len`` are in tokens; depending on the dataset they are fixed lengths, medians, or
    limits. ``rate`` is in requests per second; infinite means that all requests are due at the start, or at the times
    of the trace.
    """

    name: str = "high-variance"
    path: str | None = None
    count: int = 300
    input_len: int = 24
    output_len: int = 128
    prefix_len: int = 1000
    seed: int = 0
    rate: float = math.inf
    burstiness: float = 1.0

    def draw(self, workload: Workload | None = None) -> tuple[Work, ...]:
        """The requests in order of arrival; ``workload`` overrides ``name``.

        Raises:
            BadDataset: an unknown name, no file name, or a file that is not a trace.
        """
        if workload is not None:
            work = tuple(sorted(workload.draw(self), key=lambda each: each.arrival))
        elif self.name in DATASETS:
            work = DATASETS[self.name](self)
        else:
            raise BadDataset(f"there is no dataset {self.name!r}; known datasets are {', '.join(DATASETS)}")
        if math.isinf(self.rate) and (workload is not None or self.name == "trace"):
            return work  # the workload has its own arrival times
        return arriving(work, poisson(len(work), self.rate, self.seed, self.burstiness))


class Workload(Protocol):
    """Draws the ``count`` requests of a dataset; equal datasets give equal requests."""

    def draw(self, dataset: Dataset) -> Sequence[Work]: ...


def _jsonl(d: Dataset) -> tuple[Work, ...]:
    if d.path is None:
        raise BadDataset("--dataset-name jsonl needs a file: --dataset-path FILE")
    return jsonl(Path(d.path), d.count, d.output_len, d.seed)


def _trace(d: Dataset) -> tuple[Work, ...]:
    if d.path is None:
        raise BadDataset("--dataset-name trace needs a file: --dataset-path FILE")
    try:
        return tuple(replayed(read_trace(Path(d.path), d.count), Synthesis(VOCABULARY, d.seed)))
    except BadTrace as error:
        raise BadDataset(str(error)) from None


DATASETS: Mapping[str, Callable[[Dataset], tuple[Work, ...]]] = {
    "high-variance": lambda d: high_variance(d.count, d.input_len, d.seed),
    "high-variance-chats": lambda d: high_variance_chats(d.count, d.seed),
    "fixed": lambda d: fixed_lengths(d.count, d.input_len, d.output_len, d.seed),
    "log-normal": lambda d: log_normal_lengths(d.count, d.input_len, d.output_len, seed=d.seed),
    "shared-prefix": lambda d: shared_prefix(d.count, d.prefix_len, d.input_len, d.output_len, d.seed),
    "jsonl": _jsonl,
    "trace": _trace,
}
