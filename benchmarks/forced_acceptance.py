"""Speed of speculative decoding at a given acceptance rate, for any weights: automatic and fixed draft lengths.

A first run without drafts records the answers. Each following run drafts their tokens, right with probability
``--acceptance``. Runs alternate in rounds; the figures are medians of ratios to the run without drafts of the same
round. ``arithmetic`` is the ratio that tokens per step and the learned step times allow.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from pathlib import Path

from benchmarks.stage import arguments, say
from headrace import LLM, SamplingParams
from headrace.core.drafting.acceptance import Acceptance
from headrace.core.drafting.draft_budget import DraftBudget
from headrace.core.drafting.drafter import BudgetedDrafter
from headrace.core.drafting.proposal import Drafter
from headrace.lab.forced_acceptance import ForcedAcceptance

PROMPT_TOKENS = 32

Answers = dict[tuple[int, ...], tuple[int, ...]]


def run(llm: LLM, prompts: list[list[int]], length: int, drafter: Drafter | None) -> tuple[float, Answers]:
    """Tokens per second of one batch, and its answers."""
    llm.loaded.engine.scheduler._drafted._drafter = drafter
    llm.loaded.engine.reset_prefix_cache()
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, progress=False)
    seconds = time.perf_counter() - began
    answers = {
        tuple(prompt): tuple(output.outputs[0].token_ids)
        for prompt, output in zip(prompts, outputs, strict=True)
    }
    return len(prompts) * length / seconds, answers


def arithmetic(llm: LLM, rows: int, length: int, rate: float, context: int) -> float:
    """The speed-up of drafts of ``length``, by step times and the chance of acceptance."""
    times = llm.loaded.engine.scheduler._times
    assert times is not None
    plain = times.predict(rows, rows, rows * context)
    drafted = times.predict(rows, rows * (1 + length), rows * (1 + length) * context)
    return sum(rate**at for at in range(length + 1)) * plain / drafted


def main() -> None:
    """Measure, print, write."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.0, 0.5, 0.7, 0.9])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2, 4, 8], help="fixed draft lengths")
    parser.add_argument("--output-len", type=int, default=96)
    args = parser.parse_args()
    rng, found = random.Random(args.seed), []
    with LLM(args.model, load_format=args.load_format, device=args.device) as llm:
        words = range(100, min(2000, llm.loaded.tokenizer.vocab_size))
        for batch in args.batches:
            prompts = [rng.choices(words, k=PROMPT_TOKENS) for _ in range(batch)]
            for rate in args.acceptance:
                ratios: dict[str, list[float]] = {}
                for number in range(args.rounds + 1):  # the first one warms up
                    plain, answers = run(llm, prompts, args.output_len, None)
                    for length in (None, *args.lengths):
                        forced = ForcedAcceptance(answers, rate, length or max(args.lengths), number)
                        drafter = BudgetedDrafter([forced], Acceptance(), DraftBudget(length))
                        speed, drafted = run(llm, prompts, args.output_len, drafter)
                        same = sum(drafted[prompt] == answers[prompt] for prompt in answers)
                        if same < batch:
                            say(f"batch {batch}: {batch - same} answers differ with drafts")
                        if number:
                            ratios.setdefault(str(length or "automatic"), []).append(speed / plain)
                row = {name: statistics.median(each) for name, each in ratios.items()}
                context = PROMPT_TOKENS + args.output_len // 2
                allowed = {each: arithmetic(llm, batch, each, rate, context) for each in (0, *args.lengths)}
                found.append({"batch": batch, "acceptance": rate, "speedup": row, "arithmetic": allowed})
                shown = ", ".join(f"{name} {value:.2f}x" for name, value in row.items())
                said = ", ".join(f"{name} {value:.2f}x" for name, value in allowed.items())
                say(f"batch {batch:3}, acceptance {rate:.2f}: {shown}; arithmetic: {said}")
    path = args.output or Path("bench-results") / "forced_acceptance.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
