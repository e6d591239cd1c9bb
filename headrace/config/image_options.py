"""Options of images in prompts: how many, how large, where from, and the memory of those that are encoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from headrace.config.values import BYTES


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

    limit_mm_per_prompt: Annotated[
        str,
        Field(
            description='Maximum number of images of a prompt, as image=N or the JSON object {"image": N}.'
        ),
    ] = "image=64"
    max_image_bytes: Annotated[
        int,
        Field(ge=1, description="Maximum size of an encoded image.", json_schema_extra=BYTES),
    ] = 20 << 20
    max_image_pixels: Annotated[
        int,
        Field(
            ge=1,
            le=100_000_000,
            description="Maximum number of pixels of an image. It is checked before the image is decoded.",
        ),
    ] = 16_000_000
    allowed_media_domains: Annotated[
        tuple[str, ...],
        Field(
            description="Host that images of requests may be fetched from, as HOST for the ports 80 and 443, or "
            "HOST:PORT. Repeatable (default: none; images come as data URLs)."
        ),
    ] = ()
    allow_private_media_addresses: Annotated[
        bool,
        Field(
            description="Let the hosts of --allowed-media-domains have private, link-local and loopback addresses. "
            "Without it, only public addresses are connected to."
        ),
    ] = False

    @property
    def cache_bytes(self) -> int:
        """The memory limit of encoded images."""
        return int(self.mm_processor_cache_gb * 2**30)
