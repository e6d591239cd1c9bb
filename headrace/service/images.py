"""Images of prompts: what a served model that takes images offers to the compiler of requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple, Protocol

from headrace.core.images import ImageSpan
from headrace.text.images import Picture


class Placed(NamedTuple):
    """A prompt whose images have been placed: its tokens with all placeholders, and the positions of its images."""

    tokens: tuple[int, ...]
    images: tuple[ImageSpan, ...]


class ImagesLost(RuntimeError):
    """No engine process computes the images of a request; the message is that of a `core.events.Finished`."""


class SentPicture(Protocol):
    """An image of a request, which is decoded only if its pixels are needed.

    ``name`` stands for its file, and for how it is decoded; it is empty if there is no file.
    """

    name: bytes

    def decoded(self) -> AbstractAsyncContextManager[Picture]:
        """The image, which holds memory until the context is left."""
        ...


class ImageText(Protocol):
    """Places images in prompts; its work runs beside the engine, once for each distinct image."""

    def part(self) -> Mapping[str, Any]:
        """The content part that the chat template of the model takes for an image."""
        ...

    async def place(self, tokens: Sequence[int], pictures: Sequence[SentPicture], scope: str) -> Placed:
        """Replace the placeholder of each image in the tokens of a rendered prompt, in their order.

        What an image was encoded to is found again by requests of the same ``scope`` only.

        Raises:
            ImagesLost: as said there.
            BadPicture: the processor refuses an image, which the error counts, or the tokens have another number of
                placeholders than there are pictures; or whatever decoding raises.
        """
        ...
