"""How fidelity simulates several servers on the same cores."""

import math
from types import SimpleNamespace

import pytest

from benchmarks.fidelity import Shared
from headrace.lab.simulate.work import StepWork

WORK = StepWork(1, 1, 1, 1, 1)


class Fixed:
    """A device whose steps all take the same time."""

    def __init__(self, seconds):
        self._seconds = seconds

    def seconds(self, work):
        return self._seconds

    def host_seconds(self, work):
        return self._seconds / 10


@pytest.mark.parametrize(
    ("due", "seconds"),
    [
        ([1.0], 2.0),
        ([1.0, math.inf], 2.0),
        ([1.0, 5.0], 3.0),
        ([math.inf, 5.0, 1.0], 2.5),
        ([7.0, 5.0, 1.0], 3.0),
    ],
)
def test_a_step_takes_longer_by_the_share_of_other_servers_that_compute(due, seconds):
    device = Shared(Fixed(2.0), Fixed(3.0))
    device.replicas = [SimpleNamespace(due=each) for each in due]
    assert device.seconds(WORK) == pytest.approx(seconds)
    assert device.host_seconds(WORK) == pytest.approx(seconds / 10)
