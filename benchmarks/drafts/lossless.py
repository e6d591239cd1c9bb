"""Whether speculative decoding changes an output.

- ``requests``: random requests in mixed batches, with each proposer and without drafts. Tokens, ends, usage and
  log-probabilities must be equal, greedy and seeded.
- ``distribution``: tokens sampled at drafted positions, compared with the target's distribution by a chi-square test.
- ``lives``: random histories of the core (cancellations, failures, preemptions, grammars) with a drafter that also
  proposes wrong tokens, and without. Finished shards are kept in the output file, so an interrupted run continues.

The C++ kernels compute a position to the same bits in any batch, so outputs are equal without a tolerance. ``--kernels
torch`` does not, and a near-tie may be decided the other way.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.stage import arguments, publish, say
from headrace.config import options
from headrace.core.events import Verified
from headrace.core.request import Request, SamplingParams
from headrace.wiring.model import Loaded, close, load
from tests.compute.drafting.heads import write_head
from tests.compute.fakes import entry
from tests.compute.sampling.test_sampler import naive_probabilities
from tests.parity.drafted_runs import Answer, Run, drive, liar, random_params
from tests.property.random_runs import check_drafts_change_nothing

TEXTS = Path(__file__).parents[1] / "docs"
DRAFT_MODEL = {"model": "builtin-draft"}
SINGLE: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "prediction": {"method": "prediction"},
    "cached": {"method": "cached"},
    "draft_model": {"method": "draft_model"} | DRAFT_MODEL,
}
FIXED = {"adaptive": False, "num_speculative_tokens": 6}
CONFIGS: dict[str, dict[str, Any] | None] = {
    **{name: each | FIXED for name, each in SINGLE.items()},
    "all, adaptive": {"method": list(SINGLE)} | DRAFT_MODEL,
    "lies": None,
}
"""Configurations of speculative decoding. There is also one with an EAGLE-3 head: of a folder, or random."""
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_p": {"top_p": 0.9},
    "penalties": {"presence_penalty": -1.5, "frequency_penalty": -2.0},
    "top_p and penalties": {"top_p": 0.95, "presence_penalty": -1.5, "frequency_penalty": -2.0},
}
"""Negative penalties: positive ones hardly change a distribution in which a repetition is unlikely."""

TEMPERATURES = (0.7, 1.0, 1.5)
FIRST_SEED = 10**9
QUEUED = 2000
"""Number of requests that are queued together."""

SHARD = 500
"""Number of histories per shard."""


def loaded_model(args: argparse.Namespace, speculation: dict[str, Any] | None, **given: Any) -> Loaded:
    """The model with a configuration of drafts; a small pool and short steps, so that prompts are cut and preempted."""
    return load(
        options(
            {
                "model": args.model,
                "device": args.device,
                "dtype": "float32",
                "kernels": args.kernels,
                "max_model_len": 256,
                "max_num_seqs": args.rows,
                "max_num_batched_tokens": max(args.rows, 48),
                "speculative_config": speculation and json.dumps(speculation),
            }
            | given
        )
    )


# -- requests --------------------------------------------------------------------------------------


class Comparison(NamedTuple):
    """Requests of one proposer whose output differs, with both outputs, and what was drafted and accepted."""

    different: list[str]
    drafted: int
    accepted: int
    logprob_error: float


def random_requests(
    loaded: Loaded, texts: Sequence[list[int]], seed: int, count: int, earlier: Sequence[Request]
) -> list[Request]:
    """Requests on pieces of real text, some of which repeat themselves, and some an ``earlier`` request."""
    rng, made = random.Random(seed), list[Request]()
    (*_, end) = sorted(loaded.tokenizer.eos_token_ids)
    for number in range(count):
        text = rng.choice(texts)
        begin = rng.randrange(max(1, len(text) - 100))
        tokens = tuple(text[begin : begin + rng.randint(3, 90)]) * rng.choice([1, 1, 2])
        params = SamplingParams(**random_params(rng, loaded.shape.vocab_size, end))
        if earlier and rng.random() < 0.4:
            again = rng.choice(earlier)
            tokens, params = again.tokens, again.params
        made.append(
            Request(
                f"s{seed}-{number}",
                tokens,
                params,
                seed=rng.randrange(1 << 40),
                eos_token_ids=loaded.tokenizer.eos_token_ids,
            )
        )
    return made


def edited(tokens: Sequence[int], rng: random.Random, vocab_size: int) -> tuple[int, ...]:
    """A text with a few tokens replaced, left out or added."""
    result: list[int] = []
    for token in tokens:
        chance = rng.random()
        if chance > 0.12:
            result.append(token)
        if 0.06 < chance < 0.16:
            result.append(rng.randrange(vocab_size))
    return tuple(result)


def with_texts(requests: Sequence[Request], plain: Run, vocab_size: int, seed: int) -> list[Request]:
    """The requests with a prediction and a cached answer, which are almost right."""
    rng = random.Random(seed)
    return [
        replace(
            each,
            prediction=edited(plain.answers[each.id].tokens, rng, vocab_size),
            cached_answer=edited(plain.answers[each.id].tokens, rng, vocab_size),
        )
        for each in requests
    ]


def differences(plain: Run, drafted: Run) -> Comparison:
    """Count what differs between two runs of the same requests."""
    different, error = [], 0.0
    for name, answer in plain.answers.items():
        other = drafted.answers[name]
        if _without_numbers(answer) != _without_numbers(other):
            different.append(
                f"{name}: {_without_numbers(answer)} without drafts, {_without_numbers(other)} with them"
            )
            continue
        for first_value, second_value in ((answer.logprobs, other.logprobs), (answer.prompt, other.prompt)):
            for one, two in zip(first_value, second_value, strict=True):
                if math.isfinite(one.logprob):
                    error = max(error, abs(one.logprob - two.logprob))
    verified = [event for event in drafted.events if isinstance(event, Verified)]
    counts = sum(each.drafted for each in verified), sum(each.accepted for each in verified)
    return Comparison(different, *counts, error)


def _without_numbers(answer: Answer) -> tuple[object, ...]:
    ranks = [[(each.token, each.rank) for each in scores] for scores in (answer.logprobs, answer.prompt)]
    return answer.tokens, ranks, answer.end._replace(cached_tokens=0)


def measure_requests(args: argparse.Namespace) -> dict[str, Any]:
    """Compare every proposer with no drafts."""
    plain_model = loaded_model(args, None)
    with TemporaryDirectory() as folder:
        head = {"method": "eagle3", "model": str(args.head or write_head(Path(folder)))} | FIXED
        configs = CONFIGS | {"eagle3": head}
        models = {name: loaded_model(args, config) for name, config in configs.items()}
    encode, vocab_size = plain_model.tokenizer.encode, plain_model.shape.vocab_size
    texts = [encode(path.read_text(encoding="utf-8")) for path in sorted(TEXTS.glob("*.md"))]
    totals = {name: Comparison([], 0, 0, 0.0) for name in models}
    earlier: list[Request] = []
    for seed in range(args.seed, args.seed + -(-args.requests // args.together)):
        requests = random_requests(plain_model, texts, seed, args.together, earlier)
        now = 1e7 * (seed - args.seed)
        # Constraints are compiled now: the time limit of compiling is real, that of steps is not.
        for constraint in filter(None, {request.params.structured_outputs for request in requests}):
            for model in (plain_model, *models.values()):
                model.grammars.check(constraint)
        plain = drive(plain_model.engine, requests, now)
        earlier += requests
        for name, model in models.items():
            if name == "lies":
                drafted_rows = model.engine.scheduler._drafted
                drafted_rows._drafter = liar(plain, seed, vocab_size)
            drafted = drive(model.engine, with_texts(requests, plain, vocab_size, seed), now)
            found, total = differences(plain, drafted), totals[name]
            totals[name] = Comparison(
                total.different + found.different,
                total.drafted + found.drafted,
                total.accepted + found.accepted,
                max(total.logprob_error, found.logprob_error),
            )
        say(
            f"{len(earlier)} requests: {sum(len(each.different) for each in totals.values())} different outputs"
        )
    for name, total in totals.items():
        say(
            f"{name:14} {len(earlier)} requests, {len(total.different)} different, {total.drafted} tokens drafted,"
            f" {total.accepted} accepted, largest difference of a log-probability {total.logprob_error:g}"
        )
    for model in (plain_model, *models.values()):
        close(model)
    return {"requests": len(earlier)} | {name: total._asdict() for name, total in totals.items()}


# -- distribution ----------------------------------------------------------------------------------


def chi_square_p(counts: Sequence[int], expected: Sequence[float]) -> float:
    """The p-value of a chi-square test (Wilson and Hilferty's approximation), cells of small expectation joined."""
    total = sum(counts)
    cells = [(count, p * total) for count, p in zip(counts, expected, strict=True) if p * total >= 8]
    rest = total - sum(count for count, _ in cells), total - sum(mean for _, mean in cells)
    if rest[1] >= 1e-6 * total:
        cells.append(rest)
    freedom = len(cells) - 1
    if freedom < 1:
        return 1.0 if rest[0] == 0 or rest[1] >= 1e-6 * total else 0.0
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(z / math.sqrt(2))


def raw_logits(loaded: Loaded, tokens: tuple[int, ...], now: float) -> list[float]:
    """The target's log-probabilities after ``tokens``, as logits."""
    vocab_size = loaded.shape.vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=vocab_size, ignore_eos=True)
    (score,) = drive(loaded.engine, [Request("raw", tokens, params)], now).answers["raw"].logprobs
    logits = [-math.inf] * vocab_size
    for token, logprob in score.top:
        logits[token] = logprob
    return logits


def measure_distribution(args: argparse.Namespace) -> dict[str, Any]:
    """Sample with the likeliest text as prediction, and count the tokens at its second and third position."""
    speculation = {"method": "prediction", "adaptive": False, "num_speculative_tokens": 4}
    loaded = loaded_model(args, speculation, max_num_batched_tokens=1024)
    prompt = tuple(loaded.tokenizer.encode(args.prompt))
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    likeliest = drive(loaded.engine, [Request("greedy", prompt, params)]).answers["greedy"].tokens
    raw = [raw_logits(loaded, prompt + likeliest[:count], 100.0 * (1 + count)) for count in (1, 2)]
    found: list[dict[str, Any]] = []
    now = 1e6
    for temperature in TEMPERATURES:
        for name, shape in SHAPES.items():
            params = SamplingParams(temperature=temperature, max_tokens=3, ignore_eos=True, **shape)
            drawn: Counter[tuple[int, ...]] = Counter()
            for first in range(0, args.draws, QUEUED):
                seeds = range(FIRST_SEED + first, FIRST_SEED + min(args.draws, first + QUEUED))
                requests = [
                    Request(f"d{seed}", prompt, params, seed=seed, prediction=likeliest) for seed in seeds
                ]
                answers = drive(loaded.engine, requests, now).answers.values()
                drawn.update(answer.tokens for answer in answers)
                now += 1e5
            for position, logits in enumerate(raw, 1):
                before = likeliest[:position]
                counts = [0] * loaded.shape.vocab_size
                for tokens, count in drawn.items():
                    if tokens[:position] == before:
                        counts[tokens[position]] += count
                shown = entry(0, prompt, temperature=temperature, ignore_eos=True, **shape)
                expected = naive_probabilities(logits, [*prompt, *before], shown)
                p = chi_square_p(counts, expected) if sum(counts) else math.nan
                found.append(
                    {
                        "temperature": temperature,
                        "shape": name,
                        "position": position,
                        "draws": sum(counts),
                        "accepted": counts[likeliest[position]],
                        "p": p,
                    }
                )
                say(
                    f"temperature {temperature}, {name:20} position {position}: {sum(counts):7} draws,"
                    f" {counts[likeliest[position]]:7} drafts accepted, p {p:.3f}"
                )
    close(loaded)
    least = min(each["p"] for each in found)
    say(f"{len(found)} tests, smallest p {least:.4f}; by chance {1 / (1 + len(found)):.4f} is expected")
    return {"tests": found}


# -- lives -----------------------------------------------------------------------------------------


def live(shard: int) -> dict[str, Any]:
    """The histories of a shard, with drafts and without."""
    accepted, wrong = 0, []
    for seed in range(shard * SHARD, (shard + 1) * SHARD):
        try:
            accepted += check_drafts_change_nothing(seed)
        except Exception as error:  # whatever it is, the seed shows it again
            wrong.append(f"seed {seed}: {type(error).__name__}: {error}")
    return {"shard": shard, "accepted": accepted, "wrong": wrong}


def measure_lives(args: argparse.Namespace) -> dict[str, Any]:
    """Run the shards that the file of finished ones does not have yet."""
    path: Path = args.shards
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {each["shard"]: each for each in _lines(path)}
    left = [shard for shard in range(-(-args.lives // SHARD)) if shard not in done]
    with path.open("a", encoding="utf-8") as file, ProcessPoolExecutor(args.processes) as pool:
        for each in pool.map(live, left):
            done[each["shard"]] = each
            file.write(json.dumps(each) + "\n")
            file.flush()
            wrong = sum(len(every["wrong"]) for every in done.values())
            say(f"{len(done) * SHARD} histories, {wrong} with another output")
    wrong_ones = [line for each in done.values() for line in each["wrong"]]
    say(*wrong_ones[:10], sep="\n")
    accepted = sum(each["accepted"] for each in done.values())
    return {"histories": len(done) * SHARD, "accepted": accepted, "wrong": wrong_ones}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


MEASURES = {"requests": measure_requests, "distribution": measure_distribution, "lives": measure_lives}


def main() -> None:
    """Measure, print, write."""
    parser = arguments(__doc__ or "")
    parser.add_argument("what", choices=list(MEASURES))
    parser.add_argument("--kernels", default="auto", help="auto, cpp or torch")
    parser.add_argument("--rows", type=int, default=16, help="requests that run together")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--together", type=int, default=250, help="requests of one comparison")
    parser.add_argument(
        "--head", type=Path, help="folder of an EAGLE-3 head for the model (default: a random one)"
    )
    parser.add_argument("--draws", type=int, default=20_000, help="samples of each setting")
    parser.add_argument("--prompt", default="Once upon a time there was a little")
    parser.add_argument("--lives", type=int, default=100_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--shards", type=Path, default=Path("bench-results") / "drafted_lives.jsonl")
    args = parser.parse_args()
    found = MEASURES[args.what](args)
    publish(f"drafts-lossless-{args.what}", args, [], [], **found)
