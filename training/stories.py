"""Story grammar: a story keeps one state (hero, home, friend, lost thing, ...) from its first to its last line."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from training import lexicon as lx
from training.lexicon import article


@dataclass
class StoryState:
    """Everything that a story must keep straight, and that questions can ask about."""

    name: str
    pronoun: str
    kind: str
    trait: str
    home: str
    friend: str
    friend_kind: str
    thing: str
    colour: str
    place: str
    items: str
    count: int
    feeling: str
    lesson: str
    used: set[int] = field(default_factory=set)

    @property
    def slots(self) -> dict[str, str]:
        """Return the slots which the sentence templates may name."""
        she = self.pronoun
        her, his, herself = {
            "she": ("her", "her", "herself"),
            "he": ("him", "his", "himself"),
        }[she]
        return {
            "N": self.name,
            "she": she,
            "She": she.capitalize(),
            "him": her,
            "his": his,
            "His": his.capitalize(),
            "self": herself,
            "kind": self.kind,
            "akind": article(self.kind),
            "trait": self.trait,
            "atrait": article(self.trait),
            "home": self.home,
            "ahome": article(self.home),
            "aplace": article(self.place),
            "Afkind": article(self.friend_kind).capitalize(),
            "F": self.friend,
            "fkind": self.friend_kind,
            "afkind": article(self.friend_kind),
            "thing": self.thing,
            "col": self.colour,
            "acol": article(self.colour),
            "place": self.place,
            "items": self.items,
            "n": str(self.count),
            "feeling": self.feeling,
            "lesson": self.lesson,
        }


def pick_name(r: random.Random, invented: float = 0.3) -> tuple[str, str]:
    """Return a name, known or (with the probability ``invented``) made up, with its pronoun."""
    roll = r.random()
    if roll < invented:
        name = lx.random_name(r)
        return name, "she" if name[-1] in "aeiy" else "he"
    if roll < invented + (1 - invented) / 2:
        return r.choice(lx.SHE_NAMES), "she"
    return r.choice(lx.HE_NAMES), "he"


def new_state(
    r: random.Random,
    name: str | None = None,
    pronoun: str | None = None,
    kind: str | None = None,
    thing: str | None = None,
    place: str | None = None,
    friend: str | None = None,
    unknown: float = 0.4,
) -> StoryState:
    """Draw a story's state; the given fields are kept, other names are made up as often as ``unknown`` says."""
    if name is None:
        name, pronoun = pick_name(r, unknown)
    pronoun = pronoun or r.choice(("she", "he"))
    if kind is None:
        own = lx.GIRL_KINDS if pronoun == "she" else lx.BOY_KINDS
        kind = r.choice((r.choice(own), r.choice(lx.PEOPLE), r.choice(lx.CREATURES)))
    if friend is None:
        friend = pick_name(r, unknown)[0]
        while friend == name:
            friend = pick_name(r, unknown)[0]
    home, where = r.sample(lx.PLACE_ADJ, 2)
    return StoryState(
        name=name,
        pronoun=pronoun,
        kind=kind,
        trait=r.choice(lx.TRAITS),
        home=f"{home} {r.choice(lx.HOMES)}",
        friend=friend,
        friend_kind=r.choice([c for c in lx.CREATURES if c != kind]),
        thing=thing or r.choice(lx.OBJECTS),
        colour=r.choice(lx.COLOURS),
        place=place or f"{where} {r.choice(lx.PLACES)}",
        items=r.choice(lx.ITEMS),
        count=r.randint(2, 20),
        feeling=r.choice(lx.FEELINGS),
        lesson=r.choice(lx.LESSONS),
    )


OPENINGS = [
    "Once upon a time there was {atrait} {kind} called {N} who lived in {ahome}.",
    "Once upon a time, in {ahome}, there lived {atrait} {kind} named {N}.",
    "In {ahome} lived {atrait} {kind}. {His} name was {N}.",
    "{N} was {atrait} {kind} who lived in {ahome}.",
    "Long ago, {atrait} {kind} named {N} lived in {ahome}.",
    "There was once {akind} called {N}. {She} was {trait} and lived in {ahome}.",
    "Everyone in the {home} knew {N}, the {trait} {kind}.",
]
WANTS = [
    "{N} had {acol} {thing}, and {she} loved it more than anything else.",
    "More than anything, {N} loved {his} {col} {thing}.",
    "{His} greatest treasure was {acol} {thing}.",
    "{N} kept {acol} {thing} under {his} bed.",
]
LOSSES = [
    "{time}, the {col} {thing} was gone.",
    "{time}, {she} woke up and could not find the {col} {thing}.",
    "{time}, {weather}, and a crow flew away with the {col} {thing}.",
    "{time}, a thief came and took the {col} {thing}.",
    "{time}, {she} dropped the {col} {thing} into the river and the water carried it away.",
    "{time}, the wind carried the {col} {thing} far away.",
]
DEPARTURES = [
    "{N} was sad, but {she} did not give up. {She} packed some {food} and went out to look for it.",
    '"I will find it," said {N}, and {she} set out at once.',
    "{N} put on {his} boots, took some {food} and began to search.",
    "{She} looked everywhere in the {home}, but it was not there. So {N} left home to search for it.",
    '"It cannot be far," {she} thought, and {she} walked out into the world.',
]
MEETINGS = [
    'On the way {she} met {afkind} called {F}. "I will help you," said {F}.',
    "Soon {she} met {F} the {fkind}, and they walked on together.",
    'Near the old road sat {afkind}. "My name is {F}," it said. "May I come with you?" {N} was glad.',
    'There {she} met {F}, {afkind} with bright eyes. {F} said, "Two can see more than one."',
]
FINDS = [
    "At last they came to {aplace}. There, behind a stone, lay the {col} {thing}.",
    "In {aplace} they found the {col} {thing} at last.",
    "They searched in {aplace} until the evening, and then {F} saw it: the {col} {thing}!",
    "Far away, in {aplace}, the {col} {thing} was waiting for {him}.",
]
EXTRAS = [
    "Next to it {N} found {n} {items}.",
    "{N} also found {n} {items} and put them into {his} bag.",
    "{F} found {n} {items} there, and they shared them.",
]
RETURNS = [
    "{N} was {happy}. Together they went back to the {home}.",
    '"Thank you, {F}," said {N}. Then they walked home to the {home}.',
    "{N} took the {thing} home, and {F} came to live in the {home} too.",
    "{N} laughed, {F} danced, and they carried the {thing} home.",
]
ENDINGS = [
    "From that day on, {N} knew that {lesson}.",
    "And {N} never forgot that {lesson}.",
    "{N} and {F} stayed friends for ever.",
    "That night {N} slept well, with the {thing} beside {him}.",
    "And so {N} learned that {lesson}.",
    "They lived happily ever after.",
]
# An episode is a list of steps; each step is a list of variants. Lower-case slots x1.. are drawn per episode.
EPISODES: list[tuple[str, list[list[str]]]] = [
    (
        "The {Creature}",
        [
            [
                "In {aadj} {spot} {she} met {acreature}.",
                "{Acreature} stood in the middle of the road.",
                "Suddenly {acreature} came out of the {spot}.",
            ],
            [
                '"I am so {feel}," said the {creature}.',
                'The {creature} looked {feel}. "Have you any {food}?" it asked.',
                '"Nobody talks to me," said the {creature} in a low voice.',
            ],
            [
                "{N} sat down and listened to the {creature} for a long time.",
                "{N} gave the {creature} some {food}, and they ate together.",
                "{N} told the {creature} a joke, and soon it laughed.",
            ],
            [
                '"Go to the {spot2}," said the {creature}. "There you will learn more."',
                "To thank {him}, the {creature} gave {him} {acolour2} {object2}.",
                'The {creature} smiled. "You are {trait}, {N}. I will not forget you."',
            ],
        ],
    ),
    (
        "The {Spot}",
        [
            [
                "The next day {she} came to {aadj} {spot}.",
                "After a long walk {N} reached {aadj} {spot}.",
                "Behind the hill lay {aadj} {spot}.",
            ],
            [
                "There was no way around it.",
                "It was so quiet that {N} could hear {his} own heart.",
                "An old sign said: Do not enter.",
            ],
            [
                "{N} was afraid, but {she} went on step by step.",
                "{N} counted to {k} and then began to run.",
                "{N} sang a song to feel less alone.",
            ],
            [
                "When {she} came out on the other side, {weather}.",
                "It took {k} hours, and then {she} was through.",
                "On the other side {she} found {k} {items2} and ate some {food}.",
            ],
        ],
    ),
    (
        "The Storm",
        [
            [
                "In the afternoon the sky turned black.",
                "A storm came over the {spot}.",
                "Then the storm began.",
            ],
            [
                "The wind tore at {his} coat, and the rain was cold.",
                "Lightning struck a tree only {k} steps away.",
                "The thunder was so loud that the ground shook.",
            ],
            [
                "{N} crept under a rock and waited.",
                "{N} found an empty hut and closed the door.",
                "An old {person} called {him} into a warm house.",
            ],
            [
                "In the morning the storm was over, and the world smelled fresh.",
                "{She} slept deeply, and when {she} woke, {weather}.",
                "They drank tea and told stories until the rain stopped.",
            ],
        ],
    ),
    (
        "The Market",
        [
            [
                "The road led {him} to a market.",
                "In the next town there was a great market.",
                "{N} came to a market full of people.",
            ],
            [
                "{Aperson} sold {items2} and {food}.",
                "There were {k} tables with {items2} and old books.",
                '{Aperson} shouted: "Fresh {items2}! Only {k} coins!"',
            ],
            [
                "{N} asked everyone about the {thing}.",
                '"Have you seen {acol} {thing}?" asked {N}.',
                "{N} showed a drawing of the {col} {thing}.",
            ],
            [
                '"Yes," said the {person}. "I saw it on the road to the {spot}."',
                '"No," said the {person}, "but ask the {creature} at the {spot}."',
                "Nobody had seen it, but a child gave {him} {acolour2} {object2} for luck.",
            ],
        ],
    ),
    (
        "The Riddle",
        [
            [
                "A gate stood in the way, and on it sat {acreature}.",
                "{Acreature} guarded the bridge.",
                "At the door of a tower waited {acreature}.",
            ],
            [
                '"Answer my riddle and you may pass," said the {creature}.',
                '"Only those who think may go on," said the {creature}.',
            ],
            [
                '"What has a face and two hands, but no legs?" {N} thought hard. "A clock," {she} said.',
                '"What grows when you share it?" {N} smiled. "Joy," {she} said.',
                '"What is full of holes but still holds water?" "A sponge," said {N} at once.',
                '"What goes up but never comes down?" {N} thought for a while. "Your age," {she} said.',
            ],
            [
                '"That is right," said the {creature}, and it let {him} pass.',
                "The {creature} bowed and opened the way.",
                "The {creature} clapped and gave {him} some {food}.",
            ],
        ],
    ),
    (
        "The Night",
        [
            [
                "When night came, {N} made a small fire.",
                "It grew dark, and {N} lay down under a tree.",
                "At night the stars came out one by one.",
            ],
            [
                "{She} thought of the {home} and felt {feel}.",
                "{She} ate some {food} and looked at the moon.",
                "Far away {she} heard {sound}.",
            ],
            [
                "In a dream {she} saw the {col} {thing} in {aadj} {spot}.",
                "{Acreature} came to the fire and sat down without a word.",
                "A falling star crossed the sky, and {N} made a wish.",
            ],
            [
                "In the morning {she} went on.",
                "When the sun rose, {N} was ready again.",
                "Then {she} slept until dawn.",
            ],
        ],
    ),
    (
        "The {Object2}",
        [
            [
                "On the ground {N} saw {acolour2} {object2}.",
                "Under a tree lay {acolour2} {object2}.",
                "Something shone in the grass. It was {acolour2} {object2}.",
            ],
            [
                "It was not {hers}, so {she} looked for its owner.",
                "{N} picked it up and cleaned it.",
                '"Somebody must miss it," {she} thought.',
            ],
            [
                "After {k} hours {she} met {aperson} who was crying.",
                "In the {spot} {aperson} was looking for something.",
                "{Aperson} came running along the road.",
            ],
            [
                '"My {object2}!" cried the {person}. "How can I thank you?"',
                "The {person} was so happy that {she2} gave {N} {k} {items2}.",
                "The {person} hugged {him} and told {him} the way to the {spot2}.",
            ],
        ],
    ),
    (
        "The River",
        [
            ["A river blocked the way.", "Soon {N} stood at a wide river.", "The path ended at a river."],
            ["There was no bridge, and the water was fast.", "The water was as cold as ice."],
            [
                "{N} built a raft from {k} logs.",
                "{Acreature} showed {him} a place with flat stones.",
                "{Aperson} with a small boat took {him} across.",
            ],
            [
                "{She} got wet, but {she} reached the other side.",
                "On the other side {she} dried {his} clothes in the sun.",
                "The crossing took {k} minutes, and {N} was {feel} when it was over.",
            ],
        ],
    ),
    (
        "The Song",
        [
            [
                "From the {spot} came a soft song.",
                "{N} heard music and followed it.",
                "Somebody was singing in the {spot}.",
            ],
            [
                "It was {aperson} with a violin.",
                "It was {acreature} with a small drum.",
                "{K} children danced in a circle.",
            ],
            [
                "{N} sang along, although {she} did not know the words.",
                "{N} danced until {his} feet hurt.",
                "{N} listened with closed eyes.",
            ],
            [
                "When the song was over, everybody ate {food}.",
                "The music made {him} feel less {feel}.",
                "{She} kept the tune in {his} head for the rest of the way.",
            ],
        ],
    ),
]
FRIEND_LINES = [
    '"Are you tired?" asked {F}. "A little," said {N}.',
    '{F} said, "I am glad that I came with you."',
    "{N} and {F} shared the last piece of {food}.",
    '"We must be close now," said {F}.',
    '"Do you think we will find the {thing}?" asked {N}. "Of course," said {F}.',
    "{F} carried the bag for a while.",
]


def _line(r: random.Random, variants: list[str], slots: dict[str, str]) -> str:
    extra = {
        "time": r.choice(lx.TIMES),
        "weather": r.choice(lx.WEATHER),
        "food": r.choice(lx.FOODS),
        "happy": r.choice(("happy", "so happy", "very glad", "full of joy")),
    }
    return r.choice(variants).format(**{**extra, **slots})


def episode(r: random.Random, s: StoryState, with_friend: bool) -> tuple[str, str]:
    """Return (title, text) of one episode; episodes repeat only after all have been used."""
    if len(s.used) >= len(EPISODES):
        s.used.clear()
    index = r.choice([i for i in range(len(EPISODES)) if i not in s.used])
    s.used.add(index)
    title, steps = EPISODES[index]
    creature = r.choice([c for c in lx.CREATURES if c not in (s.kind, s.friend_kind)])
    person, colour2, object2 = r.choice(lx.PEOPLE), r.choice(lx.COLOURS), r.choice(lx.OBJECTS)
    spot, spot2 = r.sample(lx.PLACES, 2)
    k = r.randint(2, 12)
    slots = {
        **s.slots,
        "creature": creature,
        "acreature": article(creature),
        "Acreature": article(creature).capitalize(),
        "Creature": creature.capitalize(),
        "person": person,
        "aperson": article(person),
        "Aperson": article(person).capitalize(),
        "acolour2": article(colour2),
        "object2": object2,
        "Object2": object2.capitalize(),
        "spot": spot,
        "Spot": spot.capitalize(),
        "spot2": spot2,
        "aadj": article(r.choice(lx.PLACE_ADJ)),
        "feel": r.choice(lx.FEELINGS),
        "k": str(k),
        "K": lx.NUMBER_WORDS[k].capitalize(),
        "items2": r.choice(lx.ITEMS),
        "sound": r.choice(lx.SOUNDS),
        "hers": "hers" if s.pronoun == "she" else "his",
        "she2": r.choice(("she", "he")),
    }
    lines = [_line(r, step, slots) for step in steps]
    if with_friend and r.random() < 0.7:
        lines.append(_line(r, FRIEND_LINES, slots))
    return title.format(**slots), " ".join(lines)


def short_story(r: random.Random, s: StoryState, episodes: int = 0) -> list[str]:
    """Return the paragraphs of a story with ``episodes`` adventures between its start and its end."""
    slots = s.slots
    first = [_line(r, OPENINGS, slots), _line(r, WANTS, slots)]
    if episodes:
        first += [_line(r, LOSSES, slots), _line(r, DEPARTURES, slots)]
        middle = [_line(r, MEETINGS, slots)]
        paragraphs = [" ".join(first), " ".join(middle)]
        paragraphs += [episode(r, s, with_friend=True)[1] for _ in range(episodes)]
    else:
        first += [_line(r, LOSSES, slots), _line(r, MEETINGS, slots)]
        paragraphs = [" ".join(first)]
    last = [_line(r, FINDS, slots)]
    if r.random() < 0.6:
        last.append(_line(r, EXTRAS, slots))
    last += [_line(r, RETURNS, slots), _line(r, ENDINGS, slots)]
    return [*paragraphs, " ".join(last)]


def tiny_story(r: random.Random, s: StoryState, sentences: int) -> str:
    """Return a story of one to three sentences."""
    slots = s.slots
    lines = [
        _line(
            r,
            [
                "{N} the {trait} {kind} lost {acol} {thing} and found it again in {aplace}.",
                "Once upon a time {N} the {kind} found {acol} {thing} in {aplace}.",
            ],
            slots,
        ),
        _line(r, ["{F} the {fkind} helped {him}.", "{She} showed it to {F} the {fkind}."], slots),
        _line(r, ["They lived happily ever after.", "{N} was happy."], slots),
    ]
    return " ".join(lines[:sentences])


def chapter_story(r: random.Random, s: StoryState, chapters: int) -> list[str]:
    """Return the paragraphs of a story in numbered chapters that ends with ``The End.``"""
    slots = s.slots
    parts: list[str] = []
    for number in range(1, chapters + 1):
        if number == 1:
            title = f"The {s.colour.capitalize()} {s.thing.capitalize()}"
            groups = [OPENINGS, WANTS, LOSSES, DEPARTURES]
            body = [" ".join(_line(r, g, slots) for g in groups)]
        elif number == 2 and chapters > 2:
            title = s.friend
            body = [_line(r, MEETINGS, slots), episode(r, s, with_friend=True)[1]]
        elif number == chapters:
            title = r.choice(("The Way Home", "Home Again", "The End of the Search"))
            body = [
                " ".join(_line(r, g, slots) for g in (FINDS, EXTRAS)),
                " ".join(_line(r, g, slots) for g in (RETURNS, ENDINGS)),
            ]
        else:
            title, text = episode(r, s, with_friend=True)
            body = [text]
            if r.random() < 0.6:
                body.append(episode(r, s, with_friend=True)[1])
        parts += [f"Chapter {number} of {chapters}: {title}", *body]
    return [*parts, "The End."]


def qa_story(r: random.Random, s: StoryState) -> tuple[str, list[tuple[str, str]]]:
    """Return a short story that states every fact, with questions and answers about it."""
    slots = s.slots
    time, weather = r.choice(lx.TIMES), r.choice(lx.WEATHER)
    lines = [
        _line(r, OPENINGS[:6], slots),
        _line(
            r, ["{She} had {acol} {thing}.", "{N} owned {acol} {thing}.", "{His} {thing} was {col}."], slots
        ),
        f"{time}, {weather}, and the {s.thing} was gone.",
        _line(
            r,
            [
                "{F} the {fkind} helped {him}.",
                "{Afkind} called {F} came to help {him}.",
                "{His} friend {F}, {afkind}, helped {him} to search.",
            ],
            slots,
        ),
        _line(
            r,
            [
                "They found the {thing} in {aplace}.",
                "In {aplace} they found the {thing}.",
                "At last the {thing} was found in {aplace}.",
            ],
            slots,
        ),
        _line(
            r,
            ["There were also {n} {items}.", "{N} also found {n} {items}.", "Next to it were {n} {items}."],
            slots,
        ),
        _line(r, ["In the end {N} was {feeling}.", "{N} felt {feeling}.", "{N} was very {feeling}."], slots),
    ]
    keep = [0, 1, *sorted(r.sample(range(2, 7), r.randint(2, 5)))]
    pairs: dict[int, list[tuple[list[str], str]]] = {
        0: [
            (
                ["Where does {N} live?", "Where did {N} live?", "In what place does {N} live?"],
                "{N} lives in {ahome}.",
            ),
            (["Who is {N}?", "What is {N}?", "What kind of character is {N}?"], "{N} is {atrait} {kind}."),
            (
                [
                    "Who is the story about?",
                    "Who is the main character?",
                    "What is the name of the {kind}?",
                    "What is the name of the hero?",
                ],
                "The story is about {N}.",
            ),
        ],
        1: [
            (
                [
                    "What colour is the {thing}?",
                    "What color was the {thing}?",
                    "What colour was the {thing}?",
                    "Which colour does the {thing} have?",
                ],
                "The {thing} is {col}.",
            ),
            (["What did {N} have?", "What did {N} own?", "What belongs to {N}?"], "{N} had {acol} {thing}."),
            (["Is the {thing} {col}?", "Was the {thing} {col}?"], "Yes, the {thing} is {col}."),
            (["Is the {thing} {wrong}?", "Was the {thing} {wrong}?"], "No, the {thing} is {col}."),
        ],
        2: [(["What was gone?", "What did {N} lose?", "What went missing?"], "The {thing} was gone.")],
        3: [
            (
                ["Who helped {N}?", "Who helped?", "Who is {N}'s friend?", "Who came to help {N}?"],
                "{F} the {fkind} helped {N}.",
            ),
            (["What kind of animal is {F}?", "Who is {F}?", "What is {F}?"], "{F} is {afkind}."),
        ],
        4: [
            (
                [
                    "Where did they find the {thing}?",
                    "Where was the {thing}?",
                    "Where was the {thing} found?",
                ],
                "They found the {thing} in {aplace}.",
            )
        ],
        5: [
            (
                ["How many {items} were there?", "How many {items} did {N} find?", "How many {items}?"],
                "There were {n} {items}.",
            )
        ],
        6: [
            (
                ["How did {N} feel?", "How did {N} feel in the end?", "What did {N} feel?"],
                "{N} felt {feeling}.",
            )
        ],
    }
    slots["wrong"] = r.choice([c for c in lx.COLOURS if c != s.colour])
    questions = [
        (r.choice(qs).format(**slots), answer.format(**slots)) for i in keep for qs, answer in pairs[i]
    ]
    r.shuffle(questions)
    return " ".join(lines[i] for i in keep), questions


def summary(r: random.Random, s: StoryState) -> str:
    """Return a one-sentence summary of a story with this state."""
    return (
        f"{s.name}, {article(s.trait)} {s.kind}, lost {article(s.colour)} {s.thing} and found it again with the "
        f"help of {s.friend}."
    )
