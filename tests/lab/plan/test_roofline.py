from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from headrace.core.capacity import SparseLayers
from headrace.lab.plan.roofline import (
    CPU,
    H100,
    H200,
    KV_BYTES,
    MEMORY_SHARE,
    PARALLEL_SHARE,
    SHAPES,
    WEIGHTS,
    DeviceSpec,
    Load,
    ModelShape,
    Precision,
    Replica,
    chunk,
    decoding,
)

# Hidden 100, 2 heads of 10 (1 of keys and values), MLP 200, 1 layer: 100*10*(4+2) + 3*100*200 = 66,000 weights in
# matrices, 1,000 x 100 in each of the two tables; 2 * 1 * 1 * 10 * 2 = 40 bytes a token.
SMALL = ModelShape("small", 1, 100, 2, 1, 10, 200, 1000)
ROUND = DeviceSpec("round", 1e9, 2e9, 1_000_000, 1e6, 1e5, 0.5, 0.5, 0.25, 2.0)

# Of a token, 8 experts of 100,000 columns, beside which the rest of the model is nothing.
EXPERTS = replace(SMALL, intermediate_size=800_000, sparse=SparseLayers(1, 128, 8, 3 * 100 * 100_000))


def test_a_decode_step_by_hand():
    load = decoding(rows=3, context=500)
    # Bytes: 2 * 66,000 + 2 * 100,000 + 3 * 500 * 40 = 392,000 at 0.5e6 a second.
    seconds = 0.784 + 0.25
    # Operations: 2 * (66,000 + 100,000) * 3 + 4 * 1 * 2 * 10 * 1,500 = 1,116,000.
    replica = Replica(SMALL, ROUND)
    assert replica.step_seconds(load) == pytest.approx(seconds)
    assert replica.flops(load) == 1_116_000
    assert replica.mfu(load) == pytest.approx(1_116_000 / (seconds * 1e9))


def test_a_prompt_by_hand_is_bound_by_arithmetic():
    fast_memory = DeviceSpec("fast", 1e6, 2e6, 1 << 30, 1e12, 1e5, 0.5, 0.5, 0.25, 2.0)
    replica = Replica(SMALL, fast_memory)
    # 60 tokens and then 40, which attend to 60 * 30 and 40 * 80 positions; only the second needs the LM head.
    first = (2 * 66_000 * 60 + 80 * 60 * 30) / 0.5e6 + 0.25
    second = (2 * 66_000 * 40 + 2 * 100_000 + 80 * 40 * 80) / 0.5e6 + 0.25
    assert replica.prefill_seconds(100, max_num_batched_tokens=60) == pytest.approx(first + second)
    assert chunk(60, 40, last=True) == Load(0, 40, 40 * 80, 100, 1, 1)


def test_integer_matrices_run_at_the_integer_rate_but_attention_does_not():
    slow = DeviceSpec("slow", 1e6, 2e6, 1 << 30, 1e12, 1e5, 0.5, 0.5, 0.0, 2.0)
    load = decoding(rows=1, context=100)
    whole = Replica(SMALL, slow, precision=WEIGHTS["int8"]).step_seconds(load)
    assert whole == pytest.approx(2 * (66_000 + 100_000) / 1e6 + 80 * 100 / 0.5e6)


def test_several_devices_share_everything_but_the_overhead():
    load = decoding(rows=3, context=500)
    shared = Replica(SMALL, ROUND, degree=2).step_seconds(load)
    assert shared - 0.25 == pytest.approx(0.784 / (2 * PARALLEL_SHARE))
    assert Replica(SMALL, ROUND, degree=2).dollars_per_hour == 4.0


def test_what_fits_beside_weights_and_workspace():
    replica = Replica(SMALL, ROUND)
    # 100 matrices' norms aside: 66,000 + 300 norm weights + 200,000 of tables, two bytes each.
    assert replica.weight_bytes == 2 * 266_300
    # 8 tokens * (8 * 100 + 3 * 200) * 2 bytes, and logits of all 8, fewer than 32: 5 copies of 1,000 floats.
    assert replica.workspace_bytes(8, 4) == 8 * 1400 * 2 + 8 * 5 * 1000 * 4
    left = int(1_000_000 * MEMORY_SHARE) - 532_600 - 182_400
    assert replica.num_blocks(16, 8, 4) == left // (16 * 40)
    assert replica.sequences_that_fit(context=33, num_blocks=10, block_size=16) == 3  # 3 blocks each
    assert Replica(SMALL, ROUND).num_blocks(16, 64, 64) == 0  # the workspace alone is too much


def test_recurrent_states_take_memory_and_time():
    replica = Replica(replace(SMALL, state_bytes=2000), ROUND)
    plain = Replica(SMALL, ROUND)
    left = plain.kv_budget(8, 4, MEMORY_SHARE)
    assert replica.kv_budget(8, 4, MEMORY_SHARE) == left - 4 * 2000
    assert plain.room(left, 16) == (left // 640, 0)
    assert replica.room(100_000, 16) == ((100_000 - 12 * 2000) // 640, 12), "checkpoints get a quarter"
    assert replica.room(100_000, 16, needed=95_000) == (96_000 // 640, 2)
    assert replica.room(100_000, 16, state_cache_bytes=6100) == (100_000 // 640, 3)
    load = decoding(rows=3, context=500)
    moved = 3 * 2 * 2000 / 0.5e6
    assert replica.step_seconds(load) - plain.step_seconds(load) == pytest.approx(moved)
    assert replica.flops(load) - plain.flops(load) == 3 * 6 * 500


def test_quantized_keys_and_values_take_half_and_a_scale():
    shape = SHAPES["llama-3.1-8b"]
    assert Replica(shape, H100, precision=Precision(kv_bytes=KV_BYTES["int8"])).kv_bytes_per_token == 67_584
    assert Replica(shape, H100, precision=WEIGHTS["int4"]).weight_bytes < 6e9


@pytest.mark.parametrize(("batch", "tokens_per_second"), [(1, 284), (64, 11_661), (256, 22_297)])
def test_bounds_of_an_8b_model_at_what_an_h200_reached(batch, tokens_per_second):
    """4.3 TB/s and nothing else: the roofline that was worked out by hand for Llama-3.1-8B at 1k of context."""
    bare = DeviceSpec("bare", 790e12, 1_580e12, H200.memory_bytes, 4.3e12, 50e9, 1.0, 1.0, 0.0, 0.0)
    step = Replica(SHAPES["llama-3.1-8b"], bare).step_seconds(decoding(batch, 1024))
    assert batch / step == pytest.approx(tokens_per_second, rel=0.02)


def test_a_small_server_decodes_as_measured():
    """Qwen3-0.6B in bfloat16 on two cores: OpenVINO 2026.4 decodes 18.4 tokens a second for one stream."""
    one = Replica(SHAPES["qwen3-0.6b"], CPU).step_seconds(decoding(1, 192))
    assert 1 / one == pytest.approx(18.4, rel=0.1)
    prompt = Replica(SHAPES["qwen3-0.6b"], CPU).prefill_seconds(2048, 1024)
    assert 2048 / prompt == pytest.approx(880, rel=0.25)


def test_a_quantized_model_has_its_lm_head_in_8_bits():
    load = decoding(rows=1, context=100)
    int8, int4 = (Replica(SMALL, ROUND, precision=WEIGHTS[name]) for name in ("int8", "int4"))
    assert int8.weight_bytes_read(load) == 66_000 + 100_000
    assert int8.weight_bytes_read(load._replace(samples=0)) == 66_000
    assert int4.weight_bytes_read(load) == 66_000 * (0.5 + 5 / 128) + 100_000
    assert int8.weight_bytes == 66_000 + 2 * (300 + 100_000) + 100_000


def test_a_tied_head_is_counted_once_unless_it_has_a_copy_in_8_bits():
    tied = replace(SMALL, tied_embeddings=True)
    assert Replica(tied, ROUND).weight_bytes == 2 * 166_300
    assert Replica(tied, ROUND, precision=WEIGHTS["int8"]).weight_bytes == 66_000 + 2 * 100_300 + 100_000


def test_every_weight_of_a_float32_model_has_four_bytes():
    assert Replica(SMALL, ROUND, precision=Precision(4.0, plain_bytes=4.0)).weight_bytes == 4 * 266_300


@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize("tokens", [1, 4, 32])
def test_a_step_of_whole_experts_waits_for_the_busiest_device(degree, tokens):
    slow = DeviceSpec("slow", 1e30, 1e30, 1 << 30, 1e6, 1e5, 1.0, 1.0, 0.0, 2.0)
    even = Replica(EXPERTS, slow, degree)
    waits = replace(even, expert_parallel=True)
    load = decoding(tokens, 1)
    draws, busiest, used = random.Random(1), 0, 0
    for _ in range(2000):
        chosen = {expert for _ in range(tokens) for expert in draws.sample(range(128), 8)}
        on_each = Counter(expert * degree // 128 for expert in chosen)
        busiest, used = busiest + max(on_each.values()), used + len(chosen)
    drawn = busiest * degree / used
    assert waits.step_seconds(load) / even.step_seconds(load) == pytest.approx(drawn, rel=0.08)


def test_whole_experts_wait_for_the_device_with_most_tokens_when_arithmetic_is_the_bound():
    fast = DeviceSpec("fast", 1e6, 1e6, 1 << 30, 1e30, 1e5, 1.0, 1.0, 0.0, 2.0)
    even = Replica(EXPERTS, fast, 4)
    waits = replace(even, expert_parallel=True)
    draws, busiest = random.Random(1), 0
    for _ in range(500):
        on_each = Counter(expert // 32 for _ in range(100) for expert in draws.sample(range(128), 8))
        busiest += max(on_each.values())
    load = decoding(100, 1)
    drawn = busiest / 500 * 4 / 800
    assert waits.step_seconds(load) / even.step_seconds(load) == pytest.approx(drawn, rel=0.03)
    assert waits.weight_bytes_read(load) == even.weight_bytes_read(load)
