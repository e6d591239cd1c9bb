"""Experts of another library's models: its three-dimensional weights as experts of the kernels, or as a loop.

The library's `ExpertsInterface` describes such a module by its attributes: ``has_gate``, ``has_bias``,
``is_transposed``, ``has_post_expert_norm``, and the method ``_apply_gate``, which may interleave gate and factor,
clamp them or add to them. This file takes the description and not the implementations, of which one copies the
weights of each token's experts. Where a gate is one of the kernels' activations, the experts are those of
`Kernels.experts`; other gates are computed by the module, between prepared linears.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.compute.adopted.samples import agree, nothing_like, result, sample
from headrace.compute.checkpoint import ModelError
from headrace.compute.kernels import Activation, Kernels
from headrace.compute.kernels.experts import Mlp
from headrace.compute.kernels.reference import ACTIVATIONS
from headrace.compute.kernels.stack import Linear
from headrace.compute.quantization.scheme import Scheme, round_to_nearest
from headrace.compute.quantization.weight import QuantizedWeight

_DESCRIBED = (
    "has_gate",
    "has_bias",
    "is_transposed",
    "has_post_expert_norm",
    "_apply_gate",
    "down_proj",
)


class _Expert(NamedTuple):
    """Weights [2 * I or I, hidden] and [hidden, I], plain or as `Kernels.prepare_linear` made them; their biases."""

    first: Any
    first_bias: Tensor | None
    second: Any
    second_bias: Tensor | None


def is_experts(module: nn.Module) -> bool:
    """Whether a module is described as experts with three-dimensional weights, and not replaced yet."""
    if not all(hasattr(module, name) for name in _DESCRIBED) or "prepared" in vars(module):
        return False
    weights = [getattr(module, name, None) for name in _weights(module)]
    return all(isinstance(weight, Tensor) and weight.dim() == 3 for weight in weights)


def replace_experts(module: Any, kernels: Kernels, scheme: Scheme | None, path: str) -> bool:
    """Let prepared linears compute the experts of a module, and free its weights; False if it computes otherwise.

    Raises:
        ModelError: they cannot be quantized so, or the kernels give another result.
    """
    inputs = _samples(module)
    plain = _Experts(module, _each(module), F.linear)
    eager = inspect.unwrap(type(module).forward)  # the interface would choose an implementation
    theirs = result(lambda x: eager(module, x, *inputs[1:]), inputs[0])
    if not agree(plain(*inputs), theirs):
        return False
    compared, prepared = {*inputs[1].flatten().tolist()}, []
    for number, expert in enumerate(plain.each):
        weights: tuple[Any, Any] = expert.first, expert.second
        if scheme is not None:
            weights = _rounded(expert.first, scheme, path), _rounded(expert.second, scheme, path)
            if number in compared:  # of the others there is no second copy
                first, second = (weight.dequantized(inputs[0].dtype) for weight in weights)
                plain.each[number] = expert._replace(first=first, second=second)
        first, second = (kernels.prepare_linear(weight) for weight in weights)
        prepared.append(expert._replace(first=first, second=second))
    loop = _Experts(module, prepared, kernels.linear)
    each, activation = tuple(loop.each), _activation(module)
    experts: _Experts | _Mixture = loop
    if activation is not None and not module.has_post_expert_norm:
        experts = _Mixture(kernels, each, activation, inputs[0].dtype)
    rough = scheme is not None and scheme.activation_bits == 8
    if not agree(experts(*inputs), plain(*inputs), rough=rough):
        raise ModelError(
            f"kernels '{kernels.name}' give another result than {type(module).__name__} at {path};"
            " use other --kernels"
        )
    for name in _weights(module):
        setattr(module, name, nothing_like(getattr(module, name)))
    module.forward = experts
    module.prepared = each
    return True


def _rounded(weight: Tensor, scheme: Scheme, path: str) -> QuantizedWeight:
    try:
        return round_to_nearest(weight.contiguous(), scheme)
    except ValueError as error:
        raise ModelError(f"--quantization: {path}: {error}") from error


def _each(module: Any) -> list[_Expert]:
    """The weights of each expert as they are stored, and its biases."""
    first, second = (getattr(module, name).detach() for name in _weights(module))
    if module.is_transposed:
        first, second = first.transpose(1, 2), second.transpose(1, 2)
    biases = [getattr(module, f"{name}_bias", None) if module.has_bias else None for name in _weights(module)]
    ones, others = ([None] * len(first) if each is None else each.detach().unbind() for each in biases)
    return [_Expert(*parts) for parts in zip(first.unbind(), ones, second.unbind(), others, strict=True)]


class _Mixture:
    """Experts that the kernels compute; `_Experts` defines the call."""

    def __init__(
        self, kernels: Kernels, each: tuple[_Expert, ...], activation: Activation, dtype: torch.dtype
    ) -> None:
        mlps = [Mlp(Linear(one.first, one.first_bias), Linear(one.second, one.second_bias)) for one in each]
        self._kernels, self._activation = kernels, activation
        self._experts = kernels.prepare_experts(mlps, dtype)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return self._kernels.experts(
            hidden_states, top_k_index, top_k_weights, self._experts, self._activation
        )


class _Experts:
    """``each`` of the experts of ``module``, whose weights are those of ``linear``; it computes its own gates."""

    def __init__(
        self,
        module: Any,
        each: list[_Expert],
        linear: Callable[[Tensor, Any, Tensor | None], Tensor],
    ) -> None:
        self.each = each
        self._linear = linear
        self._act = module._apply_gate if module.has_gate else module.act_fn
        self._after = module.post_expert_norm if module.has_post_expert_norm else None

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, hidden] of [T, hidden] and each token's experts int64 [T, K] with their weights [T, K].

        An index beyond the experts counts for nothing: the library marks absent experts so. The weighted results
        are added in float32.
        """
        tokens, chosen = top_k_index.shape
        ids = top_k_index.reshape(-1)
        order = ids.argsort(stable=True)
        rows = hidden_states.index_select(0, order // chosen)
        counts = ids.bincount(minlength=len(self.each)).tolist()
        parts: list[Tensor] = []
        begin = 0
        for expert, count in zip(self.each, counts, strict=False):
            if count:
                parts.append(self._one(rows[begin : begin + count], expert))
                begin += count
        if begin < len(rows):
            parts.append(torch.zeros_like(rows[begin:]))
        weighted = torch.cat(parts).float() * top_k_weights.reshape(-1, 1).index_select(0, order).float()
        restored = torch.empty_like(weighted).index_copy_(0, order, weighted)
        return restored.view(tokens, chosen, -1).sum(1).to(hidden_states.dtype)

    def _one(self, rows: Tensor, expert: _Expert) -> Tensor:
        inner = self._act(self._linear(rows, expert.first, expert.first_bias))
        out = self._linear(inner, expert.second, expert.second_bias)
        return out if self._after is None else self._after(out)


def _weights(module: Any) -> tuple[str, str]:
    return ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"


def _samples(module: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs [T, hidden], experts [T, 2] and their weights for a comparison."""
    down = module.down_proj
    hidden = down.shape[2 if module.is_transposed else 1]
    x = sample(hidden, down).flatten(0, 1)
    index = torch.arange(2 * len(x), device=down.device).view(-1, 2) % len(down)
    weights = torch.linspace(0.2, 0.8, 2 * len(x), device=down.device).view(-1, 2).to(x.dtype)
    return x, index, weights


def _activation(module: Any) -> Activation | None:
    """The activation of the kernels that gives the module's gates, compared in float32; None: there is none."""
    if not module.has_gate:
        return None
    x = sample(64, torch.empty(0)).flatten(0, 1)
    theirs = result(module._apply_gate, x)
    if not isinstance(theirs, Tensor):
        return None
    gate, up = x.chunk(2, -1)
    for name, activation in ACTIVATIONS.items():
        if theirs.shape == up.shape and torch.allclose(activation(gate) * up, theirs, rtol=1e-5, atol=1e-6):
            return name
    return None
