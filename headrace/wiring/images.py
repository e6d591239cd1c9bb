"""Places images in prompts: encodes each distinct one once, on threads of its own beside the engine."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from headrace.api.compile.pictures import PictureReader
from headrace.api.fetching import FetchRules
from headrace.compute.device import compute_beside_steps
from headrace.compute.idle_cores import IdleThread
from headrace.compute.images.cache import EncodedImage, ImageCache
from headrace.compute.images.families import UnusableImage
from headrace.config import ImageOptions, image_limit, media_domains
from headrace.core.images import ImageSpan
from headrace.observe.images import ImageCounts, ImageMetrics
from headrace.observe.metrics_page import MetricsPage
from headrace.service.images import Placed, SentPicture
from headrace.text.images import BadPicture, Picture, PictureLimits
from headrace.wiring.feature import Feature
from headrace.wiring.loading.images import OpenImages

if TYPE_CHECKING:
    from headrace.compute.images.encoder import ImageEncoder

PART = {"type": "image"}


class ModelImages:
    """The `service.images.ImageText` of a model. ``seconds`` sums the time of encoding."""

    def __init__(self, encoder: ImageEncoder, cache: ImageCache) -> None:
        self.cache = cache
        self.seconds = 0.0
        self._encoder = encoder
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="headrace-images", initializer=compute_beside_steps
        )
        self._idle = IdleThread("headrace-images-idle")

    def part(self) -> Mapping[str, Any]:
        """See `ImageText.part`."""
        return PART

    async def place(self, tokens: Sequence[int], pictures: Sequence[SentPicture], scope: str) -> Placed:
        """See `ImageText.place`."""
        places = [at for at, token in enumerate(tokens) if token == self._encoder.placeholder]
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
            digest = self._encoder.digest(pixels, several)
            if (image := self.cache.look_up(own + digest)) is not None:
                return digest, image
        async with sent.decoded() as picture:
            digest = self._encoder.digest(picture.digest, several)
            image = None if pixels is not None else self.cache.look_up(own + digest)
            if image is None:
                loop = asyncio.get_running_loop()
                try:
                    image = await loop.run_in_executor(
                        self._thread, self._encode, own + digest, picture, several, time.monotonic()
                    )
                except UnusableImage as error:
                    raise BadPicture(str(error), index) from error
        if sent.name:
            self.cache.note_file(own + sent.name, picture.digest)
        return digest, image

    def _encode(self, key: bytes, picture: Picture, several: bool, asked: float) -> EncodedImage:
        image = self.cache.arrived(key)
        if image is None:
            began = time.perf_counter()
            image = self._idle.call(lambda: self._encoder.encode(*picture[:3], several), asked)
            self.seconds += time.perf_counter() - began
            self.cache.store(key, image)
        return image

    def counts(self) -> ImageCounts:
        """What its metrics show."""
        return ImageCounts(self.cache.queries, self.cache.hits, self.cache.nbytes, self.seconds)

    def close(self) -> None:
        """End the threads."""
        self._thread.shutdown(cancel_futures=True)
        self._idle.close()


def make_images(opened: OpenImages) -> ModelImages | None:
    """What places the images of a model; None if it takes none."""
    if opened.encoder is None or opened.cache is None:
        return None
    return ModelImages(opened.encoder, opened.cache)


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
