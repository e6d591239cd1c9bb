"""Requests as people type them at first, written by hand and not drawn from the grammar, each with a rule.

An answer that repeats itself, copies half, or names the wrong thing is wrong; the rules are strict where they can be.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable

from training import lexicon as lx

Rule = Callable[[str], bool]


def _says(*parts: str) -> Rule:
    return lambda answer: all(part.lower() in answer.lower() for part in parts) and len(answer) < 200


def _is(text: str) -> Rule:
    return lambda answer: answer == text


def _items(category: str, count: int) -> Rule:
    def rule(answer: str) -> bool:
        items = [re.sub(r"^(\d+\.|-) ", "", item) for item in re.split(r"\n|, ", answer)]
        return len(items) == len(set(items)) == count and set(items) <= set(lx.CATEGORIES[category])

    return rule


def _object(**fields: object) -> Rule:
    """Return the rule that the answer is a JSON object with these fields; an ellipsis stands for any value."""

    def rule(answer: str) -> bool:
        try:
            pairs = json.loads(answer, object_pairs_hook=tuple)
        except ValueError:
            return False
        if not isinstance(pairs, tuple) or [key for key, _ in pairs] != list(fields):
            return False
        return all(fields[key] in (..., value) for key, value in pairs)

    return rule


def _tells(name: str, longer_than: int = 150) -> Rule:
    return lambda answer: answer.count(name) >= 2 and len(answer) > longer_than


def _code(*parts: str) -> Rule:
    def rule(answer: str) -> bool:
        found = re.fullmatch(r"```python\n(.*)\n```", answer, re.DOTALL)
        if not found or not all(part in answer for part in parts):
            return False
        try:
            ast.parse(found[1])
        except SyntaxError:
            return False
        return True

    return rule


SHORT_STORY = "Tom has a blue cat named Pip. "
MARKET = "Lisa went to the market and bought 7 apples. Her brother Paul stayed at home. "
LANTERN = "Ida lost her silver lantern in the forest. Her friend Bruno found it near an old bridge. "
NATURAL: list[tuple[str, Rule]] = [
    ("Hello!", _says("hello")),
    ("hi there, how are you?", _says("thank you")),
    ("Who are you?", _says("toy")),
    ("thanks a lot", _says("welcome")),
    ("List three animals.", _items("animals", 3)),
    ("Name 5 fruits", _items("fruits", 5)),
    ("give me four colors", _items("colours", 4)),
    ("Please list 7 countries.", _items("countries", 7)),
    ("What are three good names for a pet?", lambda a: len(set(a.split("\n"))) == 3),
    ("Write a list of six vegetables", _items("vegetables", 6)),
    ("Can you name two planets?", _items("planets", 2)),
    ("Write a small JSON object for a person named Oskar, age 31.", _object(name="Oskar", age=31)),
    ("Give me JSON with name Lena and age 7", _object(name="Lena", age=7)),
    ('Make a JSON object with the keys "name" and "city".', _object(name=..., city=...)),
    ("Return a JSON object with title, author and year.", _object(title=..., author=..., year=...)),
    ("JSON for a dog called Rex, colour brown", _object(name="Rex", colour="brown")),
    ("Turn this into JSON: name: Emil, city: Oslo, age: 44", _object(name="Emil", city="Oslo", age=44)),
    ("Create a json object with fields id and price", _object(id=..., price=...)),
    ("Copy this text: the red boat sailed past the old mill.", _is("the red boat sailed past the old mill.")),
    ("Repeat: hello world", _is("hello world")),
    ("Repeat after me: I like green tea in the morning", _is("I like green tea in the morning")),
    ('Copy exactly: "A small bird sang over the lake."', _is("A small bird sang over the lake.")),
    ("Say this: good night moon", _is("good night moon")),
    (
        "Copy the following text:\nSeven ships came home from the cold sea.",
        _is("Seven ships came home from the cold sea."),
    ),
    ("Replace cat with dog in this sentence: The cat sat on the table.", _is("The dog sat on the table.")),
    ('Replace "red" by "green": a red hat and a red coat', _is("a green hat and a green coat")),
    ("Remove the word very: the very old house", _is("the old house")),
    ("Make this uppercase: small dog", _is("SMALL DOG")),
    (f"Story: {SHORT_STORY}Question: what is the cat called?", _says("cat", "pip")),
    (f"{SHORT_STORY}What colour is the cat?", _says("blue")),
    (f"{SHORT_STORY}Who has a cat?", _says("tom")),
    (f"{MARKET}What did Lisa buy?", _says("apples")),
    (f"{MARKET}How many apples did Lisa buy?", _says("7")),
    (f"Read this: {MARKET}Who is Lisa's brother?", _says("brother", "paul")),
    (f"{LANTERN}\n\nWhat did Ida lose?", _says("lantern")),
    (f"{LANTERN}Who found the lantern?", _says("bruno", "found")),
    (f"Text: {LANTERN}Question: Where did Ida lose the lantern?", _says("forest")),
    ("Tell me a story about Mara and a lantern.", lambda a: _tells("Mara")(a) and "lantern" in a),
    ("Write a short story about a fox named Rusty", lambda a: _tells("Rusty")(a) and "fox" in a),
    ("tell me a story about a dragon", _tells("dragon")),
    ("Write a very long story about Nora.", _tells("Nora", 3200)),
    ("Tell me a long story about a sailor called Finn.", _tells("Finn", 1000)),
    ("Write a Python function that adds two numbers.", _code("return a + b")),
    ("Write a python function called triple that doubles a number", _code("def triple(n)", "return 2 * n")),
    (
        "Write a class Car with the fields speed and colour.",
        _code("class Car:", "self.speed = speed", "self.colour = colour"),
    ),
    ("Count from 1 to 10.", _is("1, 2, 3, 4, 5, 6, 7, 8, 9, 10")),
    ("What is 3 + 4?", _says("7")),
    ("What are the days of the week?", _is(", ".join(lx.DAYS))),
]
