from __future__ import annotations

import dataclasses

import pytest

from headrace.core.events import Admitted, Preempted, PromptScored, Stepped
from headrace.core.knobs import Knobs
from headrace.core.plan import Move, StepOutput, StepPlan, TokenLogprob
from headrace.core.queueing.order import ByPriority
from headrace.core.request import FinishReason, SamplingParams
from headrace.core.scheduler.admitter import LOOKAHEAD
from headrace.testing.engines import Record, drain, hashing_engine
from headrace.testing.hashing_runner import HashingRunner, expected_tokens
from tests.doubles.scenes import admitted, chunks, plans, request, skips, step

# -- one step ------------------------------------------------------------------------------------------


def test_decode_comes_before_prefill_in_rows_and_budget():
    engine, _ = hashing_engine(knobs=Knobs(batched_tokens=6))
    record = Record()
    seen = plans(engine)
    engine.submit(request("a", 4), 0.0)
    step(engine, record)
    engine.submit(request("b", 20), 0.0)
    step(engine, record)
    assert [(row.start, row.length, row.samples) for row in seen[1].rows] == [(4, 1, True), (0, 5, False)]


def test_a_prompt_is_cut_by_the_budget_and_each_cut_says_why():
    engine, _ = hashing_engine(knobs=Knobs(batched_tokens=6))
    record = Record()
    engine.submit(request("a", 15), 0.0)
    drain(engine, record)
    assert chunks(record, "a") == [(0, 6, "budget"), (6, 6, "budget"), (12, 3, "rest")]
    assert len(record.tokens["a"]) == 4


def test_a_prompt_that_fits_is_computed_whole():
    engine, _ = hashing_engine()
    record = Record()
    engine.submit(request("a", 15), 0.0)
    drain(engine, record)
    assert chunks(record, "a") == [(0, 15, "whole")]


def test_a_started_prompt_goes_before_a_new_one_of_the_same_tenant():
    engine, _ = hashing_engine(knobs=Knobs(batched_tokens=12))
    record = Record()
    engine.submit(request("a", 8), 0.0)
    engine.submit(request("started", 8), 0.0)
    step(engine, record)
    engine.submit(request("new", 8), 0.0)
    step(engine, record)
    assert chunks(record, "started") == [(0, 4, "budget"), (4, 4, "rest")]
    assert chunks(record, "new") == [(0, 7, "budget")]


def test_long_prefill_tokens_bounds_the_chunk_of_one_request_only():
    engine, _ = hashing_engine(knobs=Knobs(batched_tokens=64, long_prefill_tokens=5))
    record = Record()
    engine.submit(request("a", 12), 0.0)
    engine.submit(request("b", 4), 0.0)
    step(engine, record)
    assert chunks(record, "a") == [(0, 5, "long_prompt")]
    assert chunks(record, "b") == [(0, 4, "whole")]


def test_mixed_prefill_ratio_bounds_all_prefill_only_while_something_decodes():
    engine, _ = hashing_engine(knobs=Knobs(batched_tokens=64, mixed_prefill_ratio=4.0))
    record = Record()
    engine.submit(request("a", 12), 0.0)
    step(engine, record)
    assert chunks(record, "a") == [(0, 12, "whole")]
    engine.submit(request("b", 3), 0.0)
    engine.submit(request("c", 9), 0.0)
    step(engine, record)
    assert chunks(record, "b") == [(0, 3, "whole")]
    assert chunks(record, "c") == [(0, 1, "budget")], "two may add 1.2 times as much as one"


def test_prompts_for_which_there_is_no_memory_do_not_hurry_the_one_that_is_computed():
    engine, _ = hashing_engine(num_blocks=16, knobs=Knobs(batched_tokens=64, mixed_prefill_ratio=4.0))
    record = Record()
    engine.submit(request("a", 12, max_tokens=30), 0.0)
    step(engine, record)
    for name, tokens in (("b", 20), ("large", 40), ("larger", 44)):
        engine.submit(request(name, tokens), 0.0)
    step(engine, record, 4)
    assert skips(record, "large") == ["no_blocks"]
    assert [length for _, length, _ in chunks(record, "b")] == [5, 4, 4, 4], "three may start, then one has"


def test_without_chunking_a_prompt_waits_until_it_fits_whole():
    engine, _ = hashing_engine(knobs=Knobs(batched_tokens=10, chunked_prefill=False))
    record = Record()
    engine.submit(request("a", 7), 0.0)
    engine.submit(request("b", 7), 0.0)
    step(engine, record)
    assert admitted(record) == ["a"]
    assert skips(record, "b") == ["no_budget"]
    step(engine, record)
    assert chunks(record, "b") == [(0, 7, "whole")]


def test_a_prompt_that_can_never_fit_in_a_step_fails_instead_of_waiting_for_ever():
    engine, _ = hashing_engine(knobs=Knobs(batched_tokens=6, chunked_prefill=False))
    record = Record()
    engine.submit(request("a", 9), 0.0)
    engine.submit(request("b", 9), 0.0)
    engine.submit(request("c", 5), 0.0)
    drain(engine, record)
    assert [record.ends[name][0].reason for name in "abc"] == ["failed", "failed", "length"]
    assert "9 tokens" in record.ends["a"][0].message


def test_chunking_switched_off_lets_a_started_prompt_go_on_in_chunks():
    engine, _ = hashing_engine(knobs=Knobs(batched_tokens=6))
    record = Record()
    engine.submit(request("a", 20), 0.0)
    step(engine, record)
    engine.knobs = dataclasses.replace(engine.knobs, chunked_prefill=False)
    drain(engine, record)
    assert record.ends["a"][0].reason is FinishReason.LENGTH


# -- waiting -------------------------------------------------------------------------------------------


def test_requests_without_a_slot_wait_in_order():
    engine, _ = hashing_engine(max_num_seqs=1)
    record = Record()
    for name in "abc":
        engine.submit(request(name), 0.0)
    step(engine, record)
    assert skips(record, "b") == ["no_slot"]
    assert skips(record, "c") == [], "nobody behind a full house is looked at"
    drain(engine, record)
    assert admitted(record) == ["a", "b", "c"]


@pytest.mark.parametrize("max_skips", [0, 1, 3])
def test_a_head_that_does_not_fit_is_overtaken_at_most_so_often(max_skips):
    engine, _ = hashing_engine(
        num_blocks=16, max_num_seqs=8, max_model_len=64, knobs=Knobs(max_skips=max_skips)
    )
    record = Record()
    engine.submit(request("runs", 24, max_tokens=8), 0.0)
    step(engine, record)
    engine.submit(request("large", 40, max_tokens=1), 0.0)
    for i in range(6):
        engine.submit(request(f"small{i}", 2, max_tokens=2), 0.0)
    drain(engine, record)
    order = admitted(record)
    assert order.index("large") - order.index("runs") - 1 == max_skips
    assert skips(record, "large") == ["no_blocks"]


def test_planning_looks_past_a_bounded_number_of_requests():
    engine, _ = hashing_engine(num_blocks=16, max_num_seqs=40, max_model_len=64, knobs=Knobs(max_skips=99))
    record = Record()
    engine.submit(request("runs", 24, max_tokens=4), 0.0)
    step(engine, record)
    for i in range(LOOKAHEAD + 3):
        engine.submit(request(f"large{i}", 40, max_tokens=1), 0.0)
    engine.submit(request("small", 2), 0.0)
    step(engine, record)
    assert admitted(record) == ["runs"]
    assert [len(skips(record, f"large{i}")) for i in range(LOOKAHEAD + 3)] == [1] * LOOKAHEAD + [0] * 3


def test_one_free_block_per_running_sequence_is_kept_back():
    engine, _ = hashing_engine(num_blocks=4, max_model_len=16)
    record = Record()
    engine.submit(request("a", 8), 0.0)
    step(engine, record)
    engine.submit(request("b", 4), 0.0)
    step(engine, record)
    assert skips(record, "b") == ["no_blocks"], "one block is free, but it is for the growth of a"


def test_lower_priority_value_goes_first():
    engine, _ = hashing_engine(max_num_seqs=1, order=ByPriority())
    record = Record()
    for name, priority in {"a": 0, "b": 5, "c": -1}.items():
        engine.submit(request(name, priority=priority), 0.0)
    drain(engine, record)
    assert admitted(record) == ["c", "a", "b"]


def test_cancelled_requests_do_not_pile_up_in_the_queue():
    engine, _ = hashing_engine(max_num_seqs=1, order=ByPriority())
    engine.submit(request("runs", max_tokens=None), 0.0)
    step(engine, Record())
    for i in range(2000):
        engine.submit(request(f"r{i}", priority=i % 7), 0.0)
        if i:
            engine.cancel(f"r{i}", FinishReason.CANCELLED, 0.0)
    assert engine.scheduler.num_waiting == 1
    queues = [t.queue for c in engine.scheduler._waiting._classes.values() for t in c.tenants.values()]
    assert sum(len(queue._timely._heap) for queue in queues) < 200


# -- shared prefixes -----------------------------------------------------------------------------------


def test_a_request_waits_for_a_prefix_that_is_being_computed():
    engine, runner = hashing_engine(knobs=Knobs(long_prefill_tokens=8))
    record = Record()
    prompt = tuple(range(20))
    engine.submit(request("a", prompt), 0.0)
    engine.submit(request("b", (*prompt, 99)), 0.0)
    step(engine, record, 2)
    assert admitted(record) == ["a"]
    assert skips(record, "b") == ["prefix_in_flight"]
    drain(engine, record)
    assert record.of(Admitted)[1].cached_tokens == 20
    assert runner.computed_tokens == 20 + 3 + 1 + 3


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_promise_is_withdrawn_when_its_maker_goes(overlap):
    engine, _ = hashing_engine(knobs=Knobs(long_prefill_tokens=4), overlap=overlap)
    record = Record()
    prompt = tuple(range(20))
    engine.submit(request("a", prompt), 0.0)
    engine.submit(request("b", prompt), 0.0)
    step(engine, record, 2)
    engine.cancel("a", FinishReason.CANCELLED, 0.0)
    step(engine, record)
    assert admitted(record) == ["a", "b"]
    drain(engine, record)
    assert record.tokens["b"] == expected_tokens(prompt, 0, 4, frozenset())


def test_a_partly_equal_block_is_copied_before_it_is_written_to():
    engine, _ = hashing_engine()
    record = Record()
    seen = plans(engine)
    prompt = tuple(range(10))
    engine.submit(request("a", prompt), 0.0)
    step(engine, record)
    engine.submit(request("b", (*prompt, 77, 78)), 0.0)
    step(engine, record)
    first, (entry,) = seen[0].entries[0], seen[1].entries
    assert entry.blocks[:2] == first.blocks[:2]
    assert seen[1].moves == (Move(first.blocks[2], entry.blocks[2]),)
    assert seen[1].rows[-1][1:3] == (10, 2)
    drain(engine, record)
    assert record.tokens["b"] == expected_tokens((*prompt, 77, 78), 0, 4, frozenset())


def test_salt_parts_what_is_shared():
    engine, _ = hashing_engine()
    record = Record()
    for name, salt in {"a": "x", "b": "y", "c": "x"}.items():
        engine.submit(request(name, tuple(range(12)), salt=salt), 0.0)
        drain(engine, record)
    assert [event.cached_tokens for event in record.of(Admitted)] == [0, 0, 11]


def test_prompt_logprobs_need_the_prompt_computed():
    engine, _ = hashing_engine()
    record = Record()
    engine.submit(request("a", tuple(range(12))), 0.0)
    drain(engine, record)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    engine.submit(request("b", tuple(range(12)), params=params), 0.0)
    drain(engine, record)
    assert record.of(Admitted)[1].cached_tokens == 0


# -- preemption ----------------------------------------------------------------------------------------


def preempting(**settings):
    """Two sequences in a pool that holds only one of them at its full length."""
    engine, runner = hashing_engine(num_blocks=8, max_model_len=32, **settings)
    record = Record()
    engine.submit(request("a", 8, max_tokens=12), 0.0)
    engine.submit(request("b", 8, max_tokens=24, seed=1), 0.0)
    return engine, runner, record


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_preempted_request_comes_back_with_cache_hits_and_the_same_text(overlap):
    engine, _, record = preempting(overlap=overlap)
    drain(engine, record)
    assert {event.request_id for event in record.of(Preempted)} == {"b"}, "who ranks first goes on"
    back = [e for e in record.of(Admitted) if e.reason == "resumed"]
    assert back
    assert back[0].cached_tokens > 0, "its blocks keep their keys"
    for name, seed, length in [("a", 0, 12), ("b", 1, 24)]:
        prompt = request(name, 8).tokens
        assert record.tokens[name] == expected_tokens(prompt, seed, length, frozenset())


def test_tokens_cached_at_a_resume_are_not_reported_as_cached_prompt():
    engine, _, record = preempting()
    drain(engine, record)
    assert record.of(Preempted)
    assert record.ends["b"][0].cached_tokens == 0, "its prompt was computed, by itself, when it came"


def test_preempted_then_cancelled_keeps_the_books():
    engine, _, record = preempting(overlap=1)
    while not record.of(Preempted):
        step(engine, record)
    engine.cancel("b", FinishReason.CANCELLED, 0.0)
    step(engine, record)
    drain(engine, record)
    assert record.ends["b"][0].reason is FinishReason.CANCELLED
    assert engine.scheduler.num_waiting == engine.scheduler.num_running == 0


class ScoringRunner(HashingRunner):
    """Scores each prompt position: the log-probability is minus the position that was scored."""

    def launch(self, plan: StepPlan, now: float) -> None:
        super().launch(plan, now)
        scores = {
            i: tuple(
                TokenLogprob(0, -float(p), 1, ())
                for p in range(row.start, min(row.start + row.length, self.prompts[row.slot] - 1))
            )
            for i, row in enumerate(plan.rows)
        }
        self._outputs[-1] = self._outputs[-1]._replace(prompt_logprobs={i: s for i, s in scores.items() if s})


@pytest.mark.parametrize("batched_tokens", [5, 64])
def test_each_prompt_position_is_scored_once_even_when_computed_twice(batched_tokens):
    engine, _ = hashing_engine(
        num_blocks=8, max_model_len=32, prefix_caching=False, knobs=Knobs(batched_tokens=batched_tokens)
    )
    engine.runner = ScoringRunner(8, 4, 8)
    record = Record()
    params = SamplingParams(max_tokens=24, prompt_logprobs=0)
    engine.submit(request("a", 8, params=params), 0.0)
    engine.submit(request("b", 8, params=params), 0.0)
    drain(engine, record)
    assert record.of(Preempted)
    scores = [e for e in record.of(PromptScored) if e.request_id == "b"]
    reported = [-entry.logprob for event in scores for entry in event.logprobs]
    assert reported == list(range(7))
    for event in scores:
        assert event.start == -event.logprobs[0].logprob


# -- the ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_stop_token_ends_the_answer_and_is_named(overlap):
    answer = expected_tokens((1, 2, 3), 0, 10, frozenset())
    stop = answer[4]
    engine, _ = hashing_engine(overlap=overlap)
    record = Record()
    params = SamplingParams(max_tokens=10, stop_token_ids=(stop,))
    engine.submit(request("a", (1, 2, 3), params=params), 0.0)
    drain(engine, record)
    assert record.tokens["a"] == answer[: answer.index(stop) + 1]
    assert (record.ends["a"][0].reason, record.ends["a"][0].stop_token) == (FinishReason.STOP, stop)


def test_a_stop_decided_outside_the_engine_names_no_token():
    engine, _ = hashing_engine()
    record = Record()
    engine.submit(request("a"), 0.0)
    step(engine, record, 2)
    engine.cancel("a", FinishReason.STOP, 0.0)
    step(engine, record)
    assert record.ends["a"][0].stop_token is None


def test_eos_is_ignored_on_request():
    answer = expected_tokens((1, 2, 3), 0, 6, frozenset())
    for ignore, length in {False: answer.index(answer[1]) + 1, True: 6}.items():
        engine, _ = hashing_engine()
        record = Record()
        params = SamplingParams(max_tokens=6, ignore_eos=ignore)
        engine.submit(request("a", (1, 2, 3), params=params, eos_token_ids=frozenset({answer[1]})), 0.0)
        drain(engine, record)
        assert len(record.tokens["a"]) == length


@pytest.mark.parametrize(
    ("tokens", "fields", "words"),
    [
        ((), {}, "empty"),
        (tuple(range(16)), {}, "limit is 15"),
        (tuple(range(12)), {"max_tokens": None}, "only 3"),
    ],
)
def test_what_can_never_be_served_is_refused_at_once_and_says_why(tokens, fields, words):
    engine, _ = hashing_engine(num_blocks=3, max_model_len=16)
    record = Record()
    engine.submit(request("a", tokens, **fields), 0.0)
    record.fold(engine.take_events())
    (end,) = record.ends["a"]
    assert end.reason is FinishReason.REJECTED
    assert words in end.message
    assert engine.wake_at(0.0) is None


def test_an_id_in_use_is_refused_and_may_be_used_again_later():
    engine, _ = hashing_engine()
    record = Record()
    engine.submit(request("a"), 0.0)
    engine.submit(request("a"), 0.0)
    record.fold(engine.take_events())
    assert "already in use" in record.ends.pop("a")[0].message
    drain(engine, record)
    assert record.ends.pop("a")[0].reason is FinishReason.LENGTH
    engine.submit(request("a"), 0.0)
    drain(engine, record)
    assert record.ends["a"][0].reason is FinishReason.LENGTH


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_deadline_ends_a_request_wherever_it_is(steps, overlap):
    engine, _ = hashing_engine(overlap=overlap)
    record = Record()
    engine.submit(request("a", max_tokens=None, deadline=1.0), 0.0)
    step(engine, record, steps)
    step(engine, record, now=0.999)
    assert "a" not in record.ends
    step(engine, record, 2, now=1.0)
    assert record.ends["a"][0].reason is FinishReason.TIMEOUT


def test_the_deadline_of_a_finished_request_wakes_no_step():
    engine, _ = hashing_engine()
    record = Record()
    engine.submit(request("a", deadline=600.0), 0.0)
    assert drain(engine, record) < 1.0


def test_a_failing_row_fails_its_request_alone():
    engine, runner = hashing_engine(overlap=1)
    record = Record()
    for name in "ab":
        engine.submit(request(name, max_tokens=8), 0.0)
    step(engine, record, 2)
    runner.poison.add("a")
    drain(engine, record)
    assert (record.ends["a"][0].reason, record.ends["a"][0].message) == (FinishReason.FAILED, "poisoned")
    assert record.tokens["b"] == expected_tokens(request("b").tokens, 0, 8, frozenset())


@pytest.mark.parametrize("overlap", [0, 1])
def test_blocks_of_a_cancelled_request_are_not_reused_while_its_rows_are_in_flight(overlap):
    engine, _ = hashing_engine(overlap=overlap, num_blocks=4, max_model_len=16)
    record = Record()
    engine.submit(request("a", 12), 0.0)
    step(engine, record)
    engine.cancel("a", FinishReason.CANCELLED, 0.0)
    free = engine.scheduler.pool.num_free
    assert free == (4 if overlap == 0 else 1)
    step(engine, record)
    assert engine.scheduler.pool.num_free == 4


def test_outputs_are_committed_in_the_order_of_launch():
    engine, _ = hashing_engine()
    engine.submit(request("a"), 0.0)
    first = engine.scheduler.plan(0.0, engine.knobs)
    engine.scheduler.plan(0.0, engine.knobs)
    with pytest.raises(ValueError, match="oldest in flight"):
        engine.scheduler.commit(first, StepOutput(1, ((0,),)))


def test_a_step_tells_its_sizes():
    engine, _ = hashing_engine(num_blocks=8, max_model_len=32)
    record = Record()
    engine.submit(request("a", 5), 0.0)
    step(engine, record)
    engine.submit(request("b", 3), 0.0)
    step(engine, record)
    reported = record.of(Stepped)[1]
    assert (reported.decode_rows, reported.prefill_rows, reported.computed_tokens) == (1, 1, 4)
    assert (reported.running, reported.waiting, reported.blocks_held, reported.blocks_total) == (2, 0, 3, 8)
    assert (reported.slots_allocated, reported.slots_filled) == (12, 9)
