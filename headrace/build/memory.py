"""The memory of a loaded model: sizes and opens the KV cache, the tiers below it, the runner and its graphs."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NamedTuple

import torch

from headrace.build.draft_models import reads_states
from headrace.build.drafting import ModelDrafts, speculation
from headrace.build.tiers import OpenTiers, open_tiers
from headrace.compute.device import DeviceFacts, DtypeChoice, device_facts
from headrace.compute.drafting.head_drafts import HeadDrafts
from headrace.compute.drafting.head_loading import LoadedHead
from headrace.compute.drafting.loading import Beside, LoadedDraft, StepSizes
from headrace.compute.grammar.matchers import Matchers
from headrace.compute.graphs.plan import Graphs, describe_graphs, plan_graphs
from headrace.compute.kernels import Kernels
from headrace.compute.kv import PagedKV, bytes_per_block
from headrace.compute.memory_clearing import MemoryClearing
from headrace.compute.memory_plan import MemoryPlan, ModelSize, plan_memory
from headrace.compute.model.decoder import Decoder
from headrace.compute.model.largest_step import CudaMeter, largest_step_bytes
from headrace.compute.model.spec import DecoderSpec
from headrace.compute.model.weights import DecoderWeights
from headrace.compute.runner import LocalRunner
from headrace.config import CacheOptions, ConfigError, Options, SchedulerOptions
from headrace.core.capacity import blocks_needed
from headrace.core.knobs import Knobs

logger = logging.getLogger(__name__)


class Computing(NamedTuple):
    """A loaded decoder, and the device and numbers it computes with."""

    spec: DecoderSpec
    max_model_len: int
    device: torch.device
    facts: DeviceFacts
    choice: DtypeChoice
    kv_dtype: torch.dtype
    kernels: Kernels
    weights: DecoderWeights
    decoder: Decoder
    fingerprint: str
    process_bytes: int

    def size(self, block_size: int) -> ModelSize:
        """Its sizes for the memory plan."""
        spec = self.spec
        return ModelSize(
            weight_bytes=self.decoder.nbytes,
            block_bytes=bytes_per_block(spec, block_size, self.kv_dtype),
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            vocab_size=spec.vocab_size,
            itemsize=self.choice.dtype.itemsize,
        )

    def beside(self) -> Beside:
        """What a draft model or head has to fit."""
        computed = self.device, self.choice.dtype, self.kv_dtype, self.kernels
        return Beside(self.spec, self.max_model_len, *computed, self.weights.embedding, self.decoder.head)

    def notes(self) -> tuple[str, str]:
        """Why it computes in this type, and a note on stored weights (empty: none)."""
        return self.choice.reason, _stored_note(self.spec, self.weights)


class Memory(NamedTuple):
    """The memory plan, the tiers below the device, the runner over both, and the draft model."""

    ledger: MemoryPlan
    tiers: OpenTiers | None
    runner: LocalRunner
    drafts: ModelDrafts | None


def open_memory(
    computing: Computing,
    draft: LoadedDraft | LoadedHead | None,
    options: Options,
    knobs: Knobs,
    overlap: int,
    matchers: Matchers,
) -> Memory:
    """Size the KV cache, allocate it, open the lower tiers, put the runner on them, and record its graphs."""
    cache, plans = options.cache, options.scheduler
    graphs = _graphs(options, computing.decoder)
    spec, device, max_model_len = computing.spec, computing.device, computing.max_model_len
    sizes = StepSizes(cache.block_size, plans.max_num_seqs, knobs.batched_tokens)
    step_bytes = _step_bytes(computing, cache, plans, knobs) if device.type == "cuda" else None
    ledger = plan_memory(
        device_facts(device),
        computing.size(cache.block_size),
        cache,
        max_model_len=max_model_len,
        max_num_seqs=plans.max_num_seqs,
        max_num_batched_tokens=knobs.batched_tokens,
        host_free_bytes=device_facts(torch.device("cpu")).free_bytes if device.type == "cuda" else None,
        process_bytes=computing.process_bytes,
        draft=draft.size(sizes) if draft else None,
        step_bytes=step_bytes,
        graph_bytes=graphs.bytes,
    )
    kv = PagedKV(spec, ledger.num_blocks, cache.block_size, computing.kv_dtype, device)
    live = plans.max_num_seqs * blocks_needed(max_model_len, cache.block_size)
    ahead = MemoryClearing(kv, far=live) if device.type == "cpu" else None
    fingerprint, layout = computing.fingerprint, computing.kernels.layout
    tiers, ledger = open_tiers(ledger, cache.kv_offload_path, kv, fingerprint, layout)
    proposer = draft.proposer(ledger.draft_blocks, sizes, logger.warning) if draft else None
    runner = LocalRunner(
        computing.decoder,
        kv,
        vocab_size=spec.vocab_size,
        max_num_seqs=plans.max_num_seqs,
        max_model_len=max_model_len,
        device=device,
        background=overlap > 0 and device.type == "cpu",
        breakable=overlap == 0,
        mover=tiers.mover if tiers else None,
        ahead=ahead,
        matchers=matchers,
        head=proposer if isinstance(proposer, HeadDrafts) else None,
        graphs=graphs.spec,
    )
    weight = draft.nbytes / computing.decoder.nbytes if draft else 0.0
    drafts = ModelDrafts(proposer, weight) if proposer else None
    captured = runner.capture()
    if captured is not None:
        ledger = replace(ledger, graph_bytes=captured.bytes, graphs=describe_graphs(captured))
    return Memory(ledger, tiers, runner, drafts)


def _graphs(options: Options, decoder: Decoder) -> Graphs:
    """The graphs to record, unless the options forbid them. A head reads states that graphs do not return."""
    if options.model.enforce_eager or reads_states(options.scheduler):
        return Graphs(None)
    config = speculation(options.scheduler)
    return plan_graphs(
        decoder, options.scheduler.max_num_seqs, None if config is None else config.num_speculative_tokens
    )


def _step_bytes(computing: Computing, cache: CacheOptions, plans: SchedulerOptions, knobs: Knobs) -> int:
    """The memory of the largest step on a GPU.

    Raises:
        ConfigError: the device has less.
    """
    try:
        return largest_step_bytes(
            computing.decoder,
            CudaMeter(computing.device),
            block_size=cache.block_size,
            kv_dtype=computing.kv_dtype,
            max_model_len=computing.max_model_len,
            max_num_seqs=plans.max_num_seqs,
            max_num_batched_tokens=knobs.batched_tokens,
        )
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"--max-num-batched-tokens {knobs.batched_tokens}, --max-num-seqs {plans.max_num_seqs}: the largest step"
            f" needs more memory than {computing.facts.name} has free: reduce them"
        ) from error


def _stored_note(spec: DecoderSpec, weights: DecoderWeights) -> str:
    if spec.stored is None or weights.quantization:
        return ""
    return f"{spec.stored.name}: weights are stored in fewer bits than are used for computing"
