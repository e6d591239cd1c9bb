"""Decoded images of requests, and their limits."""

from __future__ import annotations

from typing import NamedTuple


class BadPicture(ValueError):
    """An image that cannot be used, and why; ``index`` counts the images of its request (None: the only one known)."""

    def __init__(self, reason: str, index: int | None = None) -> None:
        super().__init__(reason)
        self.index = index


class PictureLimits(NamedTuple):
    """The most bytes of an encoded image, and the most pixels of a decoded one."""

    nbytes: int
    pixels: int


class Picture(NamedTuple):
    """A decoded image: ``pixels`` are RGB, 3 bytes each, row by row."""

    width: int
    height: int
    pixels: bytes
