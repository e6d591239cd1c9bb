"""Answer equality: whether two answers say the same, as far as that is decidable without a model.

It decides which entries share an answer, and whether an audited hit was right. Answers are compared by their first
words, which state what the rest explains. The vectors must be near, and short answers must not differ in numbers,
names or a "not", as guards detect them. Long ones always differ in some word of that kind, so there the vectors
decide.
"""

from __future__ import annotations

import re

from headrace.response_cache.rules.semantic.guards import compare, traits, veto

_NEAR = 0.9
"""The cosine from which differently worded answers may be the same."""

_GIST_WORDS = 120
"""Number of words compared: as many as sentence encoders read well."""

_SHORT_WORDS = 25
"""Up to this length each word may reverse an answer."""

_FORM = re.compile(r"[\W_]+")


def gist(answer: str) -> str:
    """The first words of an answer, which represent it in comparisons."""
    return " ".join(answer.split(maxsplit=_GIST_WORDS)[:_GIST_WORDS])


def same_answer(one: str, other: str, cosine: float | None) -> bool:
    """Whether two gists are equal up to spelling, or near in meaning.

    ``cosine`` is None if one of them has no vector: then only equal gists are the same.
    """
    if _form(one) == _form(other):
        return True
    if cosine is None or cosine < _NEAR:
        return False
    readings = traits(one), traits(other)
    if min(len(reading.words) for reading in readings) > _SHORT_WORDS:
        return True
    return veto(compare(*readings)) is None


def _form(answer: str) -> str:
    return _FORM.sub(" ", answer).strip().casefold() or answer.strip()
