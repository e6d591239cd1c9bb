"""Where the weights of a decoder's linear layers are in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class LinearPlace:
    """A linear layer of the decoder, and the modules of the checkpoint whose outputs it stacks.

    ``modules`` are names and outputs, in order. ``inputs`` and ``bias`` are the same for all of them. ``parts`` are the
    ranges of each module's outputs that it stacks, in this order (None: all of them). ``again`` is the module whose
    outputs come once more behind all.
    """

    modules: Mapping[str, int]
    inputs: int
    bias: bool
    parts: tuple[tuple[tuple[int, int], ...], ...] | None = None
    again: str | None = None


class ExpertPlace(NamedTuple):
    """The two linear layers of an expert."""

    gate_up: LinearPlace
    down: LinearPlace


def interleaved(groups: int, sizes: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Ranges of outputs that are stored group by group, each with parts of these ``sizes``: those of all groups for
    the first of the ``wanted`` parts, then for the next one.
    """
    width = sum(sizes)
    begins = [sum(sizes[:part]) for part in range(len(sizes))]
    return tuple(
        (group * width + begins[part], group * width + begins[part] + sizes[part])
        for part in wanted
        for group in range(groups)
    )
