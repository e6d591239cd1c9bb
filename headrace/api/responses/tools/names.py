"""Functions of a namespace: the model sees one name, clients see the namespace and the name.

``weather`` and ``today`` become ``weather__today`` in the prompt, which every chat template supports.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

SEPARATOR = "__"


class Spelling(NamedTuple):
    """A function's name and namespace, as the client sent them."""

    name: str
    namespace: str | None = None

    @property
    def flat(self) -> str:
        """The name that the model sees."""
        return self.name if self.namespace is None else f"{self.namespace}{SEPARATOR}{self.name}"

    def fields(self) -> dict[str, str]:
        """The fields of a ``function_call`` item."""
        return {"name": self.name} | ({} if self.namespace is None else {"namespace": self.namespace})


def spelling_of(flat: str, spellings: Mapping[str, Spelling]) -> Spelling:
    """The client's name and namespace for the function ``flat``; without an entry in ``spellings``, just the name."""
    return spellings.get(flat) or Spelling(flat)
