"""Builds a simulated fleet from its options: the engine of `wiring.engine` over a runner in virtual time.

It does not import torch, unless a model's shape is read from its ``config.json``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.config import CacheOptions, ConfigError, SchedulerOptions
from headrace.core.capacity import blocks_needed
from headrace.core.drafting.proposal import DraftRow
from headrace.core.engine import Engine
from headrace.core.prediction.step_curve import StepCost
from headrace.core.scheduler.routing import LeastLoaded, PrefixAffinity, RoundRobin, RoutingPolicy
from headrace.core.tenancy.gate import Limits
from headrace.lab.calibration import BadCalibration, Calibrated, Calibration
from headrace.lab.forced_acceptance import ForcedAcceptance, Speculation
from headrace.lab.plan.roofline import SHAPES, LayerSums, ModelShape, Replica, WindowLayers
from headrace.lab.simulate.fleet import (
    Fleet,
    Handover,
    Publisher,
    SimulatedPeers,
    SimulatedReplica,
    Steering,
    Wire,
)
from headrace.lab.simulate.runner import Device, Front, Roofline, SimulatedRunner, StepWork
from headrace.lab.simulate.tally import Tally
from headrace.tuning.class_shares import SimulatedShares
from headrace.wiring.drafting import make_simulated_drafter
from headrace.wiring.engine import (
    TierSizes,
    check_checkpoints,
    check_policies,
    make_engine,
    make_knobs,
    resolve_overlap,
    step_cost,
)
from headrace.wiring.tenants import check_moves, read_tenants

if TYPE_CHECKING:
    from headrace.compute.model import shape as computed

ROUTINGS: Mapping[str, Callable[[], RoutingPolicy]] = {
    "least-loaded": LeastLoaded,
    "round-robin": RoundRobin,
    "prefix-affinity": PrefixAffinity,
}

WIRE = Wire(latency=6e-3, bytes_per_second=25e9)
"""The latency is measured: what NVIDIA Dynamo's prefill and decode workers add to the TTFT of a toy engine on one
machine. The bandwidth is estimated: half of a 400 Gb/s network card for each replica."""

LONGEST_DRAFT = 16
"""Maximum tokens of a draft, unless ``--speculative-config`` sets another."""

LONGEST = 131_072
"""Maximum context length, if the model's own is not known and the memory holds more."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware of one simulated replica. ``kind`` (``cpu`` or ``cuda``) selects the engine's defaults.

    ``state_cells`` counts the checkpoints of recurrent states; None: the model has no such states.
    """

    name: str
    kind: str
    device: Device
    kv_tokens: int
    max_model_len: int
    cost: StepCost
    front: Front
    block_bytes: int = 0
    host_bytes_per_second: float = 0.0
    state_cells: int | None = None


def roofline_machine(
    replica: Replica,
    cache: CacheOptions,
    plans: SchedulerOptions,
    max_model_len: int | None = None,
) -> Machine:
    """A model on devices with known data sheets.

    Raises:
        ConfigError: the weights leave no memory for one sequence, or an option asks for states that there are not.
    """
    check_checkpoints(cache, replica.shape.name, stateful=bool(replica.shape.state_bytes))
    kind = "cpu" if replica.device.name == "cpu" else "cuda"
    batched = make_knobs(plans, kind, max_model_len or LONGEST).batched_tokens
    block_bytes = cache.block_size * replica.kv_bytes_per_token
    states = cache.state_cache_bytes if cache.enable_prefix_caching else 0
    budget = cache.kv_cache_memory_bytes
    if budget is None:
        budget = replica.kv_budget(batched, plans.max_num_seqs, cache.gpu_memory_utilization)
        budget = max(0, budget - (states or 0) * bool(replica.shape.state_bytes))
    elif budget < block_bytes:
        raise ConfigError(
            f"--kv-cache-memory-bytes {budget}: "
            f"one block of {cache.block_size} tokens needs {block_bytes:,} bytes"
        )
    needed = blocks_needed(max_model_len or 1, cache.block_size) * block_bytes
    num_blocks, cells = replica.room(budget, cache.block_size, needed, states)
    name = f"{replica.shape.name} on {replica.degree} x {replica.device.name}"
    return Machine(
        name,
        kind,
        Roofline(replica, cache.block_size),
        num_blocks * cache.block_size,
        _fitting(name, max_model_len, num_blocks * cache.block_size, LONGEST),
        shape_cost(replica.shape, kind),
        Front(),
        block_bytes,
        replica.device.host_bandwidth * replica.degree,
        cells if replica.shape.state_bytes else None,
    )


def calibrated_machine(
    calibration: Calibration, cache: CacheOptions, max_model_len: int | None = None, front: bool = True
) -> Machine:
    """The machine of a calibration; without ``front``, only its engine.

    Raises:
        ConfigError: options contradict the calibration.
    """
    if cache.kv_cache_memory_bytes is not None:
        raise ConfigError(
            "--kv-cache-memory-bytes cannot be set with --calibration, which has the size of the KV cache"
        )
    kv_tokens = calibration.kv_tokens // cache.block_size * cache.block_size
    if not kv_tokens:
        raise ConfigError(
            f"--block-size {cache.block_size}: {calibration.machine} "
            f"has a KV cache of {calibration.kv_tokens} tokens"
        )
    if not front:
        calibration = replace(
            calibration,
            front_request=0.0,
            front_token=0.0,
            front_step=0.0,
            front_event=0.0,
            front_stall=0.0,
            front_wake=0.0,
            front_busy=0.0,
        )
    name = f"{calibration.model} on {calibration.machine}"
    state_bytes, states = calibration.state_bytes, cache.state_cache_bytes
    check_checkpoints(cache, calibration.model, stateful=bool(state_bytes))
    cells = None if not state_bytes else calibration.state_cells if states is None else states // state_bytes
    return Machine(
        name,
        calibration.kind,
        Calibrated(calibration),
        kv_tokens,
        _fitting(name, max_model_len, kv_tokens, calibration.max_model_len),
        StepCost(calibration.fixed_tokens, calibration.context_tokens),
        calibration.front(),
        state_cells=cells if cells is None or cache.enable_prefix_caching else 0,
    )


def read_calibration(path: Path) -> Calibration:
    """A calibration from its file.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return Calibration.read_file(path)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"--calibration {path} cannot be read: {reason}") from None
    except BadCalibration as error:
        raise ConfigError(str(error)) from None


def _fitting(name: str, asked: int | None, kv_tokens: int, limit: int) -> int:
    if asked is not None and asked > kv_tokens:
        raise ConfigError(f"--max-model-len {asked}: the KV cache of {name} holds {kv_tokens} tokens")
    fitting = min(limit, kv_tokens) if asked is None else asked
    if fitting < 2:
        raise ConfigError(f"{name}: the weights leave no memory for the KV cache")
    return fitting


def shape_cost(shape: ModelShape, kind: str) -> StepCost:
    """The relative cost of rows of a step, computed as in the real engine."""
    return step_cost(
        shape.num_parameters - shape.table_parameters - round(shape.idle_parameters(1)),
        shape.attention_width,
        kind,
    )


def make_fleet(
    plans: SchedulerOptions,
    cache: CacheOptions,
    machine: Machine,
    *,
    replicas: int = 1,
    routing: str = "least-loaded",
    limits: Limits | None = None,
    with_rows: bool = False,
    steer: Callable[[Engine], Steering] | None = None,
    speculation: Speculation | None = None,
    prefill: int = 0,
    wire: Wire = WIRE,
) -> Fleet:
    """Replicas of one machine behind a router, each with the engine that a server would have on it.

    The first ``prefill`` of them compute prompts for the others, which pull the blocks over ``wire``.
    Without ``limits``, any number of requests may wait. ``with_rows`` records a row per request.
    ``steer`` creates the experiments and the tuner of an engine. ``speculation`` is the acceptance of the drafts that
    the options ask for; without it, none is accepted.
    """
    check_policies(plans)
    if prefill and machine.state_cells is not None:
        raise ConfigError(
            f"{machine.name}: recurrent states are not sent to other replicas: omit prefill replicas"
        )
    tally = Tally(plans.max_num_seqs, with_rows=with_rows)
    answers: dict[str, tuple[int, ...]] = {}
    publishers = {f"prefill-{number}": Publisher() for number in range(prefill)}
    block_seconds = machine.block_bytes / wire.bytes_per_second
    made = []
    classes = read_tenants(plans.tenants)[1]
    check_moves(classes, plans.scheduling_policy, recorded=False)
    for number in range(replicas):
        moving = SimulatedShares(classes) if any(each.most for each in classes) else None
        forced = _forced(answers, speculation or Speculation((0.0,)), machine.device, number)
        peers = SimulatedPeers(publishers, block_seconds) if 0 < prefill <= number else None
        engine, runner = make_replica(plans, cache, machine, answers, forced, peers)
        front = copy(machine.front)
        steering = steer(engine) if steer is not None else moving
        made.append(SimulatedReplica(engine, runner, tally, answers, front, steering))
        if peers is not None:
            peers.clock = partial(getattr, made[-1], "began")
    door, handover = limits or Limits(1 << 62, 1 << 62), None
    if prefill:
        first = ROUTINGS[routing]()
        handover = Handover(made[:prefill], publishers, first, wire, tally, answers)
    return Fleet(made[prefill:], ROUTINGS[routing](), door, tally, answers, handover)


def make_replica(
    plans: SchedulerOptions,
    cache: CacheOptions,
    machine: Machine,
    answers: Mapping[str, tuple[int, ...]],
    forced: ForcedAcceptance | None = None,
    peers: SimulatedPeers | None = None,
) -> tuple[Engine, SimulatedRunner]:
    """The engine that a server would have on a machine, and its runner, which outputs ``answers``.

    ``forced`` determines which drafts are accepted. Without it, the options' methods propose drafts from the tokens.
    """
    tenants, classes = read_tenants(plans.tenants)
    runner = SimulatedRunner(machine.device, answers, drafts=forced, peers=peers)
    tiers = lower_tiers(cache, machine)
    if peers is not None and tiers is None:
        raise ConfigError("blocks of prefill replicas arrive in host memory: set --kv-offload-bytes")
    engine = make_engine(
        plans,
        cache,
        runner,
        num_blocks=machine.kv_tokens // cache.block_size,
        max_model_len=machine.max_model_len,
        knobs=make_knobs(plans, machine.kind, machine.max_model_len),
        cost=machine.cost,
        overlap=resolve_overlap(plans, machine.kind),
        classes=classes,
        weights=tenants.weights(),
        tiers=tiers,
        state_cells=machine.state_cells,
        peers=peers,
        drafter=None if forced is None else make_simulated_drafter(plans, forced),
    )
    return engine, runner


def _forced(
    answers: Mapping[str, Sequence[int]], speculation: Speculation, device: Device, seed: int
) -> ForcedAcceptance:
    """Drafts of one replica; drafting a token takes a share of the time of a decode step."""

    def seconds(draft_rows: Sequence[DraftRow]) -> float:
        contexts = sum(len(draft_row.tokens) for draft_row in draft_rows)
        work = StepWork(len(draft_rows), len(draft_rows), contexts, contexts, len(draft_rows))
        return speculation.cost * device.seconds(work)

    return ForcedAcceptance(
        answers,
        speculation.rates,
        LONGEST_DRAFT,
        seed,
        key=attrgetter("id"),
        cost=seconds if speculation.cost else None,
        share=speculation.cost,
    )


def lower_tiers(cache: CacheOptions, machine: Machine) -> TierSizes | None:
    """The host memory tier of a simulated replica, if its options have one.

    Raises:
        ConfigError: there is a disk tier, which cannot be simulated, or the machine's host bandwidth is not known.
    """
    if cache.kv_offload_path is not None:
        raise ConfigError("--kv-offload-path: a disk tier cannot be simulated")
    if not cache.kv_offload_bytes:
        return None
    if not machine.host_bytes_per_second:
        raise ConfigError(f"--kv-offload-bytes: the host bandwidth of {machine.name} is not known")
    blocks = cache.kv_offload_bytes // machine.block_bytes
    if not blocks:
        raise ConfigError(
            f"--kv-offload-bytes {cache.kv_offload_bytes}: one block needs {machine.block_bytes} bytes"
        )
    return TierSizes(blocks, 0, machine.block_bytes, machine.host_bytes_per_second)


def shape_of(model: str) -> ModelShape:
    """A model's shape: one of `SHAPES`, or read from the config of a folder, GGUF file or Hugging Face model.

    Raises:
        ConfigError: there is no such model.
    """
    if (known := SHAPES.get(model.lower())) is not None:
        return known
    from headrace.compute.checkpoint import ModelError
    from headrace.compute.model.families import parse_config
    from headrace.compute.model.hub import read_config, resolve_model

    try:
        spec = parse_config(read_config(resolve_model(model, with_weights=False)))
    except ModelError as error:
        raise ConfigError(f"{error}; the shapes known by name are {', '.join(SHAPES)}") from None
    dense = planned_shape(model, spec.shape)
    return replace(
        dense,
        qkv_bias=spec.qkv_bias,
        qk_norm=spec.qk_norm is not None,
        post_norms=None not in spec.norms,
        stored="mxfp4" if spec.stored is not None and spec.stored.name == "mxfp4" else "bfloat16",
    )


def planned_shape(name: str, shape: computed.ModelShape) -> ModelShape:
    """The shape that the planner and rooflines take for a model that can be loaded."""
    sizes = shape.hidden_size, *shape.heads, shape.intermediate_size, shape.vocab_size
    tied, sparse = shape.tied_embeddings, shape.sparse
    alike = len({layer.heads for layer in shape.layers}) == 1 and not shape.lookup_parameters
    alike = alike and not shape.state_bytes  # layers with mixers have no keys and values, and other matrices
    own = all(layer.shares is None and not layer.latent for layer in shape.layers)
    sums = None if alike and own else layer_sums(shape)
    return ModelShape(
        *(name, shape.num_layers, *sizes),
        tied_embeddings=tied,
        sparse=sparse,
        sums=sums,
        state_bytes=shape.state_bytes,
        windows=window_layers(shape),
    )


def window_layers(shape: computed.ModelShape) -> WindowLayers | None:
    """The groups of layers with a window; None if there are none."""
    from headrace.compute.model.shape import LayerGroups, layer_groups

    groups = layer_groups(shape, 0)
    if not isinstance(groups, LayerGroups):
        return None
    return WindowLayers(groups.windows.groups, groups.windows.tokens, groups.block_elements(shape))


def layer_sums(shape: computed.ModelShape) -> LayerSums:
    """The sums over layers that differ; their norms, which are few, count as matrices."""
    tables = shape.vocab_size * shape.hidden_size * (1 if shape.tied_embeddings else 2)
    other = tables + shape.lookup_parameters
    return LayerSums(shape.num_parameters - other, shape.attention_width, shape.kv_elements, other)
