"""Questions about a few plain sentences: who has what, where, how many, what it is called."""

from __future__ import annotations

import random

from training import lexicon as lx
from training import stories
from training.lexicon import article
from training.requests import QUESTION_FORMS, Task

# Each kind of sentence: its variants, and questions with their answers.
SCENES: list[tuple[list[str], list[tuple[list[str], str]]]] = [
    (
        [
            "{N} has {acol} {pet} named {M}.",
            "{N} has {acol} {pet} called {M}.",
            "{N} has {acol} {pet}. The {pet} is called {M}.",
            "{N} had {acol} {pet}. Its name was {M}.",
            "{N}'s {pet} is {col} and is called {M}.",
        ],
        [
            (
                [
                    "What is the {pet} called?",
                    "What is the name of the {pet}?",
                    "What is {N}'s {pet} called?",
                    "What is the {pet}'s name?",
                    "What's the name of the {pet}?",
                    "How is the {pet} called?",
                    "What is the name of {N}'s {pet}?",
                    "What did {N} call the {pet}?",
                ],
                "The {pet} is called {M}.",
            ),
            (
                [
                    "What colour is the {pet}?",
                    "What color is the {pet}?",
                    "What colour is {M}?",
                    "Which colour does the {pet} have?",
                ],
                "The {pet} is {col}.",
            ),
            (["Who has {apet}?", "Who has the {pet}?", "Whose {pet} is it?"], "{N} has {apet}."),
            (["Who is {M}?", "What is {M}?", "What kind of animal is {M}?"], "{M} is {acol} {pet}."),
            (
                ["What does {N} have?", "What animal does {N} have?", "Which pet does {N} have?"],
                "{N} has {acol} {pet}.",
            ),
        ],
    ),
    (
        ["{N} lives in {city}.", "{N} comes from {city}.", "{N} is from {city}."],
        [
            (
                ["Where does {N} live?", "Where is {N} from?", "Where does {N} come from?"],
                "{N} is from {city}.",
            ),
            (["Who lives in {city}?", "Who is from {city}?"], "{N} is from {city}."),
        ],
    ),
    (
        ["{N} went to the {place} and bought {n} {items}.", "{N} bought {n} {items} at the {place}."],
        [
            (["Where did {N} go?", "Where was {N}?"], "{N} went to the {place}."),
            (["What did {N} buy?", "What did {N} get?"], "{N} bought {n} {items}."),
            (["How many {items} did {N} buy?", "How many {items}?"], "{N} bought {n} {items}."),
            (["Who bought the {items}?", "Who went to the {place}?"], "{N} did."),
        ],
    ),
    (
        ["{N} and {F} are friends.", "{N} has a friend called {F}.", "{N}'s best friend is {F}."],
        [
            (
                ["Who is {N}'s friend?", "Who is the friend of {N}?", "What is the name of {N}'s friend?"],
                "{N}'s friend is {F}.",
            )
        ],
    ),
    (
        [
            "{N} has {arel} named {F}.",
            "{N}'s {rel} is called {F}.",
            "{F} is the {rel} of {N}.",
            "{N} has {arel} called {F}.",
        ],
        [
            (
                [
                    "Who is {N}'s {rel}?",
                    "What is {N}'s {rel} called?",
                    "What is the name of {N}'s {rel}?",
                    "What is the {rel} called?",
                ],
                "{N}'s {rel} is {F}.",
            )
        ],
    ),
    (
        [
            "{N} lost {acol} {thing} in the {place}. {F} found it.",
            "{N} lost {his} {col} {thing} in the {place}, and {F} found it.",
        ],
        [
            (["What did {N} lose?", "What was lost?"], "{N} lost {acol} {thing}."),
            (
                ["Where did {N} lose the {thing}?", "Where was the {thing} lost?", "Where was the {thing}?"],
                "{N} lost it in the {place}.",
            ),
            (["Who found it?", "Who found the {thing}?"], "{F} found it."),
            (["Who lost the {thing}?", "Who lost {acol} {thing}?"], "{N} lost the {thing}."),
            (["What colour is the {thing}?", "What color was the {thing}?"], "The {thing} is {col}."),
        ],
    ),
    (
        ["{N} gave {F} {acol} {thing}.", "{N} gave {acol} {thing} to {F}."],
        [
            (
                ["What did {N} give {F}?", "What did {F} get?", "What did {N} give to {F}?"],
                "{F} got {acol} {thing}.",
            ),
            (["Who got the {thing}?", "Who has the {thing} now?"], "{F} got the {thing}."),
            (["Who gave {F} the {thing}?", "Who gave the {thing} away?"], "{N} gave it to {F}."),
        ],
    ),
    (
        ["{N} is {n} years old and works as {ajob}.", "{N} is {ajob}. {She} is {n} years old."],
        [
            (["How old is {N}?", "What is {N}'s age?"], "{N} is {n} years old."),
            (["What does {N} do?", "What is {N}'s job?", "What is {N}?"], "{N} is {ajob}."),
        ],
    ),
    (
        ["{N} likes {food} but not {food2}.", "{N} loves {food}.", "{N}'s favourite food is {food}."],
        [
            (
                ["What does {N} like?", "What is {N}'s favourite food?", "What does {N} love?"],
                "{N} likes {food}.",
            ),
            (["Who likes {food}?", "Who loves {food}?"], "{N} likes {food}."),
        ],
    ),
    (
        [
            "The {col} {thing} is {where} the {spot}.",
            "There is {acol} {thing} {where} the {spot}.",
            "{N} put the {col} {thing} {where} the {spot}.",
        ],
        [
            (["Where is the {thing}?", "Where is the {col} {thing}?"], "The {thing} is {where} the {spot}."),
            (["What is {where} the {spot}?"], "The {col} {thing} is {where} the {spot}."),
            (["What colour is the {thing}?", "Which colour has the {thing}?"], "The {thing} is {col}."),
        ],
    ),
]


def scenes(r: random.Random) -> Task:
    """Questions about one to four plain sentences about different people."""
    parts: list[str] = []
    pairs: list[tuple[str, str]] = []
    for lines, questions in r.sample(SCENES, r.choice((1, 1, 2, 2, 3, 4))):
        slots = _slots(r)
        parts.append(r.choice(lines).format(**slots))
        pairs += [(r.choice(asks).format(**slots), answer.format(**slots)) for asks, answer in questions]
    r.shuffle(pairs)
    turns = pairs[: r.choice((1, 1, 1, 2, 3))]
    question = turns[0][0].lower() if r.random() < 0.05 else turns[0][0]
    turns[0] = (r.choice(QUESTION_FORMS).format(t=" ".join(parts), q=question), turns[0][1])
    return Task("qa_scenes", turns, exact=True)


def _slots(r: random.Random) -> dict[str, str]:
    name, pronoun = stories.pick_name(r)
    pet = r.choice((*lx.CREATURES, "parrot", "hamster", "pony", "kitten", "puppy"))
    colour, job, relative = r.choice(lx.COLOURS), r.choice(lx.PEOPLE), r.choice(RELATIVES)
    food, other = r.sample(lx.FOODS, 2)
    return {
        "N": name,
        "M": stories.pick_name(r)[0],
        "F": stories.pick_name(r)[0],
        "She": pronoun.capitalize(),
        "his": "her" if pronoun == "she" else "his",
        "pet": pet,
        "apet": article(pet),
        "col": colour,
        "acol": article(colour),
        "city": r.choice((*lx.CATEGORIES["cities"], *lx.CATEGORIES["countries"], lx.random_name(r))),
        "place": r.choice(lx.PLACES),
        "n": str(r.randint(2, 40)),
        "items": r.choice(lx.ITEMS),
        "rel": relative,
        "arel": article(relative),
        "thing": r.choice((r.choice(lx.OBJECTS), r.choice(lx.NOUNS))),
        "ajob": article(job),
        "food": food,
        "food2": other,
        "where": r.choice(("on", "under", "behind", "near", "in")),
        "spot": r.choice(SPOTS),
    }


RELATIVES = lx.words("sister brother mother father aunt uncle cousin neighbour teacher son daughter")
SPOTS = lx.words("table chair bed kitchen garden house box tree door cupboard shelf tower boat drawer desk")
