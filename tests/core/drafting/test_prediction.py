import random

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.drafting.prediction import CachedAnswerProposer, KnownText, PredictionProposer
from headrace.core.drafting.proposal import DraftRow, Proposal
from headrace.core.request import Request

PROMPT = (900, 901)


def steps_of(predicted: list[int], answer: list[int], max_tokens: int = 8) -> int:
    """The steps that ``answer`` takes if drafts are verified against it."""
    proposer = PredictionProposer(max_tokens)
    request = Request("r", PROMPT, prediction=tuple(predicted))
    at = steps = 0
    while at < len(answer):
        (found,) = proposer.propose([DraftRow(request, [*PROMPT, *answer[:at]], max_tokens)])
        right = 0
        for drafted, token in zip(found.tokens if found else (), answer[at:], strict=False):
            if drafted != token:
                break
            right += 1
        at += right + 1
        steps += 1
    return steps


def test_an_unchanged_text_is_proposed_from_the_first_token_on() -> None:
    text = list(range(90))
    assert steps_of(text, text) == 10


def test_an_edit_costs_a_few_tokens() -> None:
    text = list(range(90))
    for edited in (
        [*text[:40], 500, *text[41:]],  # replaced
        [*text[:40], *text[46:]],  # removed
        [*text[:40], 500, 501, 502, 503, *text[40:]],  # inserted
        [*text[:40], *text[80:], *text[40:80]],  # moved
    ):
        assert steps_of(text, edited) <= 10 + 8, edited


def test_after_one_differing_token_the_next_one_decides() -> None:
    """It was replaced, put in, or another one left out: one more wrong guess at most."""
    text = list(range(90))
    assert steps_of(text, [*text[:40], 500, *text[41:]]) <= 11
    assert steps_of(text, [*text[:40], 500, *text[40:]]) <= 12
    assert steps_of(text, [*text[:40], *text[41:]]) <= 11


def test_the_place_stays_known_after_a_long_accepted_draft() -> None:
    text = list(range(90))
    edited = [*text[:30], 500, *text[31:45], 501, *text[46:]]
    assert steps_of(text, edited, max_tokens=16) == 6


def test_a_common_word_ahead_does_not_draw_the_pointer_away() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 50, 14, 15, 16, 17]
    answer = [1, 2, 3, 4, 50, 6, 7, 8]
    request = Request("r", PROMPT, prediction=tuple(text))
    (found,) = PredictionProposer(3).propose([DraftRow(request, [*PROMPT, *answer[:5]], 3)])
    assert found is not None
    assert found.tokens == (6, 7, 8)


def test_the_place_is_the_one_that_agrees_longest() -> None:
    text = [1, 2, 3, 10, 4, 2, 3, 20, 5, 2, 3, 30, 6]
    answer = [77, 4, 2, 3]
    proposer = PredictionProposer(2)
    request = Request("r", PROMPT, prediction=tuple(text))
    (found,) = proposer.propose([DraftRow(request, [*PROMPT, *answer], 2)])
    assert found is not None
    assert found.tokens == (20, 5)


def test_after_the_text_nothing_is_proposed() -> None:
    request = Request("r", PROMPT, prediction=(1, 2))
    proposer = PredictionProposer(4)
    assert proposer.propose([DraftRow(request, [*PROMPT, 1, 2], 4)]) == [None]
    assert PredictionProposer(4).propose([DraftRow(request, [*PROMPT, 8, 8, 8, 8, 8, 8, 8], 4)]) == [None]
    assert proposer.propose([DraftRow(Request("s", PROMPT), [*PROMPT], 4)]) == [None]


@settings(max_examples=150)
@given(
    text=st.lists(st.integers(0, 5), min_size=1, max_size=40),
    answer=st.lists(st.integers(0, 5), max_size=40),
    strides=st.lists(st.integers(1, 5), min_size=1, max_size=10),
    max_tokens=st.integers(1, 6),
)
def test_proposals_are_slices_of_the_text(
    text: list[int], answer: list[int], strides: list[int], max_tokens: int
) -> None:
    proposer = PredictionProposer(max_tokens)
    request = Request("r", PROMPT, prediction=tuple(text))
    shown = " ".join(map(str, text)) + " "
    at = 0
    for stride in strides:
        (found,) = proposer.propose([DraftRow(request, [*PROMPT, *answer[:at]], max_tokens)])
        if found is not None:
            assert 1 <= len(found.tokens) == len(found.confidences) <= max_tokens
            assert " ".join(map(str, found.tokens)) + " " in shown
            assert all(0 < each < 1 for each in found.confidences)
        at += stride


@settings(max_examples=100)
@given(seed=st.integers(0, 10_000), length=st.integers(20, 200), edits=st.integers(0, 6))
def test_the_steps_grow_with_the_edits_and_not_with_the_text(seed: int, length: int, edits: int) -> None:
    rng = random.Random(seed)
    text = rng.sample(range(1000), length)
    answer = list(text)
    for _ in range(edits):
        at = rng.randrange(len(answer))
        kind = rng.randrange(3)
        answer[at : at + rng.choice((0, 1, 2)) * (kind != 1)] = [
            rng.randrange(1000, 2000) for _ in range(rng.choice((1, 2)) * (kind != 0))
        ]
    assert steps_of(text, answer) <= len(answer) / 9 + 1 + 5 * edits


def test_all_at_once_finds_the_same_place_as_step_by_step() -> None:
    rng = random.Random(3)
    text = [rng.randrange(30) for _ in range(120)]
    answer = [*text[:30], 99, *text[35:60], 98, 97, *text[60:90]]
    request = Request("r", PROMPT, prediction=tuple(text))
    gradual = PredictionProposer(4)
    found: Proposal | None = None
    for end in range(len(answer) + 1):
        (found,) = gradual.propose([DraftRow(request, [*PROMPT, *answer[:end]], 4)])
    (whole,) = PredictionProposer(4).propose([DraftRow(request, [*PROMPT, *answer], 4)])
    assert found == whole
    assert found is not None
    assert found.tokens == tuple(text[90:94])


def test_memory_is_reported_and_given_back() -> None:
    proposer = PredictionProposer(4)
    request = Request("r", PROMPT, prediction=tuple(range(100)))
    proposer.propose([DraftRow(request, [*PROMPT], 4)])
    assert proposer.nbytes >= 100 * 8
    proposer.ended(request, [*PROMPT])
    assert proposer.nbytes == 0


def test_a_cached_answer_is_a_source_of_its_own() -> None:
    request = Request("r", PROMPT, prediction=(1, 2), cached_answer=(3, 4))
    draft_row = DraftRow(request, [*PROMPT], 4)
    (predicted,), (cached,) = (
        PredictionProposer(4).propose([draft_row]),
        CachedAnswerProposer(4).propose([draft_row]),
    )
    assert predicted is not None
    assert (predicted.tokens, predicted.source) == ((1, 2), "prediction")
    assert cached is not None
    assert (cached.tokens, cached.source) == ((3, 4), "cached")


def test_after_many_unseen_tokens_the_suffix_of_the_output_finds_the_position() -> None:
    text = list(range(100, 160))
    known = KnownText(text)
    output = list(range(1000, 1020))
    assert known.advance(output, 0) is None, "nothing of it occurs in the text"
    output += [*range(2000, 2020), 110, 111, 112]
    found = known.advance(output, 0)
    assert found is not None
    assert text[found.position] == 113
    assert found.matched == 3


def test_the_nearest_of_many_equal_places_is_found() -> None:
    text = [7, 8, 9, *range(100, 150), 7, 8, 9, *range(200, 250), 7, 8, 9, *range(300, 350)]
    known = KnownText(text)
    output = [*text[:30], *range(1000, 1012), 7, 8, 9]
    assert known.advance(output[:30], 0) is not None
    found = known.advance(output, 0)
    assert found is not None
    assert text[found.position] == 200, "ahead of the pointer, and not the farther one"


def test_ids_beyond_unicode_are_found() -> None:
    far = 1 << 40
    text = [far + each for each in range(40)]
    assert steps_of(text, [7, 8, 9, *text[20:]], max_tokens=8) < 12
