"""Batch inference with Ray Data: prompts from a file through engines on all workers, results into files.

    pip install 'ray[data]>=2.60,<2.61' headrace
    python examples/ray_data.py prompts.jsonl answers/ --workers 2

Each worker loads the model once and gets batches of rows. Rows keep their columns; ``text``, ``output_tokens`` and
``finish_reason`` are added.
"""

from __future__ import annotations

import argparse
from typing import Any

import ray


class Answers:
    """One worker: an engine that answers batches."""

    def __init__(self, model: str, max_tokens: int) -> None:
        from headrace import LLM, SamplingParams

        self._llm = LLM(model)
        self._params = SamplingParams(max_tokens=max_tokens, temperature=0.0)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Answer the prompts of a batch together; a batch is a column of values by name."""
        outputs = [each.outputs[0] for each in self._llm.generate(list(batch["prompt"]), self._params)]
        batch["text"] = [each.text for each in outputs]
        batch["output_tokens"] = [len(each.token_ids) for each in outputs]
        batch["finish_reason"] = [each.finish_reason for each in outputs]
        return batch


def main() -> None:
    """Answer a file of prompts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompts", help="JSON lines with a field prompt")
    parser.add_argument("answers", help="folder for the results")
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    rows = ray.data.read_json(args.prompts, lines=True).repartition(4 * args.workers)
    answered = rows.map_batches(
        Answers,
        fn_constructor_args=(args.model, args.max_tokens),
        concurrency=args.workers,
        batch_size=args.batch_size,
        num_cpus=0.5,  # in Ray's account: the tasks that read and write need CPUs beside the engines
    )
    answered.write_json(args.answers)
    print(f"{ray.data.read_json(args.answers).count()} answers in {args.answers}")


if __name__ == "__main__":
    main()
