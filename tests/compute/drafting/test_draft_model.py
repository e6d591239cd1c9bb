from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from headrace.compute.drafting.draft_model import DraftModel
from headrace.compute.drafting.forward import guesses, guesses_on_cpu
from headrace.core.drafting.proposal import DraftRow, Proposal
from headrace.core.request import Request
from tests.compute.fakes import BLOCK, VOCAB, FakeDecoder, FakeKV, logits_of

CPU = torch.device("cpu")


class DraftKV(FakeKV):
    device = CPU


class PassByPass(FakeDecoder):
    def draft(self, *call: object) -> None:
        """There is no single call."""


def make(
    num_blocks: int = 128, *, least: float = 0.0, catch_up: int = 64, max_model_len: int = 96
) -> tuple[DraftModel, FakeDecoder, list[str]]:
    decoder, warnings = PassByPass(), list[str]()
    model = DraftModel(
        decoder,  # type: ignore[arg-type]
        DraftKV(num_blocks),  # type: ignore[arg-type]
        max_model_len=max_model_len,
        warn=warnings.append,
        least_confidence=least,
        catch_up_tokens=catch_up,
    )
    return model, decoder, warnings


def greedy(tokens: list[int], count: int) -> list[int]:
    known = list(tokens)
    for _ in range(count):
        known.append(int(logits_of(known).argmax()))
    return known[len(tokens) :]


def propose(model: DraftModel, *draft_rows: tuple[Request, list[int], int]) -> list[Proposal | None]:
    found = list(model.propose([DraftRow(*draft_row) for draft_row in draft_rows]))
    model.pages.check()
    return found


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(length)]


def computed(decoder: FakeDecoder) -> list[int]:
    """Tokens of each pass since the last question."""
    counts = [sum(batch.lengths) for batch in decoder.calls]
    decoder.calls.clear()
    return counts


def test_drafts_are_what_the_model_alone_would_write_next() -> None:
    model, _, _ = make()
    tokens = prompt(random.Random(0), 9)
    (proposal,) = propose(model, (Request("a", (1,)), tokens, 4))
    assert proposal is not None
    assert proposal.tokens == tuple(greedy(tokens, 4))
    assert proposal.source == "draft_model"


def test_a_confidence_is_the_probability_that_the_draft_model_gives_its_token() -> None:
    model, _, _ = make()
    tokens = prompt(random.Random(1), 7)
    (proposal,) = propose(model, (Request("a", (1,)), tokens, 3))
    assert proposal is not None
    known = list(tokens)
    for token, confidence in zip(proposal.tokens, proposal.confidences, strict=True):
        assert confidence == pytest.approx(float(logits_of(known).softmax(-1)[token]), rel=1e-5)
        known.append(token)


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 12))]
)
def test_any_order_of_asks_acceptances_and_ends_gives_the_drafts_of_the_model_alone(seed: int) -> None:
    rng = random.Random(seed)
    few_pages = seed % 3 == 0
    model, _, warnings = make(24 if few_pages else 256, catch_up=rng.choice((8, 64)))
    shared = prompt(rng, 11)
    alive: dict[str, tuple[Request, list[int]]] = {}
    drafted = begun = 0
    for _ in range(120):
        if len(alive) < 5 and rng.random() < 0.3:
            known = [*shared, *prompt(rng, rng.randrange(1, 20))] if rng.random() < 0.5 else prompt(rng, 14)
            alive[f"r{begun}"] = (Request(f"r{begun}", (1,), salt=rng.choice(("", "x"))), known)
            begun += 1
        # A preempted request is not asked about for a while, and keeps its tokens.
        asked = [each for each in alive.values() if rng.random() < 0.7]
        rng.shuffle(asked)
        found = propose(model, *((request, known, rng.randrange(5)) for request, known in asked))
        for (request, known), proposal in zip(asked, found, strict=True):
            accepted: list[int] = []
            if proposal is not None:
                assert list(proposal.tokens) == greedy(known, len(proposal.tokens))
                accepted = list(proposal.tokens[: rng.randrange(len(proposal.tokens) + 1)])
                drafted += 1
            known += accepted
            if rng.random() < 0.9:  # else the same tokens are asked about again
                known.append(rng.randrange(VOCAB))
            if len(known) > 80 or rng.random() < 0.04:
                model.ended(request, known)
                del alive[request.id]
    for request, known in alive.values():
        model.ended(request, known)
    assert drafted > (20 if few_pages else 100)
    assert model.pages.num_free == (24 if few_pages else 256)
    assert not len(model.pages)
    assert not warnings


def test_rows_of_one_call_share_each_pass() -> None:
    model, decoder, _ = make()
    rng = random.Random(3)
    rows = [(Request(str(i), (1,)), prompt(rng, 5 + i), 3) for i in range(4)]
    propose(model, *rows)
    assert [len(batch.lengths) for batch in decoder.calls] == [4, 4, 4]
    for _, tokens, _ in rows:
        tokens.append(1)
    decoder.calls.clear()
    propose(model, *rows)
    assert computed(decoder) == [4, 4, 4]  # no token of the prompts again


def test_accepted_drafts_are_not_computed_again_and_rejected_ones_are() -> None:
    model, decoder, _ = make()
    request, tokens = Request("a", (1,)), prompt(random.Random(4), 6)
    (proposal,) = propose(model, (request, tokens, 4))
    assert proposal is not None
    computed(decoder)
    tokens += [*proposal.tokens[:2], (proposal.tokens[2] + 1) % VOCAB]
    propose(model, (request, tokens, 1))
    assert computed(decoder) == [1]
    (proposal,) = propose(model, (request, tokens, 3))
    assert proposal is not None
    computed(decoder)
    tokens += [*proposal.tokens, 5]  # the last draft was never computed
    propose(model, (request, tokens, 1))
    assert computed(decoder) == [2]


def test_a_long_prompt_is_caught_up_in_bounded_parts_and_proposes_nothing_before() -> None:
    model, decoder, _ = make(catch_up=16)
    rng = random.Random(5)
    short, long = (Request("s", (1,)), prompt(rng, 6), 2), (Request("l", (1,)), prompt(rng, 60), 2)
    found = [propose(model, short)]
    for _ in range(4):
        short[1].append(3)
        computed(decoder)
        found.append(propose(model, short, long))
        assert max(computed(decoder)) <= 16 + 2
    assert all(each[0] is not None for each in found)
    assert [each[1] is None for each in found[1:]] == [True, True, True, False]
    last = found[-1][1]
    assert last is not None
    assert list(last.tokens) == greedy(long[1], 2)


def test_requests_that_are_behind_are_caught_up_first_come_first_served() -> None:
    model, _, _ = make(catch_up=8)
    rng = random.Random(6)
    rows = [(Request(str(i), (1,)), prompt(rng, 20), 2) for i in range(3)]
    done = [[row is not None for row in propose(model, *reversed(rows))] for _ in range(8)]
    first = [next(call for call, found in enumerate(done) if found[row]) for row in (0, 1, 2)]
    assert first == sorted(first)


def test_a_draft_ends_where_it_is_no_longer_confident() -> None:
    least = 0.02
    model, decoder, _ = make(least=least)
    rng = random.Random(7)
    rows = [(Request(str(i), (1,)), prompt(rng, 8), 6) for i in range(6)]
    lengths = []
    for (_, tokens, most), proposal in zip(rows, propose(model, *rows), strict=True):
        confidences = () if proposal is None else proposal.confidences
        assert math.prod(confidences) >= least
        lengths.append(len(confidences))
        if len(confidences) < most:
            known = [*tokens, *greedy(tokens, len(confidences))]
            following = float(logits_of(known).softmax(-1).max())
            assert math.prod(confidences) * following < least * (1 + 1e-5)
    assert len(set(lengths)) > 1
    assert len(decoder.calls) == min(6, max(lengths) + 1)


def test_logits_that_are_not_finite_end_the_draft_of_their_row_alone() -> None:
    model, decoder, warnings = make()
    rng = random.Random(8)
    good, bad = prompt(rng, 6), [*prompt(rng, 6), 11]
    good[-1] = 12
    decoder.spoil[11] = float("nan")
    found = propose(model, (Request("g", (1,)), good, 1), (Request("b", (1,)), bad, 1))
    assert found[0] is not None
    assert list(found[0].tokens) == greedy(good, 1)
    assert found[1] is None
    assert not warnings


def test_requests_beyond_the_pages_get_no_draft_until_another_one_ends() -> None:
    model, _, warnings = make(8)  # 32 positions
    rng = random.Random(9)
    rows = [(Request(str(i), (1,)), prompt(rng, 20), 2) for i in range(2)]
    found = propose(model, *rows)
    assert found[0] is not None
    assert found[1] is None
    model.ended(rows[0][0], rows[0][1])
    assert propose(model, rows[1])[0] is not None
    assert not warnings


def test_requests_that_are_no_longer_asked_about_lose_their_pages_first() -> None:
    model, _, _ = make(8)
    rng = random.Random(10)
    preempted, running = (Request("p", (1,)), prompt(rng, 20), 2), (Request("r", (1,)), prompt(rng, 20), 2)
    assert propose(model, preempted)[0] is not None
    found = propose(model, running)[0]
    assert found is not None
    assert list(found.tokens) == greedy(running[1], 2)
    model.ended(running[0], running[1])
    back = propose(model, preempted)[0]
    assert back is not None
    assert list(back.tokens) == greedy(preempted[1], 2)


def test_equal_prefixes_are_computed_once_per_salt() -> None:
    model, decoder, _ = make()
    tokens = prompt(random.Random(11), 5 * BLOCK + 2)
    propose(model, (Request("a", (1,), salt="x"), list(tokens), 1))
    assert computed(decoder) == [len(tokens)]
    propose(model, (Request("b", (1,), salt="x"), list(tokens), 1))
    assert computed(decoder) == [2]
    propose(model, (Request("c", (1,), salt="y"), list(tokens), 1))
    assert computed(decoder) == [len(tokens)]


def test_the_next_turn_of_a_chat_finds_the_pages_of_the_last_one() -> None:
    model, decoder, _ = make()
    request, tokens = Request("a", (1,)), prompt(random.Random(12), 3 * BLOCK)
    propose(model, (request, tokens, 2))
    model.ended(request, tokens)
    computed(decoder)
    propose(model, (Request("b", (1,)), [*tokens, 4, 5], 1))
    assert computed(decoder) == [2]


def test_drafts_stop_at_the_length_of_the_draft_model() -> None:
    model, _, _ = make(max_model_len=12)
    request, tokens = Request("a", (1,)), prompt(random.Random(13), 10)
    (proposal,) = propose(model, (request, tokens, 8))
    assert proposal is not None
    assert list(proposal.tokens) == greedy(tokens, 3)
    assert propose(model, (request, [*tokens, 1, 2, 3], 8)) == [None]


def test_a_request_for_which_nothing_may_be_proposed_costs_nothing() -> None:
    model, decoder, _ = make()
    assert propose(model, (Request("a", (1,)), [1, 2, 3], 0)) == [None]
    assert propose(model) == []
    assert not decoder.calls
    model.ended(Request("a", (1,)), [1, 2, 3])


def test_a_failure_disables_drafting_with_one_warning() -> None:
    model, decoder, warnings = make(16)
    rows = [(Request(str(i), (1,)), [1, 2, 3 + i], 2) for i in range(2)]
    assert None not in propose(model, *rows)
    decoder.explode = True
    for _, tokens, _ in rows:
        tokens.append(9)
    assert propose(model, *rows) == [None, None]
    decoder.explode = False
    assert propose(model, *rows) == [None, None]
    assert warnings == ["the draft model failed (device lost); requests continue without its drafts"]
    assert model.pages.num_free == 16
    model.ended(*rows[0][:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_both_ways_to_guess_agree(dtype: torch.dtype) -> None:
    logits = torch.randn(5, 301, generator=torch.Generator().manual_seed(1)).mul_(4).to(dtype)
    logits[3, 7] = math.nan
    logits[4] = -math.inf
    one, other = guesses(logits.clone()), guesses_on_cpu(logits)
    assert one.tokens[:3].tolist() == other.tokens[:3].tolist() == logits[:3].float().argmax(-1).tolist()
    expected = logits[:3].float().softmax(-1).amax(-1).numpy()
    for each in (one, other):
        np.testing.assert_allclose(each.probabilities[:3], expected, rtol=1e-5)
        assert np.isnan(each.probabilities[3:]).all()
