"""Runs given work with any scheduler options, on a model that is loaded once or on a simulated device.

Sweeps and ``headrace tune`` try many settings with it. An engine is plain Python around a runner, so each setting gets
its own engine on the same runner; only one of them may run at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from headrace.config import ConfigError, Options, SchedulerOptions
from headrace.core.capacity import activation_bytes
from headrace.lab.bench.engine import EngineTarget
from headrace.lab.bench.report import Run, measure
from headrace.lab.calibration import Calibration
from headrace.lab.plan.roofline import BY_DRIVER_NAME, DeviceSpec, Precision, Replica
from headrace.lab.simulate.fleet import OneAnswer, simulated_target, token_ids
from headrace.lab.sweep import Sizes
from headrace.lab.workload.work import Work
from headrace.wiring.engine import make_engine, make_knobs, resolve_overlap
from headrace.wiring.simulation import (
    Machine,
    calibrated_machine,
    make_replica,
    planned_shape,
    roofline_machine,
)
from headrace.wiring.tenants import read_tenants

if TYPE_CHECKING:
    from headrace.wiring.model import Loaded


@dataclass(frozen=True, slots=True)
class Evaluator:
    """A model and device on which settings are tried.

    ``target(plans, concurrency)`` makes an engine with these options, see `EngineTarget`. ``sizes`` returns the bytes
    that an engine needs with them (None: not known). ``replica`` describes model and device for a roofline (None: the
    device's peaks are not known). ``kind`` is ``cpu`` or ``cuda``.
    """

    name: str
    kind: str
    max_model_len: int
    target: Callable[[SchedulerOptions, int | None], EngineTarget]
    sizes: Callable[[SchedulerOptions], Sizes | None]
    replica: Replica | None
    close: Callable[[], object]
    _engines: dict[SchedulerOptions, EngineTarget] = field(default_factory=dict)

    def run(
        self,
        plans: SchedulerOptions,
        work: Sequence[Work],
        *,
        concurrency: int | None = None,
        slo: Mapping[str, float] | None = None,
        again: bool = False,
    ) -> Run:
        """The measures of this work with these options; ``slo`` are latency targets in seconds.

        ``again`` runs it on the engine that has run these options before, which has learned lengths and times.
        """
        target = self._engines.get(plans) if again else None
        if target is None:
            target = self.target(plans, concurrency)
            if again:
                self._engines[plans] = target
        return measure(target, work, slo)

    def tokens(self, plans: SchedulerOptions) -> int:
        """Maximum tokens of a step with these options.

        Raises:
            ConfigError: with these options, some requests could not run.
        """
        return make_knobs(plans, self.kind, self.max_model_len).batched_tokens


def refuse_speculation(plans: SchedulerOptions) -> None:
    """Raise `ConfigError` if the options ask for speculative decoding, which an evaluator does not support."""
    if plans.speculative_config is not None:
        raise ConfigError(
            "--speculative-config cannot be set here: settings are compared without speculation"
        )


def simulated_evaluator(given: Options, replica: Replica, max_model_len: int | None = None) -> Evaluator:
    """A model on a device with a known data sheet."""

    def machine(plans: SchedulerOptions) -> Machine:
        return roofline_machine(replica, given.cache, plans, max_model_len)

    first = machine(given.scheduler)

    def sizes(plans: SchedulerOptions) -> Sizes:
        tokens = make_knobs(plans, first.kind, first.max_model_len).batched_tokens
        workspace = replica.workspace_bytes(tokens, plans.max_num_seqs)
        workspace += plans.max_num_seqs * replica.shape.state_bytes
        return Sizes(replica.weight_bytes, workspace, given.cache.block_size * replica.kv_bytes_per_token)

    return _simulated(given, machine, sizes, replica)


def calibrated_evaluator(
    given: Options, calibration: Calibration, max_model_len: int | None = None
) -> Evaluator:
    """The engine of a measured machine, without its HTTP server."""
    machine = calibrated_machine(calibration, given.cache, max_model_len, front=False)
    return _simulated(given, lambda plans: machine, lambda plans: None, None)


def _simulated(
    given: Options,
    machine: Callable[[SchedulerOptions], Machine],
    sizes: Callable[[SchedulerOptions], Sizes | None],
    replica: Replica | None,
) -> Evaluator:
    refuse_speculation(given.scheduler)

    def target(plans: SchedulerOptions, concurrency: int | None = None) -> EngineTarget:
        engine, runner = make_replica(plans, given.cache, machine(plans), OneAnswer())
        return simulated_target("simulated", engine, runner, concurrency)

    first = machine(given.scheduler)
    return Evaluator(
        f"{first.name}, simulated",
        first.kind,
        first.max_model_len,
        target,
        sizes,
        replica,
        lambda: None,
    )


def loaded_evaluator(given: Options, max_num_seqs: int, max_num_batched_tokens: int | None) -> Evaluator:
    """The model of these options, loaded once with memory for engines up to these sizes.

    Raises:
        ConfigError: the model cannot be loaded with these options, or they ask for speculative decoding.
    """
    from headrace.wiring.model import close, load, warm_up

    refuse_speculation(given.scheduler)
    most = replace(given.scheduler, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    loaded = load(replace(given, scheduler=most))
    warm_up(loaded)
    return Evaluator(
        f"{loaded.name} on {loaded.facts.name}, kernels {loaded.computed_by}",
        loaded.facts.kind,
        loaded.ledger.max_model_len,
        partial(_on_loaded, loaded, given),
        lambda plans: _sizes(loaded, plans),
        _measured_replica(loaded),
        lambda: close(loaded),
    )


def _on_loaded(
    loaded: Loaded, given: Options, plans: SchedulerOptions, concurrency: int | None
) -> EngineTarget:
    from headrace.wiring.model import decoder_cost

    kind, ledger = loaded.facts.kind, loaded.ledger
    tenants, classes = read_tenants(plans.tenants)
    engine = make_engine(
        plans,
        given.cache,
        loaded.runner,
        num_blocks=ledger.num_blocks,
        windows=ledger.windows,
        max_model_len=ledger.max_model_len,
        knobs=make_knobs(plans, kind, ledger.max_model_len),
        cost=decoder_cost(loaded.shape, kind),
        overlap=resolve_overlap(plans, kind),
        classes=classes,
        weights=tenants.weights(),
        state_cells=ledger.checkpoints,
    )
    return EngineTarget(
        loaded.name,
        engine,
        token_ids,
        before=engine.reset_prefix_cache,
        concurrency=concurrency,
        kernels=loaded.computed_by,
    )


def _sizes(loaded: Loaded, plans: SchedulerOptions) -> Sizes:
    shape, ledger = loaded.shape, loaded.ledger
    workspace = activation_bytes(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        vocab_size=shape.vocab_size,
        itemsize=_itemsize(loaded.dtype),
        max_num_batched_tokens=make_knobs(plans, loaded.facts.kind, ledger.max_model_len).batched_tokens,
        max_num_seqs=plans.max_num_seqs,
    )
    workspace += plans.max_num_seqs * ledger.state_bytes
    return Sizes(ledger.weight_bytes, workspace, ledger.block_bytes)


def _itemsize(dtype: str) -> int:
    import torch

    size: int = getattr(torch, dtype).itemsize
    return size


def _weight_bytes(loaded: Loaded) -> float:
    """The bytes of an element of a linear layer's weight."""
    import torch

    from headrace.compute.kernels import weight_element_bytes

    return weight_element_bytes(loaded.decoder.kernels, getattr(torch, loaded.dtype), loaded.shape.dtype)


def _measured_replica(loaded: Loaded) -> Replica | None:
    """Model and device for a roofline: a GPU's data sheet, or rates measured on this CPU now; None if neither."""
    shape = planned_shape(loaded.name, loaded.shape)
    device = _measured_cpu(loaded) if loaded.facts.kind == "cpu" else BY_DRIVER_NAME.get(loaded.facts.name)
    if device is None or loaded.quantization:
        return None
    plain = float(_itemsize(loaded.dtype))
    kv_bytes = loaded.ledger.position_bytes / shape.kv_bytes_per_token(1.0)
    return Replica(
        shape, device, 1, Precision(weight_bytes=_weight_bytes(loaded), kv_bytes=kv_bytes, plain_bytes=plain)
    )


def _measured_cpu(loaded: Loaded) -> DeviceSpec | None:
    import torch

    from headrace.compute.kernels.cpp import CppKernels
    from headrace.compute.kernels.measure import product_rates, read_rates

    kernels = loaded.decoder.kernels
    if not isinstance(kernels, CppKernels):
        return None
    products = product_rates(kernels, getattr(torch, loaded.dtype))
    bandwidth = max(read_rates(kernels).values())
    return DeviceSpec(
        loaded.facts.name,
        bf16_flops=max(products[loaded.dtype].values()),
        int8_ops=max(products["int8"].values()),
        memory_bytes=loaded.ledger.total_bytes,
        bandwidth=bandwidth,
        host_bandwidth=bandwidth / 2,
        efficiency_compute=1.0,
        efficiency_bandwidth=1.0,
        step_overhead_seconds=0.0,
        dollars_per_hour=0.0,
    )
