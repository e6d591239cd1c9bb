"""Where the device's time goes, by kernel: for `gpu_check`."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import ProfilerActivity, profile

MOST_KERNELS = 14


def shown(what: str, steps: int, work: Callable[[], object]) -> None:
    """Run ``work`` and print its kernels, the longest first, in microseconds per step of ``steps``."""
    kind = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
    with profile(activities=[kind]) as profiled:
        began = time.perf_counter()
        work()
        seconds = time.perf_counter() - began
    kernels = sorted(profiled.key_averages(), key=_microseconds, reverse=True)
    busy = sum(map(_microseconds, kernels))
    print(f"{what}: {1e6 * seconds / steps:,.0f} us per step, the device computes for {busy / steps:,.0f}")
    for each in kernels[:MOST_KERNELS]:
        spent, calls = _microseconds(each) / steps, each.count / steps
        print(f"{spent:11,.1f} us in {calls:6.1f} calls: {each.key[:100]}", flush=True)


def _microseconds(kernel: FunctionEventAvg) -> float:
    on_device = torch.cuda.is_available()
    return float(kernel.self_device_time_total if on_device else kernel.self_cpu_time_total)
