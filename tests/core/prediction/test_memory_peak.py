from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.capacity import blocks_needed
from headrace.core.prediction.memory_peak import AlwaysFits, Growth, Headroom, peak_growth
from headrace.core.prediction.output_lengths import LengthPredictor
from headrace.core.sequence import Sequence
from tests.doubles.scenes import request

LIVES = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 60)).map(lambda pair: Growth(pair[0], sum(pair))),
    min_size=1,
    max_size=12,
)


def simulated_growth(growths: list[Growth], block_size: int) -> int:
    """Blocks held beyond those of now, at the worst step, when every sequence is really played to its end."""
    now = sum(blocks_needed(growth.tokens, block_size) for growth in growths)
    worst = 0
    for step in range(max(growth.final - growth.tokens for growth in growths) + 1):
        held = sum(
            blocks_needed(growth.tokens + step, block_size)
            if growth.tokens + step <= growth.final
            else min(growth.shared, blocks_needed(growth.tokens, block_size))
            for growth in growths
        )
        worst = max(worst, held - now)
    return worst


@settings(max_examples=300)
@given(LIVES, st.integers(1, 9))
def test_the_peak_is_that_of_playing_every_sequence_to_its_end(growths, block_size):
    assert peak_growth(growths, block_size) == simulated_growth(growths, block_size)


def test_blocks_that_others_hold_too_do_not_come_free():
    short, long = Growth(8, 12), Growth(4, 20)
    assert peak_growth([short, long], 4) == 2, (
        "the long one takes its fourth block when the short one has left"
    )
    assert peak_growth([short._replace(shared=2), long], 4) == 4
    assert peak_growth([short._replace(shared=2), long], 4) == simulated_growth(
        [short._replace(shared=2), long], 4
    )


def running(name: str, prompt: int, produced: int, max_tokens: int, block_size: int) -> Sequence:
    sequence = Sequence(request(name, prompt, max_tokens=max_tokens), (0,), 1000)
    sequence.tokens += [7] * produced
    sequence.table = list(range(blocks_needed(sequence.known, block_size)))
    return sequence


def taught(output_tokens: int, max_tokens: int) -> LengthPredictor:
    lengths = LengthPredictor(1000)
    for _ in range(300):
        lengths.observe(request("seen", max_tokens=max_tokens), output_tokens)
    return lengths


def test_a_request_that_would_cause_preemptions_later_does_not_fit_now():
    # Four with 8 tokens each will end with 22; a fifth fits into what is free now, but not at the peak.
    policy = Headroom(taught(14, 100), block_size=8, watermark=0)
    others = [running(f"r{i}", 8, 0, 100, 8) for i in range(4)]
    candidate = running("new", 8, 0, 100, 8)
    assert AlwaysFits().fits(others, candidate, fresh=1, free=9)
    assert not policy.fits(others, candidate, fresh=1, free=9)
    assert policy.fits(others, candidate, fresh=1, free=12), "each takes two more, the new one three in all"


def test_those_that_end_soon_make_room_for_those_that_run_long():
    policy = Headroom(taught(14, 100), block_size=8, watermark=0)
    candidate = running("new", 5, 0, 100, 8)
    assert policy.fits([running(f"r{i}", 8, 13, 100, 8) for i in range(3)], candidate, fresh=1, free=1)
    assert not policy.fits([running(f"r{i}", 8, 1, 100, 8) for i in range(3)], candidate, fresh=1, free=1)


def test_the_watermark_stays_free():
    others = [running("r", 8, 0, 100, 8)]
    candidate = running("new", 8, 0, 100, 8)
    lengths = taught(14, 100)
    assert Headroom(lengths, 8, watermark=0).fits(others, candidate, fresh=1, free=5)
    assert not Headroom(lengths, 8, watermark=1).fits(others, candidate, fresh=1, free=5)
    assert Headroom(lengths, 8, watermark=1).fits(others, candidate, fresh=1, free=6)


def test_with_nothing_running_whatever_fits_now_may_start():
    policy = Headroom(taught(90, 100), block_size=8, watermark=3)
    assert policy.fits([], running("new", 8, 0, 100, 8), fresh=1, free=1)
    assert not policy.fits([], running("new", 16, 0, 100, 8), fresh=2, free=1)


def test_one_that_outlives_its_prediction_is_asked_about_again():
    policy = Headroom(taught(14, 100), block_size=8, watermark=0)
    other = running("r", 8, 0, 100, 8)
    candidate = running("new", 8, 0, 100, 8)
    assert policy.fits([other], candidate, fresh=1, free=5)
    other.tokens += [7] * 50
    other.table = list(range(blocks_needed(other.known, 8)))
    assert not policy.fits([other], candidate, fresh=1, free=4), "nobody knows how long it will last now"


def test_one_at_its_limit_is_taken_to_end_now():
    policy = Headroom(taught(14, 20), block_size=8, watermark=0)
    others = [running("r", 8, 20, 20, 8)]
    assert policy.fits(others, running("new", 5, 0, 20, 8), fresh=1, free=1), "it gives back four"
