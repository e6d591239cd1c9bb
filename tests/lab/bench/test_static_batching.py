"""Static batching: the bound of what is gained over it, and padded batches of a tiny random model."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models

from headrace.lab.bench.report import measure
from headrace.lab.bench.static_batching import TransformersStatic, bound
from headrace.lab.workload.work import Work


def brute_refill(lengths: list[int], rows: int) -> int:
    """Steps with every free row refilled in order, one step at a time."""
    waiting, running, steps = list(lengths), [], 0
    while waiting or running:
        while waiting and len(running) < rows:
            running.append(waiting.pop(0))
        steps += 1
        running = [left - 1 for left in running if left > 1]
    return steps


def test_equal_lengths_gain_nothing() -> None:
    limits = bound([10] * 8, batch=4)
    assert (limits.static, limits.padded, limits.refilled, limits.floor) == (20, 20, 20, 20)
    assert limits.gain == limits.most == 1.0


def test_by_hand() -> None:
    # Static: max(1,9) + max(1,1). Refilled: the second row stays with 9, the first does the rest beside it.
    limits = bound([1, 9, 1, 1], batch=2)
    assert (limits.static, limits.refilled, limits.floor) == (10, 9, 9)


@pytest.mark.parametrize("rows", [1, 2, 5, 50])
def test_refilled_is_the_step_by_step_count(rows: int) -> None:
    rng = random.Random(rows)
    lengths = [rng.randint(1, 30) for _ in range(40)]
    limits = bound(lengths, batch=rows)
    assert limits.refilled == brute_refill(lengths, rows)
    assert limits.floor <= limits.refilled <= limits.static <= limits.padded


def test_a_cost_per_row_makes_empty_rows_cheap_and_padding_dear() -> None:
    limits = bound([1, 9], batch=2, step_cost=lambda rows: float(rows))
    assert (limits.static, limits.padded, limits.refilled) == (10, 18, 10)


@pytest.mark.parametrize(("lengths", "batch"), [([], 1), ([0], 1), ([1], 0)])
def test_nonsense_is_refused(lengths: list[int], batch: int) -> None:
    with pytest.raises(ValueError, match="at least"):
        bound(lengths, batch)


EOS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers  # takes seconds, and collecting the tests needs it for nothing else

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        eos_token_id=EOS,
        bos_token_id=1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    words = {f"w{i}": i for i in range(64)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(path)
    return path


def always(target: TransformersStatic, token: int) -> None:
    """Makes the model draw one token for ever."""
    with torch.no_grad():
        target._model.lm_head.weight.zero_()
    target._model.lm_head = torch.nn.Linear(16, 64, bias=True)
    with torch.no_grad():
        target._model.lm_head.bias.zero_()
        target._model.lm_head.bias[token] = 1e4


def test_each_row_ends_at_its_own_limit_and_batches_wait_for_their_last(folder: Path) -> None:
    target = TransformersStatic("tf", str(folder), 2)
    limits = (2, 6, 3, 1, 4)
    work = [Work(f"w{i}", tuple(range(5, 8 + i)), n, ignore_eos=True) for i, n in enumerate(limits)]
    run = measure(target, work)
    assert [record.error for record in run.records] == [""] * 5
    assert [record.output_tokens for record in run.records] == list(limits)
    assert [len(record.token_seconds) for record in run.records] == list(limits)
    assert run.facts["steps"] == 6 + 3 + 4
    assert run.facts["useful_rows_percent"] == pytest.approx(100 * 16 / (6 * 2 + 3 * 2 + 4))
    first, second, third, *_ = run.records
    assert first.finished < second.finished <= third.token_seconds[0]
    assert all(record.arrived == 0.0 for record in run.records)


def test_in_a_closed_loop_a_request_is_sent_when_its_batch_begins(folder: Path) -> None:
    work = [Work(f"w{i}", (5, 6), 2, ignore_eos=True) for i in range(4)]
    first, second, third, fourth = TransformersStatic("tf", str(folder), 2, closed=True).run(work)
    assert first.arrived == second.arrived < first.token_seconds[0]
    assert second.finished <= third.arrived == fourth.arrived < third.token_seconds[0]


def test_an_end_token_ends_a_row_unless_it_is_ignored(folder: Path) -> None:
    target = TransformersStatic("tf", str(folder), 2)
    always(target, EOS)
    obeys, ignores = target.run([Work("a", (5, 6), 5), Work("b", (5, 6), 5, ignore_eos=True)])
    assert (obeys.output_tokens, obeys.finish_reason) == (1, "stop")
    assert (ignores.output_tokens, ignores.finish_reason) == (5, "length")


def test_text_is_encoded_and_sampling_is_refused(folder: Path) -> None:
    target = TransformersStatic("tf", str(folder), 2)
    record = target.run([Work("a", "w5", 1, ignore_eos=True)])[0]
    assert (record.prompt_tokens, record.output_tokens) == (1, 1)
    with pytest.raises(ValueError, match="temperature"):
        target.run([Work("a", (5,), 1, temperature=1.0)])
