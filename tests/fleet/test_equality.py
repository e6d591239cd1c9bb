"""A model in parts gives the tokens of one process: all families, formats, caches and drafts, over gloo.

The ranks are threads here, with the workers, messages and process groups of real ones.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from headrace.compute.blockfile import BLOCKS_FILE
from headrace.config import ConfigError
from headrace.core.events import Event, Finished, Moved
from headrace.core.memory.restore import AlwaysRestore
from headrace.core.plan import StepPlan, Tier
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.wiring import engine
from headrace.wiring.loading import computing
from headrace.wiring.model import Loaded, close
from tests.fleet.runs import answers, answers_of, load
from tests.fleet.thread_ranks import ThreadRanks
from tests.oracle.families import CASES, Case
from tests.oracle.stored_formats import FORMATS
from tests.oracle.test_quantized import write


@pytest.fixture(autouse=True)
def ranks_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computing, "open_others", ThreadRanks.of)


FAMILIES = (
    "llama",
    "llama-all-heads-biases",
    "mistral",
    "qwen2-window",
    "qwen3",
    "phi3",
    "phi3-longrope",
    "gemma2",
    "gemma3",
    "glm4_moe",
    "granitemoe",
    "qwen2_moe",
)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_in_parts(family: str, tmp_path: Path) -> None:
    CASES[family].build(tmp_path)
    whole = answers_of(tmp_path)
    assert answers_of(tmp_path, 2) == whole
    assert answers_of(tmp_path, 2, 2, overlap=1) == whole


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "qwen2_moe"])
def test_whole_experts_on_each_rank(family: str, tmp_path: Path) -> None:
    CASES[family].build(tmp_path)
    whole = answers_of(tmp_path)
    assert answers_of(tmp_path, 2, enable_expert_parallel=True) == whole
    assert answers_of(tmp_path, 2, 2, enable_expert_parallel=True, overlap=1) == whole


def test_the_load_of_experts_counts_those_of_all_ranks(tmp_path: Path) -> None:
    CASES["qwen3_moe"].build(tmp_path)
    alone, leader = load(tmp_path), load(tmp_path, 2, enable_expert_parallel=True)
    try:
        assert answers(leader) == answers(alone)
        loads = leader.decoder.expert_loads()
        assert loads == alone.decoder.expert_loads()
        assert all(min(layer[: len(layer) // 2]) + max(layer[len(layer) // 2 :]) > 0 for layer in loads)
    finally:
        close(leader)
        close(alone)


def test_ranks_that_have_the_same_kv_head(tmp_path: Path) -> None:
    CASES["llama"].build(tmp_path)  # two KV heads
    assert answers_of(tmp_path, 4) == answers_of(tmp_path)


def test_stages_of_unequal_length(tmp_path: Path) -> None:
    CASES["gemma3"].build(tmp_path)  # seven layers
    whole = answers_of(tmp_path)
    assert answers_of(tmp_path, 1, 2) == whole
    assert answers_of(tmp_path, 1, 3, overlap=1) == whole


QUANTIZED = (
    "gptq",
    "gptq-8",
    "gptq-whole-rows",
    "awq",
    "packed",
    "packed-8-channel",
    "float8-channel",
    "fp8-block",
)


@pytest.mark.parametrize("name", QUANTIZED)
def test_stored_formats_are_divided_at_their_groups(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CASES, "llama", Case("llama", {"intermediate_size": 64}))
    write(tmp_path, *FORMATS[name])
    assert answers_of(tmp_path, 2) == answers_of(tmp_path)


def test_weights_that_are_quantized_while_loading(tmp_path: Path) -> None:
    Case("qwen3", {"head_dim": 16}).build(tmp_path)
    whole = answers_of(tmp_path, quantization="int4")
    assert answers_of(tmp_path, 2, quantization="int4") == whole
    # Of int8, each rank rounds its part of the activations on its own scale: in a pipeline nothing differs.
    assert answers_of(tmp_path, 1, 2, quantization="int8") == answers_of(tmp_path, quantization="int8")


WAYS: tuple[dict[str, Any], ...] = (
    {"overlap": 0},
    {"enable_prefix_caching": False},
    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    {"kv_cache_dtype": "int8"},
    {"kernels": "torch"},
)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_way_to_run(way: dict[str, Any], tmp_path: Path) -> None:
    CASES["qwen3"].build(tmp_path)
    assert answers_of(tmp_path, 2, 2, **({"overlap": 1} | way)) == answers_of(tmp_path, **way)


@pytest.mark.parametrize("stages", [2, 3])
def test_a_pipeline_computes_a_plan_in_each_stage(
    stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CASES["qwen3"].build(tmp_path)  # three layers
    begun: list[int] = []
    loaded = load(tmp_path, 1, stages, overlap=1)
    launch = loaded.runner.launch

    def spy(plan: StepPlan, now: float) -> None:
        launch(plan, now)
        begun.append(len(loaded.runner._begun))

    monkeypatch.setattr(loaded.runner, "launch", spy)
    try:
        answers(loaded)
        assert max(begun) == stages
    finally:
        close(loaded)


def test_a_small_pool_with_host_memory_below_it(tmp_path: Path) -> None:
    """Blocks are evicted to the host memory of every rank, and requests preempted."""
    CASES["qwen3"].build(tmp_path)
    blocks, block_bytes = 11, 2 * 3 * 4 * 2 * 16 * 4
    more = {"kv_offload_bytes": 1 << 18, "max_model_len": 40}
    whole = answers_of(tmp_path, kv_cache_memory_bytes=blocks * block_bytes, **more)
    assert answers_of(tmp_path, 2, kv_cache_memory_bytes=blocks * block_bytes // 2, **more) == whole


@pytest.mark.parametrize(("sizes", "parts"), [((2, 1), 2), ((1, 2), 2), ((2, 2), 4)])
def test_each_rank_keeps_its_part_of_the_disk_tier(
    sizes: tuple[int, int], parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One life after the other: blocks are saved, found by the next life, and by it again after a rank was lost."""
    monkeypatch.setattr(engine, "RestoreIfFaster", lambda *args: AlwaysRestore())
    CASES["qwen3"].build(tmp_path)
    expected, disk = answers_of(tmp_path), tmp_path / "disk"
    more = {"kv_offload_path": str(disk), "kv_offload_bytes": 1 << 20, "kv_offload_disk_bytes": 1 << 20}
    loaded = load(tmp_path, *sizes, **more)
    assert answers(loaded) == expected
    assert "blocks are saved on disk" in close(loaded)
    files = sorted(disk.glob(f"*/{BLOCKS_FILE}"))
    assert [file.parent.name for file in files] == [
        f"tensor-{sizes[0]}-pipeline-{sizes[1]}-rank-{rank}" for rank in range(parts)
    ]

    loaded = load(tmp_path, *sizes, **more)
    try:
        assert any("of the last run are on disk" in note for note in loaded.notes)
        fetched = fetches(loaded, monkeypatch)
        assert answers(loaded) == expected
        assert sum(fetched) > 0

        fetched.clear()
        lose_rank(loaded)
        assert answers(loaded) == expected
        assert sum(fetched) > 0, "the blocks on disk are found again"

        lose_rank(loaded)
        with files[1].open("r+b") as file:  # the part of one rank is damaged
            file.write(bytes(b ^ 255 for b in file.read()))
        assert answers(loaded) == expected
        assert loaded.engine.scheduler.pool.lower is not None
        loaded.engine.scheduler.pool.lower.check()
    finally:
        close(loaded)


def test_a_rank_without_its_disk_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "RestoreIfFaster", lambda *args: AlwaysRestore())
    CASES["llama"].build(tmp_path)
    disk = tmp_path / "disk"
    disk.mkdir()
    (disk / "tensor-2-pipeline-1-rank-1").write_text("a file in place of the folder")
    more = {"kv_offload_path": str(disk), "kv_offload_bytes": 1 << 20, "kv_offload_disk_bytes": 1 << 20}
    assert answers_of(tmp_path, 2, **more) == answers_of(tmp_path)


def fetches(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on, the number of blocks of each fetch from the disk."""
    found: list[int] = []
    step = loaded.engine.step

    def spy(now: float) -> list[Event]:
        events = step(now)
        moved = [event for event in events if isinstance(event, Moved)]
        found.extend(event.blocks for event in moved if event.source is Tier.DISK)
        return events

    monkeypatch.setattr(loaded.engine, "step", spy)
    return found


def lose_rank(loaded: Loaded) -> None:
    """A rank is gone; the request that finds out is computed again."""
    assert loaded.leader is not None
    loaded.leader._others.lose("rank 1 is gone")  # type: ignore[attr-defined]
    params = SamplingParams(max_tokens=2)
    loaded.engine.submit(Request("lost", (1, 2, 3), params), time.monotonic())
    ends: list[Finished] = []
    while not ends:
        ends = [each for each in loaded.engine.step(time.monotonic()) if isinstance(each, Finished)]
    assert [each.reason for each in ends] == [FinishReason.LENGTH]
    loaded.engine.check_consistency()


def test_dummy_weights_are_the_same_in_parts(tmp_path: Path) -> None:
    CASES["llama"].build(tmp_path)
    assert answers_of(tmp_path, 2, 2, load_format="dummy") == answers_of(tmp_path, load_format="dummy")


def test_a_group_that_a_rank_would_split_is_refused(tmp_path: Path) -> None:
    write(tmp_path, *FORMATS["gptq"])  # 48 inputs in groups of 16
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size: .*down_proj.*would split a group of 16"):
        load(tmp_path, 2)


def test_reordered_inputs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "llama", Case("llama", {"intermediate_size": 64}))
    write(tmp_path, *FORMATS["gptq-desc-act"])
    with pytest.raises(ConfigError, match="another order than the activations"):
        load(tmp_path, 2)
    assert answers_of(tmp_path, 1, 2) == answers_of(tmp_path)


@pytest.mark.parametrize(
    ("sizes", "more", "message"),
    [
        (
            (3, 1),
            {},
            "--tensor-parallel-size 3: it must divide the model's 4 attention heads; sizes that work are 1, 2",
        ),
        ((1, 4), {}, "--pipeline-parallel-size 4: the model has 3 layers"),
    ],
)
def test_what_cannot_work_is_refused_before_loading(
    sizes: tuple[int, int],
    more: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    CASES["llama"].build(tmp_path)
    monkeypatch.setattr(computing, "open_others", None)  # would be called
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, *sizes, **more)


def test_a_rank_with_other_weights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CASES["llama"].build(tmp_path)
    monkeypatch.setattr(computing, "identity", lambda folder: "those of rank 0")
    with pytest.raises(ConfigError, match="has other weights here than on rank 0"):
        load(tmp_path, 2)
