"""What is to come: the requests of the last scenes once more, at the present load and at higher ones.

A single scene is too short to show a queue that grows slowly, so those of some minutes are repeated. The load may rise
before the tuner looks again: a little at any time, and as fast and as high as it has done within the last hour. Near
saturation one rehearsal says little, because a small cause leaves a long queue or none; several loads say more.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from statistics import fmean

from headrace.observe.tuner.rehearsal import Job, Scene

SCENES = 5
"""Scenes whose requests are repeated, and the length of a forecast in scenes."""

PRESENT_SCENES = 2
"""Scenes whose mean is the present load."""

MEMORY_SECONDS = 3600.0
"""How long loads are remembered."""

HIGHEST = 1.3
"""How many times the present load may come in any case."""

LOADS = 4
"""Loads of a forecast, from the present to the highest one in equal factors."""


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

    def forecast(self, left: Sequence[Job], scenes: int) -> list[Scene]:
        """The next so many scenes at each load, with what is ``left`` of open requests; `ready` must be true."""
        means = list(_means(self._loads))
        present, jump = means[-1], _largest_jump(means)
        rise = max(HIGHEST, min(max(means) / present, jump)) ** (1 / (LOADS - 1))
        return [self._again(left, present * rise**step, scenes * self._seconds) for step in range(LOADS)]

    def _again(self, left: Sequence[Job], load: float, seconds: float) -> Scene:
        """The requests of the last scenes, repeated, each scene at this ``load``; what is ``left`` is open before."""
        began = now = self._scenes[-1].ended
        jobs = [job._replace(arrived=began) for job in left]
        for scene in itertools.cycle(self._scenes):
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
