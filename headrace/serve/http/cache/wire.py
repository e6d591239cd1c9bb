"""What a call asks of the response caches: the field ``response_cache`` and the header ``Cache-Control``.

The header's words have the meanings of RFC 9111, section 5.2.1; the field has the same ones and more.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field

from headrace.core.cache.response.control import NO_DIRECTIVES, CacheDirectives
from headrace.serve.http.errors import invalid
from headrace.serve.http.wire import Wire

MAX_TTL_SECONDS = 30 * 86400
MAX_TAGS = 16
MAX_SAMPLES = 64

Seconds = Annotated[float, Field(ge=0, le=MAX_TTL_SECONDS)]


class CacheDirectiveFields(Wire):
    """The object ``response_cache``."""

    no_store: bool = Field(False, description="Neither keep the answer nor look for one.")
    no_cache: bool = Field(False, description="Compute anew, and keep that.")
    only_if_cached: bool = Field(False, description="Compute nothing; 504 where nothing is kept.")
    ttl: Annotated[float, Field(gt=0, le=MAX_TTL_SECONDS)] | None = Field(
        None, description="Seconds that this answer is kept."
    )
    max_age: Seconds | None = Field(None, description="Take no answer older than so many seconds.")
    stale_while_revalidate: Seconds = Field(
        0.0, description="So many seconds after its end, take an old answer while a new one is computed."
    )
    samples: int | None = Field(
        None, ge=2, le=MAX_SAMPLES, description="Without a seed: keep so many answers, serve one at random."
    )
    tags: list[Annotated[str, Field(min_length=1, max_length=128)]] = Field(
        default=[], max_length=MAX_TAGS, description="Names to clear this answer by."
    )


_DIRECTIVE = re.compile(r"[\s,]*([\w-]+)(?:=(?:\"([^\"]*)\"|([^\s,\"]*)))?\s*(?=,|$)")


def control(wishes: CacheDirectiveFields | None, header: str | None) -> CacheDirectives:
    """What the call asks for in the field and in the header together; the field wins.

    Raises:
        ApiError: a directive that is known and cannot be honoured, or one without its number.
    """
    said = _directives(header) if header else {}
    if not said and wishes is None:
        return NO_DIRECTIVES
    given = (wishes or CacheDirectiveFields.model_validate({})).model_dump(exclude_none=True)
    given["tags"] = tuple(dict.fromkeys(given["tags"]))
    for name in ("no_store", "no_cache", "only_if_cached"):
        given[name] = given[name] or said.get(name, False)
    if "max_age" in said:
        given.setdefault("max_age", said["max_age"])
    if "max_stale" in said and not given["stale_while_revalidate"]:
        given["stale_while_revalidate"] = said["max_stale"]
    if given["no_cache"] and given["only_if_cached"]:
        raise invalid("no_cache and only_if_cached ask for opposite things", "response_cache")
    return CacheDirectives(**given)


def _directives(header: str) -> dict[str, Any]:
    """The directives of a request's ``Cache-Control`` that mean something here; unknown ones are to be ignored."""
    said: dict[str, Any] = {}
    for name, quoted, plain in _DIRECTIVE.findall(header):
        directive = name.lower()
        if directive in ("no-store", "no-cache", "only-if-cached"):
            said[directive.replace("-", "_")] = True
        elif directive in ("max-age", "max-stale"):
            said[directive.replace("-", "_")] = _seconds(directive, quoted or plain)
        elif directive == "min-fresh":
            raise invalid(
                "Cache-Control: min-fresh is not supported", "Cache-Control", "unsupported_parameter"
            )
    if said.get("max_age") == 0.0:  # what browsers say for "reload"
        said["no_cache"] = True
    return said


def _seconds(directive: str, value: str) -> float:
    if not value and directive == "max-stale":
        return float(MAX_TTL_SECONDS)  # RFC 9111: of any age
    if not value.isascii() or not value.isdigit():
        raise invalid(f"Cache-Control: {directive} needs a number of seconds", "Cache-Control")
    return float(min(int(value[:12]), MAX_TTL_SECONDS))
