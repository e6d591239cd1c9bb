"""Tasks about stories: telling, questions, summaries and continuations."""

from __future__ import annotations

import random

from training import lexicon as lx
from training import stories
from training.lexicon import article
from training.requests import QUESTION_FORMS, Task, Turn, asked_name, say, with_text

STORY = [
    "Tell me a {size}story about {who}.",
    "Write a {size}story about {who}.",
    "Tell a {size}story about {who}.",
    "I want a {size}story about {who}.",
    "Make up a {size}story about {who}.",
    "A {size}story about {who}.",
    "Give me a {size}story about {who}.",
    "Write me a {size}tale about {who}.",
    "{size}story about {who}",
    "Tell me about {who} in a {size}story.",
    "Create a {size}story with {who}.",
    "Can I have a {size}story about {who}?",
    "I would like to hear a {size}story about {who}.",
    "Write a {size}fairy tale about {who}.",
    "Please tell me a {size}story about {who}.",
    "Tell me the {size}story of {who}.",
    "Write a {size}bedtime story about {who}.",
    "Tell me another {size}story about {who}.",
    "Tell us a {size}story about {who}.",
]
STORY_FREE = [
    "Tell me a {size}story.",
    "Write a {size}story.",
    "A {size}story.",
    "Make up a {size}story.",
    "I want to hear a {size}story.",
    "Do you know a {size}story?",
    "Tell a {size}tale.",
    "Write me a {size}bedtime story.",
    "Tell me a {size}fairy tale.",
    "Say a {size}story",
]
SIZES: dict[str, list[str]] = {
    "short": ["short ", "small ", "little ", "brief ", "quick ", "very short "],
    "medium": ["", "", "", "nice ", "good ", "new ", "funny ", "happy "],
    "long": ["long ", "longer ", "detailed ", "big "],
    "very_long": [
        "very long ",
        "really long ",
        "very, very long ",
        "extremely long ",
        "huge ",
        "long multi-chapter ",
    ],
}


def story(r: random.Random, size: str | None = None) -> Task:
    """A story about somebody, in one of four sizes, or in a given number of chapters or sentences."""
    size = (
        size
        or r.choices(("tiny", "short", "medium", "long", "very_long", "chapters"), (12, 40, 26, 8, 6, 8))[0]
    )
    asked, name, pronoun = asked_name(r)
    kind = thing = place = friend = None
    who, tail = asked, ""
    free = r.random() < 0.12
    unnamed = free
    if not free:
        roll = r.random()
        if roll < 0.3:
            own = lx.GIRL_KINDS if pronoun == "she" else lx.BOY_KINDS
            kind = r.choice(
                (r.choice(own), r.choice(lx.PEOPLE), r.choice(lx.CREATURES), r.choice(lx.CREATURES))
            )
            who = r.choice(
                (
                    f"{article(kind)} called {asked}",
                    f"{article(kind)} named {asked}",
                    f"{asked} the {kind}",
                    f"{asked}, {article(kind)}",
                )
            )
        elif roll < 0.45:
            kind = r.choice((*lx.CREATURES, *lx.PEOPLE))
            unnamed = True
            who = r.choice((article(kind), article(f"{r.choice(lx.TRAITS)} {kind}"), f"the {kind}"))
        extra = r.random()
        if extra < 0.15:
            thing = r.choice((r.choice(lx.OBJECTS), r.choice(lx.NOUNS)))
            tail = r.choice(
                (
                    f" and a lost {thing}",
                    f" and {article(thing)}",
                    f" and the {thing}",
                    f" who loses {article(thing)}",
                )
            )
        elif extra < 0.25:
            place = f"{r.choice(lx.PLACE_ADJ)} {r.choice(lx.PLACES)}"
            tail = r.choice((f" in {article(place)}", f" and {article(place)}"))
        elif extra < 0.35:
            friend = stories.pick_name(r)[0]
            tail = f" and {friend}" if friend != name else ""
            friend = friend if tail else None
    if unnamed:  # names that the answer invents are mostly common ones
        name, pronoun = stories.pick_name(r, 0.1)
    state = stories.new_state(r, name, pronoun, kind, thing, place, friend, unknown=0.1)
    words = {"who": who + tail}
    if size in ("tiny", "chapters"):
        n = r.randint(1, 3) if size == "tiny" else r.randint(2, 10)
        unit = "sentence" if size == "tiny" else "chapter"
        number = r.choice((str(n), lx.NUMBER_WORDS[n]))
        about = "" if free else " about {who}"
        plural = unit if n == 1 else unit + "s"
        request = say(
            r,
            [
                f"Tell me a story{about} in {number} {plural}.",
                f"Write a {number}-{unit} story{about}.",
                f"Write a story{about} with {number} {plural}.",
                f"A story{about} in {number} {plural}.",
                f"Write {number} {plural}{about}.",
            ],
            **words,
        )
        if size == "tiny":
            return Task(
                "story_tiny", [(request, stories.tiny_story(r, state, n))], name="" if unnamed else name
            )
        text = "\n\n".join(stories.chapter_story(r, state, n))
        return Task("story_chapters", [(request, text)], name="" if unnamed else name)
    request = say(r, STORY_FREE if free else STORY, size=r.choice(SIZES[size]), **words)
    if size == "very_long":
        parts = stories.chapter_story(r, state, r.randint(11, 14))
    else:
        low, high = {"short": (0, 0), "medium": (1, 2), "long": (4, 6)}[size]
        parts = stories.short_story(r, state, r.randint(low, high))
    return Task(f"story_{size}", [(request, "\n\n".join(parts))], name="" if unnamed else name)


def qa(r: random.Random) -> Task:
    """Questions about a story in the prompt."""
    state = stories.new_state(r)
    text, questions = stories.qa_story(r, state)
    questions = questions[: r.randint(1, 6)]
    turns: list[Turn] = []
    for i, (question, answer) in enumerate(questions):
        question = question.lower() if r.random() < 0.08 and state.name not in question else question
        if i == 0:
            question = r.choice(QUESTION_FORMS).format(t=text, q=question)
        turns.append((question, answer))
    return Task("qa", turns, exact=True)


def summarise(r: random.Random) -> Task:
    """A one-sentence summary, or the rest, of a story in the prompt."""
    state = stories.new_state(r)
    parts = stories.short_story(r, state, r.choice((0, 0, 0, 1, 2)))
    text = "\n\n".join(parts)
    if r.random() < 0.6:
        request = with_text(
            r,
            [
                "Summarize this story in one sentence.",
                "Summarise this story.",
                "Summarize.",
                "Give me a short summary of this story.",
                "Sum up this text.",
            ],
            text,
        )
        return Task("summary", [(request, stories.summary(r, state))], exact=True)
    sentences = text.split(". ")
    cut = r.randint(2, max(2, len(sentences) - 2))
    head, tail = ". ".join(sentences[:cut]) + ".", ". ".join(sentences[cut:])
    request = with_text(
        r,
        [
            "Continue this story.",
            "Continue.",
            "Finish this story.",
            "What happens next in this story?",
            "Write the end of this story.",
        ],
        head,
    )
    return Task("continue", [(request, tail)], name=state.name)
