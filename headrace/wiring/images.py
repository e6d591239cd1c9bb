"""Places images in prompts: each distinct one is decoded and encoded once, then cached."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from headrace.api.compile.pictures import PictureReader
from headrace.api.fetching import FetchRules
from headrace.compute.images.cache import EncodedImage, ImageCache
from headrace.compute.images.families import UnusableImage
from headrace.config import ImageOptions, image_limit, media_domains
from headrace.core.images import ImageSpan
from headrace.observe.cache_metrics import ImageCounts, ImageMetrics
from headrace.observe.metrics_page import MetricsPage
from headrace.service.images import Placed, SentPicture
from headrace.service.service import Service
from headrace.text.images import BadPicture, Picture, PictureLimits
from headrace.wiring.feature import Feature
from headrace.wiring.image_encoding import (
    Background,
    Encoding,
    LocalEncoding,
    SliceTime,
    at_once,
    background_beside,
    beside,
    slices_beside,
    unreported,
)
from headrace.wiring.loading.images import OpenImages
from headrace.wiring.model import Loaded, ReadyModel

PART = {"type": "image"}


class ModelImages:
    """The `service.images.ImageText` of a model. Images are decoded beside the steps; ``encoding`` computes them."""

    def __init__(self, encoding: Encoding, cache: ImageCache) -> None:
        self.cache = cache
        self._encoding = encoding
        self._preparing, self._turn = asyncio.Lock(), asyncio.Lock()

    def part(self) -> Mapping[str, Any]:
        """See `ImageText.part`."""
        return PART

    async def place(self, tokens: Sequence[int], pictures: Sequence[SentPicture], scope: str) -> Placed:
        """See `ImageText.place`."""
        places = [at for at, token in enumerate(tokens) if token == self._encoding.keys.placeholder]
        if len(places) != len(pictures):
            raise BadPicture(
                f"the prompt has {len(places)} placeholders of images for {len(pictures)} images: the chat template "
                "of the model leaves some out, or a text contains the placeholder"
            )
        found, spans, done = list[int](), list[ImageSpan](), 0
        for index, (at, picture) in enumerate(zip(places, pictures, strict=True)):
            digest, image = await self._encoded(picture, index, scope, len(pictures) > 1)
            found += tokens[done:at]
            spans.append(ImageSpan(len(found), len(image.tokens), digest, image.features, image.joint))
            found += image.tokens
            done = at + 1
        found += tokens[done:]
        return Placed(tuple(found), tuple(spans))

    async def _encoded(
        self, sent: SentPicture, index: int, scope: str, several: bool
    ) -> tuple[bytes, EncodedImage]:
        """The digest of an image and what it is encoded to; the same file is not decoded again while that is cached.

        It is cached for one scope: the time of a request must not show what images others have sent.
        """
        own = hashlib.sha256(scope.encode("utf-8", "surrogatepass")).digest()
        pixels = self.cache.pixels_of(own + sent.name) if sent.name else None
        if pixels is not None:
            digest = self._encoding.keys.digest(pixels, several)
            if (image := self.cache.look_up(own + digest)) is not None:
                return digest, image
        async with AsyncExitStack() as held:
            with beside(self._encoding.background):
                picture = await held.enter_async_context(sent.decoded())
            digest = self._encoding.keys.digest(picture.digest, several)
            image = None if pixels is not None else self.cache.look_up(own + digest)
            if image is None:
                try:
                    image = await self._encode(own + digest, picture, several)
                except UnusableImage as error:
                    raise BadPicture(str(error), index) from error
        if sent.name:
            self.cache.note_file(own + sent.name, picture.digest)
        return digest, image

    async def _encode(self, key: bytes, picture: Picture, several: bool) -> EncodedImage:
        """Encode images one after the other, in the order in which they came; the next one is prepared meanwhile."""
        async with AsyncExitStack() as held:
            async with self._preparing:
                if (image := self.cache.arrived(key)) is not None:
                    return image
                prepared = self._encoding.prepared(*picture[:3], several)
                encode = await held.enter_async_context(prepared)
                await held.enter_async_context(self._turn)
            image = self.cache.arrived(key)
            if image is None:
                image = await encode()
                self.cache.store(key, image)
            return image

    def counts(self) -> ImageCounts:
        """What its metrics show."""
        return ImageCounts(self.cache.queries, self.cache.hits, self.cache.nbytes, self._encoding.seconds)

    def close(self) -> None:
        """End the threads, and the image that is being encoded."""
        self._encoding.close()


def make_images(
    opened: OpenImages, slice_time: SliceTime = at_once, background: Background = unreported
) -> ModelImages | None:
    """What places the images of a model; None if it takes none.

    An encoder in this process computes in the ``slice_time``, and makes its work known to ``background``.
    """
    encoder, cache, _, remote = opened
    if cache is None:
        return None
    if encoder is not None:
        return ModelImages(LocalEncoding(encoder, slice_time, background), cache)
    return None if remote is None else ModelImages(remote, cache)


def images_beside(loaded: ReadyModel, service: Service) -> ModelImages | None:
    """What places the images of a server's model, beside its steps; None if it takes none."""
    if not isinstance(loaded, Loaded):
        return make_images(loaded.images)
    given = loaded.engine, loaded.facts.kind
    slices = slices_beside(*given, service.between_steps)
    return make_images(loaded.images, slices, background_beside(*given, service.thread.call))


def make_reader(images: ImageOptions) -> PictureReader:
    """What reads the images of requests.

    Raises:
        ConfigError: a limit or a host is invalid.
    """
    return PictureReader(
        PictureLimits(images.max_image_bytes, images.max_image_pixels),
        image_limit(images.limit_mm_per_prompt),
        FetchRules(media_domains(images.allowed_media_domains), images.allow_private_media_addresses),
    )


def image_card(images: ImageOptions) -> dict[str, Any]:
    """What ``/v1/models`` says of a model that takes images, with their limits."""
    limits = {
        "per_prompt": image_limit(images.limit_mm_per_prompt),
        "bytes": images.max_image_bytes,
        "pixels": images.max_image_pixels,
    }
    return {"input_modalities": ["text", "image"], "image_limits": limits}


def image_feature(images: ModelImages, page: MetricsPage) -> Feature:
    """The metrics of encoded images; the threads end with the server."""
    ImageMetrics(page, images.counts)
    return Feature(close=images.close)
