"""A model in parts: bytes between ranks per decode step against the formula, memory per rank, speed; and lost ranks.

``--kills N`` kills a rank N times under load instead, and prints how long it took until the next token. All ranks
share the CPU of one machine here, so more ranks are not faster: the table says how much slower they are.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
from typing import NamedTuple

from headrace.build import model
from headrace.build.loading import computing
from headrace.config import options
from headrace.core.events import Emitted, Finished
from headrace.core.ports import LOST_PREFIX
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.fleet.processes import Processes

PROMPT_TOKENS = 900
"""Length of the prompts whose computation is measured."""


class Bytes(NamedTuple):
    """Payload of one decode step of R rows at rank 0, by kind."""

    plan: int
    sums: int
    stages: int
    states: int
    logits: int
    tokens: int


def formula(loaded: model.Loaded, rows: int, sizes: tuple[int, int], itemsize: int) -> Bytes:
    """What a decode step exchanges at rank 0, from the shape of the model.

    A plan has 28 bytes a row and 40 more, its tokens 8 bytes a row and 16 more, and the question for logits 16. All
    other ranks get the plan, those of the first stage the tokens, those with a part of the head the question.
    """
    tensor, stages = sizes
    spec, layers = loaded.spec, loaded.decoder.spec.num_layers
    states = rows * spec.hidden_size * itemsize
    others = tensor if stages > 1 else tensor - 1
    own = spec.vocab_size // tensor if stages == 1 else 0
    return Bytes(
        plan=(40 + 28 * rows) * (tensor * stages - 1) + (16 + 8 * rows) * (tensor - 1) + 16 * others,
        sums=(2 * layers + 1) * states if tensor > 1 else 0,
        stages=states if stages > 1 else 0,
        states=others * states,
        logits=rows * (spec.vocab_size - own) * itemsize,
        tokens=8 * rows if tensor > 1 else 0,
    )


def load(args: argparse.Namespace, sizes: tuple[int, int]) -> model.Loaded:
    """The model in parts of these sizes."""
    given = {
        "model": args.model,
        "dtype": args.dtype,
        "max_num_seqs": args.rows,
        "max_model_len": args.max_model_len,
        "kv_cache_memory_bytes": args.kv_bytes,
        "tensor_parallel_size": sizes[0],
        "pipeline_parallel_size": sizes[1],
        "block_size": 64,
    }
    if args.overlap is not None:
        given["overlap"] = args.overlap
    return model.load(options(given))


def submit(loaded: model.Loaded, name: str, rows: int, tokens: int, prompt_tokens: int = 64) -> None:
    """Requests with prompts and outputs of one length."""
    rng = random.Random(name)
    for i in range(rows):
        prompt = tuple(rng.randrange(8, loaded.spec.vocab_size) for _ in range(prompt_tokens))
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        loaded.engine.submit(Request(f"{name} {i}", prompt, params), time.monotonic())


def exchange(loaded: model.Loaded) -> Bytes:
    """All that rank 0 has exchanged."""
    leader = loaded.leader
    if leader is None:
        return Bytes(*[0] * 6)
    kinds = leader.payload_bytes
    return Bytes(
        leader.plan_bytes, *(kinds[kind] for kind in ("all_reduce", "stages", "hidden", "logits", "tokens"))
    )


def measure(args: argparse.Namespace, sizes: tuple[int, int]) -> None:
    """Decode steps of full batches: bytes of a step that begins no block, memory, tokens per second. And prompts."""
    loaded = load(args, sizes)
    try:
        submit(loaded, "rows", args.rows, args.tokens)
        engine, steps, seconds, found = loaded.engine, 0, 0.0, None
        share = args.rows // engine.knobs.turns
        left = args.rows
        while left:
            before, began = exchange(loaded), time.perf_counter()
            events = engine.step(time.monotonic())
            spent = time.perf_counter() - began
            left -= sum(isinstance(event, Finished) for event in events)
            if sum(isinstance(event, Emitted) for event in events) == share and left == args.rows:
                steps, seconds = steps + 1, seconds + spent
                moved = Bytes(*(new - old for new, old in zip(exchange(loaded), before, strict=True)))
                found = moved if found is None or sum(moved) < sum(found) else found
        submit(loaded, "prompts", args.rows, 1, PROMPT_TOKENS)
        began, left = time.perf_counter(), args.rows
        while left:
            left -= sum(isinstance(event, Finished) for event in engine.step(time.monotonic()))
        prompts = args.rows * PROMPT_TOKENS / (time.perf_counter() - began)
        by_formula = formula(loaded, share, sizes, loaded.decoder.dtype.itemsize)
        weights = [loaded.ledger.weight_bytes, *(each.weight_bytes for each in loaded.ledger.other_ranks)]
        kv = [loaded.ledger.kv_bytes, *(each.kv_bytes for each in loaded.ledger.other_ranks)]
        print(f"\ntensor {sizes[0]}, pipeline {sizes[1]}")
        print(
            f"  {share * steps / seconds:,.0f} tokens/s, {seconds / steps * 1e3:.2f} ms a step of {share} rows"
        )
        print(f"  {prompts:,.0f} prompt tokens/s with prompts of {PROMPT_TOKENS}")
        print("  weights by rank ", ", ".join(f"{each / 2**20:.1f} MiB" for each in weights))
        print("  KV cache by rank", ", ".join(f"{each / 2**20:.1f} MiB" for each in kv))
        if sizes != (1, 1) and found is not None:
            for name, measured, expected in zip(Bytes._fields, found, by_formula, strict=True):
                print(f"  {name:<8} {measured:>12,} bytes a step, formula {expected:>12,}")
    finally:
        model.close(loaded)


def kill(args: argparse.Namespace, sizes: tuple[int, int]) -> None:
    """Kill a random rank under load, again and again; every request must end once and every block come back."""
    started: list[Processes] = []

    def start(size: int) -> Processes:
        started.append(Processes(size))
        return started[-1]

    computing.open_others = start
    loaded = load(args, sizes)
    engine, rng, gaps = loaded.engine, random.Random(args.seed), []
    ended: dict[str, FinishReason] = {}
    failed = 0
    try:
        for number in range(args.kills):
            submit(loaded, str(number), 2 * args.rows, args.tokens)
            due, killed_at = rng.randrange(1, args.rows * args.tokens), 0.0
            emitted, open_requests, before = 0, 2 * args.rows, failed
            while open_requests:
                for event in engine.step(time.monotonic()):
                    if isinstance(event, Emitted):
                        emitted += len(event.tokens)
                        if killed_at and failed > before:
                            gaps.append(time.monotonic() - killed_at)
                            killed_at = 0.0
                    elif isinstance(event, Finished):
                        if event.request_id in ended:
                            raise AssertionError(f"{event.request_id} ended twice")
                        ended[event.request_id] = event.reason
                        open_requests -= 1
                        if event.reason is FinishReason.FAILED:
                            if not event.message.startswith(LOST_PREFIX):
                                raise AssertionError(event.message)
                            failed += 1
                if emitted >= due:
                    os.kill(rng.choice(started[0].ids), rng.choice((signal.SIGKILL, signal.SIGTERM)))
                    killed_at, due = time.monotonic(), 10**9
            engine.check_books()
    finally:
        model.close(loaded)
    gaps.sort()
    print(
        f"{args.kills} ranks killed under load: {len(ended):,} requests, each ended once; {failed:,} failed"
    )
    print(
        f"seconds to the next token: median {gaps[len(gaps) // 2]:.2f}, longest {gaps[-1]:.2f}; no block leaked"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", type=int, default=8, help="requests that decode at once")
    parser.add_argument("--tokens", type=int, default=48, help="output tokens of each request")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--kv-bytes", type=int, default=64 << 20, help="KV cache of each rank")
    parser.add_argument("--sizes", default="1x1,2x1,1x2,2x2", help="tensor and pipeline sizes")
    parser.add_argument("--overlap", type=int, choices=(0, 1), help="0: one plan at a time in a pipeline too")
    parser.add_argument("--kills", type=int, default=0, help="kill a rank so often instead of measuring")
    parser.add_argument("--seed", type=int, default=0, help="when which rank is killed")
    args = parser.parse_args()
    for pair in args.sizes.split(","):
        tensor, stages = map(int, pair.split("x"))
        if not args.kills:
            measure(args, (tensor, stages))
        elif tensor * stages > 1:
            print(f"tensor {tensor}, pipeline {stages}: ", end="")
            kill(args, (tensor, stages))


if __name__ == "__main__":
    main()
