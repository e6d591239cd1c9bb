"""Orders the lines of a batch for prefix sharing; results name their line, so any order is allowed.

`core.queueing.job_order` explains the order. Prompts are compared as text, before template and tokenizer: a common
prefix of two texts is also a common prefix of their tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from headrace.api.batch.lines import BadLine, BatchRequest
from headrace.core.prediction.output_lengths import prior_tokens
from headrace.core.queueing.job_order import order_job

WINDOW_BYTES = 64 << 20
"""Bytes of prompts that are ordered together: a batch larger than memory is processed as several jobs."""

GRAIN_BYTES = 64
"""Approximate text of one block of tokens: shorter common prefixes save nothing."""

Line = BatchRequest | BadLine


def in_job_order(lines: Iterable[Line], window_bytes: int = WINDOW_BYTES) -> Iterator[Line]:
    """The same lines, with common prefixes together; ``window_bytes`` bytes of prompts are read ahead."""
    window: list[Line] = []
    prompts: list[bytes] = []
    read = 0
    for line in lines:
        window.append(line)
        prompts.append(_prompt(line))
        read += len(prompts[-1])
        if read >= window_bytes:
            yield from _ordered(window, prompts)
            window, prompts, read = [], [], 0
    yield from _ordered(window, prompts)


def _ordered(window: list[Line], prompts: list[bytes]) -> Iterator[Line]:
    outputs = [_expected_tokens(line) for line in window]
    return (window[index] for index in order_job(prompts, outputs, GRAIN_BYTES))


def _prompt(line: Line) -> bytes:
    """The text that determines a line's tokens, in the order of a chat template."""
    if isinstance(line, BadLine):
        return b""
    body = line.body
    asked = body.get("messages", body.get("prompt", body.get("input")))
    try:
        text = json.dumps([line.url, body.get("tools"), asked], ensure_ascii=False)
    except RecursionError:
        return b""
    return text.encode(errors="surrogatepass")


def _expected_tokens(line: Line) -> float:
    if isinstance(line, BadLine):
        return 0.0
    named = (line.body.get(name) for name in ("max_completion_tokens", "max_output_tokens", "max_tokens"))
    asked = next((value for value in named if value is not None), None)
    limit = asked if isinstance(asked, int) and asked > 0 else float("inf")
    return prior_tokens(limit)
