"""Workloads of random token ids with fixed output lengths: every engine does exactly the same amount of work.

`lab.workload.chats` has requests with text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from headrace.lab.workload.lengths import HIGH_VARIANCE, log_normal, mixture
from headrace.lab.workload.work import Work

VOCABULARY = range(10, 500)
"""Token ids to draw from: above the usual special tokens, and within the vocabulary of tiny tokenizers."""


def _drawn(
    prompts: Sequence[int], answers: Sequence[int], vocabulary: range, rng: random.Random
) -> list[Work]:
    return [
        Work(f"w{i}", tuple(rng.choices(vocabulary, k=prompt)), max_tokens=answer, ignore_eos=True)
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]


def fixed_lengths(
    count: int, input_len: int, output_len: int, seed: int = 0, vocabulary: range = VOCABULARY
) -> tuple[Work, ...]:
    """Prompts of equal length, and outputs of equal length."""
    return tuple(_drawn([input_len] * count, [output_len] * count, vocabulary, random.Random(seed)))


def log_normal_lengths(
    count: int,
    input_len: int,
    output_len: int,
    sigma: float = 0.8,
    seed: int = 0,
    vocabulary: range = VOCABULARY,
) -> tuple[Work, ...]:
    """Log-normal lengths with these medians, at most eight times the median."""
    rng = random.Random(seed)
    prompts = log_normal(count, input_len, sigma, 1, 8 * input_len, rng)
    answers = log_normal(count, output_len, sigma, 1, 8 * output_len, rng)
    return tuple(_drawn(prompts, answers, vocabulary, rng))


def high_variance(
    count: int, input_len: int = 24, seed: int = 0, vocabulary: range = VOCABULARY
) -> tuple[Work, ...]:
    """80 % of outputs under 30 tokens and 4 % over 800, the rest between; prompts of equal length."""
    rng = random.Random(seed)
    return tuple(_drawn([input_len] * count, mixture(count, HIGH_VARIANCE, rng), vocabulary, rng))


def shared_prefix(
    count: int,
    prefix_len: int = 1000,
    input_len: int = 32,
    output_len: int = 16,
    seed: int = 0,
    vocabulary: range = VOCABULARY,
) -> tuple[Work, ...]:
    """Prompts that begin with the same ``prefix_len`` tokens, as under one system prompt."""
    rng = random.Random(seed)
    prefix = tuple(rng.choices(vocabulary, k=prefix_len))
    return tuple(
        Work(f"w{i}", prefix + tuple(rng.choices(vocabulary, k=input_len)), output_len, ignore_eos=True)
        for i in range(count)
    )


def long_among_decoders(
    decoders: int = 16,
    output_len: int = 256,
    long_len: int = 4000,
    arrival: float = 1.0,
    seed: int = 0,
    vocabulary: range = VOCABULARY,
) -> tuple[Work, ...]:
    """Streams that decode, and one long prompt that arrives ``arrival`` seconds later.

    The long prompt is last, with ``intruder`` as ``expect``; the others have ``stream``.
    """
    rng = random.Random(seed)
    streams = [
        Work(f"stream{i}", tuple(rng.choices(vocabulary, k=16)), output_len, 0.0, True, expect="stream")
        for i in range(decoders)
    ]
    intruder = tuple(rng.choices(vocabulary, k=long_len))
    return (*streams, Work("intruder", intruder, 8, arrival, ignore_eos=True, expect="intruder"))
