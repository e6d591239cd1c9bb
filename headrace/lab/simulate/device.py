"""Step times of a device from its data sheet."""

from __future__ import annotations

from typing import Protocol

from headrace.lab.plan.roofline import Load, Replica
from headrace.lab.simulate.work import StepWork


class Device(Protocol):
    """Seconds of a step: a roofline, or a fit to measured steps.

    ``host_seconds`` is the host's part (planning and packing), which may overlap with the previous step; ``seconds``
    is the device's part.
    """

    def seconds(self, work: StepWork) -> float: ...

    def host_seconds(self, work: StepWork) -> float: ...


class Roofline:
    """A `Device` from a model's shape and a device's peaks; moves of blocks do not overlap with computation.

    ``row_seconds`` is the host's time per row: slots, block tables, and the host's part of sampling.
    """

    def __init__(self, replica: Replica, block_size: int, row_seconds: float = 2e-6) -> None:
        self._replica = replica
        self._row_seconds = row_seconds
        block_bytes = block_size * replica.kv_bytes_per_token
        self._copy_seconds = 2 * block_bytes / (replica.device.reached_bandwidth * replica.degree)
        self._transfer_seconds = block_bytes / (replica.device.host_bandwidth * replica.degree)

    def seconds(self, work: StepWork) -> float:
        moving = work.copies * self._copy_seconds + work.transfers * self._transfer_seconds
        if not work.rows:
            return moving
        load = Load(work.rows, work.tokens - work.rows, work.contexts, work.read_tokens, work.samples)
        return self._replica.step_seconds(load) + moving

    def host_seconds(self, work: StepWork) -> float:
        return work.rows * self._row_seconds
