"""Images in prompts: which positions an image fills, and what stands for these positions in the keys of blocks.

A prompt has placeholder tokens where a model takes an image. They are equal for all images, so keys of blocks and
comparisons of prefixes read `contents`: a token stands for itself, a position of an image for the image's digest and
the offset in it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

DIGEST_BYTES = 32
_BYTES = DIGEST_BYTES + 5
_IMAGE = 1 << 8 * (_BYTES - 1)
"""Makes the content of a position larger than any token, whatever its digest is."""


class ImageSpan(NamedTuple):
    """The positions [start, start + length) of a prompt, which an image fills.

    ``digest`` is a SHA-256 over the image's pixels and all settings of its processor and encoder. ``features`` are
    what the model computes with in place of embeddings; the core only passes them on. The positions between the
    offsets of ``joint`` attend to each other both ways, so one step computes all of them that are to be computed.
    """

    start: int
    length: int
    digest: bytes
    features: Any = None
    joint: tuple[int, int] = (0, 0)

    @property
    def end(self) -> int:
        """The position behind it."""
        return self.start + self.length

    def contents(self) -> Iterable[int]:
        """A negative number for each position: digest and offset in full, never equal to a token."""
        base = -(_IMAGE | int.from_bytes(self.digest, "big") << 32)
        return range(base, base - self.length, -1)


def contents(tokens: Sequence[int], images: Sequence[ImageSpan]) -> Sequence[int]:
    """What stands at each position of ``tokens``: the token, or the position of an image.

    Raises:
        ValueError: images overlap, are out of order or lie outside of the tokens, or have no digest.
    """
    if not images:
        return tokens
    found, free = [*tokens], 0
    for span in images:
        if not free <= span.start < span.end <= len(tokens) or len(span.digest) != DIGEST_BYTES:
            raise ValueError(f"an image at [{span.start}, {span.end}) of {len(tokens)} tokens")
        found[span.start : span.end] = span.contents()
        free = span.end
    return found


def unsplit(images: Sequence[ImageSpan], start: int, length: int, most: int) -> int:
    """``length`` positions from ``start`` on, or as many that no joint positions are split: fewer, but if these are
    the first ones up to ``most``, or none.
    """
    end = start + length
    for span in images:
        begin, stop = (span.start + offset for offset in span.joint)
        if begin < end < stop:
            if begin > start:
                return begin - start
            return stop - start if stop - start <= most else 0
    return length


def image_mark(content: int) -> int:
    """One byte for a position of an image: that of its digest whose turn it is."""
    return -content >> 8 * (4 + -content % DIGEST_BYTES) & 255


def encoded(contents: Sequence[int]) -> bytes:
    """Contents as bytes, equal only for equal contents of this length: tokens alone are int64 each.

    A position of an image is -1 among them, and follows in full behind the last one.
    """
    packed = array("q", [max(each, -1) for each in contents]).tobytes()
    return packed + b"".join([(-each).to_bytes(_BYTES, "little") for each in contents if each < 0])
