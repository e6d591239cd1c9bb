"""Images of front ends: fetched and read there, decoded and encoded at the owner, which has the encoder and its cache.

```
 front end: URL or base64 → file ── PLACE: tokens, names of files ──> owner
                                <── WANT ── FILE ──> what its cache does not have is decoded and encoded
                                <── PLACED: tokens, positions, digests ──
```
What an image was encoded to stays at the owner until the engine has its request, or the front end drops it. A request
names it by its number.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

from headrace.api.compile.bodies import ImageUrl
from headrace.api.compile.model import ServedModel
from headrace.api.compile.pictures import ImageFile, PictureReader, SentImage
from headrace.api.errors import ApiError, failed, invalid, shutting_down
from headrace.api.fronts.messages import ToFront, ToOwner
from headrace.core.images import ImageSpan
from headrace.core.request import Request
from headrace.service.images import ImagesLost, Placed, SentPicture
from headrace.service.packing import Plain, packed, unpacked
from headrace.text.images import BadPicture, Picture

logger = logging.getLogger(__name__)

Send = Callable[[Plain], None]


class SentFile(NamedTuple):
    """An image of a front end: the name of its file, where a request has it, and whether it asks for low detail."""

    name: bytes
    place: str
    field: str
    low: bool


class NotPlaced(NamedTuple):
    """Why images were not placed: a `BadPicture`, an `ApiError` 400 (with a ``code``), `ImagesLost` (``lost``), or a
    failure (no message).
    """

    message: str = ""
    which: int | None = None
    param: str | None = None
    code: str | None = None
    lost: bool = False

    def error(self) -> Exception:
        """As an exception."""
        if not self.message:
            return failed()
        if self.lost:
            return ImagesLost(self.message)
        if self.code is None:
            return BadPicture(self.message, self.which)
        return invalid(self.message, self.param, self.code)


class _Kept:
    """The images of a prompt at the owner. They are dropped there after their request has been opened, or when nothing
    in the front end refers to them any more.
    """

    __slots__ = ("_drop", "number")

    def __init__(self, number: int, drop: Callable[[int], None]) -> None:
        self.number = number
        self._drop: Callable[[int], None] | None = drop

    def drop(self) -> None:
        """Drop them now; again, it does nothing."""
        drop, self._drop = self._drop, None
        if drop is not None:
            drop(self.number)

    __del__ = drop


class RemoteImages:
    """The `ImageText` of a front end. ``part`` is the owner's, ``send`` sends to it; `take` gets what it answers."""

    def __init__(self, part: Mapping[str, Any], send: Send) -> None:
        self._part = part
        self._send = send
        self._last = 0
        self._waiting: dict[int, tuple[asyncio.Future[Placed], Sequence[ImageFile]]] = {}

    def part(self) -> Mapping[str, Any]:
        """See `ImageText.part`."""
        return self._part

    async def place(self, tokens: Sequence[int], pictures: Sequence[SentPicture], scope: str) -> Placed:
        """See `ImageText.place`."""
        self._last += 1
        number, loop = self._last, asyncio.get_running_loop()
        files = [each for each in pictures if isinstance(each, ImageFile)]
        sent = [SentFile(each.name, each.sent.place, each.sent.field, each.low) for each in files]
        placed: asyncio.Future[Placed] = loop.create_future()
        self._waiting[number] = placed, files
        self._send((ToOwner.PLACE, number, list(tokens), [tuple(each) for each in sent], scope))
        try:
            found = await placed
        except BaseException:
            self._send((ToOwner.DROP, number))
            raise
        finally:
            del self._waiting[number]
        kept = _Kept(number, self._drop_on(loop))
        return Placed(found.tokens, tuple(each._replace(features=kept) for each in found.images))

    def _drop_on(self, loop: asyncio.AbstractEventLoop) -> Callable[[int], None]:
        def drop(number: int) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._send, (ToOwner.DROP, number))

        return drop

    def take(self, message: Plain) -> None:
        """Give an answer of the owner to the prompt that waits for it."""
        placed, files = self._waiting.get(message[1], (None, ()))
        match message:
            case (ToFront.WANT, number, index) if placed is not None:
                self._send((ToOwner.FILE, number, index, files[index].data))
            case (ToFront.PLACED, _, tokens, spans) if placed is not None and not placed.done():
                placed.set_result(Placed(tokens, tuple(unpacked(ImageSpan, each) for each in spans)))
            case (ToFront.NOT_PLACED, _, why) if placed is not None and not placed.done():
                placed.set_exception(NotPlaced(*why).error())

    def close(self) -> None:
        """Nothing is placed any more: the owner has ended."""
        for placed, _ in tuple(self._waiting.values()):
            if not placed.done():
                placed.set_exception(shutting_down())


def numbered(images: Sequence[ImageSpan]) -> tuple[ImageSpan, ...]:
    """The images of a request as the owner gets them: by the number of their prompt, and by their own in it."""
    return tuple(
        each._replace(features=(each.features.number, index) if isinstance(each.features, _Kept) else None)
        for index, each in enumerate(images)
    )


def dropped(requests: Iterable[Request]) -> None:
    """The engine has these requests with their images: the owner need not keep them for the front end."""
    for request in requests:
        for each in request.images:
            if isinstance(each.features, _Kept):
                each.features.drop()


class _WantedFile:
    """A `SentPicture` whose file the front end sends when it is decoded."""

    def __init__(
        self, file: SentFile, reader: PictureReader, ask: Callable[[], asyncio.Future[bytes]]
    ) -> None:
        self.name = file.name
        self._reader = reader
        self._ask = ask
        source = ImageUrl.model_construct(url="", detail="low" if file.low else None)
        self._sent = SentImage(file.place, file.field, source)

    @asynccontextmanager
    async def decoded(self) -> AsyncIterator[Picture]:
        """See `SentPicture.decoded`."""
        data = await self._ask()
        async with self._reader.decoded(self._sent, data) as picture:
            yield picture


class FrontPictures:
    """The images of one front end at the owner of ``model``; ``send`` sends to it."""

    def __init__(self, model: ServedModel, send: Send) -> None:
        self._model = model
        self._send = send
        self._placing: dict[int, asyncio.Task[None]] = {}
        self._placed: dict[int, Placed] = {}
        self._wanted: dict[tuple[int, int], asyncio.Future[bytes]] = {}

    @property
    def kept(self) -> int:
        """Number of prompts whose images are kept or being placed."""
        return len(self._placed) + len(self._placing)

    def take(self, message: Plain) -> None:
        """A message of the front end."""
        match message:
            case (ToOwner.PLACE, number, tokens, files, scope):
                work = self._place(number, tokens, [SentFile(*each) for each in files], scope)
                self._placing[number] = asyncio.get_running_loop().create_task(work)
            case (ToOwner.FILE, number, index, data):
                wanted = self._wanted.pop((number, index), None)
                if wanted is not None and not wanted.done():
                    wanted.set_result(data)
            case (ToOwner.DROP, number):
                self._placed.pop(number, None)
                if (task := self._placing.pop(number, None)) is not None:
                    task.cancel()

    def restored(self, images: Sequence[ImageSpan]) -> tuple[ImageSpan, ...]:
        """The images of a request with what they were encoded to."""
        made = []
        for each in images:
            number, index = each.features
            made.append(self._placed[number].images[index])
        return tuple(made)

    def close(self) -> None:
        """The front end has ended."""
        for task in self._placing.values():
            task.cancel()
        self._placing.clear()
        self._placed.clear()
        self._wanted.clear()

    async def _place(self, number: int, tokens: Sequence[int], files: Sequence[SentFile], scope: str) -> None:
        images, reader = self._model.images, self._model.pictures
        assert images is not None

        def ask(index: int) -> Callable[[], asyncio.Future[bytes]]:
            def asked() -> asyncio.Future[bytes]:
                wanted = self._wanted[number, index] = asyncio.get_running_loop().create_future()
                self._send((ToFront.WANT, number, index))
                return wanted

            return asked

        pictures = [_WantedFile(each, reader, ask(index)) for index, each in enumerate(files)]
        why = NotPlaced()
        try:
            placed = await images.place(tokens, pictures, scope)
        except BadPicture as error:
            why = NotPlaced(str(error), error.index)
        except ImagesLost as error:
            why = NotPlaced(str(error), lost=True)
        except ApiError as error:
            why = NotPlaced(str(error), None, error.param, error.code)
        except Exception:
            logger.exception("images of a front end cannot be placed")
        else:
            self._placed[number] = placed
            spans = [packed(ImageSpan, each._replace(features=None)) for each in placed.images]
            self._send((ToFront.PLACED, number, placed.tokens, spans))
            return
        finally:
            self._placing.pop(number, None)
        self._send((ToFront.NOT_PLACED, number, tuple(why)))
