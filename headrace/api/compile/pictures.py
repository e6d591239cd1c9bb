"""Images of conversations: found in a body, and fetched beside the event loop; decoded in processes, within limits of
memory.

Decoded images are large. So an image is decoded only when its pixels are needed (`ImageFile.decoded`), and all requests
together hold at most `MOST_HELD_BYTES` of pixels; others wait for their turn.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from hashlib import sha256
from typing import NamedTuple, TypeVar

from headrace.api.compile.bodies import Conversation, ImageUrl
from headrace.api.errors import ApiError, invalid
from headrace.api.fetching import FetchRules, MediaFetcher
from headrace.text.images import CHANNELS, PROCESSES, BadPicture, Picture, PictureLimits

MOST_HELD_BYTES = 512 << 20
"""Bytes of decoded images that all requests hold at a time."""

READERS = 2
"""Threads that decode base64 and compute digests."""
DECODERS = 2
"""Threads that wait for a process that decodes."""

IMAGE_ROLES = ("user", "tool")
DEFAULT_LIMITS = PictureLimits(20 << 20, 16_000_000)
DEFAULT_IMAGES = 64
_DATA = "data:"
_MOST_HEAD = 1024
"""Characters of a data URL before its contents."""
_PIECE = 1 << 18  # a multiple of 4; a whole file at once would hold the interpreter's lock

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


class ImageFile:
    """An image of a request: a `service.images.SentPicture`."""

    def __init__(self, reader: PictureReader, sent: SentImage, data: bytes, name: bytes) -> None:
        self.name, self.sent, self.data = name, sent, data
        self._reader = reader

    @property
    def low(self) -> bool:
        """Whether low detail is asked for."""
        return self.sent.source.detail == "low"

    def decoded(self) -> AbstractAsyncContextManager[Picture]:
        """See `SentPicture.decoded`.

        Raises:
            ApiError: it cannot be decoded, or exceeds a limit.
        """
        return self._reader.decoded(self.sent, self.data)


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
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="headrace-picture")
        self._decoders = ThreadPoolExecutor(DECODERS, thread_name_prefix="headrace-decode")
        self._room = Room(MOST_HELD_BYTES)

    def check(self, sent: Sequence[SentImage]) -> None:
        """Raise `ApiError` 400 if a request has too many images."""
        if len(sent) > self._most:
            over = sent[self._most]
            why = (
                f"the prompt has {len(sent)} images; at most {self._most} are allowed (--limit-mm-per-prompt)"
            )
            raise invalid(f"Invalid value for '{over.place}': {why}.", over.place, "too_many_images")

    async def read(self, sent: Sequence[SentImage]) -> list[ImageFile]:
        """The files of images.

        Raises:
            ApiError: one cannot be fetched, or is larger than the limit.
        """
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._file(each)) for each in sent]
        files = []
        for task in tasks:
            file = task.result()
            if isinstance(file, ApiError):
                raise file
            files.append(file)
        return files

    async def _file(self, sent: SentImage) -> ImageFile | ApiError:
        """The file of an image, or why there is none: so that the first error in the order of images is reported."""
        url, most, low = sent.source.url, self._limits.nbytes, sent.source.detail == "low"
        try:
            if url[: len(_DATA)].lower() == _DATA:
                data, name = await self._beside(partial(_named_url, url, most, low))
            else:
                data = await self._fetcher.fetch(url, most)
                name = await self._beside(partial(_name, data, low))
            return ImageFile(self, sent, data, name)
        except BadPicture as error:
            return sent.refused(str(error))

    async def _beside(self, work: Callable[[], ResultT]) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    @asynccontextmanager
    async def decoded(self, sent: SentImage, data: bytes) -> AsyncIterator[Picture]:
        """An image; the memory that it takes is free again when the context is left.

        Raises:
            ApiError: as `ImageFile.decoded`.
        """
        async with self._room.taken(min(CHANNELS * self._limits.pixels, MOST_HELD_BYTES)) as share:
            low, loop = sent.source.detail == "low", asyncio.get_running_loop()
            try:
                work = partial(PROCESSES.decode, data, self._limits, low)
                picture = await loop.run_in_executor(self._decoders, work)
            except BadPicture as error:
                raise sent.refused(str(error)) from None
            await share.shrink(len(picture.pixels))
            yield picture


class Room:
    """Memory of ``most`` bytes, which is given in the order in which it is asked for."""

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0
        self._turn, self._left = asyncio.Lock(), asyncio.Condition()

    @asynccontextmanager
    async def taken(self, nbytes: int) -> AsyncIterator[Share]:
        """Some bytes, until the context is left."""
        async with self._turn, self._left:
            await self._left.wait_for(lambda: self.held + nbytes <= self.most)
            self.held += nbytes
        share = Share(self, nbytes)
        try:
            yield share
        finally:
            await asyncio.shield(share.shrink(0))

    async def give_back(self, nbytes: int) -> None:
        """Some of the bytes are free again."""
        self.held -= nbytes
        async with self._left:
            self._left.notify_all()


class Share:
    """What a request has taken of a `Room`."""

    def __init__(self, room: Room, nbytes: int) -> None:
        self._room, self._nbytes = room, nbytes

    async def shrink(self, nbytes: int) -> None:
        """Give back all but so many bytes."""
        left, self._nbytes = self._nbytes - nbytes, nbytes
        await self._room.give_back(left)


def _name(data: bytes, low: bool) -> bytes:
    """What stands for a file, and for how it is decoded."""
    return sha256(data).digest() + bytes([low])


def _named_url(url: str, most_bytes: int, low: bool) -> tuple[bytes, bytes]:
    """The contents of a data URL, and their name."""
    data = _decoded_url(url, most_bytes)
    return data, _name(data, low)


def _decoded_url(url: str, most_bytes: int) -> bytes:
    """The contents of a data URL."""
    head, comma, _ = url[:_MOST_HEAD].partition(",")
    start = len(head) + 1
    kind, *options = head[len(_DATA) :].lower().split(";")
    if not comma or "base64" not in options:
        raise BadPicture("a data URL must be data:image/...;base64, and then the file in base64")
    if kind and not kind.startswith("image/"):
        raise BadPicture(f"the data URL has the type {kind[:80]!r}, which is no image")
    if len(url) - start > most_bytes * 4 // 3 + 4:
        raise BadPicture(f"the file is larger than {most_bytes} bytes")
    try:
        return _from_base64(url, start)
    except (binascii.Error, ValueError):
        raise BadPicture("the data URL is not valid base64") from None


def _from_base64(text: str, start: int) -> bytes:
    """The bytes of a base64 text from ``start`` on, in pieces: others run between them."""
    data = bytearray()
    for at in range(start, len(text), _PIECE):
        piece = text[at : at + _PIECE]
        if "=" in piece[:-2] or (piece.endswith("=") and at + _PIECE < len(text)):
            raise ValueError("padding within the text")
        data += base64.b64decode(piece, validate=True)
    return bytes(data)
