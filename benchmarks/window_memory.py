"""Memory of window layers: bytes of a sequence, and requests that run at once in the same memory, with groups of window
layers and without.

The requests are the first of a trace that have less than 32,768 tokens, with its lengths and shared prefixes. All wait
from the beginning. The engine is the real one, and a step takes no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from benchmarks.stage import plain_parser
from headrace.config import CacheOptions, SchedulerOptions
from headrace.core.capacity import NO_WINDOWS, WindowGroups, most_blocks
from headrace.core.events import Admitted, Finished, Preempted, Stepped
from headrace.core.knobs import Knobs
from headrace.core.prediction.step_curve import TOKENS_ONLY
from headrace.core.request import FinishReason
from headrace.lab.simulate.runner import SimulatedRequest, SimulatedRunner, StepWork, from_calls
from headrace.lab.workload.traces import read_trace
from headrace.lab.workload.work import Synthesis
from headrace.wiring.engine import make_engine

BLOCK = 16
CHUNK = 2048
LONGEST = 32_768


class Model(NamedTuple):
    """Layers without and with a window of ``window`` tokens, bytes of a token in one without, and memory in GiB.

    ``limited_bytes``: those of a token in a layer with a window (0: as many).
    """

    full: int
    limited: int
    window: int
    layer_bytes: int
    gib: float
    limited_bytes: int = 0

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all layers."""
        return self.full * self.layer_bytes + self.limited * (self.limited_bytes or self.layer_bytes)

    @property
    def group(self) -> int:
        """Layers with a window that share a block."""
        return max(1, self.full * self.layer_bytes // (self.limited_bytes or self.layer_bytes))

    @property
    def group_bytes(self) -> int:
        """Bytes of a token in a block of a group."""
        return max(self.full * self.layer_bytes, self.group * (self.limited_bytes or self.layer_bytes))


MODELS = {
    "gemma-2-9b": Model(21, 21, 4096, 2 * 2 * 8 * 256, 16),
    "gemma-3-4b": Model(5, 29, 1024, 2 * 2 * 4 * 256, 8),
    "gemma-3-27b": Model(10, 52, 1024, 2 * 2 * 16 * 128, 24),
    "gemma-4-e2b": Model(3, 12, 512, 2 * 2 * 512, 4, 2 * 2 * 256),
    "gemma-4-31b": Model(10, 50, 1024, 2 * 2 * 4 * 512, 24, 2 * 2 * 16 * 256),
    "gpt-oss-20b": Model(12, 12, 128, 2 * 2 * 8 * 64, 8),
    "olmo-3-7b": Model(8, 24, 4096, 2 * 2 * 32 * 128, 16),
}
"""Keys and values in 16 bits."""


class Free:
    """A device that takes no time."""

    def seconds(self, work: StepWork) -> float:
        return 1e-6

    def host_seconds(self, work: StepWork) -> float:
        return 0.0


class Found(NamedTuple):
    """Mean requests that ran while others waited, after the first fourth had ended; preemptions; cached share of prompt
    tokens.
    """

    running: float
    preemptions: int
    cached: float


def groups_of(model: Model, chunk: int = CHUNK) -> WindowGroups:
    """The groups of a model."""
    return WindowGroups(-(-model.limited // model.group), model.window, chunk)


def sequence_bytes(model: Model, tokens: int) -> tuple[int, int]:
    """Bytes of a sequence without and with groups, while it decodes."""
    groups = groups_of(model, 1)
    return (
        model.token_bytes * BLOCK * most_blocks(tokens, BLOCK),
        model.group_bytes * BLOCK * most_blocks(tokens, BLOCK, groups),
    )


def run(model: Model, requests: Sequence[SimulatedRequest], grouped: bool) -> Found:
    """All requests through an engine in the model's memory."""
    token_bytes = model.group_bytes if grouped else model.token_bytes
    runner = SimulatedRunner(Free(), {each.request.id: each.answer for each in requests})
    engine = make_engine(
        SchedulerOptions(max_num_seqs=512, max_num_batched_tokens=CHUNK),
        CacheOptions(),
        runner,
        num_blocks=int(model.gib * 2**30) // (BLOCK * token_bytes),
        windows=groups_of(model) if grouped else NO_WINDOWS,
        max_model_len=LONGEST,
        knobs=Knobs(batched_tokens=CHUNK),
        cost=TOKENS_ONLY,
        overlap=0,
    )
    for each in requests:
        engine.submit(replace(each.request, arrived=0.0), 0.0)
    running: list[int] = []
    cached: dict[str, int] = {}
    ended = 0
    now, preemptions = 0.0, 0
    while engine.wake_at(now) is not None:
        now += 1e-3
        for event in engine.step(now):
            if isinstance(event, Stepped) and len(requests) // 4 < ended and event.waiting:
                running.append(event.running)
            elif isinstance(event, Preempted):
                preemptions += 1
            elif isinstance(event, Finished):
                ended += event.reason is FinishReason.STOP
            elif isinstance(event, Admitted):
                cached.setdefault(event.request_id, event.cached_tokens)
    engine.check_consistency()
    assert ended == len(requests), f"{ended} of {len(requests)} requests were computed"
    prompts = sum(len(each.request.tokens) for each in requests)
    return Found(fmean(running or [len(requests)]), preemptions, sum(cached.values()) / prompts)


def main() -> None:
    """Print both tables."""
    parser = plain_parser(__doc__)
    parser.add_argument("traces", nargs="*", type=Path, help="traces whose first requests run")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    given = parser.parse_args()
    for name in given.models:
        for tokens in (2048, 8192, 32_768):
            before, after = (each / 2**20 for each in sequence_bytes(MODELS[name], tokens))
            print(
                f"{name:12} {tokens:>6} tokens: {before:8.0f} MiB, with groups {after:8.0f}, {before / after:.2f} x"
            )
    for trace in given.traces:
        fitting = (each for each in read_trace(trace) if each.prompt_tokens + each.output_tokens < LONGEST)
        calls = islice(fitting, given.requests)
        requests = list(from_calls(calls, Synthesis()))
        for name in given.models:
            plain, grouped = (run(MODELS[name], requests, grouped) for grouped in (False, True))
            print(
                f"{trace.stem:36} {name:12} running {plain.running:6.1f} -> {grouped.running:6.1f}"
                f" ({grouped.running / plain.running:.2f} x), preemptions {plain.preemptions} -> {grouped.preemptions},"
                f" cached {plain.cached:.3f} -> {grouped.cached:.3f}"
            )


if __name__ == "__main__":
    main()
