"""Decodes images of clients in processes of their own, which are ended at their limits of time and memory (`bounded`).

A decoder that fails on a broken file in the worst way ends such a process, and no copy of pixels holds the lock of the
server's interpreter.
"""

from __future__ import annotations

import atexit
from typing import Any

from headrace.text.bounded import BoundedProcesses, Limits, Stopped
from headrace.text.bounded_process import Answer, serve
from headrace.text.images import BadPicture, Picture, PictureLimits, decode_picture

BASE_SECONDS, PIXELS_OF_SECOND = 4.0, 2_000_000
"""The CPU time that an image may take, and pixels of the limit for which it may take a second more: ten times as long
as large images take."""
WALL_TIMES = 4
PIXEL_BYTES = 32
"""Memory that a pixel may take: Pillow has several copies of 4 bytes at a time."""
BASE_BYTES = 256 << 20


def decoder_limits(limits: PictureLimits) -> Limits:
    """The limits of a process that decodes an image within ``limits``."""
    seconds = BASE_SECONDS + limits.pixels / PIXELS_OF_SECOND
    return Limits(seconds, WALL_TIMES * seconds, BASE_BYTES + PIXEL_BYTES * limits.pixels)


class DecodeProcesses:
    """Processes that decode images, one at a time each. A call blocks its thread; as many run as threads call."""

    def __init__(self) -> None:
        self._processes = BoundedProcesses("headrace.text.decoding")
        self.close = self._processes.close

    def decode(self, data: bytes, limits: PictureLimits, low: bool = False) -> Picture:
        """As `images.decode_picture`.

        Raises:
            BadPicture: as there, or its decoder reached a limit.
        """
        try:
            answer, pixels = self._processes.ask(data, decoder_limits(limits), within=limits, low=low)
        except Stopped as stopped:
            raise BadPicture(f"its decoder was stopped: {stopped}") from None
        if "error" in answer:
            raise BadPicture(answer["error"])
        return Picture(answer["width"], answer["height"], pixels, bytes.fromhex(answer["digest"]))


PROCESSES = DecodeProcesses()
"""Those of this process."""

atexit.register(PROCESSES.close)


# -- in such a process


def _answer(payload: bytes, limits: Limits, options: dict[str, Any]) -> Answer:
    try:
        picture = decode_picture(payload, PictureLimits(*options["within"]), options["low"])
    except BadPicture as error:
        return {"error": str(error)}, b""
    size = {"width": picture.width, "height": picture.height, "digest": picture.digest.hex()}
    return size, bytes(picture.pixels)


if __name__ == "__main__":
    from PIL import GifImagePlugin, JpegImagePlugin, PngImagePlugin, WebPImagePlugin  # noqa: F401 (before memory is limited)

    serve(_answer, payload_times=2)
