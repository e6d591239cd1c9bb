"""Whether two answers say the same, as far as that can be told without asking a model.

It decides which entries share an answer and whether an audited hit was right, so it errs on the side of "another
answer": that costs hits, and the other mistake would cost truth.
"""

from __future__ import annotations

import re

from headrace.core.cache.guards import compare, traits, veto

_NEAR = 0.9
"""The cosine from which on differently worded answers may be the same."""

_FORM = re.compile(r"[\W_]+")


def same_answer(one: str, other: str, cosine: float | None) -> bool:
    """Whether two answers are equal up to spelling, or near in meaning without a difference that guards see.

    ``cosine`` is None where one of them is too long for the encoder: then only equal ones are the same.
    """
    if _form(one) == _form(other):
        return True
    if cosine is None or cosine < _NEAR:
        return False
    return veto(compare(traits(one), traits(other))) is None


def _form(answer: str) -> str:
    return _FORM.sub(" ", answer).strip().casefold() or answer.strip()
