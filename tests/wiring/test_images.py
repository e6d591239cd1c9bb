"""Images in prompts, with an encoder that counts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial

import pytest
import torch

from headrace.compute.images.cache import EncodedImage, ImageCache, ImageKeys
from headrace.text.images import Picture
from headrace.wiring.image_encoding import LocalEncoding, at_once
from headrace.wiring.images import ModelImages
from tests.api.image_text import Given
from tests.compute.images.test_cache import image

MARK = 9
OPERATIONS = 20
PICTURE = Picture.of(1, 1, b"rgb")


class CountingEncoder:
    keys = ImageKeys(MARK, b"")

    def __init__(self) -> None:
        self.begun, self.ended = list[bytes](), list[bytes]()

    @property
    def count(self) -> int:
        return len(self.begun)

    def inputs(self, width: int, height: int, pixels: bytes, several: bool) -> bytes:
        return pixels

    def encoded(self, inputs: bytes) -> EncodedImage:
        self.begun.append(inputs)
        for _ in range(OPERATIONS):
            torch.ones(1).add(1)
        self.ended.append(inputs)
        return image(5)


def test_an_image_that_another_tenant_has_sent_is_decoded_and_encoded_again():
    encoder = CountingEncoder()
    images = placing(encoder)
    sent = Given(PICTURE, b"file")

    def place(scope):
        return asyncio.run(images.place([1, MARK], [sent], scope))

    first = place("ann\0")
    assert place("ann\0").tokens == first.tokens == (1, *image(5).tokens)
    assert encoder.count == sent.times == 1
    other = place("bob\0")
    assert encoder.count == sent.times == 2
    assert other.images[0].digest == first.images[0].digest  # keys of blocks are separate by tenant anyway
    place("ann\0salt")
    assert encoder.count == sent.times == 3
    assert (images.cache.queries, images.cache.hits) == (4, 1)
    images.close()


def test_a_file_is_decoded_again_only_when_its_rows_are_gone():
    encoder, cache = CountingEncoder(), ImageCache(image(5).nbytes)  # room for one image
    images = placing(encoder, cache)
    one, same, other = Given(PICTURE, b"a"), Given(PICTURE, b"b"), Given(Picture.of(1, 1, b"bgr"), b"c")

    def place(sent):
        asyncio.run(images.place([MARK], [sent], ""))

    for sent in (one, one, same, same, one):  # two files of the same pixels
        place(sent)
    assert (one.times, same.times, encoder.count) == (1, 1, 1)
    place(other)
    place(one)
    assert (one.times, encoder.count) == (2, 3)
    assert (cache.queries, cache.hits) == (7, 4)
    images.close()


def placing(encoder: CountingEncoder, cache: ImageCache | None = None, *beside) -> ModelImages:
    return ModelImages(LocalEncoding(encoder, *beside), ImageCache(1 << 20) if cache is None else cache)


class Slices:
    """A `SliceTime` of which each slice has one operation, and that may wait before each."""

    def __init__(self, room: float = 0.0) -> None:
        self.room, self.count = room, 0
        self.open = asyncio.Event()
        self.open.set()

    async def __call__(self, work: Callable[[float], float]) -> None:
        await self.open.wait()
        self.count += 1
        assert await asyncio.to_thread(work, self.room) >= 0.0


def test_functions_that_are_called_at_once_have_their_slices_one_after_the_other():
    encoder, ended = CountingEncoder(), list[bytes]()
    with ThreadPoolExecutor(1) as steps:

        async def between_steps(work: Callable[[float], float]) -> None:
            await asyncio.get_running_loop().run_in_executor(steps, work, 0.0)

        encoding = LocalEncoding(encoder, between_steps)

        async def call(name: bytes) -> None:
            await encoding.in_slices(partial(encoder.encoded, name))
            ended.append(name)

        async def both() -> None:
            await asyncio.gather(call(b"a"), call(b"b"))

        asyncio.run(both())
        encoding.close()
    assert ended == encoder.ended == [b"a", b"b"]


def pictures(count: int) -> list[Given]:
    return [Given(Picture.of(1, 1, bytes([each] * 3)), bytes([each])) for each in range(count)]


def test_images_are_encoded_in_slices_one_after_the_other_in_their_order():
    encoder, slices = CountingEncoder(), Slices()
    images = placing(encoder, None, slices)

    async def place() -> None:
        await asyncio.gather(*(images.place([MARK], [each], "") for each in pictures(4)))

    asyncio.run(place())
    assert encoder.begun == encoder.ended == [bytes([each] * 3) for each in range(4)]
    assert slices.count >= 4 * OPERATIONS
    assert images.counts().seconds > 0
    before = slices.count
    asyncio.run(place())  # repeated images run no encoder
    assert (slices.count, encoder.count) == (before, 4)
    images.close()


def test_an_image_of_two_requests_at_once_is_encoded_once():
    encoder = CountingEncoder()
    images = placing(encoder, None, Slices())

    async def place() -> None:
        await asyncio.gather(*(images.place([MARK], pictures(1), "") for _ in range(3)))

    asyncio.run(place())
    assert encoder.count == 1
    assert images.cache.hits == 2
    images.close()


@pytest.mark.parametrize("begun", [False, True])
def test_a_request_that_is_cancelled_while_its_image_is_encoded_lets_the_next_one_begin(begun):
    encoder, slices = CountingEncoder(), Slices()
    images = placing(encoder, None, slices)

    async def run() -> None:
        first, second = pictures(2)
        if not begun:
            slices.open.clear()
        cancelled = asyncio.create_task(images.place([MARK], [first], ""))
        while begun and slices.count < 3:
            await asyncio.sleep(0)
        slices.open.clear()
        waiting = asyncio.create_task(images.place([MARK], [second], ""))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        slices.open.set()
        assert (await waiting).tokens == image(5).tokens

    asyncio.run(run())
    assert encoder.ended == [bytes([1] * 3)]
    images.close()


def test_work_in_the_background_is_reported_from_its_beginning_to_its_end():
    encoder, reported = CountingEncoder(), list[int]()

    class Noted(Given):
        @asynccontextmanager
        async def decoded(self):
            assert sum(reported) == 1
            async with super().decoded() as picture:
                yield picture
            assert sum(reported) == 0  # it holds memory only

    def inputs(*given):
        assert sum(reported) == 1
        return CountingEncoder.inputs(encoder, *given)

    encoder.inputs = inputs
    images = placing(encoder, None, at_once, reported.append)
    asyncio.run(images.place([MARK], [Noted(PICTURE, b"file")], ""))
    assert reported == [1, -1, 1, -1]
    images.close()


def test_without_steps_beside_an_image_is_one_slice():
    encoder, slices = CountingEncoder(), Slices(math.inf)
    images = placing(encoder, None, slices)
    asyncio.run(images.place([MARK], pictures(1), ""))
    assert (slices.count, encoder.count) == (1, 1)
    images.close()


def test_the_image_that_is_being_encoded_does_not_delay_the_end():
    encoder, slices = CountingEncoder(), Slices()
    images = placing(encoder, None, slices)

    async def run() -> None:
        placing = asyncio.create_task(images.place([MARK], pictures(1), ""))
        while slices.count < 3:
            await asyncio.sleep(0)
        slices.open.clear()
        await asyncio.to_thread(images.close)
        slices.open.set()
        with pytest.raises(RuntimeError, match="the server ends"):
            await placing

    asyncio.run(run())
    assert not encoder.ended
