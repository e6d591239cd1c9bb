"""Job order compared with arrival order: many questions about several documents, shuffled, in a small block pool.

Both orders run on engines with the same options, in alternating rounds. The pool holds a few documents at a time, so
arrival order computes each document again and again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from benchmarks.stage import arguments, publish, say, target
from headrace.core.queueing.job_order import TOKEN_BYTES, order_job, token_bytes
from headrace.lab.bench.measure import compare
from headrace.lab.bench.record import Record, Target
from headrace.lab.workload import Work
from headrace.lab.workload.dataset import VOCABULARY

BLOCK_TOKENS = 16


class InJobOrder:
    """A target that receives its work in job order, as `headrace.LLM` submits it to its engine."""

    def __init__(self, inner: Target) -> None:
        self.name = inner.name
        self._inner = inner

    def run(self, work: Sequence[Work]) -> list[Record]:
        prompts = [token_bytes(each.prompt) for each in work]  # type: ignore[arg-type]
        order = order_job(prompts, [each.max_tokens for each in work], BLOCK_TOKENS * TOKEN_BYTES)
        records = self._inner.run([work[index] for index in order])
        return [record for _, record in sorted(zip(order, records, strict=True), key=lambda pair: pair[0])]

    def facts(self) -> dict[str, Any]:
        return self._inner.facts()

    def close(self) -> None:
        self._inner.close()


def questions(documents: int, each: int, document_len: int, seed: int) -> tuple[Work, ...]:
    """``each`` questions about every document, shuffled; answers of 4 to 64 tokens."""
    rng = random.Random(seed)
    texts = [tuple(rng.choices(VOCABULARY, k=document_len)) for _ in range(documents)]
    work = [
        Work(
            f"w{i}",
            texts[i % documents] + tuple(rng.choices(VOCABULARY, k=16)),
            rng.randint(4, 64),
            0.0,
            True,
        )
        for i in range(documents * each)
    ]
    rng.shuffle(work)
    return tuple(work)


def main() -> None:
    """Measure, print, write."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--questions", type=int, default=6, help="per document")
    parser.add_argument("--document-len", type=int, default=300)
    parser.add_argument("--kv-cache-memory-bytes", type=int, default=4 << 20)
    args = parser.parse_args()
    work = questions(args.documents, args.questions, args.document_len, args.seed)
    engine = (
        f"headrace,max_num_seqs=16,block_size={BLOCK_TOKENS},max_model_len=1024,"
        f"kv_cache_memory_bytes={args.kv_cache_memory_bytes}"
    )
    arrival = target(f"arrival order={engine}", args)
    job = InJobOrder(target(f"job order={engine}", args))
    result = compare([arrival, job], work, args.rounds)
    middle = result.middle()
    cached = {run.target: run.summary.cached_tokens / run.summary.prompt_tokens for run in middle}
    publish("job_order", args, [run for runs in result.rounds for run in runs], middle, cached_share=cached)
    for name, share in cached.items():
        say(f"{name}: {100 * share:.1f} % of the prompt tokens found in the cache")
    say(
        f"job order against arrival order: {result.ratios['job order']['requests_per_second']:.2f}x requests/s"
    )


if __name__ == "__main__":
    main()
