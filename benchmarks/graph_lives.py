"""Random histories of an engine whose decode steps are CUDA graphs, compared with the simple engine.

It runs on the fake device of the tests, without a GPU. Requests arrive, are cancelled, preempted and drafted for, with
steps in flight. The tokens must be equal, and a replay must not do anything that a CUDA graph cannot do. One history in
``--traced`` is compared operation by operation. ``--output`` stores what was finished, so an interrupted run continues.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path

import torch

from headrace.compute import batch
from headrace.compute.graphs.body import Ending
from tests.compute.fakes import BLOCK
from tests.compute.graphs.lives import compare

SHARD = 100
"""Number of histories between two writes of the output."""


def run_histories(first: int, count: int, traced: int) -> Counter[str]:
    """Run histories, and return the sums of their events; a difference is printed and counted."""
    sums: Counter[str] = Counter()
    for seed in range(first, first + count):
        sums["lives"] += 1
        try:
            outcome = compare(seed, traced=seed % traced == 0)
        except Exception as error:
            print(f"life {seed}: {type(error).__name__}: {error}", flush=True)
            sums["different"] += 1
            continue
        sums.update(
            requests=len(outcome.ends),
            tokens=sum(map(len, outcome.tokens.values())),
            replays=outcome.graphs.total(),
            shared=sum(count for variant, count in outcome.graphs.items() if variant.shares),
            penalized=sum(
                count for variant, count in outcome.graphs.items() if variant.ending is Ending.PENALIZED
            ),
            preempted=outcome.preempted,
            accepted=outcome.accepted,
        )
    return sums


def main() -> None:
    """Run until ``--lives`` histories are done or the time is over."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lives", type=int, default=10_000)
    parser.add_argument("--traced", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=3600.0, help="no shard begins later than this")
    parser.add_argument("--output", type=Path, default=Path("bench-results/graph_lives.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    batch.LEAST_SHARED = batch.LEAST_SPARED = batch.SHARED_TILE = BLOCK  # prefixes are short here
    began = time.monotonic()
    sums = Counter(json.loads(args.output.read_text()) if args.output.exists() else {})
    while sums["lives"] < args.lives and time.monotonic() - began < args.seconds:
        sums += run_histories(sums["lives"], min(SHARD, args.lives - sums["lives"]), args.traced)
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(sums, indent=1) + "\n")
    print(json.dumps({"different": 0} | sums))


if __name__ == "__main__":
    main()
