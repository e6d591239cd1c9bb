"""Speed of speculative decoding at a given acceptance rate, for any weights: automatic and fixed draft lengths.

A first run without drafts records the answers. Each following run drafts their tokens, right with probability
``--acceptance``. Runs alternate in rounds; the figures are medians of ratios to the run without drafts of the same
round. ``arithmetic`` is the ratio that tokens per step and the learned step times allow.

``--shape`` and ``--draft-shape`` take the sizes of published models with random weights. The draft model then computes
its drafts, with the vocabulary of the target, and their tokens are replaced by those that are right as often as
``--acceptance`` says. ``arithmetic`` includes the measured time of drafting.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.peers.shapes import SHAPES
from benchmarks.peers.weights import write_config
from benchmarks.stage import arguments, say
from headrace import LLM, SamplingParams
from headrace.build.drafting import proposer_of
from headrace.compute.drafting.draft_model import DraftModel
from headrace.core.drafting.acceptance import Acceptance
from headrace.core.drafting.costly_sources import USUAL
from headrace.core.drafting.draft_budget import DraftBudget
from headrace.core.drafting.drafter import BudgetedDrafter
from headrace.core.drafting.proposal import DraftAsk, Drafter, Proposal
from headrace.lab.forced_acceptance import ForcedAcceptance

PROMPT_TOKENS = 32
SHARE = 0.3
"""First estimate of the time of a drafting pass, as a share of a step."""

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


def arithmetic(llm: LLM, rows: int, length: int, rate: float, context: int, drafting: float) -> float:
    """The speed-up of drafts of ``length``, by step times, the chance of acceptance and seconds of a drafting pass."""
    times = llm.loaded.engine.scheduler._times
    assert times is not None
    plain = times.predict(rows, rows, rows * context)
    drafted = times.predict(rows, rows * (1 + length), rows * (1 + length) * context) + length * drafting
    return sum(rate**at for at in range(length + 1)) * plain / drafted


class Replaced(ForcedAcceptance):
    """Forced drafts that a draft model computes, too: as many tokens, with its time."""

    def __init__(self, model: DraftModel, answers: Answers, rate: float, most: int, seed: int) -> None:
        super().__init__(answers, rate, most, seed)
        model._least_confidence = 0.0
        self.model = model
        self.passes = 0

    def propose(self, asks: Sequence[DraftAsk]) -> Sequence[Proposal | None]:
        """The forced tokens in place of the model's; it goes on from them."""
        asks = [ask._replace(most=min(ask.most, self.most)) for ask in asks]
        forced, found = super().propose(asks), list[Proposal | None]()
        computed = self.model.propose(asks)
        self.seconds = self.model.seconds
        self.passes += max((len(each.tokens) for each in computed if each), default=0)
        for ask, one, other in zip(asks, forced, computed, strict=True):
            state = self.model.pages._followed.get(ask.request.id)
            if one is None or other is None or state is None:
                found.append(None)
                continue
            count = min(len(one.tokens), len(other.tokens))
            state.drafted = one.tokens[: len(state.drafted)]
            found.append(Proposal(one.tokens[:count], (USUAL,) * count, self.name))
        return found


def drafter_of(
    llm: LLM, answers: Answers, rate: float, length: int | None, most: int, seed: int
) -> tuple[BudgetedDrafter, Replaced | None]:
    """Forced drafts of a fixed or automatic length, and those of them that the draft model computes."""
    model = proposer_of(llm.drafts, DraftModel)
    budget = DraftBudget(length)
    if model is None:
        forced = ForcedAcceptance(answers, rate, length or most, seed)
        return BudgetedDrafter([forced], Acceptance(), budget), None
    replaced = Replaced(model, answers, rate, length or most, seed)
    return BudgetedDrafter((), Acceptance(), budget, [(replaced, SHARE)]), replaced


class ForcedLLM(LLM):
    """An engine whose drafter is replaced; ``drafts`` is its own."""

    def __init__(self, model: str, **given: Any) -> None:
        super().__init__(model, **given)
        self.drafts = self.loaded.engine.scheduler.drafter


def opened(args: argparse.Namespace, folder: Path) -> ForcedLLM:
    """The model of the options, with its draft model if they name one."""
    given: dict[str, Any] = {"load_format": args.load_format, "device": args.device}
    if args.shape is None:
        return ForcedLLM(args.model, **given)
    target = write_config(SHAPES[args.shape], folder / "target")
    given |= {"load_format": "dummy", "max_model_len": 1024, "max_num_seqs": max(args.batches)}
    if args.draft_shape is not None:
        sized = replace(SHAPES[args.draft_shape], vocabulary=SHAPES[args.shape].vocabulary)
        draft = write_config(sized, folder / "draft")
        given["speculative_config"] = json.dumps({"method": "draft_model", "model": str(draft)})
    return ForcedLLM(str(target), **given)


def measure(
    llm: ForcedLLM, args: argparse.Namespace, prompts: list[list[int]], rate: float
) -> dict[str, Any]:
    """The speed-ups at one acceptance, and those that arithmetic allows."""
    batch, ratios, drafting = len(prompts), dict[str, list[float]](), list[float]()
    for number in range(args.rounds + 1):  # the first one warms up
        plain, answers = run(llm, prompts, args.output_len, None)
        for length in (None, *args.lengths):
            drafter, replaced = drafter_of(llm, answers, rate, length, max(args.lengths), number)
            began = replaced.model.seconds if replaced else 0.0
            speed, drafted = run(llm, prompts, args.output_len, drafter)
            same = sum(drafted[prompt] == answers[prompt] for prompt in answers)
            if same < batch:
                say(f"batch {batch}: {batch - same} answers differ with drafts")
            if number:
                ratios.setdefault(str(length or "automatic"), []).append(speed / plain)
                if replaced and replaced.passes:
                    drafting.append((replaced.model.seconds - began) / replaced.passes)
    context = PROMPT_TOKENS + args.output_len // 2
    each = statistics.median(drafting) if drafting else 0.0
    allowed = {length: arithmetic(llm, batch, length, rate, context, each) for length in (0, *args.lengths)}
    row = {name: statistics.median(found) for name, found in ratios.items()}
    return {
        "batch": batch,
        "acceptance": rate,
        "speedup": row,
        "arithmetic": allowed,
        "drafting_seconds": each,
    }


def main() -> None:
    """Measure, print, write."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument(
        "--shape", choices=tuple(SHAPES), help="in place of --model: a published model's sizes"
    )
    parser.add_argument("--draft-shape", choices=tuple(SHAPES), help="of a draft model, with --shape")
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.0, 0.5, 0.7, 0.9])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2, 4, 8], help="fixed draft lengths")
    parser.add_argument("--output-len", type=int, default=96)
    args = parser.parse_args()
    rng, found = random.Random(args.seed), []
    with tempfile.TemporaryDirectory() as folder, opened(args, Path(folder)) as llm:
        words = range(100, min(2000, llm.loaded.tokenizer.vocab_size))
        for batch in args.batches:
            prompts = [rng.choices(words, k=PROMPT_TOKENS) for _ in range(batch)]
            for rate in args.acceptance:
                row = measure(llm, args, prompts, rate)
                found.append(row)
                shown = ", ".join(f"{name} {value:.2f}x" for name, value in row["speedup"].items())
                said = ", ".join(f"{name} {value:.2f}x" for name, value in row["arithmetic"].items())
                drafting = row["drafting_seconds"]
                say(
                    f"batch {batch:3}, acceptance {rate:.2f}: {shown}; arithmetic: {said}"
                    + (f"; a drafting pass takes {1000 * drafting:.1f} ms" if drafting else "")
                )
    path = args.output or Path("bench-results") / "forced_acceptance.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
