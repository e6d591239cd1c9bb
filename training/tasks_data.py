"""Tasks that write small JSON or Python."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from training import lexicon as lx
from training import stories
from training.functions import FUNCTIONS
from training.requests import Task, any_sentence, code_name, indent, say


def _value(r: random.Random, key: str) -> Any:
    values: dict[str, Callable[[], Any]] = {
        "name": lambda: stories.pick_name(r)[0],
        "age": lambda: r.randint(1, 99),
        "city": lambda: r.choice(lx.CATEGORIES["cities"]),
        "country": lambda: r.choice(lx.CATEGORIES["countries"]),
        "colour": lambda: r.choice(lx.COLOURS),
        "color": lambda: r.choice(lx.COLOURS),
        "animal": lambda: r.choice(lx.CREATURES),
        "job": lambda: r.choice(lx.PEOPLE),
        "id": lambda: r.randint(1, 9999),
        "count": lambda: r.randint(1, 100),
        "price": lambda: r.choice((r.randint(1, 999), r.randint(1, 999) / 10)),
        "active": lambda: r.random() < 0.5,
        "tags": lambda: r.sample(lx.TRAITS, r.randint(1, 3)),
        "title": lambda: f"The {r.choice(lx.COLOURS).capitalize()} {r.choice(lx.OBJECTS).capitalize()}",
        "food": lambda: r.choice(lx.FOODS),
        "day": lambda: r.choice(lx.DAYS),
        "item": lambda: r.choice(lx.OBJECTS),
        "friend": lambda: stories.pick_name(r)[0],
        "quantity": lambda: r.randint(1, 50),
        "email": lambda: f"{r.choice(lx.SHE_NAMES).lower()}@example.com",
        "year": lambda: r.randint(1900, 2030),
        "author": lambda: stories.pick_name(r)[0],
        "population": lambda: r.randint(1, 9999),
    }
    if key not in values:  # any other word may be asked for as well
        return r.choice((r.choice(lx.ANY_WORDS), r.randint(0, 999)))
    return values[key]()


JSON_KEYS = lx.words(
    "name age city country colour color animal job id count price active tags title food day item friend "
    "quantity email year"
)


# Things that are described in words: what they are, and how each field is told.
DESCRIBED: list[tuple[list[str], dict[str, list[str]]]] = [
    (
        lx.words("person|man|woman|user|friend|customer|student|girl|boy|child|someone"),
        {
            "name": ["named {v}", "called {v}", "with the name {v}", "name {v}"],
            "age": ["age {v}", "aged {v}", "who is {v} years old", "with age {v}", "{v} years old"],
            "city": ["from {v}", "living in {v}", "who lives in {v}", "city {v}"],
            "job": ["who works as {v}", "job {v}", "with the job {v}"],
        },
    ),
    (
        lx.words("cat|dog|pet|animal|horse|rabbit|parrot"),
        {
            "name": ["named {v}", "called {v}", "name {v}"],
            "colour": ["colour {v}", "with the colour {v}"],
            "age": ["age {v}", "aged {v}", "{v} years old"],
        },
    ),
    (
        lx.words("book|film|song|story"),
        {
            "title": ["titled {v}", "called {v}", "with the title {v}"],
            "author": ["by {v}", "author {v}", "written by {v}"],
            "year": ["from {v}", "year {v}", "from the year {v}"],
        },
    ),
    (
        lx.words("product|item|thing|toy"),
        {
            "name": ["named {v}", "called {v}", "name {v}"],
            "price": ["price {v}", "with price {v}", "that costs {v}"],
            "quantity": ["quantity {v}", "with quantity {v}"],
        },
    ),
    (
        lx.words("city|town|village"),
        {
            "name": ["named {v}", "called {v}", "name {v}"],
            "country": ["in {v}", "country {v}"],
            "population": ["with {v} people", "population {v}"],
        },
    ),
]


def _described(r: random.Random) -> Task:
    """A JSON object of something that is described in words."""
    kinds, fields = r.choice(DESCRIBED)
    kind = r.choice(kinds)
    keys = list(fields)[: r.randint(1, len(fields))]
    if len(keys) > 2 and r.random() < 0.3:
        keys = [keys[0], *r.sample(keys[1:], 2)]
    if kind in ("product", "item", "thing", "toy"):
        own: dict[str, Any] = {"name": r.choice((*lx.OBJECTS, *lx.NOUNS))}
    else:
        own = {}
    data = {key: own.get(key, _value(r, key)) for key in keys}
    told = [r.choice(fields[key]).format(v=value) for key, value in data.items()]
    text = f"{lx.article(kind) if kind != 'someone' else kind} {r.choice((', ', ' and ', ' ')).join(told)}"
    request = say(
        r,
        [
            "Write a small JSON object for {d}.",
            "Write a JSON object for {d}.",
            "Write JSON for {d}.",
            "Give me a JSON object for {d}.",
            "Give me JSON for {d}.",
            "Make a JSON object for {d}.",
            "Create a JSON object for {d}.",
            "Describe {d} as JSON.",
            "JSON for {d}",
            "Return a JSON object that describes {d}.",
            "Write a JSON object describing {d}.",
            "Show me {d} as a JSON object.",
            "Generate JSON for {d}.",
        ],
        d=text,
    )
    return Task("json_given", [(request, json.dumps(data, ensure_ascii=False))], exact=True)


def make_json(r: random.Random) -> Task:
    """A small JSON object or array, with fields given in the request."""
    if r.random() < 0.4:
        return _described(r)
    keys = r.sample(JSON_KEYS, r.choice((1, 2, 2, 3, 3, 4, 5)))
    if r.random() < 0.3:
        keys = list(dict.fromkeys(r.choice(lx.ANY_WORDS) for _ in range(r.randint(1, 4))))
    data: Any = {key: _value(r, key) for key in keys}
    pretty = r.random() < 0.2
    tail = r.choice((", pretty printed", ", indented", " with indentation")) if pretty else ""
    listed = (
        ", ".join(keys) if len(keys) == 1 or r.random() < 0.5 else ", ".join(keys[:-1]) + " and " + keys[-1]
    )
    if r.random() < 0.5:
        given = [f"{k} {v if isinstance(v, str) else json.dumps(v)}" for k, v in data.items()]
        equal = [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in data.items()]
        is_ = [f"{k} is {v if isinstance(v, str) else json.dumps(v)}" for k, v in data.items()]
        colon = [f"{k}: {v if isinstance(v, str) else json.dumps(v)}" for k, v in data.items()]
        request = say(
            r,
            [
                "Give me a JSON object with {w}{t}.",
                "Write a JSON object with {w}{t}.",
                "Write a small JSON object with {w}{t}.",
                "Create JSON with {w}{t}.",
                "Write a JSON object with {c}{t}.",
                "Write a JSON object where {i}{t}.",
                "Make JSON from this{t}: {e}",
                "Convert this to JSON{t}: {e}",
                "Make a JSON object with {w}{t}.",
                "Write JSON with {w}{t}.",
                "Write this as JSON{t}: {c}",
                "Turn this into JSON{t}: {c}",
                "Convert to JSON{t}: {c}",
                "JSON{t}: {c}",
            ],
            w=" and ".join(given) if len(given) < 4 else ", ".join(given),
            c=", ".join(colon),
            e=", ".join(equal),
            i=" and ".join(is_),
            t=tail,
        )
        return Task("json_given", [(request, json.dumps(data, indent=2 if pretty else None))], exact=True)
    if r.random() < 0.25:
        keys = keys[:3]
        n = r.randint(2, 4)
        data = [{key: _value(r, key) for key in keys} for _ in range(n)]
        request = say(
            r,
            [
                "Give me a JSON array of {n} objects with {k}{t}.",
                "Write a JSON list of {n} items with the fields {k}{t}.",
            ],
            n=n,
            k=", ".join(keys),
            t=tail,
        )
    else:
        request = say(
            r,
            [
                "Give me a JSON object with the fields {k}{t}.",
                "Make a JSON object with the keys {k}{t}.",
                "Write a small JSON object with {k}{t}.",
                "Return JSON with the fields {k}{t}.",
                "Answer in JSON with {k}{t}.",
                "Generate a JSON object with fields {k}{t}.",
                "Describe a person as JSON with {k}{t}.",
                "Write JSON with the keys {k}{t}.",
                "Write a JSON object with the fields {k}{t}.",
                "Write a small JSON object with the keys {k}{t}.",
                "Give me JSON with {k}{t}.",
                "Create a JSON object with the keys {k}{t}.",
                "Give me an example JSON object with {k}{t}.",
            ],
            k=listed,
            t=tail,
        )
    return Task("json_free", [(request, json.dumps(data, indent=2 if pretty else None))], name=",".join(keys))


FIELDS = lx.words(
    "name age x y z width height colour price title size count left right speed weight city year owner text"
)


def _prints(r: random.Random) -> Task:
    """A program that prints a given text."""
    hello = r.random() < 0.5
    text = "Hello, world!" if hello else any_sentence(r).split("\n")[0]
    requests = [
        "Write a Python program that prints {x}.",
        "Write Python code to print {x}.",
        "How do I print {x} in Python?",
        "Print {x} in Python.",
    ]
    if hello:
        requests += ["Write hello world in Python.", "Hello world in Python", "Write a hello world program."]
    request = say(r, requests, x=f'"{text}"')
    return Task("code", [(request, f'```python\nprint("{text}")\n```')], exact=True)


def code(r: random.Random) -> Task:
    """A small Python function, or a class with given fields."""
    if r.random() < 0.08:
        return _prints(r)
    if r.random() < 0.3:
        fields = r.sample(FIELDS, r.randint(1, 5))
        cls = r.choice(
            (r.choice(lx.OBJECTS), r.choice(lx.CREATURES), r.choice(lx.PEOPLE), "point", lx.random_name(r))
        ).capitalize()
        listed = ", ".join(fields[:-1]) + " and " + fields[-1] if len(fields) > 1 else fields[0]
        word = "fields" if len(fields) > 1 else "field"
        request = say(
            r,
            [
                "Write a Python class called {k} with the {w} {f}.",
                "Write a class {k} with the {w} {f}.",
                "Make a Python class {k} with {w} {f}.",
                "Define a class named {k} with the {w} {f}.",
            ],
            k=cls,
            w=word,
            f=listed,
        )
        body = f"class {cls}:\n    def __init__(self, {', '.join(fields)}):\n" + "\n".join(
            f"        self.{f} = {f}" for f in fields
        )
        return Task("code", [(request, f"```python\n{body}\n```")], exact=True)
    what, default, args, body = r.choice(FUNCTIONS)
    name = default
    if r.random() < 0.5:
        name = code_name(r)
        request = say(
            r,
            [
                "Write a Python function called {n} that {w}.",
                "Write a function named {n} which {w}.",
                "Define a function {n} that {w}.",
                "Write a function {n} that {w} in Python.",
                "Write a Python function {n} that {w}.",
                "Create a Python function {n} that {w}.",
            ],
            n=name,
            w=what,
        )
    else:
        request = say(
            r,
            [
                "Write a Python function that {w}.",
                "Write a function that {w}.",
                "Python function that {w}",
                "Show me Python code that {w}.",
                "Give me a function that {w}.",
                "I need code that {w}.",
                "Write Python code that {w}.",
            ],
            w=what,
        )
    text = f"def {name}({args}):\n{indent(body)}"
    return Task("code", [(request, f"```python\n{text}\n```")], exact=True)
