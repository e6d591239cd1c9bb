"""Tags and how often each has been cleared: one number makes any number of entries unservable.

A snapshot is taken when computing *begins*. What was cleared meanwhile has another number by the time the answer is
asked for, so an answer that was under way during a clearing is never served.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

EVERYTHING = "*"
"""The tag that every entry carries."""


def tenant_tag(tenant: str) -> str:
    """The tag of all entries of one tenant."""
    return f"tenant:{tenant}"


def user_tag(tenant: str, tag: str) -> str:
    """The tag that a tenant calls ``tag``; two tenants' tags of one name are two tags."""
    return f"tag:{len(tenant)}:{tenant}:{tag}"


class TagVersions:
    """The current number of each tag that was ever cleared; all others have 0."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def snapshot(self, tags: Iterable[str]) -> tuple[tuple[str, int], ...]:
        """The tags with their numbers now."""
        return tuple([(tag, self._numbers.get(tag, 0)) for tag in tags])

    def current(self, taken: Iterable[tuple[str, int]]) -> bool:
        """Whether none of the tags has been cleared since ``taken``."""
        return all(self._numbers.get(tag, 0) == number for tag, number in taken)

    def raise_(self, tag: str) -> int:
        """Clear a tag; its new number."""
        self._numbers[tag] = number = self._numbers.get(tag, 0) + 1
        return number

    def merge(self, numbers: Mapping[str, int], before: Mapping[str, int]) -> list[str]:
        """Learn of clearings elsewhere from the ``numbers`` there, which were ``before``; the tags that are news.

        A number that has fallen was lost, and nobody can say what has been cleared since: the tag counts as cleared.
        """
        news = [tag for tag, number in numbers.items() if number > self._numbers.get(tag, 0)]
        for tag in news:
            self._numbers[tag] = numbers[tag]
        lost = [tag for tag, number in before.items() if numbers.get(tag, 0) < number and tag not in news]
        for tag in lost:
            self.raise_(tag)
        return news + lost

    def ahead_of(self, numbers: Mapping[str, int]) -> dict[str, int]:
        """By how much the ``numbers`` elsewhere are behind, where they are."""
        gaps = {tag: number - numbers.get(tag, 0) for tag, number in self._numbers.items()}
        return {tag: gap for tag, gap in gaps.items() if gap > 0}
