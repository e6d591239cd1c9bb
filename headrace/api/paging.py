"""The query parameters of a listing: how many objects, in which order, and after which one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from headrace.api.errors import invalid


class Page(NamedTuple):
    """The page that a listing asks for; ``after`` is the id of the object before it."""

    limit: int
    newest_first: bool
    after: str | None


def read_page(query: Mapping[str, str], default: int, most: int) -> Page:
    """The page that ``query`` asks for, by default of ``default`` objects.

    Raises:
        ApiError: ``limit`` is no whole number from 1 to ``most``, or ``order`` is unknown.
    """
    limit = query.get("limit", str(default))
    if not (limit.isascii() and limit.isdigit() and len(limit) < 10 and 1 <= int(limit) <= most):
        raise invalid(f"limit must be a whole number from 1 to {most}", "limit")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid("order must be 'asc' or 'desc'", "order")
    return Page(int(limit), order == "desc", query.get("after"))
