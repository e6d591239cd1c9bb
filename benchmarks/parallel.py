"""A model on several ranks: bytes between ranks per decode step compared with the formula, memory, speed, lost ranks.

``--kills N`` kills a rank N times under load instead, and prints how long it took until the next token; with ``--disk``
over a disk tier, whose blocks must be found again each time. All ranks share the CPU of one machine here, so more ranks
are not faster: the table says how much slower they are.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple
from unittest import mock

from headrace.config import ModelOptions, options
from headrace.core.events import Emitted, EngineLost, Event, Finished, Moved
from headrace.core.memory.restore import AlwaysRestore
from headrace.core.plan import Tier
from headrace.core.ports import LOST_PREFIX
from headrace.core.recovery import LOSS_SECONDS
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.fleet.others import Processes
from headrace.lab.bench.stats import percentile
from headrace.wiring import model
from headrace.wiring.loading import computing

PROMPT_TOKENS = 900
"""Length of the prompts whose computation is measured, and of those whose blocks go to the disk."""


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
    spec, layers = loaded.shape, loaded.decoder.shape.num_layers
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


def load(args: argparse.Namespace, sizes: tuple[int, int], disk: str = "") -> model.Loaded:
    """The model in parts of these sizes; over host memory and a disk tier in the folder ``disk``, if it is given."""
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
    if disk:
        given["kv_offload_path"] = disk
        given["kv_offload_bytes"] = args.kv_bytes // 2
        given["kv_offload_disk_bytes"] = 8 * args.kv_bytes
    loaded = model.load(options(given))
    if lower := loaded.engine.scheduler.pool.lower:
        lower._restore = AlwaysRestore()  # so small a model computes faster
    return loaded


def random_prompts(loaded: model.Loaded, count: int, length: int = 64) -> list[tuple[int, ...]]:
    """The same prompts each time."""
    rng = random.Random(length)
    return [tuple(rng.randrange(8, loaded.shape.vocab_size) for _ in range(length)) for _ in range(count)]


def submit(loaded: model.Loaded, name: str, prompts: Sequence[tuple[int, ...]], tokens: int) -> None:
    """Requests with outputs of one length."""
    for i, prompt in enumerate(prompts):
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
        submit(loaded, "rows", random_prompts(loaded, args.rows), args.tokens)
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
        submit(loaded, "prompts", random_prompts(loaded, args.rows, PROMPT_TOKENS), 1)
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


class RequestOutcomes:
    """The outcomes of the requests of `kill`. ``right`` are the expected tokens of each prompt, by its number."""

    def __init__(self, right: Mapping[str, list[int]]) -> None:
        self.ended: dict[str, FinishReason] = {}
        self.tokens: dict[str, list[int]] = {}
        self.emitted = self.fetched = self.failed = self.wrong = self.losses = self.recomputed = 0
        """Tokens; blocks from the disk; requests that failed, and that have other tokens than the right ones; losses of
        a rank, and requests that were computed again."""
        self.later = 0.0
        """How far the engine's clock is ahead, so that losses of one minute do not count together."""
        self._right = right

    def fold(self, event: Event) -> None:
        """Raises AssertionError if a request ends twice, or fails for another reason than a lost rank."""
        if isinstance(event, Emitted):
            self.emitted += len(event.tokens)
            self.tokens.setdefault(event.request_id, []).extend(event.tokens)
        elif isinstance(event, Moved) and event.source is Tier.DISK:
            self.fetched += event.blocks
        elif isinstance(event, EngineLost):
            self.losses += 1
            self.recomputed += event.recomputed
        elif isinstance(event, Finished):
            assert event.request_id not in self.ended, f"{event.request_id} ended twice"
            self.ended[event.request_id] = event.reason
            if event.reason is FinishReason.FAILED:
                assert event.message.startswith(LOST_PREFIX), event.message
                self.failed += 1
            else:
                tokens = self.tokens[event.request_id]
                self.wrong += tokens != self._right.get(event.request_id.split()[1], tokens)

    def step(self, loaded: model.Loaded) -> None:
        for event in loaded.engine.step(time.monotonic() + self.later):
            self.fold(event)


def serve(
    loaded: model.Loaded,
    outcomes: RequestOutcomes,
    name: str,
    prompts: Sequence[tuple[int, ...]],
    tokens: int,
    kill_at: int = sys.maxsize,
    kill_one: Callable[[], None] = lambda: None,
) -> float:
    """Serve a request with each prompt; after ``kill_at`` tokens lose a rank, and return seconds to the next token."""
    submit(loaded, name, prompts, tokens)
    engine, pool = loaded.engine, loaded.engine.scheduler.pool
    until, losses, kill_at = len(outcomes.ended) + len(prompts), outcomes.losses, outcomes.emitted + kill_at
    killed_at = seconds = 0.0
    while len(outcomes.ended) < until or engine.wake_at(0.0) is not None:
        lost, emitted = outcomes.losses > losses, outcomes.emitted
        if not lost:
            outcomes.fetched = 0
        outcomes.step(loaded)
        if lost and not seconds and outcomes.emitted > emitted:
            seconds = time.monotonic() - killed_at
        if not killed_at and outcomes.emitted >= kill_at:
            kill_one()
            killed_at = time.monotonic()
    engine.check_consistency()
    assert pool.num_free == pool.num_blocks, "a block is lost"
    return seconds


def kill(args: argparse.Namespace, sizes: tuple[int, int]) -> None:
    """Kill a random rank under load, again and again; every request must end once and every block come back."""
    started: list[Processes] = []

    def start(options: ModelOptions) -> Processes:
        started.append(Processes(options.tensor_parallel_size * options.pipeline_parallel_size))
        return started[-1]

    rng = random.Random(args.seed)

    def kill_one() -> None:
        os.kill(rng.choice(started[0].ids), rng.choice((signal.SIGKILL, signal.SIGTERM)))

    whole, teacher = load(args, (1, 1)), RequestOutcomes({})
    prompts = random_prompts(whole, 2 * args.rows, PROMPT_TOKENS if args.disk else 64)
    serve(whole, teacher, "right", prompts, args.tokens)
    model.close(whole)
    outcomes = RequestOutcomes({name.split()[1]: tokens for name, tokens in teacher.tokens.items()})
    seconds, fetched = list[float](), list[int]()
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(computing, "open_others", start):
        loaded = load(args, sizes, folder if args.disk else "")
        try:
            for name in ("first", "second"):  # they bring the blocks to the disk
                serve(loaded, outcomes, name, prompts, args.tokens)
            for number in range(args.kills):
                outcomes.later += LOSS_SECONDS
                due = rng.randrange(1, args.rows * args.tokens)
                seconds.append(serve(loaded, outcomes, str(number), prompts, args.tokens, due, kill_one))
                fetched.append(outcomes.fetched)
                print(
                    f"kill {number}: {seconds[-1]:.2f} s, {fetched[-1]} blocks fetched",
                    file=sys.stderr,
                    flush=True,
                )
        finally:
            model.close(loaded)
    print(
        f"{args.kills} ranks killed under load: {len(outcomes.ended):,} requests, each ended once; "
        f"{outcomes.recomputed:,} were computed again, {outcomes.failed:,} failed, "
        f"{outcomes.wrong:,} had other tokens than in one process; no block leaked"
    )
    print(
        f"seconds to the next token: median {statistics.median(seconds):.2f}, p99 {percentile(seconds, 99):.2f}, "
        f"longest {max(seconds):.2f}"
    )
    if args.disk:
        print(f"blocks that came from the disk after a kill: {min(fetched)} to {max(fetched)}")


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
    parser.add_argument(
        "--disk", action="store_true", help="with --kills: over a disk tier, and longer prompts"
    )
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
