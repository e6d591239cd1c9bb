"""Reads the limits of ``--limit-mm-per-prompt`` and the hosts of ``--allowed-media-domains``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.config.errors import ConfigError

LIMIT = "--limit-mm-per-prompt"
DOMAINS = "--allowed-media-domains"
_OTHERS = ("audio", "video")
_HOST = re.compile(r"(?:[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")


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
