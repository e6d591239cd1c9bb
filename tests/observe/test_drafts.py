from headrace.core.drafting.draft_budget import Cut
from headrace.core.events import Arrived, DraftDeclined, DraftedStep, DraftingFailed, Verified
from headrace.observe.metrics import Metrics
from headrace.observe.metrics_page import MetricsPage
from headrace.observe.requests import RequestBook


def scraped(page: MetricsPage) -> dict[str, float]:
    lines = page.render().decode().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if "spec_decode" in line and not line.startswith("#")]
    return {name.removeprefix("headrace:spec_decode_"): float(value) for name, value in pairs}


def test_drafts_add_up() -> None:
    page = MetricsPage("headrace")
    metrics = Metrics(page)
    for event in (
        Arrived("a", 3, "t", 0),
        Verified("a", "ngram", 4, 3, 2.5, Cut.NOT_WORTH),
        Verified("a", "ngram", 2, 0, 1.0, Cut.WHOLE),
        Verified("a", "suffix", 1, 1, 0.5),
        DraftDeclined("a", "ngram", Cut.NOT_WORTH),
        DraftedStep(0.02, 0.05, 0.04),
        DraftedStep(0.02, 0.01, 0.03),
        DraftingFailed("ValueError: no"),
    ):
        metrics.fold(event, 1.0)
    seen = scraped(page)
    assert seen['num_drafts_total{source="ngram"}'] == 2
    assert seen['num_draft_tokens_total{source="ngram"}'] == 6
    assert seen['num_accepted_tokens_total{source="ngram"}'] == 3
    assert seen['num_expected_tokens_total{source="ngram"}'] == 3.5
    positions = [
        seen[f'num_accepted_tokens_per_pos_total{{position="{at}",source="ngram"}}'] for at in range(3)
    ]
    assert positions == [1, 1, 1]
    assert seen['num_accepted_tokens_total{source="suffix"}'] == 1
    assert seen['cuts_total{reason="not_worth"}'] == 1
    assert seen['cuts_total{reason="whole"}'] == 1
    assert seen['declined_total{reason="not_worth"}'] == 1
    assert seen['predicted_seconds_total{tokens="drafted"}'] == 0.04
    assert round(seen['predicted_seconds_total{tokens="without_drafts"}'], 9) == 0.06
    assert seen['predicted_seconds_total{tokens="expected_without_drafts"}'] == 0.07
    assert seen["failures_total"] == 1


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
