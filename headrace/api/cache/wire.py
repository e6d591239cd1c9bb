"""Cache directives of a request: the field ``response_cache`` and the header ``Cache-Control``.

The header's directives have the meaning of RFC 9111, section 5.2.1. The field has the same directives and more.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field

from headrace.api.errors import invalid
from headrace.api.wire import Wire
from headrace.response_cache.rules.cacheability import NO_DIRECTIVES, CacheDirectives

MAX_TTL_SECONDS = 30 * 86400
MAX_TAGS = 16
MAX_SAMPLES = 64

Seconds = Annotated[float, Field(ge=0, le=MAX_TTL_SECONDS)]


class CacheDirectiveFields(Wire):
    """The object ``response_cache``."""

    no_store: bool = Field(False, description="Neither look up a cached response nor store this one.")
    no_cache: bool = Field(False, description="Compute the response, and store it.")
    only_if_cached: bool = Field(False, description="Never compute; status 504 if no response is cached.")
    ttl: Annotated[float, Field(gt=0, le=MAX_TTL_SECONDS)] | None = Field(
        None, description="Seconds until this response expires in the cache."
    )
    max_age: Seconds | None = Field(None, description="Maximum age in seconds of a cached response.")
    stale_while_revalidate: Seconds = Field(
        0.0,
        description="Seconds after its expiry in which a cached response is served while a new one is computed.",
    )
    samples: int | None = Field(
        None,
        ge=2,
        le=MAX_SAMPLES,
        description="Without a seed: number of responses to store; one of them is served at random.",
    )
    tags: list[Annotated[str, Field(min_length=1, max_length=128)]] = Field(
        default=[], max_length=MAX_TAGS, description="Tags by which this response can be invalidated."
    )


_DIRECTIVE = re.compile(r'(?:[^,"]+|"[^"]*")+')
"""The text between two commas outside quotation marks. It takes linear time on any header."""


def control(fields: CacheDirectiveFields | None, header: str | None) -> CacheDirectives:
    """The directives of the field and the header together; the field takes precedence.

    Raises:
        ApiError: a directive is known but not supported, or its number is missing.
    """
    directives = _directives(header) if header else {}
    if not directives and fields is None:
        return NO_DIRECTIVES
    given = (fields or CacheDirectiveFields.model_validate({})).model_dump(exclude_none=True)
    given["tags"] = tuple(dict.fromkeys(given["tags"]))
    for name in ("no_store", "no_cache", "only_if_cached"):
        given[name] = given[name] or directives.get(name, False)
    if "max_age" in directives:
        given.setdefault("max_age", directives["max_age"])
    if "max_stale" in directives and not given["stale_while_revalidate"]:
        given["stale_while_revalidate"] = directives["max_stale"]
    if given["no_cache"] and given["only_if_cached"]:
        raise invalid("no_cache and only_if_cached contradict each other", "response_cache")
    return CacheDirectives(**given)


def _directives(header: str) -> dict[str, Any]:
    """The known directives of a request's ``Cache-Control``; unknown ones are ignored, as RFC 9111 demands."""
    directives: dict[str, Any] = {}
    for text in _DIRECTIVE.findall(header):
        name, _, value = text.strip().partition("=")
        directive = name.lower()
        if directive in ("no-store", "no-cache", "only-if-cached"):
            directives[directive.replace("-", "_")] = True
        elif directive in ("max-age", "max-stale"):
            directives[directive.replace("-", "_")] = _seconds(directive, value.strip('"'))
        elif directive == "min-fresh":
            raise invalid(
                "Cache-Control: min-fresh is not supported", "Cache-Control", "unsupported_parameter"
            )
    if directives.get("max_age") == 0.0:  # browsers send this for "reload"
        directives["no_cache"] = True
    return directives


def _seconds(directive: str, value: str) -> float:
    if not value and directive == "max-stale":
        return float(MAX_TTL_SECONDS)  # RFC 9111: of any age
    if not value.isascii() or not value.isdigit():
        raise invalid(f"Cache-Control: {directive} needs a number of seconds", "Cache-Control")
    return float(min(int(value[:12]), MAX_TTL_SECONDS))
