"""A model that takes images, for tests of the API: an image is ``<pad>`` in its template, and as many tokens in its
prompt as the image has columns."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from io import BytesIO
from typing import Any

from PIL import Image

from headrace.core.images import ImageSpan
from headrace.service.images import Placed, SentPicture
from headrace.text.images import BadPicture, Picture
from tests.text.vocabularies import byte_level

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<pad>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
MARK = byte_level().encode("<pad>", add_special_tokens=False)[0]
WIDEST = 30


class Given:
    """A `service.images.SentPicture` that counts how often it is decoded."""

    def __init__(self, picture: Picture, name: bytes = b"") -> None:
        self.name, self.times = name, 0
        self._picture = picture

    @asynccontextmanager
    async def decoded(self) -> AsyncIterator[Picture]:
        self.times += 1
        yield self._picture


class ColumnImages:
    """A `service.images.ImageText`; it refuses images with more than `WIDEST` columns."""

    def __init__(self) -> None:
        self.pictures: list[Picture] = []

    def part(self) -> Mapping[str, Any]:
        return {"type": "image"}

    async def place(self, tokens: Sequence[int], sent: Sequence[SentPicture], scope: str) -> Placed:
        if tokens.count(MARK) != len(sent):
            raise BadPicture("the chat template leaves out images")
        pictures = []
        for each in sent:
            async with each.decoded() as picture:
                pictures.append(picture)
        self.pictures += pictures
        placed: list[int] = []
        spans: list[ImageSpan] = []
        for token in tokens:
            placed.append(token)
            if token == MARK:
                width, _, _, digest = pictures[len(spans)]
                if width > WIDEST:
                    raise BadPicture(f"the image has more than {WIDEST} columns", len(spans))
                spans.append(ImageSpan(len(placed) - 1, width, digest, digest[0]))
                placed += [MARK] * (width - 1)
        return Placed(tuple(placed), tuple(spans))


def png(width: int, height: int = 2, color: tuple[int, int, int] = (200, 30, 30)) -> bytes:
    """An image of one color."""
    file = BytesIO()
    Image.new("RGB", (width, height), color).save(file, "PNG")
    return file.getvalue()


def data_url(file: bytes, kind: str = "image/png") -> str:
    """A file as a data URL."""
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"
