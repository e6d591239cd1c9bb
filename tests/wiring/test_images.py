"""Images in prompts, with an encoder that counts."""

from __future__ import annotations

import asyncio
import hashlib

from headrace.compute.images.cache import EncodedImage, ImageCache
from headrace.text.images import Picture
from headrace.wiring.images import ModelImages
from tests.compute.images.test_cache import image

MARK = 9


class CountingEncoder:
    placeholder = MARK

    def __init__(self) -> None:
        self.encoded = 0

    def digest(self, width: int, height: int, pixels: bytes) -> bytes:
        return hashlib.sha256(pixels).digest()

    def encode(self, width: int, height: int, pixels: bytes) -> EncodedImage:
        self.encoded += 1
        return image(5)


def test_an_image_that_another_tenant_has_sent_is_encoded_again():
    encoder = CountingEncoder()
    images = ModelImages(encoder, ImageCache(1 << 20))
    picture = Picture(1, 1, b"rgb")

    def place(scope):
        return asyncio.run(images.place([1, MARK], [picture], scope))

    first = place("ann\0")
    assert place("ann\0").tokens == first.tokens == (1, *image(5).tokens)
    assert encoder.encoded == 1
    other = place("bob\0")
    assert encoder.encoded == 2
    assert other.images[0].digest == first.images[0].digest  # keys of blocks are separate by tenant anyway
    place("ann\0salt")
    assert encoder.encoded == 3
    assert (images.cache.queries, images.cache.hits) == (4, 1)
    images.close()
