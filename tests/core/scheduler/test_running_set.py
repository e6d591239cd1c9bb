"""Which of the running sequences a step may compute, where several steps are in flight."""

from __future__ import annotations

import pytest

from headrace.core.knobs import Knobs
from headrace.core.plan import StepPlan
from headrace.testing.checks import make_crowd
from headrace.testing.engines import Record, drain, hashing_engine
from headrace.testing.hashing_runner import HashingRunner, expected_tokens, seed_of
from tests.doubles.scenes import plans, request


class InFlight(HashingRunner):
    """Keeps the slots that the plans in flight draw tokens for, and how many plans draw at once."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.drawing: list[set[int]] = []
        self.most = 0

    def launch(self, plan: StepPlan, now: float) -> None:
        drawn = {row.slot for row in plan.rows if row.samples}
        assert not any(drawn & other for other in self.drawing), "a step waits for a token of another one"
        self.drawing.append(drawn)
        self.most = max(self.most, sum(map(bool, self.drawing)))
        super().launch(plan, now)

    def collect(self):
        self.drawing.pop(0)
        return super().collect()


@pytest.mark.parametrize("turns", [2, 3])
def test_steps_in_flight_draw_tokens_of_different_sequences(turns: int) -> None:
    """Also while memory is short, and sequences are preempted and end."""
    engine, _ = hashing_engine(
        overlap=turns - 1, knobs=Knobs(batched_tokens=16, turns=turns), num_blocks=20, max_model_len=48
    )
    runner = engine.runner = InFlight(20, 4, 8)
    crowd = make_crowd()
    record = Record()
    for each in crowd:
        engine.submit(each, 0.0)
    drain(engine, record)
    engine.check_consistency()
    assert runner.most == turns
    for each in crowd:
        assert each.params.max_tokens is not None
        seed = seed_of(each.params, each.seed)
        right = expected_tokens(each.tokens, seed, each.params.max_tokens, each.eos_token_ids)
        assert record.tokens[each.id] == right


def test_decoding_sequences_take_equal_turns() -> None:
    engine, _ = hashing_engine(overlap=1, knobs=Knobs(turns=2))
    seen = plans(engine)
    for i in range(5):
        engine.submit(request(str(i), 4, max_tokens=9), 0.0)
    drain(engine, Record())
    sizes = [len(plan.rows) for plan in seen]
    assert sizes[:7] == [5, 3, 2, 3, 2, 3, 2]


def test_a_long_prompt_is_computed_in_every_step_and_takes_no_turn() -> None:
    engine, _ = hashing_engine(overlap=1, knobs=Knobs(batched_tokens=8, turns=2))
    seen = plans(engine)
    engine.submit(request("short", 4, max_tokens=20), 0.0)
    engine.submit(request("long", 80, max_tokens=1), 0.0)
    drain(engine, Record())
    lengths = [sorted(row.length for row in plan.rows) for plan in seen[:6]]
    assert all(each[-1] > 1 for each in lengths)  # a chunk
    assert [each for each in lengths[2:] if each[0] == 1]  # a token beside it
