"""Images in prompts, with an encoder that counts."""

from __future__ import annotations

import asyncio
import hashlib

from headrace.compute.images.cache import EncodedImage, ImageCache
from headrace.text.images import Picture
from headrace.wiring.images import ModelImages
from tests.api.image_text import Given
from tests.compute.images.test_cache import image

MARK = 9
PICTURE = Picture.of(1, 1, b"rgb")


class CountingEncoder:
    placeholder = MARK

    def __init__(self) -> None:
        self.encoded = 0

    def digest(self, pixels: bytes, several: bool) -> bytes:
        return hashlib.sha256(pixels).digest()

    def encode(self, width: int, height: int, pixels: bytes, several: bool) -> EncodedImage:
        self.encoded += 1
        return image(5)


def test_an_image_that_another_tenant_has_sent_is_decoded_and_encoded_again():
    encoder = CountingEncoder()
    images = ModelImages(encoder, ImageCache(1 << 20))
    sent = Given(PICTURE, b"file")

    def place(scope):
        return asyncio.run(images.place([1, MARK], [sent], scope))

    first = place("ann\0")
    assert place("ann\0").tokens == first.tokens == (1, *image(5).tokens)
    assert encoder.encoded == sent.times == 1
    other = place("bob\0")
    assert encoder.encoded == sent.times == 2
    assert other.images[0].digest == first.images[0].digest  # keys of blocks are separate by tenant anyway
    place("ann\0salt")
    assert encoder.encoded == sent.times == 3
    assert (images.cache.queries, images.cache.hits) == (4, 1)
    images.close()


def test_a_file_is_decoded_again_only_when_its_rows_are_gone():
    encoder, cache = CountingEncoder(), ImageCache(image(5).nbytes)  # room for one image
    images = ModelImages(encoder, cache)
    one, same, other = Given(PICTURE, b"a"), Given(PICTURE, b"b"), Given(Picture.of(1, 1, b"bgr"), b"c")

    def place(sent):
        asyncio.run(images.place([MARK], [sent], ""))

    for sent in (one, one, same, same, one):  # two files of the same pixels
        place(sent)
    assert (one.times, same.times, encoder.encoded) == (1, 1, 1)
    place(other)
    place(one)
    assert (one.times, encoder.encoded) == (2, 3)
    assert (cache.queries, cache.hits) == (7, 4)
    images.close()
