"""Rows with drafts in the runner: each token is drawn as without them, and what counts ends at the first wrong one."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from headrace.compute.sampling.choice import NO_DRAFT, counting_of
from headrace.compute.step_sampling import Lines
from headrace.core import capacity
from headrace.core.plan import Row, StepPlan
from tests.compute.fakes import VOCAB, FakeDecoder, entry, logits_of
from tests.compute.sampling.test_sampler import chi_square, naive_probabilities
from tests.compute.test_runner import PROMPT, blocks, greedy, make, plans_alone, run, text

SHAPED = {
    "temperature": 1.0,
    "seed_": 99,
    "repetition_penalty": 1.4,
    "frequency_penalty": 0.7,
    "presence_penalty": 0.4,
    "bad_words": ((3,), (8, 9)),
    "logit_bias": ((50, 1.0),),
    "min_tokens": 6,
    "eos": (3, 5),
    "logprobs": 2,
}


def drafting(slot: int, start: int, length: int, *drafts: int) -> Row:
    """A row of ``length`` known positions and its drafts; the blocks are in the table."""
    return Row(slot, start, length + len(drafts), (), True, drafts)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("right", [0, 1, 3, 5])
@pytest.mark.parametrize("chunk", [1, 9])
def test_drafts_are_accepted_up_to_the_first_wrong_one(right: int, background: bool, chunk: int) -> None:
    runner, _, _ = make(background)
    said = greedy(PROMPT, 9)
    drafts = [token if i < right else (token + 1) % VOCAB for i, token in enumerate(said[:5])]
    first = entry(1, PROMPT, blocks(1))
    before = [StepPlan(0, (first,), (), (Row(1, 0, 9 - chunk, (), False),))] if chunk < 9 else []
    entries = () if before else (first,)
    plan = StepPlan(1, entries, (), (drafting(1, 9 - chunk, chunk, *drafts),))
    (output,) = run(runner, *before, plan)[-1:]
    assert output.tokens == (tuple(said[: right + 1]),)
    rest = [StepPlan(2 + i, (), (), (drafting(1, 9 + right + i, 1),)) for i in range(3)]
    assert text(run(runner, *rest)) == said[right + 1 : right + 4]
    runner.close()


@pytest.mark.parametrize("parts", [(1, 3, 4), (2, 0, 5), (0, 0, 7)])
def test_shaped_and_sampled_tokens_and_their_scores_are_those_without_drafts(parts: tuple[int, ...]) -> None:
    plain = run(make()[0], *plans_alone(entry(1, PROMPT, **SHAPED), [9], 12))
    said = text(plain)
    scores = [score for output in plain for score in output.logprobs[0]]
    runner, _, _ = make()
    plans = [StepPlan(0, (entry(1, PROMPT, blocks(1), **SHAPED),), (), (Row(1, 0, 9, (), True),))]
    done, got = 1, 1
    for number, right in enumerate(parts):
        wrong = (said[done + right] + 1) % VOCAB
        drafts = (*said[done : done + right], wrong, said[done + right + 1] if done + right + 1 < 12 else 0)
        if done + right >= 12:
            break
        plans.append(StepPlan(1 + number, (), (), (drafting(1, 8 + done, 1, *drafts),)))
        done += right + 1
    outputs = run(runner, *plans)
    got = [token for output in outputs for token in output.tokens[0]]
    assert got == said[: len(got)]
    assert len(got) == done
    reported = [score for output in outputs for score in output.logprobs[0]]
    assert reported == scores[:done]
    counts = runner._sampling._sampler._penalties.counts
    assert int(counts.sum()) == done, "only accepted tokens are counted"


def test_a_fault_behind_a_draft_fails_its_row_when_it_is_reached_and_not_before() -> None:
    runner, decoder, _ = make()
    said = greedy(PROMPT, 4)
    decoder.spoil[said[1]] = math.nan
    plan = StepPlan(0, (entry(1, PROMPT, blocks(1)),), (), (drafting(1, 0, 9, *said[:3]),))
    (output,) = run(runner, plan)
    assert output.tokens == (tuple(said[:2]),)
    assert not output.failures
    (output,) = run(runner, StepPlan(1, (), (), (drafting(1, 10, 1, said[2]),)))
    assert "finite" in output.failures[0]
    assert output.tokens == ((),)


@pytest.mark.parametrize("impossible", [-1, -2, NO_DRAFT, VOCAB, 1 << 40])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_draft_outside_the_vocabulary_is_wrong(impossible: int, place: int) -> None:
    runner, decoder, _ = make()
    said = greedy(PROMPT, 4)
    drafts = [*said[:3]]
    drafts[place] = impossible
    plan = StepPlan(0, (entry(1, PROMPT, blocks(1)),), (), (drafting(1, 0, 9, *drafts),))
    (output,) = run(runner, plan)
    assert output.tokens == (tuple(said[: place + 1]),)
    assert 0 <= int(decoder.calls[-1].tokens.min()) <= int(decoder.calls[-1].tokens.max()) < VOCAB


def test_what_raises_behind_a_draft_ends_the_drafts_there(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, _, _ = make()
    sample = runner._sampling._sampler.sample
    said = greedy(PROMPT, 4)

    def fussy(logits: torch.Tensor, slots: object, positions: np.ndarray, *rest: object, **named: object):
        if 11 in positions:
            raise RuntimeError("odd")
        return sample(logits, slots, positions, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(runner._sampling._sampler, "takes_likeliest", lambda *_: False)
    monkeypatch.setattr(runner._sampling._sampler, "sample", fussy)
    plan = StepPlan(0, (entry(1, PROMPT, blocks(1)),), (), (drafting(1, 0, 9, *said[:3]),))
    (output,) = run(runner, plan)
    assert (output.tokens, dict(output.failures)) == ((tuple(said[:2]),), {})
    (output,) = run(runner, StepPlan(1, (), (), (drafting(1, 10, 1, said[2]),)))
    assert output.failures == {0: "sampling failed: odd"}


def test_many_drafts_are_sampled_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory has been set aside for as many logits as there are slots."""
    monkeypatch.setattr(capacity, "MIN_LOGIT_ROWS", 2)
    runner, decoder, _ = make(max_num_seqs=3)
    entries = tuple(
        entry(slot, PROMPT[slot:], blocks(slot), logprobs=slot, presence_penalty=0.01) for slot in range(3)
    )
    said = [
        text(run(make()[0], *plans_alone(each._replace(blocks=()), [len(each.tokens)], 8)))
        for each in entries
    ]
    rows = tuple(drafting(slot, 0, len(entries[slot].tokens), *said[slot][: 2 + slot]) for slot in range(3))
    (output,) = run(runner, StepPlan(0, entries, (), rows))
    assert [list(tokens) for tokens in output.tokens] == [said[slot][: 3 + slot] for slot in range(3)]
    assert [len(output.logprobs[slot]) for slot in range(3)] == [3, 4, 5]
    assert decoder.max_logit_rows <= 3


def test_the_head_is_read_once_for_the_drafts_of_one_row() -> None:
    runner, decoder, _ = make(max_num_seqs=1)
    said = greedy(PROMPT, 8)
    plan = StepPlan(0, (entry(0, PROMPT, blocks(0)),), (), (drafting(0, 0, 9, *said[:7]),))
    (output,) = run(runner, plan)
    assert list(output.tokens[0]) == said
    assert decoder.max_logit_rows == 8


def test_prompt_scores_and_drafts_in_one_row() -> None:
    said = greedy(PROMPT, 4)
    scored = {"logprobs": 1, "prompt_logprobs": 1}
    plain = run(make()[0], *plans_alone(entry(1, PROMPT, **scored), [9], 4))
    plan = StepPlan(0, (entry(1, PROMPT, blocks(1), **scored),), (), (drafting(1, 0, 9, *said[:3]),))
    (output,) = run(make()[0], plan)
    assert output.prompt_logprobs == plain[0].prompt_logprobs
    assert output.logprobs[0] == tuple(score for each in plain for score in each.logprobs[0])


def test_which_tokens_count() -> None:
    rows = np.array([0, 2, 2, 2, 5, 5])
    offsets = np.array([0, 0, 1, 2, 0, 1])
    none = NO_DRAFT
    lines = Lines(rows, rows, rows, offsets, np.array([none, 7, 8, none, 4, none]), True)

    def counting(*drawn: int) -> list[int]:
        tokens, first = torch.tensor(drawn), torch.arange(6) - torch.from_numpy(offsets)
        found = lines.counting(tokens, counting_of)
        on_device = counting_of(tokens, torch.from_numpy(lines.drafts), first, torch.from_numpy(offsets))
        assert found.tolist() == on_device.tolist()
        return [int(each) for each in found]

    assert counting(1, 7, 8, 9, 4, 4) == [1, 1, 1, 1, 1, 1]
    assert counting(1, 6, 8, 9, 3, 4) == [1, 1, 0, 0, 1, 0]
    assert counting(-1, 7, 9, 9, -1, 4) == [1, 1, 1, 0, 1, 0]
    assert counting(1, 7, -1, 9, 4, -2) == [1, 1, 0, 0, 1, 0]
    assert lines.before().tolist() == [[none] * 2, [none] * 2, [7, none], [7, 8], [none] * 2, [4, none]]
    assert lines.cut({2: 1, 5: 0}).drafts.tolist() == [none, 7, none, none, none, none]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7},
        {"temperature": 1.0, "presence_penalty": 0.6, "frequency_penalty": 0.5},
        {"temperature": 1.5, "top_p": 0.9},
    ],
    ids=str,
)
def test_tokens_follow_the_targets_distribution_behind_drafts(params: dict[str, float]) -> None:
    """The draft is the likeliest token: the first token has the target's distribution whether it is accepted or not,
    and the one after an accepted draft has the target's distribution after it."""
    prompt, plain = (5, 17, 3), entry(0, (5, 17, 3), **params)
    draft = int(logits_of(list(prompt)).argmax())
    counts, after = [0] * VOCAB, [0] * VOCAB
    runner, _, _ = make()
    decoder = _Remembering()
    runner._decoder = decoder  # type: ignore[assignment]
    for begin in range(0, 12_000, 8):
        entries = tuple(
            entry(slot, prompt, blocks(slot)[:3], seed_=10**9 + begin + slot, **params) for slot in range(8)
        )
        rows = tuple(drafting(slot, 0, 3, draft) for slot in range(8))
        (output,) = run(runner, StepPlan(begin, entries, (), rows))
        for tokens in output.tokens:
            counts[tokens[0]] += 1
            assert (len(tokens) == 2) == (tokens[0] == draft)
            if len(tokens) == 2:
                after[tokens[1]] += 1
    first = naive_probabilities(logits_of(list(prompt)).tolist(), list(prompt), plain)
    assert sum(after) > 1000
    assert chi_square(counts, first) < 2.5
    behind = naive_probabilities(logits_of([*prompt, draft]).tolist(), [*prompt, draft], plain)
    assert chi_square(after, behind) < 2.5


class _Remembering(FakeDecoder):
    """Computes the logits of a prefix once."""

    def hidden(self, batch, kv):
        tokens = batch.tokens.tolist()
        return torch.stack(
            [
                self._of(tuple(tokens[begin : index + 1]))
                for begin, end in pairwise(batch.query_starts.tolist())
                for index in batch.logits_indices.tolist()
                if begin <= index < end
            ]
        )

    def _of(self, prefix: tuple[int, ...]) -> torch.Tensor:
        known = self.__dict__.setdefault("_known", {})
        if prefix not in known:
            known[prefix] = logits_of(list(prefix))
        return known[prefix]
