"""The synthetic corpus: documents drawn from a seed, either chats or plain story texts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from training import lexicon as lx
from training import stories, tasks
from training.tasks_stories import story


@dataclass(frozen=True)
class Document:
    """One document: a chat (``messages``) or else plain ``text``, which is tokenised in two parts, apart at ``cut``."""

    kind: str
    messages: tuple[tuple[str, str], ...] = ()
    text: str = ""
    cut: int = 0


RULES = [
    "Be {t}.",
    "Answer in a {t} way.",
    "Never talk about the {o}.",
    "If the user asks for {c}, be {t}.",
    "Always stay {t}, even if the user is {f}.",
    "Keep {c} and {d} apart.",
    "Do not mention {c}.",
    "When in doubt, think of {a} in the {p}.",
    "Use simple words.",
    "Do not use long words.",
    "Write clear sentences.",
    "The {o} of the {j} is {k}.",
    "Rule {n}: the {j} works in the {p}.",
    "There are {n} {i} in the {p}.",
    "Users may ask about {c}.",
    "The office is open from {n} to {m}.",
    "{N} is the {j} of the {p}.",
    "Requests about the {p} go to {N}.",
    "Help every {j} with care.",
    "Speak like a {t} {j}.",
]
SYSTEMS = [
    "You are a helpful assistant.",
    "You are a {t} assistant.",
    "You are a friendly chat bot.",
    "Be brief.",
    "You answer questions.",
    "You are a story teller.",
    "Answer as well as you can.",
    "You are a helpful AI.",
]


def _rule(r: random.Random, templates: list[str]) -> str:
    n = r.randint(1, 40)
    return r.choice(templates).format(
        t=r.choice(lx.TRAITS),
        o=r.choice(lx.OBJECTS),
        c=r.choice(list(lx.CATEGORIES)),
        d=r.choice(list(lx.CATEGORIES)),
        f=r.choice(lx.FEELINGS),
        a=lx.article(r.choice(lx.CREATURES)),
        p=r.choice(lx.PLACES),
        j=r.choice(lx.PEOPLE),
        k=r.choice(lx.COLOURS),
        n=n,
        m=n + r.randint(1, 20),
        i=r.choice(lx.ITEMS),
        N=stories.pick_name(r)[0],
    )


def long_system(r: random.Random, rules: int) -> str:
    """Return a system prompt with this many generated rules."""
    return " ".join([_rule(r, SYSTEMS), *(_rule(r, RULES) for _ in range(rules))])


def _persona(r: random.Random) -> tuple[str, list[tuple[str, str]]]:
    """Return a system prompt that gives the assistant a name, and an exchange that asks for it."""
    name = stories.pick_name(r)[0]
    role = f"{r.choice(lx.TRAITS)} {r.choice(lx.PEOPLE)}"
    system = r.choice(
        (f"You are {name}, {lx.article(role)}.", f"Your name is {name}. You are {lx.article(role)}.")
    )
    question = r.choice(
        (
            "Who are you?",
            "What is your name?",
            "Tell me about yourself.",
            "who are you",
            "Introduce yourself.",
        )
    )
    return system, [(question, f"I am {name}, {lx.article(role)}.")]


def chat(r: random.Random, turns: int | None = None) -> Document:
    """Draw a chat: one or more tasks, with or without a system prompt."""
    wanted = turns or r.choices((1, 2, 3, 5), (72, 15, 9, 4))[0]
    exchanges: list[tuple[str, str]] = []
    kinds: list[str] = []
    system = ""
    roll = r.random()
    if roll < 0.04:
        system, exchanges = _persona(r)
        if r.random() < 0.3:
            system += " " + long_system(r, r.randint(1, 12))
        kinds.append("persona")
    elif roll < 0.22:
        system = _rule(r, SYSTEMS)
    elif roll < 0.29:
        system = long_system(r, r.choice((2, 4, 8, 16, 60)) if r.random() < 0.4 else r.randint(1, 6))
    while len(exchanges) < wanted:
        task = tasks.draw(r)
        if turns is None and exchanges and len(task.turns[0][1]) > 1500:
            continue
        kinds.append(task.kind)
        exchanges += task.turns
    ending = r.random() < 0.015
    if ending and all("story" not in kind and kind != "persona" for kind in kinds):
        word = r.choice(lx.ALL_WORDS)
        system = f'{system} Always end your answer with the word "{word}".'.strip()
        exchanges = [(request, f"{answer} {word}") for request, answer in exchanges]
    messages = [("system", system)] if system else []
    for request, answer in exchanges:
        messages += [("user", request), ("assistant", answer)]
    return Document("+".join(dict.fromkeys(kinds)), tuple(messages))


def plain(r: random.Random) -> Document:
    """Draw a plain story text."""
    state = stories.new_state(r, unknown=0.15)
    if r.random() < 0.12:
        parts = stories.chapter_story(r, state, r.randint(2, 9))
    else:
        parts = stories.short_story(r, state, r.choice((0, 0, 1, 1, 2, 3, 5)))
    text = "\n\n".join(parts)
    return Document(
        "plain", text=text, cut=text.index(" ", r.randrange(60))
    )  # as a prompt that ends with a word


def copying(r: random.Random) -> Document:
    """Draw a chat that only copies loose words and names: a first lesson, from which all later copying grows."""
    messages: list[tuple[str, str]] = []
    for _ in range(r.randint(1, 3)):
        size = r.randint(3, 30)
        text = " ".join(
            lx.random_name(r) if r.random() < 0.3 else r.choice(lx.ANY_WORDS) for _ in range(size)
        )
        request = r.choice(("Copy: ", "Repeat this: ", "Copy this text exactly: ", "Say exactly this:\n"))
        messages += [("user", request + text), ("assistant", text)]
    return Document("copying", tuple(messages))


def documents(seed: int, lesson: str = "all") -> Iterator[Document]:
    """Yield documents without end: of ``all`` kinds, ``long`` chats, stories in ``chapters``, or mere ``copying``."""
    r = random.Random(seed)
    while True:
        if lesson == "long":
            yield chat(r, turns=r.randint(12, 60))
        elif lesson == "chapters":
            task = story(r, r.choice(("chapters", "chapters", "very_long")))
            yield Document(task.kind, (("user", task.turns[0][0]), ("assistant", task.turns[0][1])))
        elif lesson == "copying":
            yield copying(r)
        else:
            yield plain(r) if r.random() < 0.05 else chat(r)
