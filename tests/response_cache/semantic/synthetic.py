"""Questions whose intents, words and vectors are drawn, so that nothing depends on an encoder.

Two questions differ in three words or more, and mostly in their number of words: texts that differ in one or two at one
place, or in words at the same places, are never matched.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from headrace.response_cache.semantic.calibrate import Pair, Pairs, Question, Stream

LETTERS = "bcdfghjklmnpqrstvwxz"


def word(number: int) -> str:
    """A made-up word for a number, without digits in it."""
    return "".join(LETTERS[(number // 20**place) % 20] + "a" for place in range(4))


class Traffic:
    """A stream over ``intents``, and its vectors: centres with noise, so that near questions are mostly the same.

    With ``alike`` above 0 all centres lie near each other, as those of one trade do, and no word tells the intent.
    """

    def __init__(
        self, rows: int, seed: int, intents: int = 40, noise: float = 0.35, alike: float = 0.0
    ) -> None:
        draw = random.Random(seed)
        numbers = np.random.default_rng(seed)
        centres = numbers.normal(size=(intents, 24))
        centres += alike * numbers.normal(size=24)
        centres /= np.linalg.norm(centres, axis=1, keepdims=True)
        self._vectors: dict[str, bytes] = {}
        questions = []
        for row in range(rows):
            intent = draw.randrange(intents)
            own = [word(1000 + row), word(70_000 + 7 * row), word(100_000 + 9 * row)]
            own += [word(20_000 + 5 * row + number) for number in range(row % 7)]
            text = " ".join([word(row if alike else intent), *own])
            vector = centres[intent] + noise * numbers.normal(size=24) / np.sqrt(24)
            self._vectors[text] = (vector / np.linalg.norm(vector)).astype(np.float32).tobytes()
            questions.append(Question(text, f"intent {intent}"))
        self.stream = Stream("traffic", tuple(questions))

    def embed(self, texts: Sequence[str]) -> list[bytes | None]:
        """What the sentence encoder would do."""
        return [self._vectors[text] for text in texts]


def unlike(cosine: float) -> float:
    """How likely the two of a pair with this cosine are not the same."""
    return 2.0 * (1.0 - cosine) ** 2 * (1.0 if cosine > 0.7 else 5.0)


class Likeness:
    """Pairs whose cosine says how likely they are the same."""

    def __init__(self, rows: int, seed: int) -> None:
        draw = random.Random(seed)
        self._vectors: dict[str, bytes] = {}
        pairs = []
        for row in range(rows):
            cosine = draw.uniform(0.5, 1.0)
            first, second = (
                f"{word(number)} {word(70_000 + 7 * number)} {word(100_000 + 9 * number)} shoes"
                for number in (2 * row, 2 * row + 1)
            )
            second = (
                f"{word(130_000 + 3 * row)} {second}"  # equally many would be words exchanged at their places
            )
            self._vectors[first] = np.array([1.0, 0.0], np.float32).tobytes()
            self._vectors[second] = np.array([cosine, (1.0 - cosine**2) ** 0.5], np.float32).tobytes()
            pairs.append(Pair(first, second, draw.random() > unlike(cosine)))
        self.pairs = Pairs("likeness", tuple(pairs))

    def embed(self, texts: Sequence[str]) -> list[bytes | None]:
        """What the sentence encoder would do."""
        return [self._vectors[text] for text in texts]
