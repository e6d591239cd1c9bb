"""A value beside the default of each sampling field that bodies and `SamplingParams` spell alike."""

from __future__ import annotations

from typing import Any

OTHER_SAMPLING: dict[str, Any] = {
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 3,
    "min_p": 0.1,
    "seed": 2,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "min_tokens": 2,
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "prompt_logprobs": 1,
}
"""A new sampling field has its row here; the tests of the wire, of the core's parameters and of cache keys use it."""
