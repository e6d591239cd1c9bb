from __future__ import annotations

import math

import pytest
import torch

from headrace.compute.batch import Batch, Ints
from headrace.compute.runner import LocalRunner
from headrace.compute.sampling.choice import likeliest
from headrace.core import capacity
from headrace.core.plan import Entry, Move, Row, StepOutput, StepPlan, Tier
from tests.compute.fakes import BLOCK, VOCAB, FakeDecoder, FakeKV, entry, greedy, logits_of, row

PROMPT = (5, 17, 3, 88, 41, 9, 60, 2, 33)


class Reached:
    """A `ClearedAhead` that only listens."""

    def __init__(self) -> None:
        self.reported: list[int | str] = []

    def begin(self, blocks: int) -> None:
        self.reported.append(blocks)

    def rest(self) -> None:
        self.reported.append("rest")


def make(
    background: bool = False,
    vocab: int = VOCAB,
    max_num_seqs: int = 8,
    ahead: Reached | None = None,
    pipelined: bool = False,
    decoder: FakeDecoder | None = None,
) -> tuple[LocalRunner, FakeDecoder, FakeKV]:
    decoder, kv = decoder or FakeDecoder(vocab), FakeKV()
    runner = LocalRunner(
        decoder,  # type: ignore[arg-type]
        kv,  # type: ignore[arg-type]
        vocab_size=vocab,
        max_num_seqs=max_num_seqs,
        max_model_len=48,
        device=torch.device("cpu"),
        background=background,
        ahead=ahead,  # type: ignore[arg-type]
        pipelined=pipelined,
    )
    return runner, decoder, kv


def run(runner: LocalRunner, *plans: StepPlan) -> list[StepOutput]:
    outputs = []
    for plan in plans:
        runner.launch(plan, 0.0)
        outputs.append(runner.collect())
    return outputs


def blocks(slot: int) -> tuple[int, ...]:
    return tuple(range(slot * 12 + 11, slot * 12 - 1, -1))[:12]


def needed(tokens: int) -> int:
    return -(-tokens // BLOCK)


def plans_alone(first: Entry, chunks: list[int], tokens: int) -> list[StepPlan]:
    """Prefill in ``chunks``, then decode; blocks are appended as the sequence grows."""
    own = blocks(first.slot)
    plans, done, held = [], 0, 0
    for index, length in enumerate(chunks):
        done += length
        rows = (row(first.slot, done - length, length, own[held : needed(done)], done == len(first.tokens)),)
        held = needed(done)
        plans.append(StepPlan(index, (first,) if index == 0 else (), (), rows))
    for _ in range(tokens - 1):
        done += 1
        rows = (row(first.slot, done - 1, 1, own[held : needed(done)]),)
        held = needed(done)
        plans.append(StepPlan(len(plans), (), (), rows))
    return plans


def text(outputs: list[StepOutput]) -> list[int]:
    assert not any(output.failures for output in outputs)
    return [token for output in outputs for tokens in output.tokens for token in tokens]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("chunks", [[9], [4, 5], [1, 1, 3, 4]])
def test_chunked_is_whole_is_greedy(chunks: list[int], background: bool) -> None:
    runner, _, _ = make(background)
    outputs = run(runner, *plans_alone(entry(1, PROMPT), chunks, 8))
    assert text(outputs) == greedy(PROMPT, 8)
    assert all(output.tokens == ((),) for output in outputs[: len(chunks) - 1])
    assert [output.step for output in outputs] == list(range(len(outputs)))
    runner.close()


@pytest.mark.parametrize("way", [{}, {"background": True}, {"pipelined": True}], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_overlap_needs_no_token_from_the_host(way: dict[str, bool], temperature: float) -> None:
    first = entry(
        2, PROMPT, temperature=temperature, seed_=11, presence_penalty=1.5, bad_words=((4, 5), (1,))
    )
    alone = text(run(make()[0], *plans_alone(first, [9], 10)))
    runner, _, _ = make(**way)
    plans = plans_alone(first, [9], 10)
    runner.launch(plans[0], 0.0)
    outputs = []
    for plan in plans[1:]:
        runner.launch(plan, 0.0)
        outputs.append(runner.collect())
    outputs.append(runner.collect())
    assert text(outputs) == alone
    runner.close()


def test_a_slot_that_gets_another_request_keeps_no_token_of_a_step_under_way() -> None:
    runner, _, _ = make(pipelined=True)
    gone, *_ = plans_alone(entry(2, PROMPT), [9], 1)
    runner.launch(gone, 0.0)
    first, *rest = plans_alone(entry(2, (1, 2, 3)), [3], 6)
    runner.launch(first, 0.0)
    outputs = [runner.collect(), runner.collect(), *run(runner, *rest)]
    assert text(outputs[1:]) == greedy((1, 2, 3), 6)


def test_mixed_batch_is_each_alone() -> None:
    a = entry(0, PROMPT, temperature=0.9, seed_=1, logprobs=3)
    b = entry(5, (1, 2, 3), temperature=1.3, seed_=2, top_k=7, prompt_logprobs=1)
    c = entry(3, (90, 4, 6, 7, 11), seed_=3)
    alone = [
        run(make()[0], *plans_alone(each, chunks, 6)) for each, chunks in ((a, [9]), (b, [3]), (c, [2, 3]))
    ]
    plans = [plans_alone(each, chunks, 6) for each, chunks in ((a, [9]), (b, [3]), (c, [2, 3]))]
    runner, decoder, _ = make()
    got: list[list[object]] = [[], [], []]
    # Sequence 0 starts at step 0, 1 at step 2, 2 at step 3: prefill and decode share a step.
    starts = (0, 2, 3)
    for step in range(10):
        here = [(k, plans[k][step - s]) for k, s in enumerate(starts) if 0 <= step - s < len(plans[k])]
        plan = StepPlan(
            step,
            tuple(e for _, p in here for e in p.entries),
            (),
            tuple(r for _, p in here for r in p.rows),
        )
        (output,) = run(runner, plan)
        for index, (k, _) in enumerate(here):
            got[k].append(
                (output.tokens[index], output.logprobs.get(index), output.prompt_logprobs.get(index))
            )
    for k in range(3):
        assert got[k] == [(o.tokens[0], o.logprobs.get(0), o.prompt_logprobs.get(0)) for o in alone[k]]
    assert decoder.calls[2].lengths == (1, 3)
    assert decoder.calls[2].decode_rows == 1


class OneCall(FakeDecoder):
    """Computes states and likeliest tokens in one call, and keeps for how many positions."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[int] = []

    def greedy(self, batch: Batch, kv: FakeKV) -> Ints:
        self.taken.append(len(batch.logits_indices))
        return likeliest(self.hidden(batch, kv)).numpy()


@pytest.mark.parametrize(
    ("params", "calls"),
    [
        ({}, [1, 1, 1, 1, 1]),
        ({"min_tokens": 3, "eos": (4,)}, [1, 1]),
        ({"presence_penalty": 1.5}, []),
        ({"temperature": 0.8, "seed_": 3}, []),
        ({"logit_bias": {5: 2.0}}, []),
        ({"logprobs": 2}, []),
        ({"prompt_logprobs": 0}, [1, 1, 1, 1]),
    ],
    ids=str,
)
def test_one_call_for_the_likeliest_tokens_where_nothing_else_is_asked_for(
    params: dict[str, object], calls: list[int]
) -> None:
    first = entry(1, PROMPT, **params)
    alone = run(make()[0], *plans_alone(first, [4, 5], 5))
    decoder = OneCall()
    runner, _, _ = make(decoder=decoder)
    assert run(runner, *plans_alone(first, [4, 5], 5)) == alone
    assert decoder.taken == calls


def test_one_call_for_drafts_and_a_fault() -> None:
    right = greedy(PROMPT, 3)
    first = entry(1, PROMPT, blocks(1))
    rows = (
        Row(1, 0, 9, (), True, ()),
        Row(1, 9, 3, (), True, (right[1], (right[2] + 1) % VOCAB)),
        Row(1, 11, 1, (), True, ()),
    )
    plans = [StepPlan(step, (first,) if step == 0 else (), (), (each,)) for step, each in enumerate(rows)]
    outputs = []
    for decoder in (FakeDecoder(), OneCall()):
        decoder.spoil = {right[2]: math.nan}
        outputs.append(run(make(decoder=decoder)[0], *plans))
    assert outputs[0] == outputs[1]
    assert [output.tokens for output in outputs[1][:2]] == [((right[0],),), ((right[1], right[2]),)]
    assert outputs[1][2].failures


def test_what_clears_ahead_hears_of_the_highest_block_before_it_is_written() -> None:
    ahead = Reached()
    runner, _, _ = make(ahead=ahead)
    shared = entry(3, PROMPT)._replace(blocks=(50, 7))
    run(
        runner,
        StepPlan(0, (entry(0, PROMPT),), (), (row(0, 0, 8, (1, 30), False),)),
        StepPlan(1, (shared,), (), (row(3, 0, 9, (20,)),)),
        StepPlan(2, (), (), (row(0, 8, 1, (4,)),)),
    )
    assert ahead.reported == [31, "rest", 51, "rest", 51, "rest"]


def test_what_clears_ahead_hears_of_rest_when_nothing_that_was_launched_is_left() -> None:
    ahead = Reached()
    runner, decoder, _ = make(background=True, ahead=ahead)
    first = StepPlan(0, (entry(0, PROMPT),), (), (row(0, 0, 8, (1, 30), False),))
    runner.launch(first, 0.0)
    runner.launch(StepPlan(1, (), (), (row(0, 8, 1, (4,)),)), 0.0)
    runner.collect()
    assert "rest" not in ahead.reported
    runner.collect()
    assert ahead.reported == [31, 31, "rest"]
    decoder.explode = True
    runner.launch(StepPlan(2, (), (), (row(0, 9, 1, (4,)),)), 0.0)
    with pytest.raises(RuntimeError):
        runner.collect()
    assert ahead.reported[-1] == "rest"


def test_logits_only_where_wanted() -> None:
    runner, decoder, _ = make()
    run(runner, StepPlan(0, (entry(0, PROMPT),), (), (row(0, 0, 4, (1,), False),)))
    assert decoder.calls[0].logits_indices.tolist() == []
    run(runner, StepPlan(1, (), (), (row(0, 4, 5, (2, 3)),)))
    assert decoder.calls[1].logits_indices.tolist() == [4]


def test_shared_prefix_and_moves_in_order() -> None:
    runner, _, kv = make()
    expected = text(run(runner, *plans_alone(entry(0, PROMPT), [9], 6)))
    own = blocks(0)
    # Slot 4 shares slot 0's first block, and takes a copy of the second by way of a block in between.
    shared = entry(4, PROMPT, (own[0], 120))
    plan = StepPlan(9, (shared,), (Move(own[1], 121), Move(121, 120)), (row(4, 8, 1, (122,)),))
    rest = [StepPlan(10 + i, (), (), (row(4, 9 + i, 1, (123,) if i == 3 else ()),)) for i in range(5)]
    assert text(run(runner, plan, *rest)) == expected
    assert torch.equal(kv.pages.view(128, BLOCK, 2)[120], kv.pages.view(128, BLOCK, 2)[own[1]])


def test_moves_between_other_tiers_are_refused() -> None:
    runner, _, _ = make()
    runner.launch(StepPlan(0, (), (Move(0, 1, Tier.HOST, Tier.DEVICE),), ()), 0.0)
    with pytest.raises(ValueError, match="cannot leave the device"):
        runner.collect()


def test_slot_is_forgotten_when_taken_again() -> None:
    runner, _, _ = make()
    run(runner, *plans_alone(entry(1, PROMPT, temperature=1.0, frequency_penalty=2.0, seed_=5), [9], 12))
    assert text(run(runner, *plans_alone(entry(1, (8, 8)), [2], 6))) == greedy((8, 8), 6)


@pytest.mark.parametrize("cut", [1, 3, 5])
def test_preempted_and_resumed_is_undisturbed(cut: int) -> None:
    params = {
        "temperature": 1.0,
        "seed_": 99,
        "repetition_penalty": 1.4,
        "frequency_penalty": 0.7,
        "min_tokens": 9,
        "eos": (3, 5),
    }
    whole = text(run(make()[0], *plans_alone(entry(1, PROMPT, **params), [9], 10)))
    runner, _, _ = make()
    before = text(run(runner, *plans_alone(entry(1, PROMPT, **params), [9], cut)))
    run(runner, *plans_alone(entry(1, (1, 1, 1)), [3], 2))  # another takes the slot and its blocks
    back = entry(2, PROMPT + tuple(before), prompt_tokens=len(PROMPT), **params)
    plans = plans_alone(back, [4, 5 + cut], 10 - cut)
    assert before + text(run(runner, *plans)) == whole


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_spoilt_logits_fail_their_row_alone(value: float) -> None:
    runner, decoder, _ = make()
    decoder.spoil[13] = value
    entries = (
        entry(0, PROMPT),
        entry(1, (13,), logprobs=1),
        entry(2, PROMPT, temperature=1.0, top_p=0.5),
        entry(3, (13,), temperature=1.0, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.1),
    )
    rows = (row(0, 0, 9, (0, 1, 2)), row(1, 0, 1, (3,)), row(2, 0, 9, (4, 5, 6)), row(3, 0, 1, (7,)))
    (output,) = run(runner, StepPlan(0, entries, (), rows))
    assert set(output.failures) == {1, 3}
    assert output.tokens[0] == (greedy(PROMPT, 1)[0],)
    assert len(output.tokens[2]) == 1
    assert output.tokens[1] == output.tokens[3] == ()
    assert not output.logprobs
    # The next step may be in flight already: it must compute something harmless.
    (after,) = run(runner, StepPlan(1, (), (), (row(1, 1, 1), row(0, 9, 1))))
    assert after.tokens[1] == (greedy(PROMPT, 2)[1],)


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("logit_bias", ((VOCAB, 1.0),)),
        ("logit_bias", ((-1, 1.0),)),
        ("allowed_token_ids", (0, 10**30)),
        ("bad_words", ((1, VOCAB + 4),)),
        ("bad_words", ((-7, 1),)),
        ("stop_token_ids", (VOCAB,)),
    ],
)
def test_token_outside_the_vocabulary_fails_its_row_alone(param: str, value: object) -> None:
    runner, _, _ = make()
    entries = (entry(0, PROMPT), entry(1, (1, 2), temperature=1.0, **{param: value}))
    (output,) = run(runner, StepPlan(0, entries, (), (row(0, 0, 9, (0, 1, 2)), row(1, 0, 2, (3,)))))
    assert set(output.failures) == {1}
    assert param in output.failures[1]
    assert "vocabulary" in output.failures[1]
    assert output.tokens == ((greedy(PROMPT, 1)[0],), ())
    # The slot is sound again for the next sequence.
    assert text(run(runner, *plans_alone(entry(1, (8, 8)), [2], 3))) == greedy((8, 8), 3)


def test_prompt_outside_the_vocabulary_never_reaches_the_model() -> None:
    runner, decoder, _ = make()
    (output,) = run(runner, StepPlan(0, (entry(0, (1, VOCAB)),), (), (row(0, 0, 2, (0,)),)))
    assert "prompt" in output.failures[0]
    assert int(decoder.calls[0].tokens.max()) < VOCAB


def test_a_batch_that_raises_in_sampling_fails_only_the_guilty(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, _, _ = make()
    sample = runner._sampling._sampler.sample

    def fussy(logits: torch.Tensor, slots: object, *rest: object, **named: object) -> torch.Tensor:
        if 1 in slots:  # type: ignore[operator]
            raise RuntimeError("grammar broke")
        return sample(logits, slots, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(runner._sampling._sampler, "takes_likeliest", lambda *_: False)
    monkeypatch.setattr(runner._sampling._sampler, "sample", fussy)
    entries = (entry(0, PROMPT), entry(1, (1, 2)))
    (output,) = run(runner, StepPlan(0, entries, (), (row(0, 0, 9, (0, 1, 2)), row(1, 0, 2, (3,)))))
    assert output.failures == {1: "sampling failed: grammar broke"}
    assert output.tokens == ((greedy(PROMPT, 1)[0],), ())


@pytest.mark.parametrize("background", [False, True])
def test_an_exception_in_the_forward_comes_from_collect(background: bool) -> None:
    runner, decoder, _ = make(background)
    decoder.explode = True
    runner.launch(StepPlan(0, (entry(0, (1,)),), (), (row(0, 0, 1, (0,)),)), 0.0)
    with pytest.raises(RuntimeError, match="device lost"):
        runner.collect()
    runner.close()


@pytest.mark.parametrize(("start", "length"), [(0, 5), (44, 5)])
def test_a_row_without_room_is_an_error_and_not_another_ones_memory(start: int, length: int) -> None:
    runner, _, _ = make()
    held = (0,) if start == 0 else tuple(range(12))
    runner.launch(StepPlan(0, (entry(0, (1,) * 9, held),), (), (row(0, start, length),)), 0.0)
    with pytest.raises(ValueError, match="exceeds the blocks"):
        runner.collect()


def test_the_last_position_of_the_context_can_be_computed() -> None:
    runner, _, _ = make()
    prompt = tuple(range(48))
    (output,) = run(runner, StepPlan(0, (entry(0, prompt, tuple(range(12))),), (), (row(0, 0, 48),)))
    assert output.tokens == ((greedy(prompt, 1)[0],),)


def test_logprobs_are_of_the_raw_logits() -> None:
    runner, _, _ = make()
    first = entry(0, PROMPT, temperature=0.7, logit_bias=((50, 100.0),), logprobs=4)
    (output,) = run(runner, *plans_alone(first, [9], 1))
    raw = logits_of(list(PROMPT)).log_softmax(0)
    (score,) = output.logprobs[0]
    assert output.tokens[0] == (50,) == (score.token,)
    assert score.logprob == pytest.approx(float(raw[50]), abs=1e-5)
    assert score.rank == 1 + int((raw > raw[50]).sum())
    best = raw.topk(4)
    assert [token for token, _ in score.top] == best.indices.tolist()
    assert [value for _, value in score.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_each_row_gets_its_own_number_of_alternatives() -> None:
    runner, _, _ = make()
    asked = [0, 5, None, 2, VOCAB + 50]
    entries = tuple(entry(i, (i + 1,), logprobs=n) for i, n in enumerate(asked))
    (output,) = run(runner, StepPlan(0, entries, (), tuple(row(i, 0, 1, (i,)) for i in range(5))))
    assert {i: len(scores[0].top) for i, scores in output.logprobs.items()} == {0: 0, 1: 5, 3: 2, 4: VOCAB}


@pytest.mark.parametrize("chunks", [[9], [4, 5], [8, 1]])
def test_prompt_logprobs_score_the_following_token(chunks: list[int]) -> None:
    runner, _, _ = make()
    outputs = run(runner, *plans_alone(entry(0, PROMPT, prompt_logprobs=2), chunks, 3))
    scores = [score for output in outputs for score in output.prompt_logprobs.get(0, ())]
    assert [score.token for score in scores] == list(PROMPT[1:])
    for position, score in enumerate(scores):
        raw = logits_of(list(PROMPT[: position + 1])).log_softmax(0)
        assert score.logprob == pytest.approx(float(raw[score.token]), abs=1e-5)
        assert score.rank == 1 + int((raw > raw[score.token]).sum())
        assert [token for token, _ in score.top] == raw.topk(2).indices.tolist()
    assert text(outputs) == greedy(PROMPT, 3)


def test_no_more_logits_are_made_at_once_than_start_up_reckons_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "MIN_LOGIT_ROWS", 2)
    runner, decoder, _ = make(max_num_seqs=3)
    (output,) = run(runner, plans_alone(entry(0, PROMPT, prompt_logprobs=1), [9], 1)[0])
    assert len(output.prompt_logprobs[0]) == len(PROMPT) - 1
    assert decoder.max_logit_rows == 3


def test_seconds_are_summed_by_phase() -> None:
    runner, _, _ = make()
    run(runner, *plans_alone(entry(0, PROMPT), [9], 2))
    assert set(runner.seconds) == {"prepare", "forward", "sample", "collect"}
    assert all(value > 0 for value in runner.seconds.values())
