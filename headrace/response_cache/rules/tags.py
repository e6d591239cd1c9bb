"""Versions of tags: raising one number invalidates any number of entries.

A snapshot is taken when computing *begins*. A tag invalidated meanwhile has another version when the response is
looked up. So a response computed during an invalidation is never served.

A version must never be forgotten, or older entries would be served again, and clients may invent any number of tags.
So tags share a fixed number of counters. Invalidating a tag also invalidates the entries of the few tags that have the
same counter, which costs a computation and serves nothing wrong.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

EVERYTHING = "*"
"""The tag that every entry carries."""

COUNTERS = 4096
"""Number of counters of each kind of tag. A server reads all of them from a shared store each second."""


def tenant_tag(tenant: str) -> str:
    """The tag of all entries of one tenant."""
    return f"tenant:{tenant}"


def tenant_of(tag: str) -> str | None:
    """The tenant whose `tenant_tag` this is; None for any other tag."""
    return tag.removeprefix("tenant:") if tag.startswith("tenant:") else None


def user_tag(tenant: str, tag: str) -> str:
    """The tag that a tenant calls ``tag``; equal names of two tenants are two tags."""
    return f"tag:{len(tenant)}:{tenant}:{tag}"


def counter_of(tag: str) -> str:
    """The name of the counter that is the version of ``tag``. Tenants and their own tags use different counters."""
    if tag == EVERYTHING:
        return tag
    digest = hashlib.sha256(tag.encode("utf-8", "surrogatepass")).digest()
    return f"{tag.partition(':')[0]}:{int.from_bytes(digest[:4]) % COUNTERS}"


class TagVersions:
    """The current versions of all tags, by counter; a counter that was never raised is 0."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def snapshot(self, tags: Iterable[str]) -> tuple[tuple[str, int], ...]:
        """The counters of the tags with their current numbers."""
        return tuple([(counter, self._numbers.get(counter, 0)) for counter in map(counter_of, tags)])

    def current(self, taken: Iterable[tuple[str, int]]) -> bool:
        """Whether none of the tags has been invalidated since ``taken``."""
        return all(self._numbers.get(counter, 0) == number for counter, number in taken)

    def raise_(self, tag: str) -> str:
        """Invalidate a tag; returns its counter."""
        counter = counter_of(tag)
        self._raise(counter)
        return counter

    def merge(self, numbers: Mapping[str, int], before: Mapping[str, int]) -> list[str]:
        """Merge the counters ``numbers`` of a shared store, which were ``before``; returns those that changed.

        A counter that has fallen was lost, and invalidations since then are unknown: its tags count as invalidated.
        """
        news = [counter for counter, number in numbers.items() if number > self._numbers.get(counter, 0)]
        for counter in news:
            self._numbers[counter] = numbers[counter]
        lost = [
            counter
            for counter, number in before.items()
            if numbers.get(counter, 0) < number and counter not in news
        ]
        for counter in lost:
            self._raise(counter)
        return news + lost

    def exceed(self, counters: Iterable[str], numbers: Mapping[str, int]) -> None:
        """Raise those of ``counters`` that are not ahead of the ``numbers`` of a shared store.

        The store has missed an invalidation here. Equal numbers hide it if another server has counted one of its own.
        """
        for counter in counters:
            if self._numbers.get(counter, 0) <= numbers.get(counter, 0):
                self._raise(counter)

    def ahead_of(self, numbers: Mapping[str, int]) -> dict[str, int]:
        """By how much the counters ``numbers`` of a shared store are behind, for those that are."""
        gaps = {counter: number - numbers.get(counter, 0) for counter, number in self._numbers.items()}
        return {counter: gap for counter, gap in gaps.items() if gap > 0}

    def _raise(self, counter: str) -> None:
        self._numbers[counter] = self._numbers.get(counter, 0) + 1
