"""A runner that computes nothing: it plays answers that are known to it alone, and says when a step would be done.

The scheduler is given what a real one would have, the request's ``max_tokens``. That an answer ends earlier it finds
out as it would in earnest: by an end-of-sequence token that the runner draws at last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import chain, islice, repeat

from headrace.core.plan import StepOutput, StepPlan
from headrace.lab.simulate.device import Device
from headrace.lab.simulate.work import work_of

EOS = -1
"""The token that ends an answer; no synthesized token has this id."""

EOS_IDS = frozenset({EOS})
_ENDED = repeat((EOS,))
_NOTHING: tuple[int, ...] = ()


class SimulatedRunner:
    """`core.ports.Runner` in virtual time.

    ``answers`` holds the tokens of each open request's answer; its last one is replaced by `EOS`. ``time`` is when
    the last call returned: a launch when the host has packed the step, a collect when the device is done with it; the
    caller's clock follows it. The device takes one step after the other.
    """

    def __init__(self, device: Device, answers: Mapping[str, tuple[int, ...]]) -> None:
        self.time = 0.0
        self.busy_seconds = 0.0
        self._device = device
        self._answers = answers
        self._draws: dict[int, Iterator[tuple[int, ...]]] = {}
        self._free_at = 0.0
        self._launched: deque[tuple[float, StepOutput]] = deque()

    def launch(self, plan: StepPlan, now: float) -> None:
        draws = self._draws
        for entry in plan.entries:
            answer = self._answers[entry.request_id]
            drawn = len(entry.tokens) - entry.prompt_tokens
            draws[entry.slot] = chain(islice(zip(answer), drawn, len(answer) - 1), _ENDED)
        tokens = tuple([next(draws[row[0]]) if row[4] else _NOTHING for row in plan.rows])
        work = work_of(plan)
        seconds = self._device.seconds(work)
        self.busy_seconds += seconds
        self.time = now + self._device.host_seconds(work)
        self._free_at = max(self._free_at, self.time) + seconds
        self._launched.append((self._free_at, StepOutput(plan.step, tokens)))

    def collect(self) -> StepOutput:
        done, output = self._launched.popleft()
        self.time = max(self.time, done)
        return output
