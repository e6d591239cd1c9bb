"""The graphs of decode steps that a model records, their reserved memory, and their line in the memory plan."""

from __future__ import annotations

from typing import NamedTuple

from headrace.compute.graphs.body import Ending
from headrace.compute.graphs.buffers import CudaRecorder
from headrace.compute.graphs.steps import (
    MOST_LINES,
    MOST_TOKENS,
    Captured,
    GraphSpec,
    few_sizes,
    graph_sizes,
    prompt_sizes,
)
from headrace.compute.model.decoder import ModelDecoder
from headrace.core.capacity import activation_bytes

GRAPHED_KERNELS = frozenset({"triton"})
"""Backends whose decode step uses no host arrays; torch's attention creates some in each step."""

TILE_LINES = 32
"""Query heads times tokens for which attention reads the keys of a row once: an estimate, not measured."""

GRAPH_BYTES = 1 << 20
"""Memory of a recorded graph in addition to its activations: an estimate."""


class Graphs(NamedTuple):
    """The graphs to record (None: none), and the memory to reserve for them in bytes."""

    spec: GraphSpec | None
    bytes: int = 0


def plan_graphs(decoder: ModelDecoder, rows: int, drafts: int | None, tokens: int) -> Graphs:
    """The graphs for steps of at most ``rows`` rows and ``tokens`` tokens; none on a CPU, or with kernels that cannot
    be recorded.

    ``drafts`` is the maximum number of drafts of a row in a step; None: no drafter.
    """
    on_device = decoder.device.type == "cuda" and decoder.kernels.name in GRAPHED_KERNELS
    if not (decoder.graphed and on_device):
        return Graphs(None)
    lines, drafting = min(MOST_LINES, rows * (1 + (drafts or 0))), drafts is not None
    most = max(1, TILE_LINES // (decoder.shape.heads.heads // decoder.shape.heads.kv_heads))
    row_tokens = most if drafts is None else min(most, 1 + drafts)
    spec = GraphSpec(
        CudaRecorder(decoder.device),
        lines,
        drafting,
        decoder.shape.hidden_size,
        decoder.dtype,
        row_tokens,
        min(tokens, MOST_TOKENS),
        single=decoder.states is not None,
    )
    counts = (rows + 1) * decoder.shape.vocab_size * 4
    return Graphs(spec, _graph_bytes(decoder, spec) + counts)


def _graph_bytes(decoder: ModelDecoder, spec: GraphSpec) -> int:
    """Memory to reserve for graphs: that of the largest step, which all graphs share, and the overhead of each."""
    sizes, few = graph_sizes(spec.lines), prompt_sizes(max(spec.tokens, spec.lines))
    graphs = (len(sizes) + len(few_sizes(sizes))) * (2 * len(Ending) if spec.drafts else len(Ending) + 1)
    step = activation_bytes(
        hidden_size=decoder.shape.hidden_size,
        intermediate_size=decoder.shape.intermediate_size,
        vocab_size=decoder.shape.vocab_size,
        itemsize=decoder.dtype.itemsize,
        max_num_batched_tokens=few[-1],
        max_num_seqs=0,  # a graph samples from its logits as they are, without a copy
    )
    step += 2 * sizes[-1] * decoder.shape.vocab_size * 4  # and those that are penalized in float32
    return step + (graphs + len(few)) * GRAPH_BYTES


def describe_graphs(captured: Captured) -> str:
    """What was recorded, as a line of the memory plan."""
    done = (
        f"{captured.graphs}, for up to {captured.lines} tokens per step, recorded in {captured.seconds:.1f} s"
    )
    if not captured.problem:
        return done
    return (
        f"{done}; larger decode steps are launched operation by operation, because recording failed at"
        f" {captured.problem} (lower --gpu-memory-utilization or --max-num-seqs, or use --enforce-eager)"
    )
