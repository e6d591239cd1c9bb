"""Images of an engine in a process of its own: its process has the encoder, the server's what it has encoded.

```
 server: PIXELS ── PREPARE, ENCODE ──> engine's process: image processor, then the encoder between its steps
                <── tokens, rows ──                       (`image_encoding`)
         cache of rows ── SUBMIT: request with rows ──> shared by its requests with equal images
```
Only the server keeps rows. So cached images need no question, and another process, started in place of a lost one, gets
the rows of all open requests with them.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from headrace.compute.images.cache import EncodedImage, ImageKeys
from headrace.compute.images.families import UnusableImage
from headrace.compute.images.rows_bytes import SharedRows, to_bytes
from headrace.core.ports import LOST_PREFIX
from headrace.core.recovery import MOST_LOSSES_OF_REQUEST
from headrace.core.request import Request
from headrace.service.engine_process import EngineProcess, ProcessLost
from headrace.service.images import ImagesLost
from headrace.service.packing import Plain
from headrace.service.thread import ENGINE_FAILED
from headrace.text.images import CHANNELS
from headrace.wiring.image_encoding import Encode, LocalEncoding, Pixels

PIXELS, PREPARE, ENCODE = "image_pixels", "prepare_image", "encode_image"
DROP, DECODING = "drop_image", "decoding_images"

IMAGE_QUESTIONS = frozenset({PIXELS, PREPARE, ENCODE, DROP, DECODING})

PIECE = 1 << 18
"""Bytes of pixels in a message. Each is copied with the lock of an interpreter; others run between two of them."""


class RemoteEncoding:
    """The `Encoding` of an engine process. Its images are bytes: see `rows_bytes`."""

    def __init__(self, process: EngineProcess, keys: ImageKeys) -> None:
        self.keys = keys
        self.seconds = 0.0
        self._process = process
        self._numbers = itertools.count()
        self._decoding = 0

    def background(self, change: int) -> None:
        """Report the number of images that are being decoded, also to a process that is started later."""
        self._decoding += change
        self._process.remember(DECODING, DECODING, self._decoding)
        self._process.post(DECODING, self._decoding)

    @asynccontextmanager
    async def prepared(self, width: int, height: int, pixels: Pixels, several: bool) -> AsyncIterator[Encode]:
        """See `Encoding.prepared`."""
        number = next(self._numbers)
        asked = _AskedImage(self._process, number, pixels, (width, height, several))
        try:
            await asked.prepare()
            yield partial(self._encoded, asked)
        finally:
            self._process.post(DROP, number)

    async def _encoded(self, asked: _AskedImage) -> EncodedImage:
        seconds, tokens, features, joint = await asked.encode()
        self.seconds += seconds
        return EncodedImage(tokens, features, joint)

    def close(self) -> None:
        """The other process ends its threads itself."""


class _AskedImage:
    """An image that an engine process prepares and encodes; again in the next process if one is lost meanwhile.

    It may be the cause: after as many losses as a request may meet, it fails.
    """

    def __init__(self, process: EngineProcess, number: int, pixels: Pixels, given: tuple[Plain, ...]) -> None:
        self._process = process
        self._number = number
        self._pixels = pixels
        self._given = given
        self._losses = 0

    async def prepare(self) -> None:
        """Let the process prepare it."""
        await self._send()
        while await self._answer(PREPARE, *self._given) is None:
            await self._send()

    async def _send(self) -> None:
        """Send the pixels. If a process gets a part of them only, it does not know the image."""
        with memoryview(self._pixels) as pixels:
            for at in range(0, len(pixels), PIECE):
                self._process.post(PIXELS, self._number, pixels[at : at + PIECE])
                await asyncio.sleep(0)

    async def encode(self) -> Plain:
        """Let the process encode it; returns seconds, tokens, features and joint offsets."""
        while (answer := await self._answer(ENCODE)) is None:
            await self.prepare()
        return answer

    async def _answer(self, name: str, *arguments: Plain) -> Plain:
        """The answer of the process; None if it does not know the image."""
        try:
            error, answer = await asyncio.wrap_future(self._process.post(name, self._number, *arguments))
        except ProcessLost as lost:
            self._losses += 1
            if self._losses > MOST_LOSSES_OF_REQUEST:
                raise ImagesLost(f"{LOST_PREFIX}{lost}") from None
            return None
        except RuntimeError:
            if self._process.progress().failure:
                raise ImagesLost(ENGINE_FAILED) from None
            raise
        if error is not None:
            raise UnusableImage(error)
        return answer


class ImageQuestions:
    """In the engine process: answers `RemoteEncoding`, on an event loop of its own, for one thread that asks.

    An answer to `PREPARE` and `ENCODE` is an error or None, and the value. None as the value says that the image is not
    here, or only a part of its pixels.
    """

    def __init__(self, encoding: LocalEncoding) -> None:
        self._encoding = encoding
        self._pixels: dict[int, bytearray] = {}
        self._prepared: dict[int, Encode] = {}
        self._working: dict[int, Future[Plain]] = {}
        self._decoding = 0
        self._reported_seconds = 0.0
        self._ended = asyncio.Event()
        started: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(started)), name="headrace-image-questions", daemon=True
        )
        self._thread.start()
        self._loop = started.result()

    @property
    def open(self) -> int:
        """Number of images that are received or prepared, or being worked on."""
        return len(self._pixels) + len(self._prepared) + len(self._working)

    async def _serve(self, started: Future[asyncio.AbstractEventLoop]) -> None:
        started.set_result(asyncio.get_running_loop())
        await self._ended.wait()

    def close(self) -> None:
        """End the threads, and the image that is being encoded."""
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()
        self._encoding.close()

    def answer(self, name: str, number: int, *given: Any) -> Future[Plain] | None:
        """The answer to a question, which may come later."""
        if name == PREPARE:
            return self._work(number, self._prepare(number, self._pixels.pop(number, b""), *given))
        if name == ENCODE:
            return self._work(number, self._encode(number))
        if name == PIXELS:
            self._pixels.setdefault(number, bytearray()).extend(*given)
        elif name == DROP:
            self._drop(number)
        else:
            change, self._decoding = number - self._decoding, number
            self._encoding.background(change)
        return None

    def _work(self, number: int, work: Coroutine[Any, Any, Plain]) -> Future[Plain]:
        future = self._working[number] = asyncio.run_coroutine_threadsafe(work, self._loop)
        future.add_done_callback(lambda _: self._working.pop(number, None))
        return future

    def _drop(self, number: int) -> None:
        self._pixels.pop(number, None)
        if (future := self._working.get(number)) is not None:
            future.cancel()
        self._loop.call_soon_threadsafe(self._prepared.pop, number, None)

    async def _prepare(
        self, number: int, pixels: Pixels, width: int, height: int, several: bool
    ) -> tuple[str | None, Plain]:
        if len(pixels) < CHANNELS * width * height:
            return None, None
        try:
            self._prepared[number] = await self._encoding.prepare(width, height, pixels, several)
        except UnusableImage as error:
            return str(error), None
        return None, True

    async def _encode(self, number: int) -> tuple[str | None, Plain]:
        encode = self._prepared.pop(number, None)
        if encode is None:
            return None, None
        try:
            image = await encode()
        except UnusableImage as error:
            return str(error), None
        seconds, self._reported_seconds = self._seconds(), self._encoding.seconds
        return None, (seconds, image.tokens, to_bytes(image.features), image.joint)

    def _seconds(self) -> float:
        """Seconds of encoding since the last image, with those of images that were dropped."""
        return self._encoding.seconds - self._reported_seconds


def with_rows(rows: SharedRows, request: Request) -> Request:
    """In the engine process: a request whose images have ``rows`` in place of bytes."""
    if not request.images:
        return request
    images = [each._replace(features=rows.of(each.digest, each.features)) for each in request.images]
    return replace(request, images=tuple(images))
