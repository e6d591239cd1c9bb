"""How requests are phrased, and the shape of a task."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from tools.builtin_model import lexicon as lx
from tools.builtin_model import stories

Turn = tuple[str, str]


@dataclass(frozen=True)
class Task:
    """Exchanges of one kind; ``exact`` says that the answers are determined by the requests."""

    kind: str
    turns: list[Turn]
    exact: bool = False
    name: str = ""


PREFIXES = [
    "Please ",
    "please ",
    "Can you ",
    "Could you ",
    "Could you please ",
    "Hey, ",
    "Now ",
    "I want you to ",
    "Hi! ",
    "Hello, ",
    "Ok, ",
    "Would you ",
    "I would like you to ",
    "So, ",
    "Quick: ",
    "um, ",
]
SUFFIXES = [" please", ", please", " thanks", " for me", " now", " :)", " Thank you!", "!", "?", "..."]


def say(r: random.Random, templates: list[str], imperative: bool = True, /, **slots: Any) -> str:
    """Fill one of the templates, in one of many tones: lower case, polite, without a full stop, ..."""
    text = r.choice(templates)
    style = r.random()
    if style < 0.25:
        text = text.lower()
    elif style < 0.28:
        text = text if "{" in text else text.upper()
    end = text[-1] if text[-1] in ".?!" else ""
    body = text[: len(text) - len(end)]
    if imperative and r.random() < 0.35:
        body = r.choice(PREFIXES) + body[0].lower() + body[1:]
    if r.random() < 0.2:
        end = r.choice(SUFFIXES)
    elif r.random() < 0.3:
        end = ""
    return (
        (body + end).format(**slots).replace(" a extremely", " an extremely").replace(" a eight", " an eight")
    )


def asked_name(r: random.Random) -> tuple[str, str, str]:
    """Return a name as it is asked for, as it must be answered, and its pronoun."""
    name, pronoun = stories.pick_name(r)
    known = name in lx.SHE_NAMES or name in lx.HE_NAMES
    return (name.lower() if known and r.random() < 0.15 else name), name, pronoun


def code_name(r: random.Random) -> str:
    """Return a name in snake case."""
    return "_".join(r.choice(lx.ALL_WORDS).lower() for _ in range(r.randint(1, 3)))


def indent(text: str, width: int = 4) -> str:
    """Indent every line of a text."""
    return "\n".join(" " * width + line for line in text.split("\n"))


def any_sentence(r: random.Random) -> str:
    """Return a loose sentence, or noise, for copying and editing."""
    roll = r.random()
    if roll < 0.35:
        return (
            f"{r.choice((stories.pick_name(r)[0], 'The ' + r.choice(lx.CREATURES)))} {r.choice(lx.VERBS_PAST)} "
            f"the {r.choice(lx.TRAITS)} {r.choice(lx.CREATURES)} in the {r.choice(lx.PLACES)}."
        )
    if roll < 0.65:
        return " ".join(r.choice(lx.ALL_WORDS) for _ in range(r.randint(2, 10)))
    if roll < 0.8:
        return " ".join(lx.random_name(r) for _ in range(r.randint(1, 6)))
    return stories.qa_story(r, stories.new_state(r))[0]


def with_text(r: random.Random, requests: list[str], text: str) -> str:
    """Return a request that is followed by the text that it is about."""
    request = say(r, requests)
    if request[-1] in ".!" or request.endswith("..."):
        request = request.rstrip(".!")
    glue = r.choice((": {}", ":\n{}", ":\n\n{}", ': "{}"', ":\n```\n{}\n```", ": {}"))
    return request + glue.replace("{}", text, 1)
