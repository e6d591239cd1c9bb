"""Figures on a simulated H200 with Llama-3.1-8B's shape: the engine's own scheduler, caches and drafting decisions.

Only the time of a step is predicted, from the device's data sheet (`headrace.lab.plan.roofline`). The figures are the
same on every machine, and a second run gives the same bytes. Each part returns the values of its claims and the rows of
its tables; the record has their words.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.chunked_prefill import gaps_during
from benchmarks.headline.record import Found
from headrace.cli.machines import with_speculation
from headrace.config import Options, options
from headrace.core.events import Event, Stepped
from headrace.lab.bench.engine import KvWaste
from headrace.lab.bench.report import measure
from headrace.lab.bench.static_batching import bound
from headrace.lab.bench.stats import Summary, percentile
from headrace.lab.forced_acceptance import Speculation
from headrace.lab.plan.roofline import KV_BYTES, SHAPES, WEIGHTS, Load, Replica, decoding, device
from headrace.lab.simulate.runner import SimulatedRequest, from_calls, from_work
from headrace.lab.simulate.tally import outcome
from headrace.lab.workload.dataset import high_variance, log_normal_lengths, long_among_decoders
from headrace.lab.workload.work import Call, Span, Synthesis, Work
from headrace.wiring.evaluator import simulated_evaluator
from headrace.wiring.simulation import make_fleet, roofline_machine

ROOT = Path(__file__).resolve().parents[2]
MODEL, DEVICE = "llama-3.1-8b", "H200"
PROMPT = 24
"""Prompt tokens of the requests whose outputs vary."""

MEMORY_SLOTS = 64
"""Requests that the memory of the comparison holds if each reserves the longest."""

BATCHES = (1, 8, 16, 32, 64, 128, 256, 512)
MOST_SLOTS = 1024
CONTEXT = 1024
"""Context of the decode steps whose time is shown by batch."""


class Size(NamedTuple):
    """How many requests the simulations have."""

    requests: int
    sizes: tuple[int, ...]
    drafted: int


FULL = Size(2000, (8, 16, 32, 64, 128, 256, 512, 1024), 64)
QUICK = Size(200, (8, 64, 128), 4)


class Reserved:
    """A `core.ports.Watcher`: the memory that the same requests would reserve at ``longest`` tokens each."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._last: Stepped | None = None
        self._since = self._reserved = self._filled = self._running = self._seconds = 0.0
        self.most = 0

    def fold(self, event: Event, now: float) -> None:
        if type(event) is not Stepped:
            return
        if self._last is not None:
            spent = now - self._since
            self._reserved += self._last.running * self._longest * spent
            self._filled += self._last.slots_filled * spent
            self._running += self._last.running * spent
            self._seconds += spent
        self._last, self._since = event, now
        self.most = max(self.most, event.running)

    @property
    def waste(self) -> float:
        """Share of reserved slots without a token."""
        return 1.0 - self._filled / self._reserved

    @property
    def running(self) -> float:
        """Requests that ran at once, on average over time."""
        return self._running / self._seconds


class Simulated(NamedTuple):
    """The result of one simulation."""

    summary: Summary
    facts: Mapping[str, Any]
    waste: float
    reserved: Reserved
    rows: Sequence[Mapping[str, Any]]
    device_seconds: float


def replica(weights: str = "bfloat16", kv: str = "bfloat16") -> Replica:
    """The simulated model on its device."""
    return Replica(SHAPES[MODEL], device(DEVICE), 1, WEIGHTS[weights]._replace(kv_bytes=KV_BYTES[kv]))


def simulate(
    asked: Iterable[SimulatedRequest],
    *,
    on: Replica | None = None,
    longest: int = 0,
    speculation: Speculation | None = None,
    **given: Any,
) -> Simulated:
    """Run requests with these options, the device's own default of slots among them."""
    found: Options = options({"max_num_seqs": MOST_SLOTS} | given)
    plans = with_speculation(found.scheduler, speculation)
    machine = roofline_machine(on or replica(), found.cache, plans)
    fleet = make_fleet(plans, found.cache, machine, with_rows=True, speculation=speculation)
    waste, reserved = KvWaste(), Reserved(longest)
    fleet.replicas[0].watch(waste)
    fleet.replicas[0].watch(reserved)
    fleet.run(asked)
    busy = [each.runner.busy_seconds for each in fleet.replicas]
    result = outcome(fleet.tally, {}, busy)
    return Simulated(result.summary, result.facts, waste.share, reserved, fleet.tally.rows, sum(busy))


def rate(work: Sequence[Work], **given: Any) -> float:
    """Output tokens per second."""
    return simulate(from_work(work), **given).summary.output_tokens_per_second


# -- batching --------------------------------------------------------------------------------------------


def batching(size: Size) -> Found:
    """Continuous over static and padded batches of every size."""
    work = high_variance(size.requests, PROMPT)
    lengths, model = [each.max_tokens for each in work], replica()
    mean = PROMPT + sum(lengths) / len(lengths)

    def cost(rows: int) -> float:
        return model.step_seconds(decoding(rows, mean))

    best = rate(work)
    rows = []
    for slots in size.sizes:
        static = rate(work, scheduling_policy="static", max_num_seqs=slots)
        padded = sum(lengths) / bound(lengths, slots, cost).padded
        rows.append((slots, padded, static, rate(work, max_num_seqs=slots), _padding(lengths, slots)))
    fastest_padded, fastest = (max(row[at] for row in rows) for at in (1, 2))
    same = max(row[3] / row[2] for row in rows)
    run = simulate(from_work(work))
    needed = sum(PROMPT + each - 1 for each in lengths) - run.summary.cached_tokens
    wasted = 1.0 - needed / run.facts["computed_tokens"]
    values = (same, best / fastest_padded, best / fastest, 100.0 * wasted)
    return Found(values, {"simulated-batching": rows})


def _padding(lengths: Sequence[int], slots: int) -> float:
    """Percent of the decode rows of padded batches that are of outputs that have ended."""
    groups = [lengths[at : at + slots] for at in range(0, len(lengths), slots)]
    return 100.0 * (1.0 - sum(lengths) / sum(max(each) * len(each) for each in groups))


def memory(size: Size) -> Found:
    """Paged blocks beside reservation of the longest request, in the same memory."""
    work = log_normal_lengths(size.requests, 160, 200)
    longest = max(len(each.prompt) + each.max_tokens for each in work)
    token_bytes = replica().kv_bytes_per_token
    room = MEMORY_SLOTS * longest * token_bytes
    paged = simulate(from_work(work), longest=longest, kv_cache_memory_bytes=room)
    fixed = simulate(from_work(work), longest=longest, kv_cache_memory_bytes=room, max_num_seqs=MEMORY_SLOTS)
    runs = (("reserved", fixed, fixed.reserved.waste), ("paged", paged, paged.waste))
    rows = [
        (name, run.reserved.running, run.reserved.most, 100.0 * waste, run.summary.output_tokens_per_second)
        for name, run, waste in runs
    ]
    values = (
        100.0 * fixed.reserved.waste,
        100.0 * paged.waste,
        paged.reserved.running / fixed.reserved.running,
    )
    contexts = [_context(tokens) for tokens in (1024, 4096, 16_384, 32_768, 131_072)]
    return Found(values, {"simulated-memory": rows, "kv-growth": contexts})


def _context(tokens: int) -> tuple[int, float, float, int, float]:
    model = replica()
    blocks = model.num_blocks(16, 8192, 64)
    held = tokens * model.kv_bytes_per_token
    step = decoding(8, tokens)
    shared = 8 * held / model.weight_bytes_read(step)
    return (
        tokens,
        held / 2**30,
        shared,
        model.sequences_that_fit(tokens, blocks, 16),
        1e3 * model.step_seconds(step),
    )


# -- prompts ---------------------------------------------------------------------------------------------


def prefixes(size: Size) -> Found:
    """TTFT and computed prompt tokens under a shared system prompt."""
    rows = []
    for system in (1000, 4000, 16_000):
        calls = list(_chats(size.requests // 10, system, rate=2.0))
        run = {
            on: simulate(from_calls(calls, Synthesis(seed=0)), enable_prefix_caching=on)
            for on in (False, True)
        }
        cold, warm = (run[on].summary.ttft.p50 for on in (False, True))
        saved = run[True].facts["cache_hit_percent"]
        seconds = 100.0 * (1.0 - run[True].device_seconds / run[False].device_seconds)
        rows.append((system, 1e3 * cold, 1e3 * warm, 100.0 * (1.0 - warm / cold), saved, seconds))
    return Found((rows[1][3], rows[0][3], rows[0][4]), {"simulated-prefix": rows})


def _chats(count: int, system: int, rate: float, repeated: float = 0.0, seed: int = 0) -> Iterator[Call]:
    """Questions under a system prompt; a share of ``repeated`` are asked again, word for word."""
    rng = random.Random(seed)
    known: list[Call] = []
    now = 0.0
    for number in range(count):
        now += rng.expovariate(rate) if math.isfinite(rate) else 0.0
        if known and rng.random() < repeated:
            yield rng.choice(known)._replace(arrival=now)
            continue
        asked = max(8, min(1600, round(rng.lognormvariate(math.log(200), 0.8))))
        answered = max(4, min(1200, round(rng.lognormvariate(math.log(150), 0.8))))
        content = (Span(0, 0, system), Span(number + 1, 0, asked))
        known.append(Call(now, system + asked, answered, content=content))
        yield known[-1]


def chunks(size: Size) -> Found:
    """A prompt of 10,000 tokens beside 32 streams, and what chunks cost in throughput."""
    rows = []
    for chunk in (512, 1024, 2048, 4096, 0):
        given = {
            "mixed_prefill_ratio": 0.0,
            "max_step_seconds": 0.0,
            "max_num_batched_tokens": chunk or 16_384,
        }
        if not chunk:
            given["enable_chunked_prefill"] = False
            given["max_model_len"] = 16_000
        rows.append((f"{chunk:,} tokens" if chunk else "whole prompts", *_long_prompt(size, given)))
    rows.append(("default (ratio 0.7)", *_long_prompt(size, {})))
    whole = rows[4][4]
    shown = [(*row[:4], row[4], 100.0 * row[4] / whole) for row in rows]
    return Found((), {"simulated-chunks": shown})


def _long_prompt(size: Size, given: Mapping[str, Any]) -> tuple[float, float, float, float]:
    made = options({"max_num_seqs": 64} | dict(given))
    target = simulated_evaluator(made, replica(), made.model.max_model_len).target(made.scheduler, None)
    work = long_among_decoders(32, 400, 10_000, arrival=1.0)
    run = measure(target, work)
    first = run.records[-1].token_seconds[0]
    gaps = gaps_during(run, 1.0, first)
    rng = random.Random(0)
    prompts = [rng.randint(2000, 10_000) for _ in range(max(32, size.requests // 10))]
    load = [
        Work(f"w{i}", tuple(rng.choices(range(10, 500), k=tokens)), rng.randint(50, 250), ignore_eos=True)
        for i, tokens in enumerate(prompts)
    ]
    saturated = measure(target, load).summary.total_tokens_per_second
    return 1e3 * max(gaps), 1e3 * percentile(gaps, 99), 1e3 * (first - 1.0), saturated


# -- steps -----------------------------------------------------------------------------------------------


def steps(size: Size) -> Found:
    """Time, MFU and speed of quantized weights by batch."""
    plain, rows, quantized = replica(), [], []
    one = plain.step_seconds(decoding(1, CONTEXT))
    real = measured_steps()
    for batch in BATCHES:
        load = decoding(batch, CONTEXT)
        seconds = plain.step_seconds(load)
        step = real.get(batch)
        share = None if step is None else 100.0 * plain.flops(load) / (step * plain.device.bf16_flops)
        shown = None if step is None else 1e3 * step
        rows.append(
            (batch, 1e3 * seconds, seconds / one, batch / seconds, 100.0 * plain.mfu(load), shown, share)
        )
        quantized.append(
            (batch, *(seconds / replica(weights).step_seconds(load) for weights in ("int8", "int4")))
        )
    served = simulate(from_work(log_normal_lengths(size.requests, 800, 150)))
    load = _served(served)
    mfu = 100.0 * plain.flops(load) / (served.device_seconds * plain.device.bf16_flops)
    values = (rows[BATCHES.index(32)][2], mfu, quantized[0][1], quantized[0][2])
    crossing = [(context, _crossover(context)) for context in (0, 128, 256, 512)]
    return Found(
        values,
        {"simulated-steps": rows, "simulated-crossover": crossing, "simulated-quantized": quantized},
    )


def measured_steps() -> dict[int, float]:
    """Seconds of the decode steps that were measured on an H200, by batch."""
    results = json.loads((ROOT / "docs" / "data" / "results.json").read_text(encoding="utf-8"))
    [found] = [
        each for section in results["sections"] for each in section["tables"] if each["id"] == "h200-steps"
    ]
    return {batch: step / 1e3 for model, batch, _, step, _ in found["rows"] if model.lower() == MODEL}


def _served(run: Simulated) -> Load:
    """All work of a run as one load."""
    prompts = sum(row["prompt_tokens"] - row["cached_tokens"] for row in run.rows)
    outputs = sum(row["output_tokens"] for row in run.rows)
    contexts = sum(
        row["prompt_tokens"] ** 2 / 2
        + row["output_tokens"] * (row["prompt_tokens"] + row["output_tokens"] / 2)
        for row in run.rows
    )
    return Load(outputs, prompts, contexts, contexts, outputs)


def _crossover(context: int) -> int | None:
    model = replica()
    for batch in range(1, 2049):
        load = decoding(batch, context)
        read = model.weight_bytes_read(load) + load.read_tokens * model.kv_bytes_per_token
        computed = model.step_seconds(load) - model.device.step_overhead_seconds
        if computed > read / model.device.reached_bandwidth * (1 + 1e-9):
            return batch
    return None


def drafts(size: Size) -> Found:
    """Speed with drafts by batch: looked up at no cost, and by a draft model that takes a tenth of a step."""
    rows: list[tuple[float, ...]] = []
    kinds = (Speculation((0.5,)), Speculation((0.8,)), Speculation((0.8,), 0.1))
    for batch in (1, 4, 16, 64, 256):
        work = log_normal_lengths(batch * 2, 200, 200, sigma=0.0, seed=batch)[: max(batch, size.drafted)]
        plain = simulate(from_work(work), max_num_seqs=batch)
        speeds = [simulate(from_work(work), max_num_seqs=batch, speculation=kind) for kind in kinds]
        base = plain.summary.output_tokens_per_second
        last = speeds[1].facts
        rows.append(
            (
                batch,
                *(each.summary.output_tokens_per_second / base for each in speeds),
                last["drafted_tokens"] / max(1, last["computed_tokens"]) * 100.0,
            )
        )
    return Found((rows[0][2], rows[0][3]), {"simulated-drafts": rows})


# -- everything ------------------------------------------------------------------------------------------


def layers(size: Size) -> Found:
    """One layer after the other, each added to those before it: device time and rate of the same chats."""
    calls = list(_chats(size.requests, 1000, math.inf, repeated=0.3))
    first = list({call.content: call for call in calls}.values())
    bare = {"enable_prefix_caching": False}
    int8 = replica("int8", "int8")
    stages: list[tuple[str, Sequence[Call], dict[str, Any]]] = [
        ("one request at a time", calls[: size.requests // 10], bare | {"max_num_seqs": 1}),
        ("static batches of 32", calls, bare | {"max_num_seqs": 32, "scheduling_policy": "static"}),
        ("continuous batching, 32 slots", calls, bare | {"max_num_seqs": 32}),
        ("slots as memory allows", calls, bare),
        ("prefix sharing", calls, {}),
        ("exact response cache", first, {}),
        ("weights and KV in 8 bits", first, {"on": int8}),
        ("drafts, right with probability 0.8", first, {"on": int8, "speculation": Speculation((0.8,))}),
    ]
    rows: list[tuple[str, float, float, float]] = []
    for name, asked, given in stages:
        spent = simulate(from_calls(asked, Synthesis(seed=0)), **given).device_seconds
        spent /= len(asked if asked is not first else calls)
        before = rows[-1][1] if rows else 1e3 * spent
        rows.append(
            (name, 1e3 * spent, before / (1e3 * spent), (rows[0][1] if rows else 1e3 * spent) / (1e3 * spent))
        )
    return Found((rows[-1][3],), {"simulated-layers": rows})


PARTS = (batching, memory, prefixes, chunks, steps, drafts, layers)
