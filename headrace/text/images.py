"""Decoded images of requests, and their limits.

```
 decode_picture    size in the header, before anything is decoded; then RGB pixels, upright, transparency on white
 convert_picture   the same of an image that Pillow has opened
```
Images of clients are decoded in processes of their own, which are ended at their limits of time and memory (`bounded`).
A decoder that fails on a broken file in the worst way ends such a process, and no copy of pixels holds the lock of the
server's interpreter.
"""

from __future__ import annotations

import atexit
from hashlib import sha256
from io import BytesIO
from mmap import mmap
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.text.bounded import Answer, BoundedProcesses, Limits, Stopped, serve

if TYPE_CHECKING:
    from PIL import Image

SIGNATURES: tuple[tuple[str, int, bytes], ...] = (
    ("PNG", 0, b"\x89PNG\r\n\x1a\n"),
    ("JPEG", 0, b"\xff\xd8\xff"),
    ("GIF", 0, b"GIF87a"),
    ("GIF", 0, b"GIF89a"),
    ("WEBP", 8, b"WEBP"),
)
"""How files of each format begin: the format, and the offset of its bytes."""

MOST_SCANS = 100
"""Scans of a JPEG file. Each costs as much time as the whole image, whatever its length; encoders write about ten."""

_SCAN = b"\xff\xda"
LOW_SIDE = 512
"""The longer side of an image whose ``detail`` is low, as OpenAI's API has it."""

CHANNELS = 3


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
    """A decoded image: ``pixels`` are RGB, 3 bytes each, row by row; ``digest`` is the SHA-256 of size and pixels."""

    width: int
    height: int
    pixels: bytes | mmap
    digest: bytes

    @classmethod
    def of(cls, width: int, height: int, pixels: bytes) -> Picture:
        """An image with these pixels."""
        digest = sha256(width.to_bytes(4, "little") + height.to_bytes(4, "little"))
        digest.update(pixels)
        return cls(width, height, pixels, digest.digest())


def decode_picture(data: bytes, limits: PictureLimits, low: bool = False) -> Picture:
    """Decode an image in PNG, JPEG, WebP or GIF, of which the first frame counts.

    It is turned as its EXIF orientation says, and put on white where it is transparent. ``low`` reduces its longer side
    to `LOW_SIDE`.

    Raises:
        BadPicture: the format is not supported, a limit is exceeded, or the data is cut off or broken.
    """
    with _opened(data, limits) as image:
        return _decoded(image, low)


def convert_picture(image: Image.Image, limits: PictureLimits) -> Picture:
    """What `decode_picture` returns for an image of Pillow, which stays as it is.

    Raises:
        BadPicture: it has too many pixels, or cannot be decoded.
    """
    _check_pixels(image, limits)
    return _decoded(image)


def _decoded(image: Image.Image, low: bool = False) -> Picture:
    from PIL import ImageOps

    try:
        image.load()
        turned = ImageOps.exif_transpose(image)  # always a copy
        if low:
            turned.thumbnail((LOW_SIDE, LOW_SIDE))
        decoded = _rgb(turned)
        return Picture.of(decoded.width, decoded.height, decoded.tobytes())
    except MemoryError:
        raise
    except Exception as error:  # decoders raise errors of many types for broken data
        what = f"the {image.format} file" if image.format else "the image"
        raise BadPicture(f"{what} cannot be decoded: {_reason(error)}") from None


def _check_pixels(image: Image.Image, limits: PictureLimits) -> None:
    width, height = image.size
    if width * height > limits.pixels:
        raise BadPicture(
            f"the image has {width} x {height} pixels; at most {limits.pixels} in all are allowed"
        )


def _opened(data: bytes, limits: PictureLimits) -> Image.Image:
    from PIL import Image

    if len(data) > limits.nbytes:
        raise BadPicture(f"the file has {len(data)} bytes; at most {limits.nbytes} are allowed")
    kind = next((name for name, at, sign in SIGNATURES if data[at : at + len(sign)] == sign), None)
    if kind is None or (kind == "WEBP" and data[:4] != b"RIFF"):
        raise BadPicture("the data is no image in PNG, JPEG, WebP or GIF format")
    if kind == "JPEG" and data.count(_SCAN) > MOST_SCANS:
        raise BadPicture(f"the JPEG file has more than {MOST_SCANS} scans")
    try:
        image = Image.open(BytesIO(data), formats=(kind,))
    except MemoryError:
        raise
    except Image.DecompressionBombError:
        raise BadPicture(f"the image has more than {limits.pixels} pixels") from None
    except Exception as error:  # as above
        raise BadPicture(f"the {kind} file cannot be read: {_reason(error)}") from None
    try:
        _check_pixels(image, limits)
    except BadPicture:
        image.close()
        raise
    return image


def _rgb(image: Image.Image) -> Image.Image:
    from PIL import Image

    if image.mode == "RGB":
        return image
    if image.mode.startswith("I"):  # 16 bits of gray: a conversion would cut off all values above 255
        wide: Any = image.convert("I")
        return Image.Image.convert(wide.point(lambda value: value * (1 / 257)).convert("L"), "RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    seen = image.convert("RGBA")
    white = Image.new("RGBA", seen.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, seen).convert("RGB")


def _reason(error: Exception) -> str:
    text = str(error)
    return "its contents are broken" if "object at 0x" in text or not text else text[:200]


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
        self._processes = BoundedProcesses("headrace.text.images")
        self.close = self._processes.close

    def decode(self, data: bytes, limits: PictureLimits, low: bool = False) -> Picture:
        """As `decode_picture`.

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
