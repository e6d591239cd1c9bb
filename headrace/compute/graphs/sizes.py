"""The numbers of lines for which graphs are recorded: a step takes the smallest graph that holds it."""

from __future__ import annotations

MOST_LINES = 512
"""Maximum lines of a graph that samples tokens."""

MOST_TOKENS = 2048  # see docs/decisions/gpu.md#mixed-steps-in-graphs
"""Maximum tokens of a graph of steps with prompts. Larger steps are launched operation by operation: the device takes
longer than the host anyway, although the launches compete with HTTP threads for the interpreter lock."""

MOST_KEYS_AGAIN = 1 << 17
"""Limit of additional key reads. A graph reads the keys of a long row once for every few tokens, more often than a step
without graphs. Up to this limit that takes less time than the launches: half a gigabyte per layer of Llama-3.1-8B,
mostly from the cache."""


def few_sizes(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The ``sizes`` that further kinds of graphs have: 2, 4, 8, 16, 24, 32, 48, … and the largest.

    They are few, because each graph takes start-up time and memory.
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


def prompt_sizes(tokens: int) -> tuple[int, ...]:
    """Sizes for steps with prompts, ascending up to the first that holds ``tokens``, or `MOST_TOKENS`: beyond
    `MOST_LINES` padding is at most 63 tokens, then 127.
    """
    small = few_sizes(graph_sizes(min(tokens, MOST_LINES)))
    large = (*range(MOST_LINES + 64, 1025, 64), *range(1152, MOST_TOKENS + 1, 128))
    smaller = (MOST_LINES, *large)
    return small + tuple(size for size, before in zip(large, smaller, strict=False) if before < tokens)
