import math
import random

import pytest

from headrace.core.prediction.step_curve import StepCost, StepCurve
from headrace.core.prediction.step_times import StepTimes


def learned(*steps, token=math.inf, context_tokens=math.inf):
    curve = StepCurve((0.0, token, 0.0), context_tokens)
    for tokens, seconds in steps:
        curve.observe(tokens, 0, seconds)
    return curve


def test_measured_sizes_are_returned_as_measured():
    curve = learned((32, 0.02), (32, 0.03), (512, 0.1))
    assert curve.seconds(32) == pytest.approx(0.0245, rel=0.01)
    assert curve.seconds(512) == pytest.approx(0.1)


def test_between_two_sizes_a_step_reads_weights_or_computes_whichever_is_longer():
    curve = learned((32, 0.02), (512, 0.1))
    assert curve.seconds(64) == pytest.approx(0.02), "0.1 * 64 / 512 is less"
    assert curve.seconds(256) == pytest.approx(0.05)
    assert curve.seconds(1024) == pytest.approx(0.2), "more arithmetic"
    assert curve.seconds(1) == pytest.approx(0.02), "the weights are read all the same"


@pytest.mark.parametrize(("slope", "seconds"), [(math.inf, 0.04), (1.0, 0.04), (1e-4, 0.0216)])
def test_beyond_the_largest_size_a_token_costs_its_share_or_the_slope_if_that_is_less(slope, seconds):
    curve = learned((8, 0.019), (16, 0.02), token=slope)
    assert curve.seconds(16) == pytest.approx(0.02)
    assert curve.seconds(32) == pytest.approx(seconds)
    assert curve.longest(0, seconds + 1e-9, 16) == 16


def test_before_the_first_step_the_line_holds():
    curve = StepCurve((0.01, 1e-3, 1e-5))
    assert curve.seconds(10, 100) == pytest.approx(0.021)
    assert curve.longest(0, 0.0212, 4, 100) == 6, "1e-5 for each position that they attend to"
    assert StepCurve((0.0, 0.0, 0.0)).longest(0, 1.0) > 10**9, "tokens seem to cost nothing"


def test_below_the_smallest_measured_size_a_step_takes_no_longer_than_the_line_says():
    """Only chunks of prompts have been measured: nothing says that one token takes as long."""
    curve = StepCurve((0.01, 1e-3, 0.0))
    curve.observe(512, 0, 0.5)
    assert curve.seconds(1) == pytest.approx(0.011)
    assert curve.seconds(256) == pytest.approx(0.25)
    assert curve.longest(0, 0.25 + 1e-9) == 256
    curve.observe(1, 0, 0.4)
    assert curve.seconds(256) == pytest.approx(0.4), "the weights are read"


def test_without_a_limit_of_its_time_a_step_takes_a_row_of_any_length():
    assert learned((32, 0.02), token=1e-3, context_tokens=1000.0).longest(0, math.inf, 4, 100) > 10**9


def test_a_curve_never_falls_between_two_sizes_that_do():
    curve = learned((32, 0.05), (512, 0.04))
    assert curve.seconds(300) <= 0.05


def test_a_size_takes_at_most_as_long_as_a_larger_one():
    curve = learned((16, 0.5), (32, 0.02))  # the first step waited for the machine
    assert curve.seconds(16) == pytest.approx(0.02)


def test_a_step_that_was_interrupted_counts_little_and_a_new_pace_is_learned():
    curve = learned(*[(32, 0.02)] * 40, (32, 10.0))
    assert curve.seconds(32) < 0.022
    slow_start = learned((32, 5.0), *[(32, 0.02)] * 60)
    assert slow_start.seconds(32) < 0.03
    for _ in range(2500):
        curve.observe(32, 0, 0.04)
    assert curve.seconds(32) == pytest.approx(0.04, rel=0.01)
    assert StepCurve.of(curve.measured()).seconds(32) == pytest.approx(0.04, rel=0.01)


def test_a_slow_first_step_of_a_size_does_not_keep_all_prompts_below_it():
    """The first step of a server computes a short prompt with cold weights. Without another step of this size its time
    would never be corrected: chunks would end below it, however many tokens larger steps compute in the same time.
    """
    steps = [(4, 0.133), *[(1, 0.0135)] * 400, *[(110, 0.08)] * 8]
    curve = learned(*steps)
    assert curve.longest(0, 0.0227, 1) >= 8
    assert curve.seconds(4) <= 0.0135 + (0.08 - 0.0135) * 3 / 109 + 1e-9
    assert curve.seconds(110) == pytest.approx(0.08)
    for _ in range(50):
        curve.observe(4, 0, 0.03)
    assert curve.seconds(4) > 0.025, "what is measured often counts"


def test_a_slow_first_step_of_the_largest_size_does_not_keep_all_prompts_below_it():
    """24 rows decode, and the first prompts beside them were computed with cold caches. No larger step follows."""
    steps = [(32, 0.048), *[(26, 0.0217)] * 400]
    curve = learned(*steps)
    assert curve.longest(0, 0.034, 24) >= 12
    assert curve.seconds(32) <= 0.0217 * 32 / 26 + 1e-9
    for _ in range(50):
        curve.observe(32, 0, 0.04)
    assert curve.seconds(32) > 0.035, "what is measured often counts"


def test_a_new_pace_of_the_machine_is_followed_for_all_sizes_and_not_copied():
    """A busy machine in the last steps is not taken for the usual pace."""
    curve = learned(*[(512, 0.1), (32, 0.02)] * 600, *[(32, 0.04)] * 100)
    assert curve.seconds(32) == pytest.approx(0.04, rel=0.05)
    assert curve.seconds(512) == pytest.approx(0.2, rel=0.15)
    usual = StepCurve.of(curve.measured())
    assert usual.seconds(512) == pytest.approx(0.1)
    assert usual.seconds(32) < 0.025


def test_attention_is_no_part_of_a_size():
    """Steps of 64 tokens attended to many positions, and those of 512 to few."""
    curve = StepCurve()
    for contexts in (20_000, 60_000, 100_000) * 100:
        curve.observe(64, contexts, 0.02 + 2e-7 * contexts)
    curve.observe(512, 1000, 0.1)
    curve = StepCurve.of(curve.measured())
    assert curve.seconds(64, 50_000) == pytest.approx(0.03, rel=0.03)
    assert curve.seconds(512, 1000) == pytest.approx(0.1)
    assert curve.seconds(64) == pytest.approx(0.02, rel=0.05)


def test_each_size_has_its_own_cost_of_a_position():
    """Decoding reads keys and values, and a chunk computes with them: one cost for both was wrong for one of them."""
    curve, rng = StepCurve((0.0, 1e-3, 1e-6), context_tokens=50_000), random.Random(1)

    def seconds(tokens, contexts):
        return 0.02 + 6e-8 * contexts if tokens < 100 else 2e-4 * tokens + 4e-9 * contexts

    for _ in range(2000):
        rows, start = rng.randint(8, 40), rng.choice((0, 4000, 30_000))
        tokens, contexts = rows, rows * rng.randint(200, 3000)
        if rng.random() < 0.3:
            chunk = rng.randint(300, 2000)
            tokens, contexts = rows + chunk, contexts + chunk * start + chunk * chunk // 2
        curve.observe(tokens, contexts, seconds(tokens, contexts) * math.exp(rng.gauss(0.0, 0.1)))
    curve.line_changed((0.0, 1e-4, 1e-6))
    for tokens, contexts in ((16, 3000), (16, 60_000), (32, 100_000)):
        assert curve.seconds(tokens, contexts) == pytest.approx(seconds(tokens, contexts), rel=0.1)
    for start in (0, 60_000):
        contexts = 1000 * start + 500_000
        assert curve.seconds(1000, contexts) == pytest.approx(seconds(1000, contexts), rel=0.15)


def test_where_tokens_explain_the_time_as_well_attention_costs_what_its_arithmetic_does():
    """First chunks of prompts: the positions grow with the square of the tokens, and nothing else differs."""
    curve, rng = StepCurve(context_tokens=50_000), random.Random(1)
    for _ in range(2000):
        tokens = rng.randint(512, 723)
        curve.observe(tokens, tokens * tokens // 2, 1e-4 * tokens)
    extra = curve.seconds(600, 600 * 10_000) - curve.seconds(600, 0)
    assert extra == pytest.approx(1e-4 * 600 * 10_000 / 50_000, rel=0.5)


@pytest.mark.parametrize("start", [0, 100, 50_000])
@pytest.mark.parametrize("seconds", [0.01, 0.024, 0.06, 0.1, 0.5])
def test_the_longest_row_beside_others_keeps_the_step_in_time(start, seconds):
    curve = learned((4, 0.018), (32, 0.02), (512, 0.1), (1000, 0.19), token=2e-4, context_tokens=6e4)
    context = 0.19 / 1000 / 6e4
    length = curve.longest(start, seconds, 8, 4000)

    def of(more):
        return curve.seconds(8 + more, 4000) + context * (more * start + more * more / 2)

    assert length == 0 or of(length) <= seconds + 1e-9
    assert of(length + 1) > seconds


def test_step_times_keep_a_curve_of_steps_without_drafts():
    times = StepTimes()
    for _ in range(20):
        times.observe(4, 12, 400, 0.5, drafted=True)
    times.observe(4, 4, 400, 0.04)  # directly after drafts: it is not counted
    times.observe(4, 4, 400, 0.02)
    assert times.curve.seconds(4) == pytest.approx(0.02)


def test_a_curve_of_measured_steps_predicts_the_same_and_learns_for_itself():
    times = StepTimes()
    for tokens in (4, 8, 64, 256) * 20:
        times.observe(4, tokens, 100 * tokens, 0.01 + 1e-4 * tokens)
    measured, before = times.curve.measured(), times.curve.seconds(32, 3200)
    other = StepCurve.of(measured)
    assert other.seconds(32, 3200) == pytest.approx(before, rel=1e-3)
    assert other.measured() == measured
    for _ in range(200):
        other.observe(32, 3200, 1.0)
    assert times.curve.seconds(32, 3200) == before
    assert other.seconds(32, 3200) > 2 * before
    assert times.curve.measured() == measured, "a value does not change"
    assert StepCurve.of(measured).measured() == measured, "one curve of it has not changed it for another"


def test_decoding_is_not_underestimated_while_no_step_only_decodes():
    """A line through steps of 150 to 400 tokens ends near zero; reading weights takes 30 ms in any step."""
    times = StepTimes(StepCost(150, 50_000))
    for step in range(3000):
        rows = 20 + step % 7
        tokens = rows + (0 if step < 50 else 130 + 17 * (step % 15))
        times.observe(rows, tokens, 1000 * rows, max(0.03, 2e-4 * tokens))
    assert times.predict(20, 20, 20_000) < 0.02
    assert times.curve.seconds(20, 20_000) == pytest.approx(0.03, rel=0.1)


def test_what_a_row_costs_is_no_part_of_a_further_token():
    """Steps of at most 16 tokens, in which a row costs ten times as much as a token; a long prompt is one row."""
    times = StepTimes(StepCost(5, 50_000))
    for step in range(2000):
        rows = 1 + step % 8
        tokens = rows if step % 2 else 16
        times.observe(rows, tokens, 100 * rows, 1e-3 + 1e-3 * rows + 1e-4 * tokens)
    assert times.curve.seconds(512, 100) < 0.1


def test_the_longest_row_keeps_the_step_in_time_whatever_has_been_measured():
    rng = random.Random(3)
    for _ in range(60):
        curve = StepCurve((0.0, rng.choice((1e-4, 1e-3, math.inf)), 1e-6), rng.choice((1e3, 5e4, math.inf)))
        for _ in range(rng.randint(1, 300)):
            rows, chunk = rng.randint(1, 60), rng.choice((0, 0, rng.randint(1, 3000)))
            contexts = rows * rng.randint(10, 4000) + chunk * rng.choice((0, 0, 20_000)) + chunk * chunk // 2
            seconds = max(0.02, 1e-4 * (rows + chunk)) + 5e-8 * contexts
            curve.observe(rows + chunk, contexts, seconds * math.exp(rng.gauss(0.0, 0.2)))
        for _ in range(30):
            start, rows, limit = rng.choice((0, 100, 20_000)), rng.randint(0, 80), rng.uniform(1e-3, 0.6)
            contexts = rows * rng.randint(10, 4000)
            length = curve.longest(start, limit, rows, contexts)
            after = curve.seconds(rows + length, contexts + length * start + length * length // 2)
            assert length == 0 or after <= limit * (1 + 1e-9)
