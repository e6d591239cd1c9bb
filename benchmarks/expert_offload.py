"""What experts in host memory would cost a decode step: computed there, or copied to the device when they are needed.

The device holds all other weights, 4 GB of keys and values and workspace, and as many experts as then fit; each is
equally likely. In a layer, the device's experts and those of the host are computed at the same time. Computing on the
host reads them at the host's bandwidth and exchanges activations twice a layer; copying reads them over PCIe. Beside
them are the same model in 4 bits, the CPU alone, and several devices of the kind that hold it whole.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import NamedTuple

from headrace.core.capacity import SparseLayers
from headrace.lab.plan.roofline import (
    H200,
    MEMORY_SHARE,
    SHAPES,
    WEIGHTS,
    DeviceSpec,
    ModelShape,
    Precision,
    Replica,
    decoding,
)

OTHER_BYTES = 4e9
"""Keys, values and workspace on the device."""
CONTEXT = 1024
EXCHANGE_SECONDS = 40e-6
"""Of activations to the host and back, and of waking its threads, in a layer. Estimated."""
SHARE = 0.85
"""Of the host's bandwidth that products of experts reach: what the C++ kernels reach in `headrace bench roofline`."""

RTX4090 = DeviceSpec(
    "RTX 4090", 165e12, 330e12, 24_564 << 20, 1.008e12, 25e9, 0.55, 0.80, 0.8e-3, 0.4, 64
)  # NVIDIA Ada data sheet; PCIe 4.0 x16


class Host(NamedTuple):
    """A device with its host: bytes per second and operations per second (bfloat16) of the host."""

    device: DeviceSpec
    bandwidth: float
    flops: float


HOSTS = {
    "desktop": Host(RTX4090, 80e9, 1.5e12),  # two channels of DDR5-5600, AVX-512
    "server": Host(H200, 300e9, 20e12),  # eight channels of DDR5-5600, AMX
}

MODELS = (
    ("qwen3-30b-a3b", "bfloat16"),
    ("qwen3-30b-a3b", "int4"),
    ("gpt-oss-120b", "mxfp4"),
)


class Step(NamedTuple):
    """Seconds of a decode step; None: the weights do not fit."""

    way: str
    seconds: float | None


def used(sparse: SparseLayers, rows: int) -> float:
    """Distinct experts of a layer that a step is expected to have."""
    return sparse.experts * (1 - (1 - sparse.chosen / sparse.experts) ** rows)


def held_share(replica: Replica) -> float:
    """The share of experts that fit on the device."""
    experts = _expert_bytes(replica) * replica.shape.expert_parameters
    room = replica.device.memory_bytes * MEMORY_SHARE - OTHER_BYTES - (replica.weight_bytes - experts)
    return max(0.0, min(1.0, room / experts))


def steps(shape: ModelShape, precision: Precision, host: Host, rows: int) -> Iterator[Step]:
    """A decode step of ``rows`` sequences in every way."""
    sparse = shape.sparse
    assert sparse is not None
    replica, load = Replica(shape, host.device, precision=precision), decoding(rows, CONTEXT)
    held, each = held_share(replica), sparse.size * _expert_bytes(replica)
    whole = replica.step_seconds(load)
    yield Step("on the device", whole if held == 1 else None)
    chosen = used(sparse, rows) * each
    dense = whole - sparse.layers * chosen / host.device.reached_bandwidth
    device = held * chosen / host.device.reached_bandwidth
    away = (1 - held) * chosen
    products = 2 * (1 - held) * rows * sparse.chosen * sparse.size / host.flops
    computed = max(away / (SHARE * host.bandwidth), products) + EXCHANGE_SECONDS
    if held < 1:
        yield Step("computed on the host", dense + sparse.layers * max(device, computed))
        yield Step("copied when needed", dense + sparse.layers * (device + away / host.device.host_bandwidth))
    four = Replica(shape, host.device, precision=WEIGHTS["int4"])
    yield Step("in 4 bits on the device", four.step_seconds(load) if held_share(four) == 1 else None)
    read = replica.weight_bytes_read(load) + load.read_tokens * replica.kv_bytes_per_token
    yield Step("the CPU alone", max(read / (SHARE * host.bandwidth), replica.flops(load) / host.flops))


def devices_that_hold(shape: ModelShape, precision: Precision, device: DeviceSpec) -> int:
    """How many devices of a kind hold the model whole."""
    needed = Replica(shape, device, precision=precision).weight_bytes + OTHER_BYTES
    return -int(-needed // (device.memory_bytes * MEMORY_SHARE))


def _expert_bytes(replica: Replica) -> float:
    precision = replica.precision
    return precision.weight_bytes if precision.expert_bytes is None else precision.expert_bytes


def main() -> None:
    """Print a table for each machine and model."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    for name, host in HOSTS.items():
        for model, weights in MODELS:
            shape, precision = SHAPES[model], WEIGHTS[weights]
            replica = Replica(shape, host.device, precision=precision)
            print(
                f"\n{name} ({host.device.name}), {model} in {weights}: {replica.weight_bytes / 1e9:.1f} GB,"
                f" {100 * held_share(replica):.0f} % of the experts fit,"
                f" {devices_that_hold(shape, precision, host.device)} devices hold it; tokens/s"
            )
            columns = {rows: list(steps(shape, precision, host, rows)) for rows in (1, 8, 64)}
            print(f"{'':26}" + "".join(f"{f'batch {rows}':>12}" for rows in columns))
            for at, first in enumerate(columns[1]):
                seconds = [(rows, found[at].seconds) for rows, found in columns.items()]
                cells = [f"{rows / each:12,.1f}" if each else f"{'-':>12}" for rows, each in seconds]
                print(f"{first.way:26}" + "".join(cells))


if __name__ == "__main__":
    main()
