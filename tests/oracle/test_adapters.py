"""LoRA adapters through the whole engine: texts equal those of plain transformers with merged weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from headrace import LoRARequest
from headrace.config import ConfigError
from headrace.core.request import InvalidParameter, SamplingParams
from headrace.llm import LLM
from tests.doubles.adapters import (
    ATTENTION,
    MLP,
    config_of,
    fused_tensors,
    merge,
    sizes_of,
    sizes_of_experts,
    write_adapter,
    write_files,
)
from tests.oracle.families import CASES
from tests.oracle.greedy import COUNT, counted, gap

VOCAB = 96
CLOSE = 1e-4
"""Gap of logits in float32 between added products and merged weights."""
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 3, "adaptive": false, "prompt_lookup_min": 1}'
NAMES = ("llama", "gemma2", "glm4", "granite", "olmo2", "phi3", "qwen3")


def build(name: str, folder: Path) -> Any:
    model = CASES[name].build(folder)
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    return model


def adapters_of(model: Any, folder: Path, count: int) -> list[Path]:
    """Adapters of several ranks and scales; some change attention alone."""
    every = ("qkv_proj", "gate_up_proj", "o_proj", "down_proj", *ATTENTION, "gate_proj", "up_proj")
    found = []
    for seed in range(count):
        names = tuple(each for each in every if seed % 3 < 2 or each in ATTENTION or each == "qkv_proj")
        sizes = sizes_of(model, names)
        changed = {"r": 2 + seed, "lora_alpha": 3 + seed, "use_rslora": seed % 2 == 1}
        target = sorted({name.rpartition(".")[2] for name in sizes})
        folder_of = folder / f"adapter{seed}"
        found.append(write_adapter(folder_of, sizes, seed=seed, target_modules=target, **changed))
    return found


@contextmanager
def merged(model: Any, adapter: Path | None) -> Iterator[Any]:
    if adapter is not None:
        merge(model, adapter)
    yield model
    if adapter is not None:
        merge(model, adapter, -1)


def open_llm(folder: Path, **given: Any) -> LLM:
    plain = {"max_model_len": 64, "kv_cache_memory_bytes": "1MiB", "block_size": 8, "dtype": "float32"}
    return LLM(str(folder), **{**plain, "enable_lora": True, "max_loras": 8, **given})


def texts(
    llm: LLM, prompts: list[list[int]], adapters: list[Path | None], count: int = COUNT
) -> list[list[int]]:
    asked = [None if each is None else LoRARequest(each.name, 1, str(each)) for each in adapters]
    sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    outputs = llm.generate(prompts, sampling, lora_request=asked, progress=False)
    assert [each.outputs[0].error for each in outputs] == [""] * len(outputs)
    return [list(each.outputs[0].token_ids) for each in outputs]


def gaps(
    model: Any, prompts: list[list[int]], found: list[list[int]], adapters: list[Path | None]
) -> list[float]:
    each = []
    for prompt, text, adapter in zip(prompts, found, adapters, strict=True):
        with merged(model, adapter):
            each.append(gap(model, prompt, text))
    return each


def check_preempted(
    model: Any,
    folder: Path,
    prompts: list[list[int]],
    adapters: list[Path | None],
    kv_bytes: int,
    places: int,
) -> None:
    """The texts with drafts in so little memory that requests are preempted, and ``places`` for adapters."""
    given: dict[str, Any] = {"kv_cache_memory_bytes": str(kv_bytes), "scheduling_policy": "fcfs"}
    given |= {"max_loras": places, "max_cpu_loras": places}
    for _ in range(30):  # requests that start late, because their adapters do, may need no preemption
        with open_llm(folder, speculative_config=DRAFTS, **given) as llm, counted(llm) as events:
            assert max(gaps(model, prompts, texts(llm, prompts, adapters), adapters)) <= CLOSE
        if events["Preempted"]:
            break
    assert events["Preempted"]
    assert events["Verified"]


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_adapters_and_none_with_prefixes_chunks_preemption_and_drafts(
    name: str, tmp_path: Path
) -> None:
    model = build(name, tmp_path)
    folders = adapters_of(model, tmp_path, 8 if name == "llama" else 3)
    adapters: list[Path | None] = [*folders, None, folders[0], None]
    generator = torch.Generator().manual_seed(5)
    shared = 5 * torch.randint(3, VOCAB, (5,), generator=generator).tolist()
    tails = [
        torch.randint(3, VOCAB, (1 + at % 4,), generator=generator).tolist() for at in range(len(adapters))
    ]
    prompts = [shared + 2 * tail for tail in tails]
    with open_llm(tmp_path, max_num_batched_tokens=48, max_num_seqs=12) as llm:
        first = texts(llm, prompts, adapters)
        assert max(gaps(model, prompts, first, adapters)) <= CLOSE
        assert len({tuple(text) for text in first[: len(folders) + 1]}) > 1
        # Again, behind the cached prefixes of the same adapters.
        again = llm.generate(
            prompts,
            SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True),
            lora_request=[
                None if each is None else LoRARequest(each.name, 1, str(each)) for each in adapters
            ],
            progress=False,
        )
        assert all(each.metrics.cached_tokens >= 24 for each in again)
        assert (
            max(gaps(model, prompts, [list(each.outputs[0].token_ids) for each in again], adapters)) <= CLOSE
        )
        block = llm.loaded.ledger.block_bytes
    check_preempted(model, tmp_path, prompts, adapters, 11 * block, places=4)


@pytest.mark.slow
def test_adapters_that_peft_saves_equal_the_models_that_it_merges(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = build("llama", tmp_path)
    folders, wholes = list[Path](), [model]
    for seed in range(8):
        torch.manual_seed(seed)
        config = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=2 + seed,
            lora_alpha=3 + seed,
            use_rslora=seed % 2 == 1,
            target_modules=[*ATTENTION, *MLP] if seed % 3 < 2 else [*ATTENTION],
            init_lora_weights=False,  # else they change nothing
        )
        wrapped = peft.get_peft_model(deepcopy(model), config)
        folders.append(tmp_path / f"adapter{seed}")
        wrapped.save_pretrained(folders[-1])
        wholes.append(wrapped.merge_and_unload())
    prompts = [torch.randint(3, VOCAB, (9 + at,)).tolist() for at in range(len(wholes))]
    with open_llm(tmp_path, max_num_batched_tokens=48, max_num_seqs=12) as llm:
        found = texts(llm, prompts, [None, *folders])
    assert len({tuple(text) for text in found}) == len(wholes)
    compared = zip(wholes, prompts, found, strict=True)
    assert max(gap(whole, prompt, text) for whole, prompt, text in compared) <= CLOSE


def adapters_of_experts(model: Any, folder: Path, form: str) -> list[Path]:
    """Adapters that change experts: each a module, or all of a layer as parameters."""
    found = []
    for seed, rank in enumerate((2, 5, 16)):
        target = folder / f"adapter{seed}"
        if form == "modules":
            sizes = sizes_of_experts(model) | sizes_of(model, (*ATTENTION, *MLP))
            found.append(write_adapter(target, sizes, seed=seed, r=rank, lora_alpha=2 * rank))
            continue
        fused = {
            "target_parameters": ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"],
            "lora_alpha": rank,
        }
        swapped = seed > 0
        changed = fused | {"r": rank, "target_modules": [], "peft_version": "0.20.0" if swapped else "0.18.1"}
        tensors = fused_tensors(model, rank, seed, swapped=swapped)
        found.append(write_files(target, config_of(**changed), tensors))
    return found


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("qwen3_moe", "parameters"),
        ("qwen2_moe", "modules"),
        ("mixtral", "parameters"),
        ("gpt_oss", "parameters"),
        ("glm4_moe", "modules"),
    ],
)
@pytest.mark.slow
def test_adapters_of_experts_equal_merged_weights(name: str, form: str, tmp_path: Path) -> None:
    model = build(name, tmp_path)
    folders = adapters_of_experts(model, tmp_path, form)
    adapters: list[Path | None] = [*folders, None, folders[0], None]
    generator = torch.Generator().manual_seed(5)
    shared = 5 * torch.randint(3, VOCAB, (5,), generator=generator).tolist()
    prompts = [
        shared + torch.randint(3, VOCAB, (1 + at % 4,), generator=generator).tolist()
        for at in range(len(adapters))
    ]
    with open_llm(tmp_path, max_num_batched_tokens=48, max_num_seqs=12) as llm:
        for _ in range(2):  # the second time behind the cached prefixes of the same adapters
            found = texts(llm, prompts, adapters)
            assert max(gaps(model, prompts, found, adapters)) <= CLOSE
        assert len({tuple(text) for text in found[:4]}) == 4
        block = llm.loaded.ledger.block_bytes
    check_preempted(model, tmp_path, prompts, adapters, 9 * block, places=2)
    with open_llm(tmp_path, kernels="torch") as llm:
        assert max(gaps(model, prompts, texts(llm, prompts, adapters), adapters)) <= CLOSE


@pytest.mark.parametrize(("name", "form"), [("qwen3_moe", "parameters"), ("qwen2_moe", "modules")])
@pytest.mark.slow
def test_adapters_of_experts_in_triton_equal_merged_weights(name: str, form: str, tmp_path: Path) -> None:
    """Three ranks in one batch, and a row without an adapter; the second model has a shared expert of another width."""
    pytest.importorskip("triton")
    model = build(name, tmp_path)
    adapters: list[Path | None] = [*adapters_of_experts(model, tmp_path, form), None]
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, VOCAB, (3 + at,), generator=generator).tolist() for at in range(4)]
    with open_llm(tmp_path, kernels="triton", device="cpu") as llm:
        found = texts(llm, prompts, adapters, 4)  # a step in the interpreter takes seconds
    assert max(gaps(model, prompts, found, adapters)) <= CLOSE
    assert len({tuple(text) for text in found}) == 4


@pytest.mark.parametrize("given", [{"kernels": "torch"}, {"overlap": 1}, {"max_loras": 1}])
def test_other_kernels_an_overlap_and_one_place(given: dict[str, Any], tmp_path: Path) -> None:
    model = build("llama", tmp_path)
    folders = adapters_of(model, tmp_path, 3)
    adapters: list[Path | None] = [*folders, None, *folders]
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(3, VOCAB, (9,), generator=generator).tolist() for _ in adapters]
    with open_llm(tmp_path, **given) as llm:
        assert max(gaps(model, prompts, texts(llm, prompts, adapters), adapters)) <= CLOSE


def test_other_weights_in_the_same_folder_share_nothing_with_the_earlier_ones(tmp_path: Path) -> None:
    model = build("llama", tmp_path)
    sizes, folder = sizes_of(model, ATTENTION), tmp_path / "adapter"
    prompt = 3 * list(range(5, 15))
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with open_llm(tmp_path, max_loras=1) as llm:
        for number in range(1, 6):
            write_adapter(folder, sizes, seed=number, size=2.0, target_modules=list(ATTENTION))
            asked = LoRARequest("adapter", number, str(folder))
            (output,) = llm.generate([prompt], params, lora_request=asked, progress=False)
            assert output.metrics.cached_tokens == 0
            text = list(output.outputs[0].token_ids)
            with merged(model, folder):
                assert gap(model, prompt, text) <= CLOSE


def test_what_cannot_be_used_is_refused(tmp_path: Path) -> None:
    model = build("llama", tmp_path)
    folder = write_adapter(tmp_path / "a", sizes_of(model), r=17)
    with open_llm(tmp_path) as llm:
        with pytest.raises(InvalidParameter, match="the rank 17 is above --max-lora-rank 16"):
            texts(llm, [[5, 6]], [folder])
        with pytest.raises(InvalidParameter, match="2 adapters for 1 prompts"):
            texts(llm, [[5, 6]], [None, None])
    with (
        open_llm(tmp_path, enable_lora=False, max_loras=1) as llm,
        pytest.raises(InvalidParameter, match="enable_lora=True"),
    ):
        texts(llm, [[5, 6]], [folder])
    for given, message in (
        ({"enable_lora": False}, "--max-loras needs --enable-lora"),
        ({"max_cpu_loras": 7}, "--max-cpu-loras 7 is less than --max-loras 8"),
        ({"model_impl": "transformers"}, "takes no adapters here"),
        ({"dtype": "float16"}, "bfloat16 or float32"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_llm(tmp_path, **given)
