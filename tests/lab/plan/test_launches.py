"""The static model of a decode step."""

from __future__ import annotations

from headrace.lab.plan.launches import (
    GRAPHS,
    REPLAY_ROW_SECONDS,
    REPLAY_SECONDS,
    TORCH,
    TRITON,
    distinct,
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


def test_a_layer_with_experts_counts_its_router_and_two_products() -> None:
    """11 in a layer: the router has two, then there are the sort, two products, and the sum with the norm."""
    qwen, oss = SHAPES["qwen3-30b-a3b"], SHAPES["gpt-oss-20b"]
    assert GRAPHS.operations(qwen, rows=8) == 48 * 11 + 1 + 2 + 8
    assert GRAPHS.operations(qwen, rows=1) == 48 * 10 + 11  # the experts of one token need no sort
    assert GRAPHS.operations(oss, rows=64) == 24 * 11 + 11
    assert (
        TRITON.operations(qwen, quantization="int8", rows=8) == TRITON.operations(qwen, rows=8) + 48 * 5 + 1
    )
    # Torch's operations launch each expert by itself: 8 of one token, 51.6 of eight.
    assert TORCH.operations(qwen, rows=1) == 48 * (37 + 8 + 18 + 8 * (3 + 5)) + 16 + 17 + 12
    assert TORCH.operations(qwen, rows=8) - TORCH.operations(qwen, rows=1) == 48 * round(5 * (51.6 - 8))


def test_experts_are_read_once_if_a_token_has_them() -> None:
    qwen = SHAPES["qwen3-30b-a3b"]
    assert qwen.sparse is not None
    assert distinct(qwen.sparse, 1) == 8
    assert 51 < distinct(qwen.sparse, 8) < 52
    replica, each = Replica(qwen, H200), 2 * 3 * 2048 * 768
    few, many = (expected(replica, GRAPHS, rows, 0) for rows in (1, 8))
    hit = distinct(qwen.sparse, 8) - distinct(qwen.sparse, 1)
    assert round((many.bytes - few.bytes) / (48 * each), 3) == round(hit, 3)


def test_limits_and_expectations_of_mixtures_on_an_h200() -> None:
    """At context 1,024: the bytes of the experts that are hit set both; at batch 1, operations come to as much."""
    found = {}
    for name in ("qwen3-30b-a3b", "gpt-oss-20b"):
        replica = Replica(SHAPES[name], H200, precision=WEIGHTS[SHAPES[name].stored])
        steps = [expected(replica, GRAPHS, rows, 1024) for rows in (1, 8, 64, 256)]
        found[name] = [(round(1000 * step.limit, 2), round(1000 * step.seconds, 2)) for step in steps]
        assert all(step.held_by == "device" for step in steps)
    assert found == {
        "qwen3-30b-a3b": [(1.29, 3.33), (5.55, 8.83), (13.74, 19.06), (17.96, 24.34)],
        "gpt-oss-20b": [(0.83, 1.91), (2.22, 3.74), (3.67, 5.55), (5.68, 8.06)],
    }
    torch = expected(Replica(SHAPES["qwen3-30b-a3b"], H200), TORCH, 8, 1024)
    assert torch.seconds > 0.05  # the device waits for the host in each layer
