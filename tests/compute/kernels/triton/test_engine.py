"""A whole engine computes with the Triton kernels what it computes with torch's: prompts, decoding, sampling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.compute.model.hub import resolve_folder
from headrace.config import ConfigError
from tests.oracle.stored_formats import FORMATS
from tests.oracle.test_quantized import write

PROMPTS = ["Once upon a time", "The fox"]


def tokens(
    kernels: str, prompts: Any = PROMPTS[1:], model: str = "builtin", **given: Any
) -> tuple[list[list[int]], LLM]:
    llm = LLM(
        model,
        device="cpu",
        kernels=kernels,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=4,
        kv_cache_memory_bytes=4 << 20,
        **given,
    )
    params = [
        SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
        SamplingParams(temperature=1.0, top_p=0.9, top_k=50, seed=7, max_tokens=3, ignore_eos=True),
    ]
    outputs = llm.generate(prompts, params[: len(prompts)], progress=False)
    llm.loaded.engine.check_consistency()
    return [output.outputs[0].token_ids for output in outputs], llm


def test_an_engine_gives_the_same_tokens_as_with_torch() -> None:
    assert tokens("triton", PROMPTS)[0] == tokens("torch", PROMPTS)[0]


def test_an_engine_in_8_bits_gives_the_same_tokens_as_with_torch() -> None:
    given = {"quantization": "int8", "kv_cache_dtype": "int8"}
    assert tokens("triton", **given)[0] == tokens("torch", **given)[0]


def test_fp8_is_computed_where_the_kernels_can() -> None:
    said, llm = tokens("triton", quantization="fp8", kv_cache_dtype="fp8")
    assert said == tokens("torch")[0]
    assert "fp8 W8A8" in llm.loaded.quantization
    assert llm.loaded.kv_dtype == "float8_e4m3fn"


def test_keys_and_values_in_bfloat16_are_refused_beside_float32() -> None:
    with pytest.raises(ConfigError, match="bfloat16: kernels 'triton' compute in float32, and read such"):
        tokens("triton", kv_cache_dtype="bfloat16")


@pytest.mark.parametrize(
    ("name", "kind"), [("float8-channel", "fp8 W8A16"), ("float8-block", "fp8 W8A16 in groups of 16")]
)
def test_an_fp8_checkpoint_stays_as_it_is_stored(tmp_path: Path, name: str, kind: str) -> None:
    write(tmp_path, *FORMATS[name])
    given = {"model": str(tmp_path), "tokenizer": str(resolve_folder("builtin"))}
    said, llm = tokens("triton", [[5, 9, 3]], **given)
    assert kind in llm.loaded.quantization
    assert not any("stored in fewer bits" in note for note in llm.loaded.notes)
    assert said == tokens("torch", [[5, 9, 3]], **given)[0]
