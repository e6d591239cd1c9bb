"""The numbers of lines for which graphs are recorded: a step takes the smallest graph that holds it."""

from __future__ import annotations

MOST_LINES = 512
"""Lines of the largest graph. Larger steps are launched operation by operation, which takes less time than they do."""


def graph_sizes(lines: int) -> tuple[int, ...]:
    """Ascending sizes up to the first that holds ``lines``, or `MOST_LINES`: padding is at most 7 lines, then 15."""
    every = (1, 2, 4, *range(8, 256, 8), *range(256, MOST_LINES + 1, 16))
    return tuple(size for number, size in enumerate(every) if not number or every[number - 1] < lines)
