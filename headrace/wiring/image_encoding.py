"""Encodes images where their encoder is: one after the other, in slices between the engine's steps.

```
 prepare: image processor, on a thread beside the steps ──> encode: a slice, a step, a slice, a step ...
```
`LocalEncoding` has the encoder. `remote_images` asks one in another process.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from mmap import mmap
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from headrace.compute.device import lower_priority
from headrace.compute.images.cache import EncodedImage, ImageKeys
from headrace.compute.images.slices import SlicedCall, Stopped
from headrace.core.engine import Engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from headrace.compute.images.encoder import ImageEncoder

ResultT = TypeVar("ResultT")

SliceTime: TypeAlias = Callable[[Callable[[float], float]], Awaitable[None]]
"""Calls a function between two steps with the seconds that it may take; it returns those that it has taken."""

Background: TypeAlias = Callable[[int], None]
"""Reports that so many works more (less, if negative) go on beside the steps."""

Pixels: TypeAlias = bytes | bytearray | mmap

Encode: TypeAlias = Callable[[], Awaitable[EncodedImage]]
"""Encodes an image that has been prepared."""

LEAST_SECONDS = 0.001
"""Time of a slice where steps have no time left: images do not starve."""
IDLE_SECONDS = 0.02
"""Time of a slice while no request runs: one that arrives waits for its end."""


LATE_MEMORY = 0.1
"""Weight of the last slice in the mean time by which slices end late: they end between two operations."""


class Encoding(Protocol):
    """Computes images: `prepared` ones are encoded, one at a time. ``seconds`` sums the time of encoding.

    ``background`` is called when work beside the steps begins and ends.
    """

    keys: ImageKeys
    seconds: float

    def background(self, change: int) -> None: ...

    def prepared(
        self, width: int, height: int, pixels: Pixels, several: bool
    ) -> AbstractAsyncContextManager[Encode]:
        """What encodes an image, alone in its prompt or one of ``several``; it holds memory until the context is left.

        Raises:
            UnusableImage: the image is refused; so does encoding it.
            ImagesLost: see there; so does encoding it.
        """
        ...

    def close(self) -> None: ...


async def at_once(work: Callable[[float], float]) -> None:
    """A `SliceTime` without limit, where no steps run on the same cores."""
    await asyncio.to_thread(work, math.inf)


def unreported(change: int) -> None:
    """A `Background` where nothing makes room for it."""


@contextmanager
def beside(background: Background) -> Iterator[None]:
    """What it contains takes cores from the steps."""
    background(1)
    try:
        yield
    finally:
        background(-1)


class LocalEncoding:
    """The `Encoding` of an encoder in this process, to whose calls ``slice_time`` gives time."""

    def __init__(
        self, encoder: ImageEncoder, slice_time: SliceTime = at_once, background: Background = unreported
    ) -> None:
        self.keys = encoder.keys
        self.seconds = 0.0
        self.background = background
        self._encoder = encoder
        self._slice_time = slice_time
        self._prepares = ThreadPoolExecutor(1, "headrace-image-inputs", initializer=lower_priority)
        self._encodes = ThreadPoolExecutor(1, "headrace-images")
        self._turn = asyncio.Lock()
        self._call: SlicedCall[Any] | None = None  # the last one
        self._late_seconds = 0.0  # the mean of slices

    @asynccontextmanager
    async def prepared(self, width: int, height: int, pixels: Pixels, several: bool) -> AsyncIterator[Encode]:
        """See `Encoding.prepared`."""
        yield await self.prepare(width, height, pixels, several)

    async def prepare(self, width: int, height: int, pixels: Pixels, several: bool) -> Encode:
        """What encodes an image, once it has been prepared."""
        inputs = partial(self._encoder.inputs, width, height, pixels, several)
        with beside(self.background):
            found = await asyncio.get_running_loop().run_in_executor(self._prepares, inputs)
        return partial(self.in_slices, partial(self._encoder.encoded, found))

    async def in_slices(self, function: Callable[[], ResultT]) -> ResultT:
        """What a function of torch returns, which encodes an image or is a part of that.

        The next one waits: a slice of it would not end before the thread has left this one.
        """
        async with self._turn:
            self._call = call = SlicedCall(self._encodes, function)
            try:
                while not call.done:
                    await self._slice_time(partial(self._advance, call))
            finally:
                call.stop()
        try:
            return call.result()
        except Stopped:
            raise RuntimeError("the server ends") from None

    def _advance(self, call: SlicedCall[Any], room: float) -> float:
        began, asked = time.perf_counter(), max(0.0, room - self._late_seconds)
        call.advance(asked)
        seconds = time.perf_counter() - began
        self.seconds += seconds
        if not call.done:
            self._late_seconds += LATE_MEMORY * (seconds - asked - self._late_seconds)
        return seconds

    def close(self) -> None:
        """End the threads, and the image that is being encoded."""
        if self._call is not None:
            self._call.stop()
        for each in (self._prepares, self._encodes):
            each.shutdown(cancel_futures=True)


def slices_beside(engine: Engine, kind: str, between_steps: Callable[..., Awaitable[Any]]) -> SliceTime:
    """The time between the steps of an engine on a CPU; steps on another ``kind`` of device, or that overlap, compute
    beside anyway. ``between_steps`` is `Service.between_steps`, or as that.
    """
    if kind != "cpu" or engine.overlap:
        return at_once

    async def between(work: Callable[[float], float]) -> None:
        def within(room: float) -> float:
            return work(IDLE_SECONDS if room == math.inf else max(room, LEAST_SECONDS))

        await between_steps(partial(engine.beside, within), last=True)  # it gives way to prompts that wait

    return between


def background_beside(engine: Engine, kind: str, call: Callable[[Callable[[], None]], Any]) -> Background:
    """Lets steps on a CPU be shorter while other work takes cores from them; ``call`` is `EngineThread.call`."""
    if kind != "cpu":
        return unreported

    def report(change: int) -> None:
        call(partial(engine.background, change))

    return report
