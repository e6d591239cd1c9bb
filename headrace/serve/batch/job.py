"""The lines of a batch in the order in which they are best computed; results name their line, so any order will do.

`core.queueing.job_order` says why. Prompts are compared as text, before any template or tokenizer: what two requests
have in common at their beginning, their tokens have too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from headrace.core.prediction.output_lengths import prior_tokens
from headrace.core.queueing.job_order import order_job
from headrace.serve.batch.lines import BadLine, BatchRequest

WINDOW_BYTES = 64 << 20
"""Prompts that are ordered together: a batch may be larger than memory, and is then several jobs."""

GRAIN_BYTES = 64
"""Text that is a block's worth of tokens or so: shorter common beginnings save nothing."""

Line = BatchRequest | BadLine


def in_job_order(lines: Iterable[Line], window_bytes: int = WINDOW_BYTES) -> Iterator[Line]:
    """The same lines, those with a common beginning together; so many bytes of prompts are read ahead."""
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
    """What a line's tokens are made of, in the order of a chat template; lines that differ elsewhere share nothing."""
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
    asked = line.body.get("max_completion_tokens", line.body.get("max_tokens"))
    limit = asked if isinstance(asked, int) and asked > 0 else float("inf")
    return prior_tokens(limit)
