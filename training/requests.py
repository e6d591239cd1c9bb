"""How requests are phrased, and the shape of a task."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from training import lexicon as lx
from training import stories

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


def _noun(r: random.Random) -> str:
    return r.choice((f"{r.choice(lx.ADJECTIVES)} ", "")) + r.choice(lx.NOUNS)


def _scene(r: random.Random) -> str:
    who = r.choice((f"The {_noun(r)}", f"{lx.article(_noun(r))}".capitalize(), stories.pick_name(r)[0]))
    text = f"{who} {r.choice(lx.VERBS)} {r.choice(lx.PREPOSITIONS)} the {_noun(r)}"
    text = text.lower() if r.random() < 0.3 else text
    return text + r.choice((".", ".", "", "!"))


def any_sentence(r: random.Random) -> str:
    """Return a loose sentence, or noise, for copying and editing."""
    roll = r.random()
    if roll < 0.35:
        return _scene(r)
    if roll < 0.5:
        return (
            f"{r.choice((stories.pick_name(r)[0], 'The ' + r.choice(lx.CREATURES)))} {r.choice(lx.VERBS_PAST)} "
            f"the {r.choice(lx.TRAITS)} {r.choice(lx.CREATURES)} in the {r.choice(lx.PLACES)}."
        )
    if roll < 0.83:
        text = " ".join(r.choice(lx.ANY_WORDS) for _ in range(r.randint(1, 10)))
        return r.choice((text, text, text.capitalize() + r.choice((".", "!", "?", ""))))
    if roll < 0.93:
        return " ".join(lx.random_name(r) for _ in range(r.randint(1, 6)))
    return stories.qa_story(r, stories.new_state(r))[0]


QUESTION_FORMS = [  # a text {t} and a question {q} about it
    "{t}\n\n{q}",
    "{t}\n{q}",
    "{t} {q}",
    "{t} {q}",
    "Story: {t}\nQuestion: {q}",
    "Story: {t} Question: {q}",
    "Story: {t} {q}",
    "Text: {t}\n\n{q}",
    "Text: {t} Question: {q}",
    "Context: {t}\nQuestion: {q}",
    "Context: {t}\n\nQuestion: {q}\nAnswer:",
    "Read this story: {t}\n\n{q}",
    "Read this: {t} {q}",
    "{q}\n\n{t}",
    "Here is a story.\n{t}\n\n{q}",
    "Here is a story: {t} {q}",
    "Answer the question about the story.\n\n{t}\n\nQuestion: {q}",
    "{t} Question: {q}",
    "{t}\nQ: {q}",
    "{t}\nQ: {q}\nA:",
]
GLUES = [
    ": {}",
    ": {}",
    ": {}",
    ":\n{}",
    ":\n\n{}",
    ': "{}"',
    ': "{}"',
    ":\n```\n{}\n```",
    " {}",
    ' "{}"',
    ": '{}'",
    "\n{}",
]


def with_text(r: random.Random, requests: list[str], text: str) -> str:
    """Return a request that is followed by the text that it is about."""
    request = say(r, requests)
    if request[-1] in ".!" or request.endswith("..."):
        request = request.rstrip(".!")
    return request + r.choice(GLUES).replace("{}", text, 1)
