"""The static model of a decode step."""

from __future__ import annotations

from headrace.lab.plan.launches import (
    GRAPHS,
    REPLAY_ROW_SECONDS,
    REPLAY_SECONDS,
    TORCH,
    TRITON,
    expected,
    few_bits,
)
from headrace.lab.plan.roofline import H200, KV_BYTES, SHAPES, WEIGHTS, Precision, Replica

LLAMA, QWEN = SHAPES["llama-3.1-8b"], SHAPES["qwen3-0.6b"]


def test_a_layer_counts_what_its_model_has() -> None:
    assert TRITON.operations(LLAMA) == 32 * 9 + 1 + 2 + 12
    assert TORCH.operations(QWEN) - 28 * (37 + 8) == TORCH.operations(LLAMA) - 32 * 37
    gemma = SHAPES["gemma-2-9b"]
    assert TRITON.operations(gemma) == 42 * (9 + 2) + 15


def test_few_bits_add_operations_and_leave_bytes() -> None:
    """Of a Llama's four products, the one with most outputs occupies the device undivided."""
    added = [
        few_bits(LLAMA, name, rows) for name, rows in (("int4", 1), ("int8", 1), ("int8", 65), ("fp8", 17))
    ]
    assert added == [3, 4, 5, 1]
    assert TRITON.operations(LLAMA, quantization="int4") == TRITON.operations(LLAMA) + 32 * 3 + 1
    replica = Replica(LLAMA, H200, precision=WEIGHTS["int8"])
    step = expected(replica, TRITON, 1, 1024, "int8")
    kv = 1024 * LLAMA.kv_bytes_per_token()
    assert step.bytes == LLAMA.linear_parameters + LLAMA.table_parameters + kv


def test_the_limit_is_the_bytes_at_the_peak() -> None:
    step = expected(Replica(LLAMA, H200), TRITON, 64, 1024)
    weights = 2 * (LLAMA.linear_parameters + LLAMA.table_parameters)
    kv = 64 * 1024 * LLAMA.kv_bytes_per_token()
    assert step.bytes == weights + kv
    assert step.limit == (weights + kv) / H200.bandwidth
    assert expected(Replica(LLAMA, H200), TORCH, 64, 1024).bytes == weights + 3 * kv
    assert expected(Replica(LLAMA, H200), TORCH, 64, 1024).limit == step.limit


def test_a_small_model_waits_for_the_host_and_a_large_batch_for_the_device() -> None:
    small, large = (expected(Replica(QWEN, H200), TRITON, rows, 1024) for rows in (1, 512))
    assert (small.held_by, large.held_by) == ("host", "device")
    assert small.seconds == small.launches * TRITON.launch_seconds
    assert large.seconds == large.device


def test_a_graph_is_one_launch_of_all_operations() -> None:
    step, one_by_one = (expected(Replica(QWEN, H200), kernels, 64, 1024) for kernels in (GRAPHS, TRITON))
    assert step.launches == 1
    assert one_by_one.operations - step.operations == TRITON.packing - GRAPHS.packing
    assert step.host == REPLAY_SECONDS + 64 * REPLAY_ROW_SECONDS
    assert step.held_by == "device"
    assert step.bytes == one_by_one.bytes


def test_integers_of_keys_and_values_are_converted_by_torch_only() -> None:
    replica = Replica(LLAMA, H200, precision=Precision(kv_bytes=KV_BYTES["int8"]))
    plain = expected(Replica(LLAMA, H200), TRITON, 64, 1024)
    ours, torchs = (expected(replica, kernels, 64, 1024) for kernels in (TRITON, TORCH))
    assert ours.bytes < plain.bytes < torchs.bytes
    assert (ours.launches, torchs.launches - TORCH.operations(LLAMA)) == (plain.launches, 32 * TORCH.integer)
