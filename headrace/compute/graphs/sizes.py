"""The numbers of lines for which graphs are recorded: a step takes the smallest graph that holds it."""

from __future__ import annotations

MOST_LINES = 512
"""Lines of the largest graph. Larger steps are launched operation by operation, which takes less time than they do."""


MOST_KEYS_AGAIN = 1 << 15
"""A graph reads the keys of a long row once for every few tokens. So many more keys than a step without graphs reads
take less time than the launches of such a step: an estimate, not measured."""


def few_sizes(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Those of ``sizes`` for which there are graphs of further kinds, too: 2, 4, 8, 16, 24, 32, 48, … and the largest.
    They are few, because each graph takes time at start and memory.
    """
    few = [size for size in sizes if size > 1 and (_doubled(size) or (size % 3 == 0 and _doubled(size // 3)))]
    return (*few, *(size for size in sizes[-1:] if size > 1 and size not in few))


def _doubled(size: int) -> bool:
    """Whether ``size`` is a power of two."""
    return size & (size - 1) == 0


def graph_sizes(lines: int) -> tuple[int, ...]:
    """Ascending sizes up to the first that holds ``lines``, or `MOST_LINES`: padding is at most 7 lines, then 15."""
    every = (1, 2, 4, *range(8, 256, 8), *range(256, MOST_LINES + 1, 16))
    return tuple(size for number, size in enumerate(every) if not number or every[number - 1] < lines)
