from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from headrace.compute.batch import Batch
from headrace.compute.device import DeviceFacts
from headrace.compute.memory_plan import (
    DraftSize,
    MemoryPlan,
    ModelSize,
    check_room,
    largest_step_bytes,
    plan_memory,
    row_lengths,
    shown_bytes,
)
from headrace.compute.model.decoder import Decoder
from headrace.compute.model.kv import PagedKV
from headrace.config import CacheOptions, ConfigError
from headrace.core.capacity import activation_bytes
from tests.parity.drafted_runs import decoder

GIB = 1 << 30
MODEL = ModelSize(
    weight_bytes=GIB, block_bytes=1 << 20, hidden_size=64, intermediate_size=128, vocab_size=1000, itemsize=2
)
CPU = DeviceFacts("cpu", "a CPU", "AVX2", (), False, 4, 4, 16 * GIB, 8 * GIB)
GPU = DeviceFacts("cuda", "a GPU", "9.0", (), True, 100, 0, 80 * GIB, 70 * GIB)


def ledger(
    facts: DeviceFacts = CPU, max_model_len: int = 4096, model: ModelSize = MODEL, **options: object
) -> MemoryPlan:
    return plan_memory(
        facts,
        model,
        CacheOptions(**options),  # type: ignore[arg-type]
        max_model_len=max_model_len,
        max_num_seqs=8,
        max_num_batched_tokens=512,
    )


ACTIVATIONS = activation_bytes(
    hidden_size=64,
    intermediate_size=128,
    vocab_size=1000,
    itemsize=2,
    max_num_batched_tokens=512,
    max_num_seqs=8,
)


def test_cpu_takes_a_share_and_no_more_than_it_needs() -> None:
    assert ledger().num_blocks == int((8 * GIB - ACTIVATIONS) * 0.4) >> 20
    assert ledger(replace(CPU, free_bytes=100 * GIB)).kv_bytes == 4 * GIB
    # One sequence of the longest context is worth more than the usual 4 GiB, within the share.
    assert ledger(replace(CPU, free_bytes=100 * GIB), max_model_len=16 * 8192).num_blocks == 8192


def test_gpu_counts_what_others_use() -> None:
    expected = int(80 * GIB * 0.5) - 10 * GIB - ACTIVATIONS
    assert ledger(GPU, gpu_memory_utilization=0.5).num_blocks == expected >> 20


def test_a_measured_step_and_graphs_are_cut_from_the_cache() -> None:
    made = plan_memory(
        GPU,
        MODEL,
        CacheOptions(gpu_memory_utilization=0.5),
        max_model_len=4096,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        step_bytes=3 * GIB,
        graph_bytes=2 * GIB,
    )
    assert made.num_blocks == (int(80 * GIB * 0.5) - 10 * GIB - 5 * GIB) >> 20
    assert made.total_bytes == GIB + made.kv_bytes + 5 * GIB
    lines = made.describe()
    assert "activations  3.00 GiB (measured)" in lines
    assert "CUDA graphs  2.00 GiB: estimate" in lines
    recorded = replace(made, graph_bytes=0, graphs="8, for up to 4 tokens per step").describe()
    assert "CUDA graphs  0 B: 8, for up to 4 tokens per step" in recorded


def test_explicit_bytes_are_taken_exactly() -> None:
    made = ledger(kv_cache_memory_bytes=GIB + 5)
    assert made.num_blocks == 1024
    assert made.kv_bytes == GIB
    assert made.kv_tokens == 16 * 1024
    assert made.concurrency == pytest.approx(4.0)


def test_more_than_is_free_is_refused() -> None:
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes") as error:
        ledger(kv_cache_memory_bytes=9 * GIB)
    most = int(re.search(r"at most (\d+)", str(error.value))[1])  # type: ignore[index]
    assert most == 8 * GIB - ACTIVATIONS
    ledger(kv_cache_memory_bytes=most)


def test_a_step_that_cannot_fit_names_its_bounds() -> None:
    with pytest.raises(
        ConfigError, match=r"--max-num-batched-tokens 512, --max-num-seqs 8: .* 1\.00 MiB are free"
    ):
        ledger(replace(CPU, free_bytes=1 << 20))


def test_a_model_that_cannot_fit_is_refused_before_it_is_loaded() -> None:
    check_room(CPU, 7 * GIB, 1024, 1 << 20)
    with pytest.raises(ConfigError, match=r"weights need at least 9\.00 GiB, but a CPU has 8\.00 GiB free"):
        check_room(CPU, 9 * GIB, 1024, 8)
    with pytest.raises(
        ConfigError, match=r"--max-model-len 2097152: .* 2\.00 GiB, but a CPU has 1\.00 GiB free"
    ):
        check_room(CPU, 7 * GIB, 1024, 2 << 20)


@pytest.mark.parametrize("facts", [CPU, GPU])
def test_what_cannot_fit_names_the_largest_that_can(facts: DeviceFacts) -> None:
    with pytest.raises(ConfigError, match="--max-model-len") as error:
        ledger(facts, max_model_len=10_000_000)
    largest = int(re.search(r"use --max-model-len (\d+)", str(error.value))[1])  # type: ignore[index]
    assert ledger(facts, max_model_len=largest).concurrency >= 1
    with pytest.raises(ConfigError):
        ledger(facts, max_model_len=largest + 1)


def test_no_room_at_all_is_said_without_a_useless_number() -> None:
    with pytest.raises(ConfigError, match="more memory"):
        ledger(replace(CPU, free_bytes=1000))


def test_concurrency_counts_whole_blocks() -> None:
    assert ledger(max_model_len=17, kv_cache_memory_bytes=6 << 20).concurrency == 3.0


def test_described() -> None:
    lines = "\n".join(ledger(kv_cache_memory_bytes=GIB).describe())
    for part in ("1.00 GiB", "1,024 blocks of 16 tokens", "16,384", "4.0 sequences", "4,096"):
        assert part in lines
    assert [shown_bytes(n) for n in (5, 2048, 3 << 20)] == ["5 B", "2.00 KiB", "3.00 MiB"]


# -- tiers below the device ----------------------------------------------------------------------------


def test_without_the_options_there_are_no_lower_tiers() -> None:
    made = ledger()
    assert (made.host_blocks, made.disk_blocks) == (0, 0)
    assert not [line for line in made.describe() if "tier" in line]


def test_lower_tiers_are_counted_in_blocks_and_shown() -> None:
    made = ledger(kv_offload_bytes=GIB, kv_offload_path="somewhere", kv_offload_disk_bytes=3 * GIB)
    assert (made.host_blocks, made.disk_blocks) == (1024, 3072)
    assert [line.split(":")[0] for line in made.describe()][-2:] == [
        "host tier    1.00 GiB",
        "disk tier    3.00 GiB",
    ]


def test_on_a_cpu_the_host_tier_is_cut_from_what_the_cache_may_take() -> None:
    most = 8 * GIB - ACTIVATIONS - GIB
    assert ledger(kv_offload_bytes=GIB).num_blocks == int(most * 0.4) >> 20


def test_on_a_gpu_it_is_cut_from_the_hosts_memory() -> None:
    def on_gpu(free: int) -> MemoryPlan:
        return plan_memory(
            GPU,
            MODEL,
            CacheOptions(kv_offload_bytes=4 * GIB),
            max_model_len=4096,
            max_num_seqs=8,
            max_num_batched_tokens=512,
            host_free_bytes=free,
        )

    assert on_gpu(8 * GIB).host_blocks == 4096
    assert on_gpu(8 * GIB).num_blocks == ledger(GPU).num_blocks
    with pytest.raises(
        ConfigError, match=re.escape("at most 80% of the host's memory that is free, which is 4.50 GiB")
    ):
        on_gpu(9 * GIB // 2)


def test_a_disk_alone_gets_a_host_tier_to_pass_through() -> None:
    made = ledger(kv_offload_path="somewhere", kv_offload_disk_bytes=GIB)
    assert (made.host_blocks, made.disk_blocks) == (64, 1024)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_offload_bytes": 1000}, "--kv-offload-bytes 1000: one block takes 1048576"),
        (
            {"kv_offload_path": "x", "kv_offload_disk_bytes": 1000},
            "--kv-offload-disk-bytes 1000: one block takes 1048576",
        ),
        ({"kv_offload_bytes": GIB, "enable_prefix_caching": False}, "they need prefix caching"),
        ({"kv_offload_path": "x", "enable_prefix_caching": False}, "they need prefix caching"),
    ],
)
def test_tiers_that_could_hold_nothing_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        ledger(**options)


def test_total_process_memory_is_reported_where_known() -> None:
    made = replace(ledger(kv_cache_memory_bytes=GIB), process_bytes=GIB)
    assert made.total_bytes == 3 * GIB + ACTIVATIONS
    assert made.describe()[-1].startswith("memory       3.")
    assert "1.00 GiB of it libraries" in made.describe()[-1]
    assert not any("libraries" in line for line in ledger().describe())


def with_draft(most_blocks: int, max_model_len: int = 4096) -> MemoryPlan:
    draft = DraftSize(
        weight_bytes=GIB // 8, block_bytes=1 << 18, activation_bytes=1 << 20, most_blocks=most_blocks
    )
    return plan_memory(
        CPU,
        MODEL,
        CacheOptions(kv_cache_memory_bytes=GIB),
        max_model_len=max_model_len,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        draft=draft,
    )


def test_the_draft_model_takes_its_kv_cache_from_that_of_the_options() -> None:
    plain = ledger(kv_cache_memory_bytes=GIB)
    made = with_draft(10_000)
    assert made.num_blocks == made.draft_blocks == GIB // (5 << 18)
    assert made.activation_bytes == plain.activation_bytes + (1 << 20)
    assert made.kv_bytes + made.draft_kv_bytes <= GIB
    expected = GIB + GIB // 8 + made.activation_bytes + made.kv_bytes + made.draft_kv_bytes
    assert made.total_bytes == expected
    assert any(line.startswith("draft model") for line in made.describe())
    assert not any(line.startswith("draft model") for line in plain.describe())


def test_the_draft_model_takes_no_more_blocks_than_all_running_sequences_fill() -> None:
    made = with_draft(100)
    assert made.draft_blocks == 100
    assert made.num_blocks == (GIB - 100 * (1 << 18)) >> 20
    assert made.num_blocks > with_draft(10_000).num_blocks


def test_a_sequence_that_does_not_fit_beside_the_draft_model_is_refused() -> None:
    most = with_draft(10_000).kv_tokens
    assert with_draft(10_000, max_model_len=most).num_blocks * 16 == most
    with pytest.raises(ConfigError, match=rf"\(with the draft model\).*use --max-model-len {most}"):
        with_draft(10_000, max_model_len=most + 1)


def test_checkpoints_of_states_are_counted() -> None:
    model = replace(MODEL, state_bytes=32 << 20)
    plain, made = ledger(), ledger(model=model)
    most = int((8 * GIB - ACTIVATIONS - 8 * (32 << 20)) * 0.4)
    assert made.state_cells == most // 4 // (32 << 20)
    assert made.num_blocks == (most - made.state_cells * (32 << 20)) >> 20
    assert made.total_bytes - made.kv_bytes - plain.total_bytes + plain.kv_bytes == (8 + made.state_cells) * (
        32 << 20
    )
    given = ledger(model=model, state_cache_bytes=100 << 20, kv_cache_memory_bytes=GIB)
    assert (given.state_cells, given.num_blocks) == (3, 1024)
    assert ledger(model=model, state_cache_bytes=0).state_cells == 0
    assert ledger(model=model, enable_prefix_caching=False).state_cells == 0
    with pytest.raises(ConfigError, match=r"--state-cache-bytes 1048576: one checkpoint takes 33554432"):
        ledger(model=model, state_cache_bytes=1 << 20)


def test_a_sequence_comes_before_checkpoints() -> None:
    made = ledger(model=replace(MODEL, state_bytes=1 << 20), kv_cache_memory_bytes=260 << 20)
    assert (made.num_blocks, made.state_cells) == (256, 4)


def test_a_step_may_copy_the_states_of_a_layer() -> None:
    model = replace(MODEL, state_bytes=32 << 20)
    copied = ledger(model=replace(model, layer_state_bytes=1 << 20)).activation_bytes
    assert copied == ledger(model=model).activation_bytes + 8 * (1 << 20)


@pytest.mark.parametrize(
    ("rows", "tokens", "longest", "lengths"),
    [
        (1, 40, 96, (40,)),
        (3, 40, 96, (1, 1, 38)),
        (3, 40, 16, (8, 16, 16)),
        (3, 60, 16, (16, 16, 16)),
        (8, 4, 96, (1, 1, 1, 1)),
    ],
)
def test_rows_have_as_many_tokens_as_the_step(
    rows: int, tokens: int, longest: int, lengths: tuple[int, ...]
) -> None:
    assert row_lengths(rows, tokens, longest) == lengths


def test_the_step_is_as_large_as_the_limits_and_measured_while_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[object] = []

    class Meter:
        def begin(self) -> None:
            seen.append("begin")

        def end(self) -> int:
            seen.append("end")
            return 12345

    hidden = Decoder.hidden

    def noted(model: Decoder, batch: Batch, kv: PagedKV) -> torch.Tensor:
        seen.append((batch.lengths, batch.decode_rows, kv.num_blocks))
        return hidden(model, batch, kv)

    monkeypatch.setattr(Decoder, "hidden", noted)
    most = largest_step_bytes(
        decoder(),
        Meter(),
        block_size=16,
        kv_dtype=torch.float32,
        max_model_len=96,
        max_num_seqs=3,
        max_num_batched_tokens=50,
    )
    assert most == 12345
    assert seen == ["begin", ((1, 1, 48), 2, 1), "end"]
