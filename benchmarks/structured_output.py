"""Overhead of structured output: masks, throughput with a schema on every row, and the TTFT of a new schema; and what
forced tokens gain.

Everything runs in this process. Rounds alternate; ratios are medians of the rounds' ratios. A schema that no answer
comes to the end of keeps both sides at the same number of tokens.
"""

from __future__ import annotations

import json
import random
import time
from contextlib import nullcontext
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from benchmarks.stage import arguments, say
from headrace import LLM, SamplingParams
from headrace.compute.grammar.compiler import Compiler
from headrace.core.constraint import Constraint, as_constraint, json_constraint
from headrace.core.drafting.forced import ForcedTokenDrafter
from headrace.core.events import Event, Stepped
from headrace.lab.bench.stats import percentile

Schema = dict[str, Any]


def records() -> Schema:
    """Objects of the kinds that people ask for, in an array that does not end."""
    fields: Schema = {
        "name": {"type": "string", "maxLength": 60},
        "email": {"type": "string", "pattern": "^[a-z0-9.]{1,20}@[a-z0-9]{1,12}\\.(com|org)$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["person", "company", "robot"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 16}, "maxItems": 5},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    }
    each = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return {"type": "array", "items": each, "minItems": 10_000}


def wide(seed: int, size: int = 5_000) -> Schema:
    """A schema of about ``size`` bytes that has not been compiled before."""
    draw = random.Random(seed)
    fields: Schema = {}
    while len(json.dumps(fields)) < size:
        name = f"field_{seed}_{len(fields)}"
        fields[name] = draw.choice(
            [
                {"type": "string", "maxLength": draw.randint(5, 80)},
                {"type": "integer", "minimum": 0, "maximum": draw.randint(10, 10_000)},
                {"enum": [f"{name}-{i}" for i in range(draw.randint(2, 8))]},
                {"type": "array", "items": {"type": "number"}, "maxItems": draw.randint(1, 9)},
                {"anyOf": [{"type": "string", "pattern": "^[A-Z]{2,4}-[0-9]+$"}, {"type": "null"}]},
            ]
        )
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def mask_times(compiler: Compiler, constraint: Constraint, tokens: int, seed: int) -> list[float]:
    """Seconds of each token's mask, along a random walk through what is allowed."""
    draw = np.random.default_rng(seed)
    matcher = compiler.matcher(constraint)
    seconds = []
    for _ in range(tokens):
        began = time.perf_counter()
        mask = matcher.compute_bitmask()
        seconds.append(time.perf_counter() - began)
        bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
        (allowed,) = np.nonzero(bits[: compiler.vocab_size])
        token = int(draw.choice(allowed))
        if token in compiler.ends or not matcher.consume_token(token):
            break
    return seconds


def throughput(llm: LLM, params: SamplingParams, rows: int, base: int) -> float:
    """Output tokens per second of ``rows`` prompts that run together."""
    prompts = [[(base + row * 7 + i) % 1000 + 10 for i in range(16)] for row in range(rows)]
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, progress=False)
    seconds = time.perf_counter() - began
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


def ttft(llm: LLM, constraint: Constraint | None, number: int) -> float:
    """Seconds to the first token of one short prompt, the compilation of its schema included."""
    params = SamplingParams(max_tokens=1, temperature=1.0, structured_outputs=constraint)
    (output,) = llm.generate([[number % 1000 + 10] * 8], params, progress=False)
    return output.metrics.first_token - output.metrics.arrived


def ticket() -> Schema:
    """An answer of a fixed shape, as extraction asks for it: names of fields are most of it."""
    fields: Schema = {
        "customer_identifier": {"type": "integer", "minimum": 1000, "maximum": 9999},
        "requested_department": {"enum": ["billing", "technical_support", "sales"]},
        "is_existing_customer": {"type": "boolean"},
        "estimated_priority": {"enum": ["low", "normal", "urgent"]},
        "contact": {
            "type": "object",
            "properties": {
                "preferred_channel": {"enum": ["email", "telephone"]},
                "language": {"enum": ["en", "fr"]},
            },
            "required": ["preferred_channel", "language"],
            "additionalProperties": False,
        },
    }
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


class Counted(NamedTuple):
    """Steps and seconds of a batch, and its answers."""

    steps: int
    seconds: float
    answers: list[tuple[int, ...]]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.answers))


def counted(llm: LLM, params: SamplingParams, rows: int, base: int, forced: bool) -> Counted:
    """Answer ``rows`` prompts that run together, with drafts of forced tokens or without."""
    prompts = [[(base + row * 7 + i) % 1000 + 10 for i in range(16)] for row in range(rows)]
    engine, steps = llm.loaded.engine, 0
    step = engine.step

    def watched(now: float) -> list[Event]:
        nonlocal steps
        events = step(now)
        steps += sum(isinstance(event, Stepped) for event in events)
        return events

    with (
        patch.object(engine, "step", watched),
        nullcontext() if forced else patch.object(ForcedTokenDrafter, "idle", True),
    ):
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, progress=False)
        seconds = time.perf_counter() - began
    return Counted(steps, seconds, [tuple(output.outputs[0].token_ids) for output in outputs])


def show_forced(llm: LLM, rows: int, rounds: int, output_len: int) -> None:
    """Print what drafts of forced tokens gain on answers of a fixed shape, and what they cost on others."""
    loads = [
        ("fixed shape, no whitespace", {"json": ticket(), "whitespace_pattern": ""}),
        ("fixed shape", {"json": ticket()}),
        ("text in a string", {"json": {"type": "string", "minLength": 100_000}}),
    ]
    for name, asked in loads:
        for count in (1, rows):
            params = SamplingParams(
                max_tokens=output_len, temperature=1.0, seed=7, structured_outputs=as_constraint(asked)
            )
            pairs = []
            for number in range(rounds + 1):
                order = (True, False) if number % 2 else (False, True)
                runs = {forced: counted(llm, params, count, number * 1009, forced) for forced in order}
                if number:  # the first round warms up
                    pairs.append((runs[True], runs[False]))
            same = sum(a.answers == b.answers for a, b in pairs)
            # The prompts take a step, which draws the first tokens.
            per_step = [
                median((each.tokens - count) / max(1, each.steps - 1) / count for each in runs)
                for runs in zip(*pairs, strict=True)
            ]
            speed = median(a.tokens / a.seconds * b.seconds / b.tokens for a, b in pairs)
            say(
                f"forced       {name}, {count} rows: {per_step[0]:.2f} a step and row, {per_step[1]:.2f} without, "
                f"speed {speed:.3f} of without; same answers in {same} of {len(pairs)} rounds"
            )


def show_masks(compiler: Compiler, seed: int) -> None:
    """Print the time of masks by schema."""
    for name, schema in (("records", records()), ("5 kB", wide(seed)), ("any object", {"type": "object"})):
        constraint = json_constraint(schema)
        compiler.check(constraint)
        walks = [mask_times(compiler, constraint, 400, seed + walk) for walk in range(5)]
        times = [each for walk in walks for each in walk]
        say(
            f"mask         {name}: p50 {1e6 * percentile(times, 50):.0f} us, p99 {1e6 * percentile(times, 99):.0f} us"
        )


def main() -> None:
    """Measure, print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--overlap", type=int, default=None)
    args = parser.parse_args()
    options = {"max_num_seqs": args.rows, "load_format": args.load_format, "max_model_len": 1024}
    llm = LLM(args.model, **options, **({} if args.overlap is None else {"overlap": args.overlap}))
    show_masks(llm.loaded.grammars, args.seed)
    constrained = SamplingParams(
        max_tokens=args.output_len, temperature=1.0, structured_outputs=json_constraint(records())
    )
    free = SamplingParams(max_tokens=args.output_len, temperature=1.0, ignore_eos=True)
    ratios = []
    for number in range(args.rounds + 1):
        order = [("free", free), ("schema", constrained)][:: 1 if number % 2 else -1]
        speed = {name: throughput(llm, params, args.rows, number * 1009) for name, params in order}
        if number:  # the first round warms up
            ratios.append(speed["schema"] / speed["free"])
            say(
                f"round        free {speed['free']:.0f} tokens/s, schema {speed['schema']:.0f}: {ratios[-1]:.3f}"
            )
    say(f"throughput   {median(ratios):.3f} of free text, {args.rows} rows")
    more = []
    for number in range(20):
        without = ttft(llm, None, number)
        more.append(ttft(llm, json_constraint(wide(1000 + number)), number) - without)
    say(f"TTFT         a new 5 kB schema adds {1e3 * median(more):.1f} ms, {1e3 * max(more):.1f} ms at most")
    show_forced(llm, args.rows, args.rounds, args.output_len)
    llm.close()


if __name__ == "__main__":
    main()
