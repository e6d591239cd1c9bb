"""Workloads of a race: requests of token ids with fixed lengths, new in every round so that no cache has them.

Lengths stay those of the workload's seed; only the ids change from round to round.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

from benchmarks.peers.vocabulary import WORDS
from headrace.lab.workload.dataset import fixed_lengths, log_normal_lengths
from headrace.lab.workload.work import Work

IDS = range(WORDS, 9_000)
"""Ids of prompts: words, and within every vocabulary that is raced."""

NAMES = ("decode", "prefill", "mixed", "long", "shared")

SHARED_TOKENS = 1_000
"""Tokens of the system prompt with which every prompt of ``shared`` begins."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A closed loop: ``concurrency`` requests are open at any time until ``requests`` have been answered.

    ``decode``: 128 + 128 tokens, as many requests as are open; ``prefill``: 2,048 + 1, one after the other; ``mixed``:
    log-normal lengths of medians 128 + 64, at most 1,024 + 512; ``long``: 8,000 + 64; ``shared``: 1,000 tokens with
    which all prompts of a round begin, then 64 + 64. Only for ``shared`` do the peers keep prefixes.
    """

    name: str
    concurrency: int
    requests: int
    seed: int = 0

    def draw(self, number: int = 0) -> tuple[Work, ...]:
        """The requests of round ``number``."""
        if self.name == "decode":
            work = fixed_lengths(self.requests, 128, 128, self.seed)
        elif self.name == "prefill":
            work = fixed_lengths(self.requests, 2048, 1, self.seed)
        elif self.name == "mixed":
            work = log_normal_lengths(self.requests, 128, 64, seed=self.seed)
        elif self.name == "long":
            work = fixed_lengths(self.requests, 8000, 64, self.seed)
        else:
            work = fixed_lengths(self.requests, SHARED_TOKENS + 64, 64, self.seed)
        words = random.Random(f"{self.seed} {number}")
        system = tuple(words.choices(IDS, k=SHARED_TOKENS if self.shares_prefix else 0))
        return tuple(
            dataclasses.replace(
                each, prompt=system + tuple(words.choices(IDS, k=len(each.prompt) - len(system)))
            )
            for each in work
        )

    @property
    def shares_prefix(self) -> bool:
        """Whether prompts begin with the same tokens."""
        return self.name == "shared"

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer."""
        return max(len(each.prompt) + each.max_tokens for each in self.draw())


def workload(name: str, concurrency: int | None = None, requests: int | None = None) -> Workload:
    """A workload by name, with its own concurrency and number of requests unless given.

    Raises:
        ValueError: there is no such workload, or `decode` of another number of requests than are open.
    """
    if name not in NAMES:
        raise ValueError(f"there is no workload {name!r}; there are {', '.join(NAMES)}")
    rows = concurrency or {"decode": 16, "prefill": 1, "mixed": 16, "long": 4, "shared": 16}[name]
    if name == "decode" and requests not in (None, rows):
        raise ValueError(
            f"decode is judged while all its requests are open: {requests} requests, {rows} at once"
        )
    count = {"decode": rows, "prefill": 4, "mixed": 3 * rows, "long": rows, "shared": 3 * rows}[name]
    return Workload(name, rows, requests or count)
