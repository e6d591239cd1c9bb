"""Images of an engine in a process of its own: its process has the encoder, the server's the cache.

```
 server: PIXELS ── PREPARE, ENCODE ──> engine's process: image processor, then the encoder between its steps
                <── tokens, size ──                       (`image_encoding`)
         place in `rows_file` ── STORE ──> rows are written there
         cache of places ── SUBMIT: request with places ──> rows are read, and shared by requests with equal images
```
Only the server's places keep rows. So cached images need no question, and another process, started in place of a lost
one, finds the rows of all open requests.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from headrace.compute.images.cache import EncodedImage, ImageKeys
from headrace.compute.images.families import UnusableImage
from headrace.compute.images.rows_file import PlacedRows, RowsFile, SharedRows, stored_bytes, write_rows
from headrace.compute.images.slots import ImageRows
from headrace.core.images import ImageSpan
from headrace.core.ports import LOST_PREFIX
from headrace.core.recovery import MOST_LOSSES_OF_REQUEST
from headrace.core.request import Request
from headrace.service.engine_process import EngineProcess, ProcessLost
from headrace.service.images import ImagesLost
from headrace.service.packing import Plain
from headrace.service.thread import ENGINE_FAILED
from headrace.text.images import CHANNELS
from headrace.wiring.image_encoding import Encode, LocalEncoding, Pixels

PIXELS, PREPARE, ENCODE, STORE = "image_pixels", "prepare_image", "encode_image", "store_image"
DROP, DECODING = "drop_image", "decoding_images"

IMAGE_QUESTIONS = frozenset({PIXELS, PREPARE, ENCODE, STORE, DROP, DECODING})

PIECE = 1 << 18
"""Bytes of pixels in a message. Each is copied with the lock of an interpreter; others run between two of them."""


class RemoteEncoding:
    """The `Encoding` of an engine process. The rows of its images are in ``file``, which the process has too."""

    def __init__(self, process: EngineProcess, keys: ImageKeys, file: RowsFile) -> None:
        self.keys = keys
        self.seconds = 0.0
        self._process = process
        self._file = file
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
        asked = _AskedImage(self._process, self._file, number, pixels, (width, height, several))
        try:
            await asked.prepare()
            yield partial(self._encoded, asked)
        finally:
            self._process.post(DROP, number)

    async def _encoded(self, asked: _AskedImage) -> EncodedImage:
        image, seconds = await asked.encode()
        self.seconds += seconds
        return image

    def close(self) -> None:
        """The other process ends its threads itself."""


class _AskedImage:
    """An image that an engine process prepares and encodes; again in the next process if one is lost meanwhile.

    It may be the cause: after as many losses as a request may meet, it fails.
    """

    def __init__(
        self, process: EngineProcess, file: RowsFile, number: int, pixels: Pixels, given: tuple[Plain, ...]
    ) -> None:
        self._process = process
        self._file = file
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

    async def encode(self) -> tuple[EncodedImage, float]:
        """Let the process encode it, and write its rows to a place in the file; returns it, and the seconds of that."""
        while True:
            if (answer := await self._answer(ENCODE)) is not None:
                tokens, nbytes, joint = answer
                rows = self._file.place(nbytes)
                if (seconds := await self._answer(STORE, rows.at, held=rows)) is not None:
                    return EncodedImage(tokens, rows, joint), seconds
            await self.prepare()

    async def _answer(self, name: str, *arguments: Plain, held: PlacedRows | None = None) -> Plain:
        """The answer of the process; None if it does not know the image.

        It may write to the place ``held`` until it answers or is lost, even if the answer is no longer awaited.
        """
        posted = self._process.post(name, self._number, *arguments)
        waited: asyncio.Future[Plain] = asyncio.wrap_future(posted)
        if held is not None:
            posted.add_done_callback(lambda _: held)
            waited = asyncio.shield(waited)
        try:
            error, answer = await waited
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

    An answer to `PREPARE`, `ENCODE` and `STORE` is an error or None, and the value. None as the value says that the
    image is not here, or only a part of its pixels. ``file`` is the descriptor of the server's file of rows.
    """

    def __init__(self, encoding: LocalEncoding, file: int) -> None:
        self._encoding = encoding
        self._file = file
        self._pixels: dict[int, bytearray] = {}
        self._prepared: dict[int, Encode] = {}
        self._encoded: dict[int, ImageRows] = {}
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
        """Number of images that are received, prepared or encoded, or being worked on."""
        return len(self._pixels) + len(self._prepared) + len(self._encoded) + len(self._working)

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
        if name == STORE:
            return self._run(self._store(number, *given))
        if name == PIXELS:
            self._pixels.setdefault(number, bytearray()).extend(*given)
        elif name == DROP:
            self._drop(number)
        else:
            change, self._decoding = number - self._decoding, number
            self._encoding.background(change)
        return None

    def _work(self, number: int, work: Coroutine[Any, Any, Plain]) -> Future[Plain]:
        future = self._working[number] = self._run(work)
        future.add_done_callback(lambda _: self._working.pop(number, None))
        return future

    def _run(self, work: Coroutine[Any, Any, Plain]) -> Future[Plain]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _drop(self, number: int) -> None:
        self._pixels.pop(number, None)
        if (future := self._working.get(number)) is not None:
            future.cancel()
        for each in (self._prepared, self._encoded):
            self._loop.call_soon_threadsafe(each.pop, number, None)

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
        self._encoded[number] = image.features
        return None, (image.tokens, stored_bytes(image.features), image.joint)

    async def _store(self, number: int, at: int) -> tuple[str | None, Plain]:
        """Not cancelled by `DROP`: the server uses the place for nothing else before there is an answer."""
        features = self._encoded.pop(number, None)
        if features is None:
            return None, None
        await self._encoding.in_slices(partial(write_rows, self._file, at, features))
        seconds, self._reported_seconds = self._seconds(), self._encoding.seconds
        return None, seconds

    def _seconds(self) -> float:
        """Seconds of encoding since the last image, with those of images that were dropped."""
        return self._encoding.seconds - self._reported_seconds


def with_places(request: Request) -> Request:
    """In the server: a request whose images say where their rows are, as it crosses."""
    return _with_features(request, lambda each: (each.features.at, each.features.nbytes))


def with_rows(rows: SharedRows, request: Request) -> Request:
    """In the engine process: a request whose images have ``rows`` in place of places."""
    return _with_features(request, lambda each: rows.of(each.digest, *each.features))


def _with_features(request: Request, features: Callable[[ImageSpan], Any]) -> Request:
    if not request.images:
        return request
    images = [each._replace(features=features(each)) for each in request.images]
    return replace(request, images=tuple(images))
