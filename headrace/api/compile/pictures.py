"""Images of conversations: found in a body, fetched and decoded beside the event loop, within limits of memory.

Decoded images are large. So a request gets them only while it places them in its prompt (`PictureReader.read`), and
all requests together hold at most `MOST_HELD_BYTES` of them; others wait for their turn.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple, TypeVar

from headrace.api.compile.bodies import Conversation, ImageUrl
from headrace.api.errors import ApiError, invalid
from headrace.api.fetching import FetchRules, MediaFetcher
from headrace.text.images import CHANNELS, BadPicture, Picture, PictureLimits, decode_picture, measure_picture

MOST_HELD_BYTES = 512 << 20
"""Bytes of decoded images that all requests hold at a time, and so the most of one request."""

DECODERS = 2
"""Threads that decode. Parts of it may hold the interpreter's lock; the limit of pixels bounds their time."""

IMAGE_ROLES = ("user", "tool")
DEFAULT_LIMITS = PictureLimits(20 << 20, 16_000_000)
DEFAULT_IMAGES = 64
_DATA = "data:"

ResultT = TypeVar("ResultT")


class SentImage(NamedTuple):
    """An image of a request: where its part is, which ``field`` of it has the image, and the image itself."""

    place: str
    field: str
    source: ImageUrl

    def refused(self, why: str) -> ApiError:
        """400: the image cannot be used."""
        path = f"{self.place}.{self.field}"
        return invalid(f"Invalid value for {path!r}: {why}.", path, "invalid_image")


def sent_images(body: Conversation) -> tuple[SentImage, ...]:
    """The images of a conversation, in their order.

    Raises:
        ApiError: a message has one whose role cannot have any.
    """
    found = []
    for number, message in enumerate(body.messages):
        for at, part in message.images():
            place, field = part.place or (f"messages[{number}].content[{at}]", "image_url.url")
            if message.role not in IMAGE_ROLES:
                why = f"only a message of the role {' or '.join(IMAGE_ROLES)} may have an image"
                raise invalid(f"Invalid value for '{place}.type': {why}.", f"{place}.type")
            found.append(SentImage(place, field, part.image_url))
    return tuple(found)


class _File(NamedTuple):
    """An encoded image, and its pixels when it is decoded."""

    data: bytes
    pixels: int


class PictureReader:
    """Reads the images of requests: ``most`` of one request, each within ``limits``. For one event loop."""

    def __init__(
        self,
        limits: PictureLimits = DEFAULT_LIMITS,
        most: int = DEFAULT_IMAGES,
        rules: FetchRules = FetchRules(),  # noqa: B008 (a constant)
    ) -> None:
        self._limits, self._most = limits, most
        self._fetcher = MediaFetcher(rules)
        self._threads = ThreadPoolExecutor(DECODERS, thread_name_prefix="headrace-picture")
        self._held = 0
        self._turn, self._left = asyncio.Lock(), asyncio.Condition()

    def check(self, sent: Sequence[SentImage]) -> None:
        """Raise `ApiError` 400 if a request has too many images."""
        if len(sent) > self._most:
            over = sent[self._most]
            why = (
                f"the prompt has {len(sent)} images; at most {self._most} are allowed (--limit-mm-per-prompt)"
            )
            raise invalid(f"Invalid value for '{over.place}': {why}.", over.place, "too_many_images")

    @asynccontextmanager
    async def read(self, sent: Sequence[SentImage]) -> AsyncIterator[list[Picture]]:
        """The decoded images; the memory that they may take is free again when the context is left.

        Raises:
            ApiError: an image cannot be fetched or decoded, or exceeds a limit.
        """
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._file(each)) for each in sent]
        files = []
        for task in tasks:
            file = task.result()
            if isinstance(file, ApiError):
                raise file
            files.append(file)
        pixels = sum([file.pixels for file in files])
        if CHANNELS * pixels > MOST_HELD_BYTES:
            most = MOST_HELD_BYTES // CHANNELS
            why = f"the images of the request have {pixels} pixels in all; at most {most} are allowed"
            raise sent[-1].refused(why)
        async with self._room(CHANNELS * pixels):
            pictures = []
            for image, file in zip(sent, files, strict=True):
                low = image.source.detail == "low"
                try:
                    work = partial(decode_picture, file.data, self._limits, low)
                    pictures.append(await self._beside(work))
                except BadPicture as error:
                    raise image.refused(str(error)) from None
            yield pictures

    async def _file(self, image: SentImage) -> _File | ApiError:
        """The file of an image, or why there is none: so that the first error in the order of images is reported."""
        url, most = image.source.url, self._limits.nbytes
        try:
            if url[: len(_DATA)].lower() == _DATA:
                data = await self._beside(partial(_decoded_url, url, most))
            else:
                data = await self._fetcher.fetch(url, most)
            return _File(data, await self._beside(partial(measure_picture, data, self._limits)))
        except BadPicture as error:
            return image.refused(str(error))

    async def _beside(self, work: Callable[[], ResultT]) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    @asynccontextmanager
    async def _room(self, nbytes: int) -> AsyncIterator[None]:
        """Room for decoded images, in the order in which requests ask for it."""
        async with self._turn, self._left:
            await self._left.wait_for(lambda: self._held + nbytes <= MOST_HELD_BYTES)
            self._held += nbytes
        try:
            yield
        finally:
            self._held -= nbytes
            await asyncio.shield(self._tell())

    async def _tell(self) -> None:
        async with self._left:
            self._left.notify_all()


def _decoded_url(url: str, most_bytes: int) -> bytes:
    """The contents of a data URL."""
    head, comma, text = url.partition(",")
    kind, *options = head[len(_DATA) :].lower().split(";")
    if not comma or "base64" not in options:
        raise BadPicture("a data URL must be data:image/...;base64, and then the file in base64")
    if kind and not kind.startswith("image/"):
        raise BadPicture(f"the data URL has the type {kind[:80]!r}, which is no image")
    if len(text) > most_bytes * 4 // 3 + 4:
        raise BadPicture(f"the file is larger than {most_bytes} bytes")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise BadPicture("the data URL is not valid base64") from None
