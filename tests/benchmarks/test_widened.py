from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.drafts.widened import write_widened
from benchmarks.peers.shapes import PACKAGED, SHAPES, widened
from headrace import LLM, SamplingParams

OWN = PACKAGED["builtin-target"]
WIDE = widened(
    OWN,
    replace(SHAPES["smollm2-135m"], hidden=320, intermediate=832, layers=4, vocabulary=OWN.vocabulary + 64),
)
PROMPTS = [
    f"<|bos|><|user|>{question}<|end|><|assistant|>"
    for question in (
        "Tell me a short story about Mia.",
        "List five animals.",
        "What is the capital of France?",
    )
]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def both(request, tmp_path_factory):
    """The built-in model, and the same in other sizes."""
    dtype: str = request.param
    folder = write_widened(OWN, WIDE, tmp_path_factory.mktemp(dtype) / "wide", getattr(torch, dtype))
    options = {"device": "cpu", "dtype": dtype, "max_model_len": 256}
    with LLM("builtin", **options) as own, LLM(str(folder), **options) as wide:
        yield dtype, own, wide


def asked(llm: LLM) -> list[list[int]]:
    return [llm.tokenizer.encode(each, add_special_tokens=False) for each in PROMPTS]


def test_the_model_says_the_same_in_other_sizes(both):
    """In bfloat16 the norms' weights are rounded anew, so that answers are equal for a while."""
    dtype, own, wide = both
    greedy = SamplingParams(temperature=0.0, max_tokens=40)
    for one, other in zip(
        *(llm.generate(asked(own), greedy, progress=False) for llm in (own, wide)), strict=True
    ):
        if dtype == "float32":
            assert one.outputs[0].token_ids == other.outputs[0].token_ids
        text = [one.prompt_token_ids + one.outputs[0].token_ids]
        scores = SamplingParams(max_tokens=1, prompt_logprobs=0)
        left, right = (
            [each.logprob for each in llm.generate(text, scores, progress=False)[0].prompt_logprobs]
            for llm in (own, wide)
        )
        assert right == pytest.approx(left, abs=1e-3 if dtype == "float32" else 0.5)


def test_added_tokens_are_never_drawn(both):
    _, _, wide = both
    hot = SamplingParams(temperature=5.0, max_tokens=40, seed=1, ignore_eos=True)
    for answer in wide.generate(asked(wide), hot, progress=False):
        assert max(answer.outputs[0].token_ids) < OWN.vocabulary
