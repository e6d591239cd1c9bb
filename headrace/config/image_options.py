"""Options of images in prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """Images in prompts, for models that take some."""

    mm_processor_cache_gb: Annotated[
        float,
        Field(
            ge=0,
            le=1024,
            description="Memory limit of encoded images in GiB; an image in it is not encoded again (0: none is kept).",
        ),
    ] = 0.5

    @property
    def cache_bytes(self) -> int:
        """The memory limit of encoded images."""
        return int(self.mm_processor_cache_gb * 2**30)
