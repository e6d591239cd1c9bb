"""Texts of the built-in model on a GPU, against those of the CPU and of single launches: for `gpu_check`."""

from __future__ import annotations

import json

from headrace import LLM, SamplingParams

PROMPTS = [f"Once upon a time, in year {year}, there was a fox" for year in range(24)]
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
SMALL = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory_bytes": 64 << 20}
WAYS = {
    "whole": {},
    "chunked": {"max_num_batched_tokens": 24, "max_num_seqs": 16},
    "overlap 0": {"overlap": 0},
    "no prefix sharing": {"enable_prefix_caching": False},
    "preempted": {"kv_cache_memory_bytes": 0, "max_num_seqs": 24},
    "preempted to a host tier": {
        "kv_cache_memory_bytes": 0,
        "max_num_seqs": 24,
        "kv_offload_bytes": 64 << 20,
    },
    "and that without overlap": {
        "kv_cache_memory_bytes": 0,
        "max_num_seqs": 24,
        "kv_offload_bytes": 64 << 20,
        "overlap": 0,
    },
}


def texts(device: str, **given: object) -> list[list[int]]:
    """The tokens that answer each prompt."""
    llm = LLM("builtin", device=device, **{**SMALL, **given})
    outputs = llm.generate(PROMPTS, GREEDY, progress=False)
    llm.loaded.engine.check_consistency()
    return [output.outputs[0].token_ids for output in outputs]


def block_bytes() -> int:
    """Bytes of one block of the small model."""
    return LLM("builtin", device="cpu", kernels="torch", **SMALL).loaded.ledger.block_bytes


def check_greedy(device: str, kernels: str) -> None:
    """Every way of scheduling gives the text of the CPU."""
    wanted = texts("cpu", kernels="torch")
    for way, given in WAYS.items():
        if "kv_cache_memory_bytes" in given:  # room for one long sequence: most of the others must give way
            given = {**given, "kv_cache_memory_bytes": 66 * block_bytes()}
        got = texts(device, kernels=kernels, **given)
        same = sum(a == b for a, b in zip(got, wanted, strict=True))
        print(f"greedy, {way}: {same} of {len(wanted)} texts equal the CPU's", flush=True)
        if same < len(wanted) - 1:  # rounding may decide between two tokens of almost the same logit
            raise SystemExit(f"FAILED: greedy text differs ({way})")


def check_seeds(device: str, kernels: str) -> None:
    """A seeded answer does not depend on other requests of the batch."""
    llm = LLM("builtin", device=device, kernels=kernels, **SMALL)
    params = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, seed=7, max_tokens=32, ignore_eos=True)
    alone = llm.generate(PROMPTS[0], params, progress=False)[0].outputs[0].token_ids
    among = llm.generate(PROMPTS, params, progress=False)[0].outputs[0].token_ids
    print(f"seeded: {'the same' if alone == among else 'DIFFERENT'} alone and among others", flush=True)
    if alone != among:
        raise SystemExit("FAILED: a neighbour changed a seeded answer")


DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
MIXED = [
    GREEDY,
    SamplingParams(temperature=1.0, top_p=0.9, top_k=50, seed=7, max_tokens=48, ignore_eos=True),
    SamplingParams(temperature=0, presence_penalty=0.5, max_tokens=48, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=8, logprobs=2, max_tokens=48, ignore_eos=True),
]


def check_graphs(device: str) -> None:
    """Steps by graphs give the tokens of single launches, whatever ends them: samples, penalties, scores, drafts."""
    if device != "cuda":
        from tests.compute.graphs.lives import compare

        for seed in range(10):
            outcome = compare(seed)
            print(f"life {seed}: {outcome.graphs.total()} replays, the same tokens", flush=True)
        return
    for drafts in (None, DRAFTS):
        found = []
        for eager in (False, True):
            given = {"speculative_config": json.dumps(drafts)} if drafts else {}
            llm = LLM("builtin", device=device, kernels="triton", enforce_eager=eager, **SMALL, **given)
            recorded = llm.loaded.ledger.graphs
            if not eager:
                print(f"graphs: {recorded}", flush=True)
                if not recorded or "failed" in recorded:
                    raise SystemExit("FAILED: graphs were not recorded")
            params = [MIXED[number % len(MIXED)] for number in range(len(PROMPTS))]
            outputs = llm.generate(PROMPTS, params, progress=False)
            llm.loaded.engine.check_consistency()
            found.append([output.outputs[0].token_ids for output in outputs])
        equal = sum(a == b for a, b in zip(*found, strict=True))
        print(
            f"graphs, {'drafts' if drafts else 'no drafts'}: {equal} of {len(PROMPTS)} texts equal",
            flush=True,
        )
        if (
            equal < len(PROMPTS) - 1
        ):  # keys are divided between programs in another way, so rounding may differ
            raise SystemExit("FAILED: graphs change the text")
