"""What the tuner has seen: the requests of the present scene, as jobs to rehearse, and what was measured in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple

from headrace.core.events import Admitted, Arrived, Chunked, Emitted, Event, Finished
from headrace.tuning.experiments.measures import WindowMeter
from headrace.tuning.tuner.rehearsal import Job, Scene


class _Live:
    """A request that is open, or ended within the scene.

    ``known`` positions of the prompt are cached or computed; ``done`` were when the scene began, and ``before`` tokens
    had been generated. ``began`` is when it arrived, or when the scene began if that was later.
    """

    __slots__ = ("arrived", "before", "began", "done", "ended", "known", "prompt", "tokens")

    def __init__(self, arrived: float, prompt: int) -> None:
        self.arrived, self.began, self.prompt = arrived, arrived, prompt
        self.known = self.done = self.tokens = self.before = 0
        self.ended = False


class Watched(NamedTuple):
    """A scene, the metrics that were measured in it by name, and what is left of its requests at its end."""

    scene: Scene
    measured: Mapping[str, float]
    left: Sequence[Job]


class History:
    """A fold over events. It follows all open requests; `open` begins a scene, `close` ends it."""

    def __init__(self) -> None:
        self._meter = WindowMeter()
        self._live: dict[str, _Live] = {}
        self._scene: list[_Live] = []
        self._began: float | None = None
        self._folds: Mapping[type, Callable[[Any, float], None]] = {
            Arrived: self._arrived,
            Admitted: self._admitted,
            Chunked: self._chunked,
            Emitted: self._emitted,
            Finished: self._finished,
        }

    def fold(self, event: Event, now: float) -> None:
        """Count one event."""
        self._meter.fold(event, now)
        fold = self._folds.get(type(event))
        if fold is not None:
            fold(event, now)

    def open(self, now: float) -> None:
        """Begin a scene with the requests that are open; one that was open already is dropped."""
        self._meter.open(now)
        self._began = now
        self._scene = list(self._live.values())
        for each in self._scene:
            each.began, each.done, each.before = now, each.known, each.tokens

    def close(self, now: float) -> Watched | None:
        """End the scene; None if no request of it has generated a token."""
        began, self._began = self._began, None
        measured, _ = self._meter.close(now)
        if began is None:
            return None
        ended = [each for each in self._scene if each.ended and each.tokens > each.before]
        if not ended:
            return None
        # how long the open requests will become is not known: as long as those that ended
        lengths = cycle([each.tokens for each in ended])
        jobs, left = [], []
        for each in self._scene:
            if each.ended and each.tokens > each.before:
                jobs.append(_job(each, each.tokens))
            elif not each.ended:
                length = max(each.tokens + 1, next(lengths))
                jobs.append(_job(each, length))
                left.append(_left(each, length, now))
        return Watched(Scene(began, now, jobs), measured, left)

    def _arrived(self, event: Arrived, now: float) -> None:
        live = self._live[event.request_id] = _Live(now, event.prompt_tokens)
        if self._began is not None:
            self._scene.append(live)

    def _admitted(self, event: Admitted, now: float) -> None:
        live = self._live.get(event.request_id)
        if live is not None and not live.tokens:
            live.known = event.cached_tokens
            # Cached before the scene or not: it is not computed.
            live.done = max(live.done, event.cached_tokens)

    def _chunked(self, event: Chunked, now: float) -> None:
        live = self._live.get(event.request_id)
        if live is not None and not live.tokens:
            live.known = event.start + event.length

    def _emitted(self, event: Emitted, now: float) -> None:
        live = self._live.get(event.request_id)
        if live is not None:
            live.tokens += len(event.tokens)

    def _finished(self, event: Finished, now: float) -> None:
        live = self._live.pop(event.request_id, None)
        if live is not None:
            live.ended = True


def _job(live: _Live, length: int) -> Job:
    """What is left of a request at the beginning of the scene, if it generates ``length`` tokens in all."""
    if live.before:
        return Job(live.began, 0, live.prompt + live.before, length - live.before)
    return Job(
        live.began, max(1, live.prompt - live.done), live.done, length, waited=live.began - live.arrived
    )


def _left(live: _Live, length: int, now: float) -> Job:
    """What is left of it ``now``."""
    if live.tokens:
        return Job(now, 0, live.prompt + live.tokens, length - live.tokens)
    return Job(now, max(1, live.prompt - live.known), live.known, length, waited=now - live.arrived)
