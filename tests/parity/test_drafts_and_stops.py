"""A stop string inside a draft: what was drawn behind it, in the same step, is no part of the completion."""

from __future__ import annotations

from headrace import LLM, SamplingParams

TEXT = "The quick brown fox jumps over the lazy dog. The cat sat on the mat. " * 3
STOPS = (["the "], ["o", " a"], ["zzz"])


def completions(speculation: dict[str, object] | None) -> list[tuple[object, ...]]:
    llm = LLM("builtin", kernels="torch", dtype="float32", max_model_len=256, speculative_config=speculation)
    try:
        params = [SamplingParams(max_tokens=24, temperature=0.0, stop=stop, logprobs=0) for stop in STOPS]
        outputs = [llm.generate([TEXT], each, progress=False)[0].outputs[0] for each in params]
    finally:
        llm.close()
    return [
        (each.text, tuple(each.token_ids), each.finish_reason, each.stop_reason, len(each.logprobs))
        for each in outputs
    ]


def test_stop_strings_cut_tokens_and_scores_where_they_do_without_drafts():
    plain = completions(None)
    drafted = completions({"method": "ngram", "num_speculative_tokens": 6, "adaptive": False})
    assert drafted == plain
    assert [reason for _, _, reason, _, _ in plain] == ["stop", "stop", "length"]
