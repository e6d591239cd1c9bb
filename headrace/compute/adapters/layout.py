"""The linear layers of a model that an adapter may change, by the names of their modules in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from headrace.compute.checkpoint import LinearPlace
from headrace.compute.kernels.adapters import LINEARS, OF_EXPERTS, of_expert
from headrace.compute.model.layout import expert_places, linear_places
from headrace.compute.model.spec import DecoderSpec
from headrace.compute.model.weights import turned_order


class Module(NamedTuple):
    """A linear module [outputs, inputs] of a checkpoint: it gives the outputs from ``offset`` on of the decoder's
    linear layer ``name`` in ``layer``. ``order`` is that of its outputs there (None: as stored). ``routed``: it belongs
    to an expert that a router chooses.
    """

    layer: int
    name: str
    offset: int
    outputs: int
    inputs: int
    order: Tensor | None
    routed: bool = False


class Fused(NamedTuple):
    """A parameter with the linear layers ``linear`` [outputs, inputs] of all ``experts`` of ``layer``.

    It is the parameter ``name`` of the module ``module``. ``turned``: each of them is [inputs, outputs] in it, and
    outputs of gates stand by turns with those beside them.
    """

    module: str
    name: str
    layer: int
    linear: str
    experts: int
    outputs: int
    inputs: int
    turned: bool


class AdapterLayout(NamedTuple):
    """All modules by name, in order, the number of layers, and the parameters of experts as transformers has them."""

    modules: Mapping[str, Module]
    layers: int
    architecture: str
    fused: tuple[Fused, ...] = ()

    def nbytes(self, rank: int, itemsize: int) -> int:
        """Bytes of an adapter that changes every module with this rank."""
        return sum(rank * (each.inputs + each.outputs) * itemsize for each in self.modules.values())


def adapter_layout(spec: DecoderSpec) -> AdapterLayout:
    """The modules of a model that an adapter may change: those of attention, of MLPs and of experts."""
    modules: dict[str, Module] = {}
    fused: list[Fused] = []

    def take(layer: int, name: str, place: LinearPlace, *, routed: bool = False) -> None:
        offset = 0
        for module, outputs in place.modules.items():
            order = turned_order(spec, module, outputs)
            modules[module] = Module(layer, name, offset, outputs, place.inputs, order, routed)
            offset += outputs

    for layer in range(spec.num_layers):
        for name, place in linear_places(spec, layer).items():
            if name in LINEARS:
                take(layer, name, place)
        for expert, pair in enumerate(expert_places(spec, layer)):
            routed = spec.experts is not None and expert < spec.experts.routing.experts
            for name, place in zip(OF_EXPERTS, pair, strict=True):
                take(layer, of_expert(name, expert), place, routed=routed)
        fused += _fused(spec, layer)
    return AdapterLayout(modules, spec.num_layers, spec.architecture, tuple(fused))


def _fused(spec: DecoderSpec, layer: int) -> list[Fused]:
    """The parameters of the experts of a layer."""
    experts, hidden = spec.experts, spec.hidden_size
    if experts is None or not spec.layers[layer].experts:
        return []
    module, count = f"model.layers.{layer}.{experts.names.block}.experts", experts.routing.experts
    return [
        Fused(module, name, layer, linear, count, *size, experts.interleaved)
        for name, linear, size in (
            ("gate_up_proj", "gate_up", (2 * experts.width, hidden)),
            ("down_proj", "down", (hidden, experts.width)),
        )
    ]
