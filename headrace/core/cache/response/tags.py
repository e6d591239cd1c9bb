"""Versions of tags: raising one number invalidates any number of entries.

A snapshot is taken when computing *begins*. A tag invalidated meanwhile has another version when the response is
looked up. So a response computed during an invalidation is never served.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

EVERYTHING = "*"
"""The tag that every entry carries."""


def tenant_tag(tenant: str) -> str:
    """The tag of all entries of one tenant."""
    return f"tenant:{tenant}"


def user_tag(tenant: str, tag: str) -> str:
    """The tag that a tenant calls ``tag``; equal names of two tenants are two tags."""
    return f"tag:{len(tenant)}:{tenant}:{tag}"


class TagVersions:
    """The current version of each tag that was ever invalidated; all others have 0."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def snapshot(self, tags: Iterable[str]) -> tuple[tuple[str, int], ...]:
        """The tags with their current versions."""
        return tuple([(tag, self._numbers.get(tag, 0)) for tag in tags])

    def current(self, taken: Iterable[tuple[str, int]]) -> bool:
        """Whether none of the tags has been invalidated since ``taken``."""
        return all(self._numbers.get(tag, 0) == number for tag, number in taken)

    def raise_(self, tag: str) -> int:
        """Invalidate a tag; returns its new version."""
        self._numbers[tag] = number = self._numbers.get(tag, 0) + 1
        return number

    def merge(self, numbers: Mapping[str, int], before: Mapping[str, int]) -> list[str]:
        """Merge the versions ``numbers`` of a shared store, which were ``before``; returns the tags that changed.

        A version that has fallen was lost, and invalidations since then are unknown: the tag counts as invalidated.
        """
        news = [tag for tag, number in numbers.items() if number > self._numbers.get(tag, 0)]
        for tag in news:
            self._numbers[tag] = numbers[tag]
        lost = [tag for tag, number in before.items() if numbers.get(tag, 0) < number and tag not in news]
        for tag in lost:
            self.raise_(tag)
        return news + lost

    def ahead_of(self, numbers: Mapping[str, int]) -> dict[str, int]:
        """By how much the versions ``numbers`` of a shared store are behind, for tags where they are."""
        gaps = {tag: number - numbers.get(tag, 0) for tag, number in self._numbers.items()}
        return {tag: gap for tag, gap in gaps.items() if gap > 0}
