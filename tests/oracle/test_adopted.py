"""Models of transformers through the whole engine: texts equal those of plain transformers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headrace.config import ConfigError
from headrace.core.request import SamplingParams
from headrace.llm import LLM
from headrace.wiring.model import describe
from tests.oracle.greedy import ROUNDED_QUERIES, counted, differing, keys_kept_in, texts
from tests.oracle.tiny import Tiny, build

PLAIN = (
    *("qwen3_moe", "gpt_oss", "deepseek_v3", "gpt2", "gemma4_text", "starcoder2", "cohere2"),
    *("mixtral", "minimax_m2", "gpt_neox", "opt", "glm4_moe", "phi", "stablelm", "olmoe"),
    *("ministral3", "granitemoe", "exaone_moe", "bart", "apertus"),
)
STATEFUL = (
    *[(kind, "native") for kind in ("qwen3_next", "qwen3_5_text", "lfm2", "granitemoehybrid", "bamba")],
    *[(kind, "native") for kind in ("nemotron_h", "falcon_h1")],
    *[(kind, "transformers") for kind in ("qwen3_next", "granitemoehybrid")],
)
"""Hybrid models, and the implementations that compute them."""

DRAFTS = '{"method": "ngram", "num_speculative_tokens": 3, "adaptive": false, "prompt_lookup_min": 1}'
BLOCKS = 16
"""Blocks that hold the prompts of a case, but not the texts behind them."""


class Made(NamedTuple):
    """A checkpoint, and prompts with a common beginning and repetitions."""

    folder: Path
    model: Any
    prompts: list[list[int]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    done: dict[str, Made] = {}

    def make(kind: str) -> Made:
        if kind not in done:
            done[kind] = _make(kind, tmp_path_factory.mktemp(kind))
        return done[kind]

    return make


def _make(kind: str, folder: Path) -> Made:
    model = build(kind, "causal", Tiny())
    model.config.eos_token_id = 2
    model.save_pretrained(folder)
    names = {chr(index) if 33 <= index < 127 else f"w{index}": index for index in range(256)}
    words = Tokenizer(models.WordLevel(names, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.decoder = decoders.ByteLevel()
    words.save(str(folder / "tokenizer.json"))
    generator = torch.Generator().manual_seed(5)
    shared = 3 * torch.randint(3, 240, (11,), generator=generator).tolist()
    sizes = (2, 8, 11, 1, 6)
    prompts = [shared + 2 * torch.randint(3, 240, (size,), generator=generator).tolist() for size in sizes]
    return Made(folder, model, prompts)


def open_llm(folder: Path, **given: Any) -> LLM:
    return LLM(
        str(folder), **{"max_model_len": 96, "kv_cache_memory_bytes": "8MiB", "block_size": 8, **given}
    )


@pytest.mark.parametrize("kind", PLAIN)
def test_prefix_hits_chunks_grammars_preemption_and_drafts(kind: str, made: Callable[[str], Made]) -> None:
    case = made(kind)
    given = {"model_impl": "transformers"}
    with open_llm(case.folder, max_num_batched_tokens=32, max_num_seqs=4, **given) as llm:
        assert differing(case.model, case.prompts, texts(llm, case.prompts)) == []
        again = llm.generate(case.prompts, SamplingParams(max_tokens=2, temperature=0.0), progress=False)
        assert all(each.metrics.cached_tokens >= 32 for each in again)
        assert any("modelling code of transformers" in line for line in describe(llm.loaded))
        sampling = SamplingParams(max_tokens=6, temperature=0.0, structured_outputs={"regex": "[ACE]{6}"})  # type: ignore[arg-type]
        answers = llm.generate(case.prompts, sampling, progress=False)
        few = str(BLOCKS * llm.loaded.ledger.block_bytes)
    written = [list(each.outputs[0].token_ids[:6]) for each in answers]
    allowed = [ord(letter) for letter in "ACE"]
    assert differing(case.model, case.prompts, written, allowed=allowed) == []
    given |= {"kv_cache_memory_bytes": few, "scheduling_policy": "fcfs", "speculative_config": DRAFTS}
    with open_llm(case.folder, **given) as llm, counted(llm) as events:
        assert differing(case.model, case.prompts, texts(llm, case.prompts)) == []
    assert events["Preempted"]
    assert events["Verified"]


@pytest.mark.parametrize("kind", PLAIN)
def test_keys_and_values_in_8_bits(kind: str, made: Callable[[str], Made]) -> None:
    case = made(kind)
    given: dict[str, Any] = {"model_impl": "transformers", "kv_cache_dtype": "int8"}
    with open_llm(case.folder, max_num_batched_tokens=32, max_num_seqs=4, **given) as llm:
        found = texts(llm, case.prompts)
    with keys_kept_in(case.model, torch.int8):
        assert differing(case.model, case.prompts, found, ROUNDED_QUERIES) == []


@pytest.mark.parametrize(("kind", "by"), STATEFUL)
def test_recurrent_states_follow_their_sequences(kind: str, by: str, made: Callable[[str], Made]) -> None:
    model, prompts = made(kind).model, made(kind).prompts
    greedy = SamplingParams(max_tokens=1, temperature=0.0)
    with open_llm(made(kind).folder, max_num_batched_tokens=32, max_num_seqs=3, model_impl=by) as llm:
        found = texts(llm, prompts)  # packed and in chunks, some of them from a shared beginning
        assert differing(model, prompts, found) == []
        turns = [[*prompt, *text, 77, 78] for prompt, text in zip(prompts, found, strict=True)]
        assert differing(model, turns, texts(llm, turns)) == []  # from the states at the ends of answers
        assert texts(llm, prompts) == found
        again = llm.generate(prompts, greedy, progress=False)
        whole = [(len(prompt) - 1) // 8 * 8 for prompt in prompts]
        assert [each.metrics.cached_tokens for each in again] == whole
        ledger = llm.loaded.ledger
        assert ledger.state_cells > 0 < ledger.state_bytes
    few, cells = str(BLOCKS * ledger.block_bytes), str(4 * ledger.state_bytes)
    given = {"scheduling_policy": "fcfs", "overlap": 1, "state_cache_bytes": cells, "model_impl": by}
    with open_llm(made(kind).folder, kv_cache_memory_bytes=few, **given) as llm, counted(llm) as events:
        assert differing(model, [*prompts, *turns], texts(llm, [*prompts, *turns])) == []
    assert events["Preempted"]
    assert events["Checkpointed"]


@pytest.mark.parametrize(("kind", "by"), STATEFUL)
def test_drafts_grammars_and_tiers_beside_states(kind: str, by: str, made: Callable[[str], Made]) -> None:
    folder, model, prompts = made(kind)
    given: dict[str, Any] = {"speculative_config": DRAFTS, "max_num_seqs": 3, "model_impl": by}
    with open_llm(folder, max_num_batched_tokens=32, **given) as llm, counted(llm) as events:
        found = texts(llm, prompts)
        assert differing(model, prompts, found) == []
        turns = [[*prompt, *text, 77, 78] for prompt, text in zip(prompts, found, strict=True)]
        assert differing(model, turns, texts(llm, turns)) == []
        sampling = SamplingParams(max_tokens=6, temperature=0.0, structured_outputs={"regex": "[ACE]{6}"})  # type: ignore[arg-type]
        answers = llm.generate(prompts, sampling, progress=False)
        assert differing(model, 3 * prompts[:2], texts(llm, 3 * prompts[:2])) == []  # as with n = 3
        blocks = str(BLOCKS * llm.loaded.ledger.block_bytes)
    assert events["Verified"]
    written = [list(each.outputs[0].token_ids[:6]) for each in answers]
    assert differing(model, prompts, written, allowed=[ord(letter) for letter in "ACE"]) == []
    given |= {"scheduling_policy": "fcfs", "kv_offload_bytes": "4MiB", "kv_cache_memory_bytes": blocks}
    with open_llm(folder, **given) as llm, counted(llm) as events:
        assert differing(model, [*prompts, *turns], texts(llm, [*prompts, *turns])) == []
    assert events["Preempted"]
    assert events["Verified"]
    assert events["Moved"]


@pytest.mark.parametrize(("kind", "by"), STATEFUL)
def test_keys_kept_in_beside_states(kind: str, by: str, made: Callable[[str], Made]) -> None:
    case = made(kind)
    given = {"kv_cache_dtype": "int8", "speculative_config": DRAFTS, "model_impl": by}
    with open_llm(case.folder, max_num_seqs=3, **given) as llm:
        found = texts(llm, case.prompts)
        again = texts(llm, case.prompts)
    with keys_kept_in(case.model, torch.int8):
        assert differing(case.model, case.prompts, found, ROUNDED_QUERIES) == []
        assert differing(case.model, case.prompts, again, ROUNDED_QUERIES) == []


@pytest.mark.parametrize(("kind", "by"), STATEFUL)
def test_states_outlive_a_restart(kind: str, by: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    case = made(kind)
    given = {"kv_offload_path": str(tmp_path), "kv_offload_disk_bytes": "64MiB", "model_impl": by}
    with open_llm(case.folder, **given) as llm:
        found = texts(llm, case.prompts)
    turns = [[*prompt, *text, 77, 78] for prompt, text in zip(case.prompts, found, strict=True)]
    with open_llm(case.folder, **given) as llm:
        assert any("checkpoints of states" in note for note in llm.loaded.notes)
        cached = [
            each.metrics.cached_tokens
            for each in llm.generate(turns, SamplingParams(max_tokens=1, temperature=0.0), progress=False)
        ]
        assert differing(case.model, turns, texts(llm, turns)) == []
    assert all(count >= len(prompt) // 8 * 8 for count, prompt in zip(cached, case.prompts, strict=True))


@pytest.mark.parametrize("overlap", [0, 1])
def test_out_of_memory_fails_the_rows_of_its_step_only(
    overlap: int, made: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = made("qwen3_next")
    with open_llm(case.folder, overlap=overlap, max_num_seqs=2, max_num_batched_tokens=32) as llm:
        decoder = llm.loaded.runner._decoder
        calls = iter(range(1000))

        def failing(compute: Callable[..., Any]) -> Callable[..., Any]:
            def computed(*args: Any) -> Any:
                if next(calls) == 4:
                    raise torch.OutOfMemoryError("no memory")
                return compute(*args)

            return computed

        for way in ("hidden", "greedy"):
            monkeypatch.setattr(decoder, way, failing(getattr(decoder, way)))
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        answers = llm.generate(case.prompts, params, progress=False)
        ended = [each.outputs[0].finish_reason for each in answers]
        assert 0 < ended.count("length") < len(ended), ended
        assert differing(case.model, case.prompts, texts(llm, case.prompts)) == []


def test_without_checkpoints_every_prompt_is_computed_as_a_whole(made: Callable[[str], Made]) -> None:
    case = made("qwen3_next")
    with open_llm(case.folder, state_cache_bytes="0") as llm:
        for _ in range(2):
            assert differing(case.model, case.prompts, texts(llm, case.prompts)) == []
        (answer,) = llm.generate([case.prompts[0]], SamplingParams(max_tokens=1), progress=False)
        assert answer.metrics.cached_tokens == 0
        assert any("every prompt is computed as a whole" in line for line in describe(llm.loaded))


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("gpt2", {"tensor_parallel_size": 2}, "--tensor-parallel-size 2: GPT2LMHeadModel"),
        ("gpt2", {"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2: GPT2LMHeadModel"),
        ("gpt2", {"model_impl": "native"}, "the config names GPT2LMHeadModel; supported"),
        (
            "qwen3_next",
            {"speculative_config": '{"method": "eagle3", "model": "x"}'},
            "--speculative-config: method eagle3 does not follow the recurrent states of Qwen3Next",
        ),
    ],
)
def test_what_does_not_work_is_refused(
    kind: str, given: dict[str, Any], message: str, made: Callable[[str], Made]
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_llm(made(kind).folder, **given)


def test_a_native_family_can_be_computed_by_transformers(made: Callable[[str], Made]) -> None:
    case = made("qwen3")
    with open_llm(case.folder, model_impl="transformers") as llm:
        assert differing(case.model, case.prompts, texts(llm, case.prompts)) == []
        assert type(llm.loaded.decoder).__name__ == "AdoptedDecoder"
    with open_llm(case.folder) as llm:
        assert differing(case.model, case.prompts, texts(llm, case.prompts)) == []
        assert type(llm.loaded.decoder).__name__ == "Decoder"


def test_a_native_model_does_not_import_transformers() -> None:
    code = (
        "import sys; from headrace.llm import LLM\n"
        "with LLM('builtin', max_model_len=128, kv_cache_memory_bytes='16MiB') as llm: pass\n"
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
