from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.compute.images import cache as module
from headrace.compute.images.cache import EncodedImage, ImageCache
from headrace.compute.images.slots import ImageRows


def image(tokens: int) -> EncodedImage:
    return EncodedImage((9,) * tokens, ImageRows(torch.zeros(tokens, 6), np.arange(tokens)))


def test_the_least_recently_used_is_dropped_first() -> None:
    cache = ImageCache(3 * image(5).nbytes)
    for name in (b"a", b"b", b"c"):
        assert cache.look_up(name) is None
        cache.store(name, image(5))
    assert cache.nbytes == 3 * image(5).nbytes == 3 * 5 * (6 * 4 + 8 + 8)
    assert cache.look_up(b"a") is not None
    cache.store(b"d", image(5))
    assert cache.look_up(b"b") is None
    assert cache.look_up(b"a") is not None
    assert len(cache) == 3
    assert cache.nbytes == 3 * image(5).nbytes
    assert (cache.queries, cache.hits) == (6, 2)


def test_an_image_above_the_limit_is_not_kept() -> None:
    cache = ImageCache(image(5).nbytes)
    cache.store(b"small", image(5))
    cache.store(b"large", image(6))
    assert cache.look_up(b"small") is not None
    assert cache.arrived(b"large") is None
    assert ImageCache(0).nbytes == 0


def test_an_image_that_was_encoded_while_a_request_waited_is_a_hit() -> None:
    cache = ImageCache(1000)
    assert cache.look_up(b"a") is None
    cache.store(b"a", image(5))
    assert cache.arrived(b"a") is not None
    assert (cache.queries, cache.hits) == (1, 1)


def test_the_files_that_are_known_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_FILES", 2)
    cache = ImageCache(1)
    cache.note_file(b"a", b"1")
    cache.note_file(b"b", b"2")
    assert cache.pixels_of(b"a") == b"1"
    cache.note_file(b"c", b"3")
    assert cache.pixels_of(b"b") is None
    assert (cache.pixels_of(b"a"), cache.pixels_of(b"c")) == (b"1", b"3")
