"""The guided tour: small scenarios that a server simulates while it serves requests, within limits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from headrace.core.request import Request, SamplingParams
from headrace.lab.simulate.runner import SimulatedRequest

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
    prompt, so that n-gram drafts are accepted. A lower ``priority`` runs sooner under the policy ``priority``.
    """

    prompt_tokens: int
    output_tokens: int
    arrival: float = 0.0
    shared_tokens: int = 0
    quotes: bool = False
    priority: int = 0


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
            within(f"requests[{i}].priority", each.priority, -100, 100)
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
            request = Request(name(i), prompt, params, each.arrival, priority=each.priority)
            made.append(SimulatedRequest(request, answer))
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


@dataclass(frozen=True, slots=True)
class Stop:
    """A stop of the tour. ``runs`` are captions with scenarios; ``look_at`` says what to look for."""

    name: str
    title: str
    text: str
    look_at: str
    runs: tuple[tuple[str, Scenario], ...]


_UNEVEN = tuple(Asked(64, tokens) for tokens in (6, 28, 10, 12, 24, 8, 16, 8))
"""Requests whose outputs differ in length, as those of real traffic do."""

_BATCHING = Scenario(_UNEVEN, max_num_seqs=4, num_blocks=96)

_PAGES = Scenario(
    (Asked(40, 30), Asked(100, 12), Asked(20, 40), Asked(72, 20, arrival=0.06)), max_num_seqs=4, num_blocks=48
)

_SHARED = Scenario(
    (
        Asked(200, 10, shared_tokens=180),
        Asked(210, 12, arrival=0.03, shared_tokens=180),
        Asked(190, 12, arrival=0.05, shared_tokens=180),
        Asked(230, 10, arrival=0.07, shared_tokens=180),
    ),
    num_blocks=96,
)

_LONG_PROMPT = Scenario(
    (Asked(32, 40), Asked(48, 40), Asked(24, 40), Asked(4000, 8, arrival=0.05)),
    max_num_seqs=4,
    max_num_batched_tokens=512,
    num_blocks=320,
)

_TIGHT = Scenario(
    (Asked(64, 48), Asked(64, 48), Asked(64, 48)),
    scheduling_policy="fcfs",
    max_num_seqs=3,
    num_blocks=16,
)

_TURNS = Scenario(
    (
        Asked(400, 12, shared_tokens=400),
        Asked(420, 12, arrival=0.3, shared_tokens=400),
        Asked(300, 8, arrival=0.15),
    ),
    max_num_seqs=2,
    num_blocks=128,
)

_RANKED = Scenario(
    (
        *(Asked(64, 12, arrival=0.001 * i, priority=5) for i in range(6)),
        Asked(64, 12, arrival=0.02, priority=0),
    ),
    scheduling_policy="fcfs",
    max_num_seqs=2,
    num_blocks=96,
)

_PAID = Scenario(
    (
        Asked(1200, 8, shared_tokens=1100),
        Asked(1200, 8, arrival=0.4, shared_tokens=1100),
        Asked(40, 40, arrival=0.4),
    ),
    max_num_seqs=3,
    num_blocks=256,
)

_QUOTES = Scenario((Asked(96, 48, quotes=True), Asked(80, 40, quotes=True)), max_num_seqs=2, num_blocks=48)

STOPS = (
    Stop(
        "static-batching",
        "Static batching",
        "A GPU reads all weights of the model to generate one token. It can generate a token for several requests in "
        "the same step at almost the same cost, so requests are batched. A static batch starts together and ends "
        "when its longest request ends.",
        "Rows that have ended leave an empty slot until the whole batch has ended. The four requests in the queue "
        "wait for the longest one.",
        (("Static batches of 4", replace(_BATCHING, scheduling_policy="static")),),
    ),
    Stop(
        "continuous-batching",
        "Continuous batching",
        "A continuous batch changes at every step: a request that ends frees its slot, and the first request in the "
        "queue takes it in the next step. Prefill rows and decode rows share a step.",
        "Both runs have the same requests. Compare the number of steps, the mean rows of a step, and the mean time to "
        "the first token.",
        (
            ("Static batches of 4", replace(_BATCHING, scheduling_policy="static")),
            ("Continuous, 4 slots", _BATCHING),
        ),
    ),
    Stop(
        "paged-kv",
        "Paged KV memory",
        "Each token leaves keys and values in memory (the KV cache). The memory is divided into blocks of 16 tokens. "
        "A request has a table of its blocks, and gets one more when its last block is full. Its blocks need not be "
        "neighbours, so no memory is reserved for tokens that may never come.",
        "Select a request to see its block table. Blocks of ended requests stay in the prefix cache until they are "
        "needed.",
        (("Four requests, 48 blocks", _PAGES),),
    ),
    Stop(
        "prefix-sharing",
        "Prefix sharing",
        "Requests of an application often begin with the same system prompt. Its blocks are computed once and shared. "
        "A block that agrees only in its first tokens is copied, and the rest of it is computed.",
        "Request A computes 200 tokens. B, C and D find 180 tokens in the prefix cache: 11 shared blocks and one "
        "copied block each. Compare the computed tokens.",
        (
            ("Without prefix caching", replace(_SHARED, enable_prefix_caching=False)),
            ("With prefix caching", _SHARED),
        ),
    ),
    Stop(
        "caches",
        "The prefix cache over time",
        "Blocks of an ended request stay in memory until they are needed for others. The next turn of a conversation "
        "finds them. If memory is short, they are evicted in between, and the prompt is computed again. Host memory "
        "or a disk can keep them (`--kv-offload-bytes`), and a response cache answers an equal request without any "
        "step.",
        "Request B repeats 400 tokens of A after A has ended; C comes between them. Compare the computed tokens of B "
        "in both runs.",
        (
            ("Much memory: B finds A's blocks", _TURNS),
            ("Little memory: C has taken most of them", replace(_TURNS, num_blocks=30)),
        ),
    ),
    Stop(
        "chunked-prefill",
        "Chunked prefill",
        "The prefill of a long prompt takes as long as many decode steps. If it runs in one step, all other requests "
        "wait for their next token. Chunked prefill divides it over several steps, in which the other requests decode.",
        "Request D has 4,000 prompt tokens. Without chunks one step takes many times as long as the others; with "
        "chunks, A, B and C receive a token in each step.",
        (
            (
                "Whole prompts",
                replace(_LONG_PROMPT, enable_chunked_prefill=False, max_num_batched_tokens=4096),
            ),
            ("Chunks of at most 512 tokens", _LONG_PROMPT),
        ),
    ),
    Stop(
        "preemption",
        "Preemption",
        "The length of an output is not known in advance, so more requests may run than fit at their full length. If "
        "no block is free, a request is preempted: it loses its blocks and returns to the queue. Its tokens are kept, "
        "and what the prefix cache still holds need not be computed again.",
        "Three requests share 16 blocks. Follow the preempted one: it waits, resumes, and computes its lost tokens in "
        "one prefill row.",
        (("Three requests, 16 blocks", _TIGHT),),
    ),
    Stop(
        "priorities",
        "Priorities",
        "Under load the order of the queue decides which requests wait. `fcfs` takes requests by arrival. With "
        "`priority`, a lower number runs sooner. The default, `fair`, divides the device between classes and tenants "
        "by weight, so that none of them can take it all.",
        "Request G arrives last and has the lowest number. Compare when it gets its first token in both runs; two "
        "requests run at a time.",
        (("By arrival", _RANKED), ("By priority", replace(_RANKED, scheduling_policy="priority"))),
    ),
    Stop(
        "cost",
        "Cost of a request",
        "A request costs the device time of its rows. Each step's time is divided among its rows: a prefill chunk is "
        "charged for its tokens, a decode row for one. Tokens from the prefix cache cost nothing. The header "
        "`X-Headrace-Cost: true` adds the cost to a response.",
        "A computes 1,200 prompt tokens, B only the last 100 of as many, C 40 and then generates. Compare the computed "
        "tokens: most of the cost of A is its prompt.",
        (("One computed prompt, one cached, one short", _PAID),),
    ),
    Stop(
        "drafts",
        "Speculative decoding",
        "A step can verify several tokens of a request at almost the cost of one. Drafts are guesses of the next "
        "tokens, here looked up in the prompt. Accepted drafts save steps; a rejected draft costs only its position in "
        "the step, and the output is the same.",
        "The outputs quote their prompts. Rows with drafts show accepted and rejected tokens. Compare the number of "
        "steps.",
        (
            ("Without drafts", _QUOTES),
            ("Up to 4 drafts", replace(_QUOTES, num_speculative_tokens=4)),
        ),
    ),
)
