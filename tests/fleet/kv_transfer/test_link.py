from __future__ import annotations

import pytest

from headrace.core.peers import NO_OFFER, Inquiry, Offer
from headrace.fleet.kv_transfer.link import _Question

KEYS = (b"a", b"b", b"c")


def answers(peer: str, *given: tuple[str, int, bool]) -> Offer:
    """The answer to an inquiry once all have answered: the name, its blocks, and whether it was lost."""
    inquiry = Inquiry(peer, b"", KEYS, ())
    question = _Question(inquiry, len(given), 10.0, 1.0)
    for at, (name, blocks, lost) in enumerate(given):
        assert inquiry.answer is None
        question.answered(name, blocks, 2.0 + at, lost=lost)
    assert inquiry.answer is not None
    return inquiry.answer


@pytest.mark.parametrize(
    "given",
    [
        (("most", 2, False), ("less", 1, False), ("none", 0, False)),
        (("none", 0, False), ("less", 1, False), ("most", 2, False)),
        (("most", 2, False), ("equal", 2, False), ("lost", 0, True)),
    ],
)
def test_the_first_peer_with_the_most_blocks_is_the_answer(given: tuple[tuple[str, int, bool], ...]) -> None:
    assert answers("", *given) == Offer("most", 2, 3.0)


def test_a_named_peer_is_the_answer_before_it_has_a_block_unless_it_is_lost() -> None:
    assert answers("named", ("named", 0, False)) == Offer("named", 0, 1.0)
    assert answers("named", ("named", 0, True)) == NO_OFFER._replace(seconds=1.0)
    assert answers("", ("other", 0, False)) == NO_OFFER._replace(seconds=1.0)
