"""What is to come: the requests of the last scenes once more, at the present load and at one that may come later.

A single scene is too short to show a queue that grows slowly, so those of some minutes are repeated. The load may rise
before the tuner looks again: a little at any time, and as fast and as high as it has done within the last hour.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from headrace.tuning.tuner.rehearsal import Job, Scene

SCENES = 5  # see docs/decisions/tuning.md#length-and-state-of-a-rehearsal
"""Scenes whose requests are repeated, and the length of a forecast in scenes."""

PRESENT_SCENES = 2
"""Scenes whose mean is the present load."""

MEMORY_SECONDS = 3600.0
"""How long loads are remembered."""

LATER = 1.3
"""How many times the present load may come in any case."""


class Forecast(NamedTuple):
    """The same requests at the present load, and at a higher one."""

    now: Scene
    later: Scene


class Forecaster:
    """Remembers the last scenes; ``scene_seconds`` is how long they last."""

    def __init__(self, scene_seconds: float) -> None:
        self._seconds = scene_seconds
        self._scenes: deque[Scene] = deque(maxlen=SCENES)
        self._loads: deque[float] = deque(maxlen=max(PRESENT_SCENES, round(MEMORY_SECONDS / scene_seconds)))

    def add(self, scene: Scene) -> None:
        """A scene has ended; one without arrivals tells nothing."""
        if scene.load:
            self._scenes.append(scene)
            self._loads.append(scene.load)

    @property
    def ready(self) -> bool:
        """Whether enough scenes are known."""
        return len(self._loads) >= PRESENT_SCENES

    def forecast(self, left: Sequence[Job], scenes: int) -> Forecast:
        """The next so many scenes, with what is ``left`` of open requests; `ready` must be true."""
        means = list(_means(self._loads))
        present, jump = means[-1], _largest_jump(means)
        later = max(LATER * present, min(max(means), jump * present))
        seconds = scenes * self._seconds
        last = list(self._scenes)[-scenes:]
        return Forecast(*(_again(last, left, load, seconds) for load in (present, later)))


def _again(scenes: Sequence[Scene], left: Sequence[Job], load: float, seconds: float) -> Scene:
    """The requests of these scenes, repeated, each scene at this ``load``; what is ``left`` is open before."""
    began = now = scenes[-1].ended
    jobs = [job._replace(arrived=began) for job in left]
    for scene in itertools.cycle(scenes):
        if now >= began + seconds:
            break
        slower = scene.load / load
        jobs += [
            job._replace(arrived=now + slower * (job.arrived - scene.began))
            for job in scene.jobs
            if job.arrived > scene.began
        ]
        now += slower * (scene.ended - scene.began)
    return Scene(began, now, jobs)


def _means(loads: Sequence[float]) -> Iterator[float]:
    """The mean of each `PRESENT_SCENES` loads in a row."""
    values = list(loads)
    for at in range(len(values) - PRESENT_SCENES + 1):
        yield fmean(values[at : at + PRESENT_SCENES])


def _largest_jump(means: Sequence[float]) -> float:
    """The largest factor by which the load has risen or fallen from some scenes to the next ones."""
    pairs = zip(means, means[PRESENT_SCENES:], strict=False)
    return math.exp(max((abs(math.log(after / before)) for before, after in pairs), default=0.0))
