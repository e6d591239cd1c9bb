"""The rows of the last images by scope and digest, within a limit of bytes."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from typing import Any, NamedTuple


class ImageKeys(NamedTuple):
    """The placeholder of images in prompts, and what their digests depend on beside pixels.

    ``settings`` is a digest of the settings of processor and encoder. ``tiled_alone``: an image that is alone in its
    prompt is computed otherwise than one of several.
    """

    placeholder: int
    settings: bytes
    tiled_alone: bool = False

    def digest(self, pixels: bytes, several: bool = False) -> bytes:
        """The digest of an image: that of its ``pixels``, and of all that processor and encoder depend on."""
        form = b"several" if several and self.tiled_alone else b""
        return hashlib.sha256(self.settings + form + pixels).digest()


class EncodedImage(NamedTuple):
    """The ``tokens`` that stand for an image in a prompt, and the features at some of their positions.

    The features are `slots.ImageRows`, or `rows_file.PlacedRows` in a process without an encoder. Positions between the
    offsets of ``joint`` attend to each other both ways.
    """

    tokens: tuple[int, ...]
    features: Any
    joint: tuple[int, int] = (0, 0)

    @property
    def nbytes(self) -> int:
        """The memory that it takes."""
        size: int = self.features.nbytes
        return size + 8 * len(self.tokens)


MOST_FILES = 1 << 14
"""Files whose pixels are known; each takes about 300 bytes."""


class ImageCache:
    """Encoded images, the least recently used dropped first; any thread may use it.

    It also knows the digests of the pixels of the last files, so that a file is not decoded again for an image that is
    here. ``queries`` counts the images of requests, ``hits`` those that were here.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._images: OrderedDict[bytes, EncodedImage] = OrderedDict()
        self._files: OrderedDict[bytes, bytes] = OrderedDict()
        self.nbytes = 0
        self.queries = 0
        self.hits = 0

    def __len__(self) -> int:
        return len(self._images)

    def look_up(self, key: bytes) -> EncodedImage | None:
        """The image that a request has, if it is here."""
        with self._lock:
            found = self._images.get(key)
            self.queries += 1
            if found is not None:
                self.hits += 1
                self._images.move_to_end(key)
            return found

    def arrived(self, key: bytes) -> EncodedImage | None:
        """An image that was not here when it was looked up, and may have been encoded since."""
        with self._lock:
            found = self._images.get(key)
            self.hits += found is not None
            return found

    def store(self, key: bytes, image: EncodedImage) -> None:
        """Keep an image that is not here, if it fits at all."""
        if image.nbytes > self._max_bytes:
            return
        with self._lock:
            self._images[key] = image
            self.nbytes += image.nbytes
            while self.nbytes > self._max_bytes:
                self.nbytes -= self._images.popitem(last=False)[1].nbytes

    def pixels_of(self, file: bytes) -> bytes | None:
        """The digest of the pixels of a file that is known."""
        with self._lock:
            found = self._files.get(file)
            if found is not None:
                self._files.move_to_end(file)
            return found

    def note_file(self, file: bytes, pixels: bytes) -> None:
        """The digest of the pixels of a file."""
        with self._lock:
            self._files[file] = pixels
            if len(self._files) > MOST_FILES:
                self._files.popitem(last=False)
