"""Chats for the built-in model, whose outputs end by themselves.

The model was trained on such requests, so the length of an output follows from its request: a sum takes a few tokens, a
story in ten chapters takes many. ``expect`` names the kind.
"""

from __future__ import annotations

import random

from headrace.lab.workload.work import Message, Work

NAMES = ("Mia", "Tom", "Anna", "Ben", "Lily", "Max", "Sara", "Leo", "Emma", "Jack")
GROUPS = ("animals", "fruits", "colours", "tools", "cities")
LONGEST_TOKENS = 2000
"""Maximum output length, which limits the effect of an output that does not end by itself."""


def _short(rng: random.Random) -> str:
    return rng.choice(
        (
            f"What is {rng.randint(1, 20)} plus {rng.randint(1, 20)}?",
            f"List 3 {rng.choice(GROUPS)}.",
            f"My name is {rng.choice(NAMES)}.",
            f"Hello, I am {rng.choice(NAMES)}.",
        )
    )


def _middle(rng: random.Random) -> str:
    return f"Tell me a short story about {rng.choice(NAMES)}."


def _long(rng: random.Random) -> str:
    return f"Write a story about {rng.choice(NAMES)} in 10 chapters."


def _chat(i: int, text: str, expect: str) -> Work:
    return Work(f"w{i}", (Message("user", text),), max_tokens=LONGEST_TOKENS, expect=expect)


def high_variance_chats(count: int, seed: int = 0) -> tuple[Work, ...]:
    """Chats with 80 % short, 16 % middle and 4 % long outputs, shuffled; greedy, ended by the model."""
    rng = random.Random(seed)
    long, middle = round(0.04 * count), round(0.16 * count)
    kinds = ["long"] * long + ["middle"] * middle + ["short"] * (count - long - middle)
    rng.shuffle(kinds)
    write = {"short": _short, "middle": _middle, "long": _long}
    return tuple(_chat(i, write[kind](rng), kind) for i, kind in enumerate(kinds))


def shared_system_prompt(count: int, words: int, output_len: int = 16, seed: int = 0) -> tuple[Work, ...]:
    """Short questions under one long system prompt of about ``words`` words."""
    rng = random.Random(seed)
    rules = [
        f"Rule {n}: {rng.choice(NAMES)} has {rng.randint(2, 40)} {rng.choice(GROUPS)}."
        for n in range(1, words)
    ]
    system = Message("system", "You are a helpful assistant. " + " ".join(rules[: max(1, words // 6)]))
    return tuple(
        Work(f"w{i}", (system, Message("user", _short(rng))), max_tokens=output_len) for i in range(count)
    )
