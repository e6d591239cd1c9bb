"""The guided tour: seven stops, each with a short text and one or two scenarios that are simulated side by side."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.lab.steps.scenario import Asked, Scenario


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
