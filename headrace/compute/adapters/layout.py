"""The linear layers of a model that an adapter may change, by the names of their modules in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from headrace.compute.kernels.adapters import LINEARS
from headrace.compute.model.layout import linear_places
from headrace.compute.model.spec import DecoderSpec
from headrace.compute.model.weights import turned_order


class Module(NamedTuple):
    """A linear module [outputs, inputs] of a checkpoint: it gives the outputs from ``offset`` on of the decoder's
    linear layer ``name`` in ``layer``. ``order`` is that of its outputs there (None: as stored).
    """

    layer: int
    name: str
    offset: int
    outputs: int
    inputs: int
    order: Tensor | None


class AdapterLayout(NamedTuple):
    """All modules by name, in order, and the number of layers."""

    modules: Mapping[str, Module]
    layers: int
    architecture: str

    def nbytes(self, rank: int, itemsize: int) -> int:
        """Bytes of an adapter that changes every module with this rank."""
        return sum(rank * (each.inputs + each.outputs) * itemsize for each in self.modules.values())


def adapter_layout(spec: DecoderSpec) -> AdapterLayout:
    """The modules of a model that an adapter may change: those of attention and of plain MLPs, not of experts."""
    modules: dict[str, Module] = {}
    for layer in range(spec.num_layers):
        for name, place in linear_places(spec, layer).items():
            if name not in LINEARS:
                continue
            offset = 0
            for module, outputs in place.modules.items():
                order = turned_order(spec, module, outputs)
                modules[module] = Module(layer, name, offset, outputs, place.inputs, order)
                offset += outputs
    return AdapterLayout(modules, spec.num_layers, spec.architecture)
