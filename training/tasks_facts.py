"""Tasks about small facts: questions, memory, lists, counting and sums."""

from __future__ import annotations

import random

from training import lexicon as lx
from training import stories
from training.lexicon import article
from training.requests import Task, say
from training.tasks_talk import small_talk


def facts(r: random.Random) -> Task:
    """Questions about a list of small facts."""
    names = list(dict.fromkeys(stories.pick_name(r)[0] for _ in range(r.randint(2, 5))))
    r.shuffle(names)
    lines, questions = [], []
    for name in names:
        form = r.randrange(6)
        n, item, colour = r.randint(2, 30), r.choice(lx.ITEMS), r.choice(lx.COLOURS)
        thing, place, food = r.choice(lx.OBJECTS), r.choice(lx.PLACES), r.choice(lx.FOODS)
        job, age = r.choice(lx.PEOPLE), r.randint(3, 99)
        line, question = [
            (f"{name} has {n} {item}.", f"How many {item} does {name} have?"),
            (f"{name} has {article(colour)} {thing}.", f"What does {name} have?"),
            (f"{name} is in the {place}.", f"Where is {name}?"),
            (f"{name} likes {food}.", f"What does {name} like?"),
            (f"{name} is {article(job)}.", f"What is {name}?"),
            (f"{name} is {age} years old.", f"How old is {name}?"),
        ][form]
        lines.append(line)
        questions.append((question, line))
        if form in (2, 3, 4):
            questions.append((f"Who {line[len(name) + 1 : -1]}?", line))
    r.shuffle(questions)
    turns = questions[: r.randint(1, 4)]
    intro = r.choice(("", "", "Here are some facts: ", "Remember: ", "Facts: "))
    joined = intro + r.choice((" ", "\n")).join(lines)
    turns[0] = (joined + r.choice(("\n\n", " ", "\n")) + turns[0][0], turns[0][1])
    return Task("qa_facts", turns, exact=True)


def memory(r: random.Random) -> Task:
    """The user states something, talks about something else, and asks for it again."""
    name = stories.pick_name(r)[0]
    colour, food, word = r.choice(lx.COLOURS), r.choice(lx.FOODS), r.choice(lx.ALL_WORDS)
    tell, reply, ask, answer = r.choice(
        [
            (
                [
                    "My name is {x}.",
                    "I am {x}.",
                    "I'm {x}.",
                    "Hi, my name is {x}.",
                    "Hello, I am {x}.",
                    "call me {x}",
                ],
                f"Hello, {name}! Nice to meet you. What can I do for you?",
                ["What is my name?", "Do you know my name?", "Who am I?", "what's my name?"],
                f"Your name is {name}.",
            ),
            (
                [
                    "My favourite colour is {c}.",
                    "I like {c} most of all colours.",
                    "my favorite color is {c}",
                ],
                f"{colour.capitalize()} is a beautiful colour.",
                ["What is my favourite colour?", "What's my favorite color?", "Which colour do I like?"],
                f"Your favourite colour is {colour}.",
            ),
            (
                ["My favourite food is {f}.", "I love {f}.", "I like to eat {f}."],
                f"{food.capitalize()} sounds good!",
                ["What is my favourite food?", "What do I like to eat?", "Which food do I like?"],
                f"Your favourite food is {food}.",
            ),
            (
                ["Remember the word {w}.", "Remember this word: {w}", "The secret word is {w}."],
                f"I will remember the word {word}.",
                ["Which word did I tell you?", "What is the word?", "What was the secret word?"],
                f"The word is {word}.",
            ),
        ]
    )
    slots = {"x": name, "c": colour, "f": food, "w": word}
    middle = [t for _ in range(r.randint(0, 2)) for t in r.choice((small_talk, arithmetic, count))(r).turns]
    turns = [(say(r, tell, False, **slots), reply), *middle, (say(r, ask, False), answer)]
    return Task("memory", turns, exact=True)


def make_list(r: random.Random) -> Task:
    """A list of n members of a category."""
    category = r.choice(list(lx.CATEGORIES))
    words = lx.CATEGORIES[category]
    n = min(len(words), r.choice((2, 2, 3, 3, 3, 4, 4, 5, 5, 5, 6, 7, 8, 9, 10, 10, 12)))
    start = r.randrange(len(words))
    chosen = [*words[start:], *words[:start]][:n]
    asked = r.choice(lx.ALIASES.get(category, [category])) if r.random() < 0.4 else category
    if r.random() < 0.12:
        asked = f"{r.choice(('different', 'random', 'common', 'nice', 'good', 'famous', 'popular'))} {asked}"
    style = r.choices(("number", "bullet", "comma"), (9, 1.5, 2))[0]
    number = r.choice((str(n), str(n), lx.NUMBER_WORDS[n]))
    tail = {
        "number": r.choice(("", "", "", "", " as a numbered list")),
        "bullet": r.choice((" as bullet points", " as a bulleted list")),
        "comma": r.choice((" in one line", " separated by commas", " on one line", ", separated by commas")),
    }[style]
    templates = [
        "List {n} {c}{t}.",
        "Give me {n} {c}{t}.",
        "Name {n} {c}{t}.",
        "Give me a list of {n} {c}{t}.",
        "Write a list of {n} {c}{t}.",
        "I need {n} {c}{t}.",
        "Tell me {n} {c}{t}.",
        "Make a list of {n} {c}{t}.",
        "Write down {n} {c}{t}.",
        "Show me {n} {c}{t}.",
        "What are {n} {c}{t}?",
        "{n} {c}{t}",
        "Write {n} {c}{t}.",
        "Can you name {n} {c}{t}?",
        "Could you list {n} {c}{t}?",
        "Give {n} {c}{t}.",
        "Give me {n} examples of {c}{t}.",
        "Name {n} of your favourite {c}{t}.",
        "Make a list with {n} {c}{t}.",
        "List exactly {n} {c}{t}.",
        "Name me {n} {c}{t}.",
        "Do you know {n} {c}{t}?",
        "Think of {n} {c}{t}.",
    ]
    if n == 5 and r.random() < 0.5:
        templates = [
            "List some {c}{t}.",
            "Give me some {c}{t}.",
            "Make a list of {c}{t}.",
            "Name a few {c}{t}.",
            "List {c}{t}.",
            "Can you list some {c}{t}?",
            "a list of {c}{t}",
        ]
    request = say(r, templates, n=number, c=asked, t=tail)
    if style == "comma":
        answer = ", ".join(chosen)
    else:
        answer = "\n".join(f"{i}. {w}" if style == "number" else f"- {w}" for i, w in enumerate(chosen, 1))
    return Task("list", [(request, answer)], name=f"{category}:{n}")


def count(r: random.Random) -> Task:
    """Count from a to b; days, months and letters too."""
    roll = r.random()
    if roll < 0.12:
        words, requests = r.choice(
            [
                (
                    lx.DAYS,
                    ["List the days of the week.", "What are the days of the week?", "Name the seven days."],
                ),
                (
                    lx.MONTHS,
                    ["List the months of the year.", "What are the twelve months?", "Name all months."],
                ),
                (
                    list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
                    ["Say the alphabet.", "Write the alphabet.", "List all letters."],
                ),
            ]
        )
        return Task("count", [(say(r, requests), ", ".join(words))], exact=True)
    start = r.choice((1, 1, 1, 1, 0, r.randint(2, 90)))
    span = r.choices((r.randint(2, 20), r.randint(20, 100), r.randint(100, 400)), (75, 22, 3))[0]
    end = start + span
    numbers = [str(i) for i in range(start, end + 1)]
    lines = r.random() < 0.15
    tail = r.choice((", one per line", ", one number per line", ", each on its own line")) if lines else ""
    if span <= 30 and r.random() < 0.2:
        request = say(
            r,
            ["Count down from {b} to {a}{t}.", "Count backwards from {b} to {a}{t}."],
            a=start,
            b=end,
            t=tail,
        )
        numbers.reverse()
    else:
        templates = [
            "Count from {a} to {b}{t}.",
            "Count {a} to {b}{t}.",
            "List the numbers from {a} to {b}{t}.",
            "Write all numbers from {a} to {b}{t}.",
            "Write the numbers {a} to {b}{t}.",
            "Show the numbers between {a} and {b}{t}.",
        ]
        if start == 1:
            templates += ["Count to {b}{t}.", "Count up to {b}{t}."]
        request = say(r, templates, a=start, b=end, t=tail)
    return Task(
        "count" if span < 100 else "count_long",
        [(request, ("\n" if lines else ", ").join(numbers))],
        exact=True,
    )


def arithmetic(r: random.Random) -> Task:
    """One small sum."""
    a, b = r.randint(0, 12), r.randint(0, 12)
    sign = r.choice("++-x")
    if sign == "-" and b > a:
        a, b = b, a
    if sign == "x":
        a, b = r.randint(0, 10), r.randint(0, 10)
    value = {"+": a + b, "-": a - b, "x": a * b}[sign]
    words = {"+": "plus", "-": "minus", "x": "times"}[sign]
    shown = r.choice((f"{a} {sign} {b}", f"{a}{sign}{b}", f"{a} {words} {b}")).replace("x", r.choice("x*"))
    request = say(
        r,
        ["What is {e}?", "{e}?", "Compute {e}.", "Calculate {e}.", "How much is {e}?", "{e} ="],
        False,
        e=shown,
    )
    return Task("arithmetic", [(request, f"{a} {sign} {b} = {value}")], exact=True)
