"""Speed of speculative decoding at a given acceptance rate, for any weights: automatic and fixed draft lengths.

A first run without drafts records the answers. Each following run drafts their tokens, right with probability
``--acceptance``. Runs alternate in rounds; the figures are medians over rounds, and speed-ups are ratios to the run
without drafts of the same round. Only decode steps count. Next to each speed-up are two bounds for exactly this
acceptance:

- ``arithmetic``: tokens per step, divided by the measured time of verification and drafting in plain steps.
- ``free verification``: the same if verification took no longer than a plain step, as where memory bounds both.

``share`` is the plain step and the drafting passes, divided by the measured step with drafts: the part of the second
bound that is reached, whatever the acceptance happened to be.

``--shape`` and ``--draft-shape`` take the sizes of published models with random weights. The draft model then computes
its drafts, with the vocabulary of the target, and their tokens are replaced by those that are right as often as
``--acceptance`` says. The automatic length continues to learn from round to round.
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
from typing import Any, NamedTuple

from benchmarks.drafts.texts import Answers, Running
from benchmarks.peers.shapes import SHAPES
from benchmarks.peers.weights import write_config
from benchmarks.stage import arguments, publish, say
from headrace import LLM, SamplingParams
from headrace.compute.drafting.draft_model import DraftModel
from headrace.core.drafting.acceptance import Acceptance
from headrace.core.drafting.costly_sources import INITIAL_CONFIDENCE
from headrace.core.drafting.draft_budget import DraftBudget
from headrace.core.drafting.drafter import BudgetedDrafter
from headrace.core.drafting.proposal import Drafter, DraftRow, Proposal
from headrace.core.request import Request
from headrace.lab.forced_acceptance import ForcedAcceptance, expected_tokens
from headrace.wiring.drafting import proposer_of

PROMPT_TOKENS = 32
SHARE = 0.3
"""First estimate of the time of a drafting pass, as a share of a step."""


class Decoded(NamedTuple):
    """The decode steps of a batch: median seconds of one, tokens of a row and step, tokens per second, and answers."""

    step: float
    tokens: float
    speed: float
    answers: Answers


def run(llm: LLM, prompts: list[tuple[int, ...]], length: int, drafter: Drafter | None, name: str) -> Decoded:
    """One batch with ``drafter``."""
    llm.loaded.engine.scheduler._drafted._drafter = drafter
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    requests = [Request(f"{name}-{at}", prompt, params) for at, prompt in enumerate(prompts)]
    running = Running(llm, requests, time.perf_counter)
    running.run_steps(1)  # the prompts
    prefill, times = running.seconds, list[float]()
    while running.left:
        before = running.seconds
        running.run_steps(1)
        times.append(running.seconds - before)
    decoded = len(prompts) * (length - 1)
    tokens = decoded / len(prompts) / len(times)
    answers = running.result().answers
    return Decoded(statistics.median(times), tokens, decoded / (running.seconds - prefill), answers)


class Replaced(ForcedAcceptance):
    """Forced drafts that a draft model computes, too: as many tokens, with its time."""

    def __init__(self, model: DraftModel, answers: Answers, rate: float, most: int, seed: int) -> None:
        super().__init__(answers, rate, most, seed)
        model._least_confidence = 0.0
        self.model = model
        self.passes = 0

    def propose(self, draft_rows: Sequence[DraftRow]) -> Sequence[Proposal | None]:
        """The forced tokens in place of the model's; it goes on from them."""
        draft_rows = [
            draft_row._replace(max_tokens=min(draft_row.max_tokens, self.most)) for draft_row in draft_rows
        ]
        forced, found = super().propose(draft_rows), list[Proposal | None]()
        computed = self.model.propose(draft_rows)
        self.seconds = self.model.seconds
        self.passes += max((len(each.tokens) for each in computed if each), default=0)
        for draft_row, one, other in zip(draft_rows, forced, computed, strict=True):
            state = self.model.pages._followed.get(draft_row.request.id)
            if one is None or other is None or state is None:
                found.append(None)
                continue
            count = min(len(one.tokens), len(other.tokens))
            state.drafted = one.tokens[: len(state.drafted)]
            found.append(Proposal(one.tokens[:count], (INITIAL_CONFIDENCE,) * count, self.name))
        return found


def drafter_of(
    llm: ForcedLLM, answers: Answers, rate: float, length: int | None, most: int, seed: int
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


def open_engines(args: argparse.Namespace, folder: Path) -> ForcedLLM:
    """The model of the options, with its draft model if they name one."""
    given: dict[str, Any] = {"load_format": args.load_format, "device": args.device}
    if args.shape is None:
        return ForcedLLM(args.model, **given)
    target = write_config(SHAPES[args.shape], folder / "target")
    given |= {"load_format": "dummy", "max_model_len": 1024, "max_num_seqs": max(args.batches)}
    if args.draft_shape is not None:
        sized = replace(SHAPES[args.draft_shape], vocabulary=SHAPES[args.shape].vocabulary)
        draft = write_config(sized, folder / "draft")
        speculation = {"method": "draft_model", "model": str(draft)}
        if args.draft_quantization:
            speculation["quantization"] = args.draft_quantization
        given["speculative_config"] = json.dumps(speculation)
    return ForcedLLM(str(target), **given)


def measure(
    llm: ForcedLLM, args: argparse.Namespace, prompts: list[tuple[int, ...]], rate: float
) -> dict[str, Any]:
    """The speed-ups at one acceptance, and what bounds them."""
    answers = run(llm, prompts, args.output_len, None, "answers").answers
    drafters = {
        length: drafter_of(llm, answers, rate, length, max(args.lengths), args.seed)
        for length in (None, *args.lengths)
    }
    found: dict[int | None, list[dict[str, float]]] = {length: [] for length in drafters}
    for number in range(args.rounds + 1):  # the first one warms up
        plain = run(llm, prompts, args.output_len, None, f"plain{number}")
        for length, (drafter, replaced) in drafters.items():
            passes, seconds = (replaced.passes, replaced.model.seconds) if replaced else (0, 0.0)
            drafted = run(llm, prompts, args.output_len, drafter, f"{length}-{number}")
            different = sum(drafted.answers[prompt] != answers[prompt] for prompt in answers)
            if different:
                say(f"batch {len(prompts)}: {different} answers differ with drafts")
            made = replaced.passes - passes if replaced else 0
            each = (replaced.model.seconds - seconds) / made if replaced and made else 0.0
            if number:
                found[length].append(_compared(plain, drafted, each, length, rate))
    lengths = {
        str(length or "automatic"): {
            name: statistics.median([one[name] for one in rounds]) for name in rounds[0]
        }
        for length, rounds in found.items()
    }
    return {"batch": len(prompts), "acceptance": rate, "lengths": lengths}


def _compared(
    plain: Decoded, drafted: Decoded, drafting: float, length: int | None, rate: float
) -> dict[str, float]:
    """One round of one length; ``drafting`` are the seconds of a drafting pass."""
    row = {
        "speedup": drafted.speed / plain.speed,
        "tokens_per_step": drafted.tokens,
        "plain_seconds": plain.step,
        "step_seconds": drafted.step,
        "pass_seconds": drafting,
    }
    if length is not None:
        tokens, least = expected_tokens((rate,), length), plain.step + length * drafting
        row["arithmetic"] = tokens * plain.step / drafted.step
        row["free_verification"] = tokens * plain.step / least
        row["share"] = least / drafted.step
    return row


def shown(row: dict[str, float]) -> str:
    """The figures of a length as text."""
    milli = {name: f"{1000 * row[name]:.2f} ms" for name in ("plain_seconds", "step_seconds", "pass_seconds")}
    said = f"{row['speedup']:.2f}x with {row['tokens_per_step']:.2f} tokens a step; a step takes"
    said += f" {milli['plain_seconds']} without drafts and {milli['step_seconds']} with, a drafting pass"
    said += f" {milli['pass_seconds']}"
    if "share" in row:
        said += (
            f"; arithmetic {row['arithmetic']:.2f}x, with free verification {row['free_verification']:.2f}x,"
        )
        said += f" of which {row['share']:.0%} are reached"
    return said


def main() -> None:
    """Measure, print, write."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument(
        "--shape", choices=tuple(SHAPES), help="in place of --model: a published model's sizes"
    )
    parser.add_argument("--draft-shape", choices=tuple(SHAPES), help="of a draft model, with --shape")
    parser.add_argument("--draft-quantization", choices=("int8", "int4", "w4a8"), help="of the draft model")
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.0, 0.5, 0.7, 0.9])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2, 4, 8], help="fixed draft lengths")
    parser.add_argument("--output-len", type=int, default=96)
    args = parser.parse_args()
    rng, found = random.Random(args.seed), []
    with tempfile.TemporaryDirectory() as folder, open_engines(args, Path(folder)) as llm:
        words = range(100, min(2000, llm.loaded.tokenizer.vocab_size))
        for batch in args.batches:
            prompts = [tuple(rng.choices(words, k=PROMPT_TOKENS)) for _ in range(batch)]
            for rate in args.acceptance:
                row = measure(llm, args, prompts, rate)
                found.append(row)
                for length, each in row["lengths"].items():
                    say(f"batch {batch:3}, acceptance {rate:.2f}, length {length}: {shown(each)}")
    publish("drafts-forced", args, [], [], rows=found)
