"""How fidelity simulates several servers on the same cores."""

import math

import numpy as np
import pytest

from benchmarks.fidelity import Shared, _simulate
from headrace.config import options
from headrace.lab.calibration import Calibration
from headrace.lab.simulate.runner import StepWork
from headrace.lab.workload.work import Work


class Device:
    """A device whose steps take ``token`` seconds for each token beside ``step``."""

    def __init__(self, step, token):
        self._step, self._token = step, token

    def seconds(self, work):
        return self._step + self._token * work.tokens

    def host_seconds(self, work):
        return self.seconds(work) / 10


class Replica:
    """A replica is idle as long as its next event is never due."""

    due = math.inf


def work(tokens):
    return StepWork(1, tokens, tokens, tokens, 1)


@pytest.mark.parametrize(
    ("others", "longer"),
    [
        ([], 0.0),
        ([(math.inf, 1)], 0.0),  # idle
        ([(9.0, 1)], 1.0),  # decodes
        ([(9.0, 19)], 0.1),  # computes a prompt of ten times that duration
        ([(9.0, 1), (math.inf, 1)], 0.5),
        ([(9.0, 1), (9.0, 1)], 1.0),
    ],
)
def test_a_step_takes_longer_while_others_read_weights(others, longer):
    device = Shared(Device(1.0, 1.0), Device(4.0, 1.0))
    replicas = device.replicas = [Replica() for _ in range(1 + len(others))]
    for replica, (due, tokens) in zip(replicas[1:], others, strict=True):
        replica.due = 0.0
        device.seconds(work(tokens))
        replica.due = due
    replicas[0].due = 1.0
    assert device.seconds(work(3)) == pytest.approx(4.0 + 3.0 * longer)
    assert device.host_seconds(work(3)) == pytest.approx(0.4 + 0.3 * longer)


CALIBRATION = Calibration(
    model="m", machine="x", kind="cpu", dtype="float32", kernels="cpp", kv_tokens=8192, max_model_len=1024,
    fixed_tokens=8.0, context_tokens=500.0, steps=50, step=1e-2, row=0.0, tokens=(0.0, 1e-3, 1e-3, 1e-3, 1e-3),
    context=0.0, read=0.0, sample=0.0, host_step=1e-4, host_row=0.0, error_p50=0.05, error_p90=0.1,
)  # fmt: skip


def test_servers_that_get_the_same_requests_serve_them_alike():
    given = options({"model": "builtin", "max_num_seqs": 16, "max_model_len": 1024})
    work = [
        Work(f"{i}-{server}", tuple(range(100 * i, 100 * i + 150)), 20, arrival=0.05 * i, ignore_eos=True)
        for i in range(20)
        for server in range(2)
    ]
    times = _simulate(given, 2, np.full(3, math.inf), [CALIBRATION, CALIBRATION], work).times
    assert times[:, 1::2] == pytest.approx(times[:, ::2], rel=0.02)
