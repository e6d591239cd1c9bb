"""Places images in prompts: encodes each distinct one once, in slices between the engine's steps."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from headrace.api.compile.pictures import PictureReader
from headrace.api.fetching import FetchRules
from headrace.compute.device import lower_priority
from headrace.compute.images.cache import EncodedImage, ImageCache
from headrace.compute.images.families import UnusableImage
from headrace.compute.images.slices import SlicedCall, Stopped
from headrace.config import ImageOptions, image_limit, media_domains
from headrace.core.images import ImageSpan
from headrace.observe.cache_metrics import ImageCounts, ImageMetrics
from headrace.observe.metrics_page import MetricsPage
from headrace.service.images import Placed, SentPicture
from headrace.service.service import Service
from headrace.text.images import BadPicture, Picture, PictureLimits
from headrace.wiring.feature import Feature
from headrace.wiring.loading.images import OpenImages
from headrace.wiring.model import Loaded, ReadyModel

if TYPE_CHECKING:
    from headrace.compute.images.encoder import ImageEncoder

PART = {"type": "image"}

SliceTime: TypeAlias = Callable[[Callable[[float], float]], Awaitable[None]]
"""Calls a function between two steps with the seconds that it may take; it returns those that it has taken."""

Background: TypeAlias = Callable[[int], None]
"""Reports that so many works more (less, if negative) go on beside the steps."""

LEAST_SECONDS = 0.001
"""Time of a slice where steps have no time left: images do not starve."""
IDLE_SECONDS = 0.02
"""Time of a slice while no request runs: one that arrives waits for its end."""


LATE_MEMORY = 0.1
"""Weight of the last slice in the mean time by which slices end late: they end between two operations."""


async def at_once(work: Callable[[float], float]) -> None:
    """A `SliceTime` without limit, where no steps run on the same cores."""
    await asyncio.to_thread(work, math.inf)


def unreported(change: int) -> None:
    """A `Background` where nothing makes room for it."""


class ModelImages:
    """The `service.images.ImageText` of a model. ``seconds`` sums the time of encoding, which ``slice_time`` gives.

    Images are decoded and prepared beside the steps; ``background`` is called when that begins and ends.
    """

    def __init__(
        self,
        encoder: ImageEncoder,
        cache: ImageCache,
        slice_time: SliceTime = at_once,
        background: Background = unreported,
    ) -> None:
        self.cache = cache
        self.seconds = 0.0
        self._encoder = encoder
        self._slice_time = slice_time
        self._background = background
        self._prepares = ThreadPoolExecutor(1, "headrace-image-inputs", initializer=lower_priority)
        self._encodes = ThreadPoolExecutor(1, "headrace-images")
        self._preparing, self._encoding = asyncio.Lock(), asyncio.Lock()
        self._call: SlicedCall[EncodedImage] | None = None  # the last one
        self._late_seconds = 0.0  # the mean of slices

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
        async with AsyncExitStack() as held:
            with self._beside():
                picture = await held.enter_async_context(sent.decoded())
            digest = self._encoder.digest(picture.digest, several)
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
        loop = asyncio.get_running_loop()
        async with self._preparing:
            if (image := self.cache.arrived(key)) is not None:
                return image
            prepare = partial(self._encoder.inputs, *picture[:3], several)
            with self._beside():
                inputs = await loop.run_in_executor(self._prepares, prepare)
            await self._encoding.acquire()
        try:
            image = self.cache.arrived(key)
            if image is None:
                image = await self._in_slices(partial(self._encoder.encoded, inputs))
                self.cache.store(key, image)
            return image
        finally:
            self._encoding.release()

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """What it contains takes cores from the steps."""
        self._background(1)
        try:
            yield
        finally:
            self._background(-1)

    async def _in_slices(self, encode: Callable[[], EncodedImage]) -> EncodedImage:
        self._call = call = SlicedCall(self._encodes, encode)
        try:
            while not call.done:
                await self._slice_time(partial(self._advance, call))
        finally:
            call.stop()
        try:
            return call.result()
        except Stopped:
            raise RuntimeError("the server ends") from None

    def _advance(self, call: SlicedCall[EncodedImage], room: float) -> float:
        began, asked = time.perf_counter(), max(0.0, room - self._late_seconds)
        call.advance(asked)
        seconds = time.perf_counter() - began
        self.seconds += seconds
        if not call.done:
            self._late_seconds += LATE_MEMORY * (seconds - asked - self._late_seconds)
        return seconds

    def counts(self) -> ImageCounts:
        """What its metrics show."""
        return ImageCounts(self.cache.queries, self.cache.hits, self.cache.nbytes, self.seconds)

    def close(self) -> None:
        """End the threads, and the image that is being encoded."""
        if self._call is not None:
            self._call.stop()
        for each in (self._prepares, self._encodes):
            each.shutdown(cancel_futures=True)


def make_images(
    opened: OpenImages, slice_time: SliceTime = at_once, background: Background = unreported
) -> ModelImages | None:
    """What places the images of a model; None if it takes none."""
    if opened.encoder is None or opened.cache is None:
        return None
    return ModelImages(opened.encoder, opened.cache, slice_time, background)


def slices_beside(loaded: ReadyModel, service: Service) -> SliceTime:
    """The time between the steps of an engine on a CPU; steps on a GPU, or that overlap, compute beside anyway."""
    if not isinstance(loaded, Loaded) or loaded.facts.kind != "cpu" or loaded.engine.overlap:
        return at_once
    beside = loaded.engine.beside

    async def between_steps(work: Callable[[float], float]) -> None:
        def within(room: float) -> float:
            return work(IDLE_SECONDS if room == math.inf else max(room, LEAST_SECONDS))

        await service.between_steps(partial(beside, within), last=True)  # it gives way to prompts that wait

    return between_steps


def background_beside(loaded: ReadyModel, service: Service) -> Background:
    """Lets steps on a CPU be shorter while other work takes cores from them."""
    if not isinstance(loaded, Loaded) or loaded.facts.kind != "cpu":
        return unreported
    background = loaded.engine.background

    def report(change: int) -> None:
        service.thread.call(partial(background, change))

    return report


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
