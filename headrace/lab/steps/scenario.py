"""A small workload with engine settings, with limits so that a server can simulate it while it serves requests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from headrace.core.request import Request, SamplingParams
from headrace.lab.simulate.requests import SimulatedRequest

MOST_REQUESTS = 32
MOST_PROMPT_TOKENS = 4096
"""Maximum prompt tokens of one request; a scenario may have four times as many."""

MOST_OUTPUT_TOKENS = 256
"""Maximum output tokens of one request; a scenario may have four times as many."""

MOST_BLOCKS = 1024

BLOCK_SIZE = 16

_TOKENS = 1 << 20


class BadScenario(ValueError):
    """A scenario that exceeds a limit; ``field`` names the field."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field} {why}")
        self.field = field


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of a scenario.

    The first ``shared_tokens`` of the prompt are the same in all requests. With ``quotes``, the output repeats the
    prompt, so that n-gram drafts are accepted.
    """

    prompt_tokens: int
    output_tokens: int
    arrival: float = 0.0
    shared_tokens: int = 0
    quotes: bool = False


@dataclass(frozen=True, slots=True)
class Scenario:
    """Requests and settings; settings have the names of the server's options.

    ``num_speculative_tokens``: drafts from an n-gram lookup in the prompt (0: none).
    """

    requests: tuple[Asked, ...]
    scheduling_policy: Literal["fair", "fcfs", "priority", "static"] = "fair"
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 512
    num_blocks: int = 256
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    num_speculative_tokens: int = 0

    def __post_init__(self) -> None:
        within("requests", len(self.requests), 1, MOST_REQUESTS)
        within("max_num_seqs", self.max_num_seqs, 1, MOST_REQUESTS)
        within(
            "max_num_batched_tokens", self.max_num_batched_tokens, self.max_num_seqs, 4 * MOST_PROMPT_TOKENS
        )
        within("num_blocks", self.num_blocks, 1, MOST_BLOCKS)
        within("num_speculative_tokens", self.num_speculative_tokens, 0, 16)
        for i, each in enumerate(self.requests):
            within(f"requests[{i}].prompt_tokens", each.prompt_tokens, 1, MOST_PROMPT_TOKENS)
            within(f"requests[{i}].output_tokens", each.output_tokens, 1, MOST_OUTPUT_TOKENS)
            within(f"requests[{i}].shared_tokens", each.shared_tokens, 0, each.prompt_tokens)
            within(f"requests[{i}].arrival", each.arrival, 0, 60)
        prompts, outputs = self.tokens
        within("requests", prompts, 1, 4 * MOST_PROMPT_TOKENS, " prompt tokens together")
        within("requests", outputs, 1, 4 * MOST_OUTPUT_TOKENS, " output tokens together")
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise BadScenario(
                "max_num_batched_tokens",
                f"must be at least {self.max_model_len} without enable_chunked_prefill: a step computes a whole prompt",
            )

    @property
    def tokens(self) -> tuple[int, int]:
        """Prompt and output tokens of all requests."""
        return (
            sum(each.prompt_tokens for each in self.requests),
            sum(each.output_tokens for each in self.requests),
        )

    @property
    def max_model_len(self) -> int:
        """Prompt plus output tokens of the longest request."""
        return max(each.prompt_tokens + each.output_tokens for each in self.requests)

    def simulated(self) -> Iterator[SimulatedRequest]:
        """The requests in order of arrival, named ``A``, ``B``, … in the scenario's order, with random tokens."""
        rng = random.Random(0)
        shared = tuple(rng.randrange(_TOKENS) for _ in range(MOST_PROMPT_TOKENS))
        made = []
        for i, each in enumerate(self.requests):
            own = tuple(rng.randrange(_TOKENS) for _ in range(each.prompt_tokens - each.shared_tokens))
            prompt = shared[: each.shared_tokens] + own
            params = SamplingParams(max_tokens=each.output_tokens, ignore_eos=True)
            repeated = prompt * (1 + each.output_tokens // len(prompt))
            drawn = tuple(rng.randrange(_TOKENS) for _ in range(each.output_tokens))
            answer = repeated[: each.output_tokens] if each.quotes else drawn
            made.append(SimulatedRequest(Request(name(i), prompt, params, each.arrival), answer))
        return iter(sorted(made, key=lambda each: each.request.arrived))


def name(number: int) -> str:
    """The name of a scenario's request: ``A`` to ``Z``, then ``A1``, …"""
    letter = chr(ord("A") + number % 26)
    return letter if number < 26 else f"{letter}{number // 26}"


def within(field: str, value: float, least: float, most: float, unit: str = "") -> None:
    """Checks that a number is within its limits.

    Raises:
        BadScenario: it is not.
    """
    if not least <= value <= most:
        raise BadScenario(field, f"must be {least} to {most}{unit}, got {value}")
