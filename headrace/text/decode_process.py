"""A process that decodes the images that `decoding` sends, within limits of time and memory."""

from __future__ import annotations

from typing import Any

from PIL import GifImagePlugin, JpegImagePlugin, PngImagePlugin, WebPImagePlugin  # noqa: F401 (before memory is limited)

from headrace.text.bounded import Limits
from headrace.text.bounded_process import Answer, serve
from headrace.text.images import BadPicture, PictureLimits, decode_picture


def _answer(payload: bytes, limits: Limits, options: dict[str, Any]) -> Answer:
    try:
        picture = decode_picture(payload, PictureLimits(*options["within"]), options["low"])
    except BadPicture as error:
        return {"error": str(error)}, b""
    size = {"width": picture.width, "height": picture.height, "digest": picture.digest.hex()}
    return size, bytes(picture.pixels)


if __name__ == "__main__":
    serve(_answer, payload_times=2)
