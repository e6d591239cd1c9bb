"""A whole engine computes with the Triton kernels what it computes with torch's: prompts, decoding, sampling."""

from __future__ import annotations

from headrace import LLM, SamplingParams


def tokens(kernels: str) -> list[list[int]]:
    llm = LLM(
        "builtin",
        device="cpu",
        kernels=kernels,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=4,
        kv_cache_memory_bytes=4 << 20,
    )
    params = [
        SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
        SamplingParams(temperature=1.0, top_p=0.9, top_k=50, seed=7, max_tokens=3, ignore_eos=True),
    ]
    outputs = llm.generate(["Once upon a time", "The fox"], params, progress=False)
    llm.loaded.engine.check_books()
    return [output.outputs[0].token_ids for output in outputs]


def test_an_engine_gives_the_same_tokens_as_with_torch() -> None:
    assert tokens("triton") == tokens("torch")
