"""How fidelity simulates several servers on the same cores."""

import math

import pytest

from benchmarks.fidelity import Shared
from headrace.lab.simulate.work import StepWork


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
