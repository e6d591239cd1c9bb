"""Options of images in prompts: how many, how large, where from, and the memory of those that are encoded."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from headrace.config.errors import ConfigError
from headrace.config.values import BYTES

LIMIT = "--limit-mm-per-prompt"
DOMAINS = "--allowed-media-domains"
_OTHERS = ("audio", "video")
_HOST = re.compile(r"(?:[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")


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


def image_limit(given: str) -> int:
    """The maximum number of images of a prompt, from ``image=N`` or a JSON object.

    Raises:
        ConfigError: the text has another form, or allows audio or video.
    """
    limits = _from_object(given) if given.lstrip().startswith("{") else _from_pairs(given)
    for kind, most in limits.items():
        if kind not in ("image", *_OTHERS):
            raise ConfigError(f"{LIMIT}: unknown kind {kind[:40]!r}; expected image")
        if type(most) is not int or most < 0:
            raise ConfigError(f"{LIMIT}: {kind} must be a whole number, at least 0, got {most!r:.40}")
        if kind in _OTHERS and most:
            raise ConfigError(f"{LIMIT}: {kind} is not supported; only images are")
    if "image" not in limits:
        raise ConfigError(f"{LIMIT} has no image=N")
    return int(limits["image"])


def _from_object(given: str) -> Mapping[str, Any]:
    try:
        limits: Mapping[str, Any] = json.loads(given)
    except ValueError as error:
        raise ConfigError(f"{LIMIT}: {given[:80]!r} is not JSON: {error}") from None
    return limits


def _from_pairs(given: str) -> Mapping[str, Any]:
    pairs = [pair.partition("=") for pair in given.split(",")]
    return {
        kind.strip(): int(most) if most.isascii() and most.strip().isdigit() else most
        for kind, _, most in pairs
    }


def media_domains(given: Sequence[str]) -> tuple[str, ...]:
    """The hosts that images may be fetched from, in lower case.

    Raises:
        ConfigError: a value is no HOST or HOST:PORT.
    """
    hosts = tuple(each.strip().lower() for each in given)
    for host, value in zip(hosts, given, strict=True):
        if not _HOST.fullmatch(host):
            raise ConfigError(f"{DOMAINS}: expected HOST or HOST:PORT, got {value[:80]!r}")
    return hosts
