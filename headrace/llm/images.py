"""Images of conversations of `LLM.chat`: read like those of requests to a server, and placed in the prompts.

An image is a part of a message: ``{"type": "image_url", "image_url": {"url": ...}}`` as in OpenAI's API, or
``{"type": "image_pil", "image_pil": image}`` with an image of Pillow.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from pydantic import ValidationError

from headrace.api.compile.bodies import IMAGE, ImageUrl
from headrace.api.compile.pictures import IMAGE_ROLES, PictureReader, SentImage
from headrace.api.errors import ApiError
from headrace.config import ImageOptions
from headrace.core.request import InvalidParameter
from headrace.service.images import Placed
from headrace.text.images import BadPicture, Picture, PictureLimits, convert_picture
from headrace.wiring.image_encoding import SliceTime, at_once
from headrace.wiring.images import make_images, make_reader
from headrace.wiring.loading.images import OpenImages

_URL, _PIL = "image_url", "image_pil"

Message = Mapping[str, Any]
"""A message of a conversation: ``{"role": ..., "content": ...}``."""


class GivenImage(NamedTuple):
    """An image of a conversation: where it is, and the image of Pillow if it is one."""

    sent: SentImage
    pil: Any = None


class PillowImage:
    """An image of Pillow: a `service.images.SentPicture`."""

    name = b""

    def __init__(self, given: GivenImage, limits: PictureLimits) -> None:
        self._given, self._limits = given, limits

    @asynccontextmanager
    async def decoded(self) -> AsyncIterator[Picture]:
        """See `SentPicture.decoded`."""
        try:
            picture = await asyncio.to_thread(convert_picture, self._given.pil, self._limits)
        except BadPicture as error:
            raise self._given.sent.refused(str(error)) from None
        yield picture


class ChatImages:
    """Reads the images of conversations and places them in prompts; for any number of threads.

    This work runs on an event loop of its own, whose thread starts with the first image.
    """

    def __init__(self, opened: OpenImages, options: ImageOptions, slice_time: SliceTime = at_once) -> None:
        self._images, self._why = make_images(opened, slice_time), opened.why
        self._limits = PictureLimits(options.max_image_bytes, options.max_image_pixels)
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reader: PictureReader = make_reader(options)

    @property
    def taken(self) -> bool:
        """Whether the model takes images."""
        return self._images is not None

    def close(self) -> None:
        """End the threads."""
        with self._starting:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)
        if self._images is not None:
            self._images.close()

    def separated(self, messages: Sequence[Message], where: str) -> tuple[list[Message], list[GivenImage]]:
        """A conversation as chat templates expect it, and its images; ``where`` names it in errors.

        Raises:
            InvalidParameter: a part is invalid, or there are too many images or some that the model does not take.
        """
        plain, found = list[Message](), list[GivenImage]()
        for number, message in enumerate(messages):
            content, place = message.get("content"), f"{where}[{number}]"
            if content is None or not has_images(message):
                plain.append(message)
                continue
            if message["role"] not in IMAGE_ROLES:
                why = f"only a message of the role {' or '.join(IMAGE_ROLES)} may have an image"
                raise InvalidParameter("messages", f"{place}.content: {why}")
            parts = []
            for at, part in enumerate(content):
                image = _image_of(part, f"{place}.content[{at}]")
                if image is not None:
                    found.append(image)
                parts.append(
                    part if image is None else IMAGE if self._images is None else self._images.part()
                )
            plain.append({**message, "content": parts})
        if found and self._images is None:
            raise InvalidParameter(
                "messages", f"{found[0].sent.place}: images are not supported: {self._why}"
            )
        try:
            self._reader.check([each.sent for each in found])
        except ApiError as error:
            raise InvalidParameter("messages", str(error)) from None
        return plain, found

    def place(self, tokens: Sequence[int], given: Sequence[GivenImage]) -> Placed:
        """The tokens of a prompt, in which the placeholders of its images have been replaced.

        Raises:
            InvalidParameter: an image cannot be used.
        """
        future = asyncio.run_coroutine_threadsafe(self._placed(tokens, given), self._running())
        try:
            return future.result()
        except ApiError as error:
            raise InvalidParameter("messages", str(error)) from None
        except BaseException:  # Ctrl-C as well
            future.cancel()
            raise

    async def _placed(self, tokens: Sequence[int], given: Sequence[GivenImage]) -> Placed:
        if self._images is None:
            raise AssertionError("images were not refused")
        files = iter(await self._reader.read([each.sent for each in given if each.pil is None]))
        pictures = [next(files) if each.pil is None else PillowImage(each, self._limits) for each in given]
        try:
            return await self._images.place(tokens, pictures, scope="")  # all of one caller
        except BadPicture as error:
            if error.index is None:
                raise InvalidParameter("messages", f"messages: {error}") from None
            raise given[error.index].sent.refused(str(error)) from None

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(
                    target=_run, args=(self._loop,), name="headrace-images-loop", daemon=True
                ).start()
            return self._loop


def has_images(messages: object) -> bool:
    """Whether a conversation, or one of several, has images."""
    if isinstance(messages, Mapping):
        content = messages.get("content")
        return isinstance(content, list | tuple) and any(map(_is_image, content))
    return isinstance(messages, list | tuple) and any(map(has_images, messages))


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _is_image(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") in (_URL, _PIL)


def _image_of(part: object, place: str) -> GivenImage | None:
    """The image of a part; None for text.

    Raises:
        InvalidParameter: the part is neither, or has another form.
    """
    if not isinstance(part, Mapping):
        raise _invalid(place, "a part must be an object with a type")
    kind = part.get("type")
    if kind == "text" and isinstance(part.get("text"), str):
        return None
    if kind == _PIL:
        return GivenImage(
            SentImage(place, _PIL, ImageUrl(url="")), _pillow(part.get(_PIL), f"{place}.{_PIL}")
        )
    if kind != _URL:
        raise _invalid(place, f"parts of type {kind!r:.80} are not supported beside images, or have no text")
    source = part.get(_URL)
    if not isinstance(source, Mapping) or not isinstance(source.get("url"), str):
        raise _invalid(f"{place}.{_URL}", 'expected {"url": …}')
    try:
        return GivenImage(SentImage(place, f"{_URL}.url", ImageUrl.model_validate(dict(source))))
    except ValidationError as error:
        first = error.errors()[0]
        raise _invalid(".".join([place, _URL, *map(str, first["loc"])]), first["msg"]) from None


def _pillow(image: object, place: str) -> object:
    from PIL import Image

    if not isinstance(image, Image.Image):
        raise _invalid(place, f"expected an image of Pillow, got {type(image).__name__}")
    return image


def _invalid(place: str, why: str) -> InvalidParameter:
    return InvalidParameter("messages", f"{place}: {why}")
