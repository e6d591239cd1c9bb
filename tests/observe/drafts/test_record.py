from headrace.core.drafting.draft_budget import Cut
from headrace.core.events import Arrived, DraftDeclined, Verified
from headrace.observe.requests import RequestBook


def test_an_explanation_says_what_was_drafted_and_what_bounded_it() -> None:
    book = RequestBook()
    book.fold(Arrived("a", 3, "t", 0), 1.0)
    assert (book.explain("a") or {})["drafting"] is None
    book.fold(Verified("a", "ngram", 4, 3, 2.5, Cut.NOT_WORTH), 1.0)
    book.fold(Verified("a", "ngram", 2, 0, 1.25, Cut.NOT_WORTH), 1.0)
    assert (book.explain("a") or {})["drafting"] == {
        "sources": {
            "ngram": {"drafts": 2, "drafted_tokens": 6, "accepted_tokens": 3, "expected_tokens": 3.75}
        },
        "bounded_by": {"not_worth": 2},
        "declined_because": None,
    }
    book.fold(DraftDeclined("a", "ngram", Cut.TPOT), 1.0)
    reported = (book.explain("a") or {})["drafting"]
    assert "TPOT target" in reported["declined_because"]
    book.fold(Verified("a", "ngram", 1, 1, 0.5, "a reason of a plug-in"), 1.0)
    reported = (book.explain("a") or {})["drafting"]
    assert (reported["declined_because"], reported["bounded_by"]["a reason of a plug-in"]) == (None, 1)
