"""The kernels inside another library's modules: linears, RMS norms and gated MLPs, recognised by what they compute.

A module stays the object that its model knows. Only its ``forward`` is shadowed on the instance, by one that calls
the kernels, after both gave the same result for sample inputs. A module that computes something else stays as it is.
A weight that the kernels hold in their own layout is freed at once. NaNs take its place, so code that reads it
directly is visibly wrong.

This file knows no architecture and does not import the other library. `experts` has the modules with many experts.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.compute.adopted.experts import is_experts, replace_experts
from headrace.compute.adopted.samples import agree, nothing_like, result, sample
from headrace.compute.checkpoint import ModelError
from headrace.compute.kernels import Activation, Kernels
from headrace.compute.kernels.reference import ACTIVATIONS
from headrace.compute.kernels.stack import Linear
from headrace.compute.quantization.scheme import Scheme, round_to_nearest
from headrace.compute.quantization.weight import QuantizedWeight, stacked


class Part(NamedTuple):
    """What a linear was replaced by: the outputs from ``begin`` to ``end`` of a product."""

    product: Linear
    begin: int
    end: int


class GatedMlp(NamedTuple):
    """What a gated MLP was replaced by; ``gate_up`` has the gate's outputs first."""

    gate_up: Linear
    down: Linear
    activation: Activation


class Norm(NamedTuple):
    """What an RMS norm was replaced by; ``weight`` float32 includes the offset."""

    weight: Tensor
    eps: float


Weight = Tensor | QuantizedWeight
Forward = Callable[[Tensor], Tensor]

_TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("wq", "wk", "wv"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("q_proj", "kv_a_proj_with_mqa"),
)
"""Names of linears that usually have the same input. Whether they have is decided at each call: see `_Product`."""

_NORM_SCALES = (1e-3, 1e-2, 1.0, 100.0)
"""Sizes of inputs of a norm: at the smallest, epsilon counts."""
_LARGEST_EPSILON = 1e-2


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A linear module: its weight is [out, in], or [in, out] if ``transposed``."""

    module: Any
    path: str
    transposed: bool

    @property
    def weight(self) -> Tensor:
        """The weight [out, in]."""
        weight: Tensor = self.module.weight.detach()
        return weight.T if self.transposed else weight

    @property
    def bias(self) -> Tensor | None:
        bias: Tensor | None = self.module.bias
        return None if bias is None else bias.detach()

    @property
    def outputs(self) -> int:
        return self.weight.shape[0]

    @property
    def inputs(self) -> int:
        return self.weight.shape[1]

    def take(self, weight: Tensor) -> None:
        """Compute with another weight [out, in]."""
        given = weight.T if self.transposed else weight
        self.module.weight = nn.Parameter(given, requires_grad=False)

    def free(self) -> None:
        self.module.weight = nothing_like(self.module.weight)

    def plain(self, x: Tensor) -> Tensor:
        """What a linear layer computes, in torch."""
        return F.linear(x, self.weight, self.bias)


class _Gated(NamedTuple):
    """A gated MLP: ``down(activation(gate) * up)``.

    ``parts`` are the linears of gate and up, or the one of both, whose first half is the gate if ``gate_first``.
    """

    parts: tuple[_Matrix, ...]
    down: _Matrix
    activation: Activation
    gate_first: bool = True

    def plain(self, x: Tensor) -> Tensor:
        """What it computes, in torch."""
        factors = [part.plain(x) for part in self.parts]
        gate, up = factors if len(factors) == 2 else self.ordered(list(factors[0].chunk(2, -1)))
        return self.down.plain(ACTIVATIONS[self.activation](gate) * up)

    def ordered(self, halves: list[Any]) -> list[Any]:
        """The gate's half first."""
        return halves if self.gate_first else halves[::-1]


def replace(
    module: nn.Module,
    kernels: Kernels,
    *,
    scheme: Scheme | None = None,
    stored: Mapping[str, QuantizedWeight] | None = None,
    name: str = "",
    head: nn.Module | None = None,
) -> Counter[str]:
    """Let the kernels compute what they can of a module, for example a layer; returns how many modules of each kind.

    Args:
        module: its tensors are loaded, in the type of the computation, and may be written.
        kernels: the backend.
        scheme: quantize the replaced linears in it; None: as they are. The router of experts is never quantized.
        stored: quantized weights [out, in] of linears by their path inside ``module``, whose own weights are on
            the meta device. A linear that the kernels cannot compute gets its dequantized weight.
        name: the path of ``module`` in the model, for messages.
        head: the linear that yields logits, in the dtype of `Kernels.logits`.

    Raises:
        ModelError: a linear cannot be quantized so, or the kernels give another result than the module.
    """
    with torch.inference_mode(False), torch.no_grad():
        return _Replacement(kernels, scheme, stored or {}, name, head=head).run(module)


def held_bytes(model: nn.Module) -> int:
    """Bytes of all parameters, buffers and prepared weights of a model, each tensor once."""
    sizes: dict[int, int] = {}
    own = itertools.chain(model.parameters(), model.buffers())
    kept = (tensor for module in model.modules() for tensor in _tensors(vars(module).get("prepared")))
    for tensor in itertools.chain(own, kept):
        if tensor.is_mkldnn:  # it has no address
            sizes[id(tensor)] = tensor.nbytes
        else:  # an expanded tensor has fewer bytes in memory
            size = min(tensor.nbytes, tensor.untyped_storage().nbytes())
            sizes[tensor.data_ptr()] = max(size, sizes.get(tensor.data_ptr(), 0))
    return sum(sizes.values())


def _tensors(part: object) -> Iterator[Tensor]:
    """Tensors in prepared weights: tuples and dataclasses of tensors and numbers."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, tuple | list):
        for each in part:
            yield from _tensors(each)
    elif is_dataclass(part):
        for field in fields(part):
            yield from _tensors(getattr(part, field.name))


class _Product:
    """Linears with one input, computed as one product when the first of them is called.

    The others find their part by the identity of the input, so a linear that is called with another input is right
    as well, only slower. So are passes of two threads.
    """

    def __init__(self, multiply: Forward, sizes: Sequence[int]) -> None:
        self._multiply, self._sizes = multiply, list(sizes)
        self._held: tuple[Tensor | None, list[Tensor | None]] = None, []

    def part(self, index: int) -> Forward:
        """The forward of one of the linears."""

        def forward(x: Tensor) -> Tensor:
            held, parts = self._held  # both at once: another thread may replace them
            found = parts[index] if held is x else None
            if found is None:
                products = [part.contiguous() for part in torch.split(self._multiply(x), self._sizes, -1)]
                found, parts = products[index], [*products]
                self._held = x, parts
            parts[index] = None
            if all(part is None for part in parts):
                self._held = None, []
            return found

        return forward


class _Replacement:
    """One walk over a module: see `replace`."""

    def __init__(
        self,
        kernels: Kernels,
        scheme: Scheme | None,
        stored: Mapping[str, QuantizedWeight],
        name: str,
        *,
        head: nn.Module | None,
    ) -> None:
        self._head = head
        self._kernels, self._scheme, self._stored, self._name = kernels, scheme, stored, name
        self._counts: Counter[str] = Counter()

    def run(self, module: nn.Module) -> Counter[str]:
        if self._stored and self._scheme is not None:
            raise ModelError("--quantization: the checkpoint is already quantized; omit this option")
        matrices = {path: _matrix(each, path) for path, each in module.named_modules()}
        for path, weight in self._stored.items():
            matrix = matrices.get(path)
            shape = None if matrix is None else (matrix.outputs, matrix.inputs)
            if shape != weight.shape:
                needed = (
                    "it is no linear layer of the model"
                    if shape is None
                    else f"the model needs {list(shape)}"
                )
                raise ModelError(f"{self._path(path)} is stored quantized as {list(weight.shape)}, {needed}")
        self._visit(module, "")
        return self._counts

    def _visit(self, module: nn.Module, path: str) -> None:
        """Replace a module, or what is in it."""
        matrix = _matrix(module, path)
        if matrix is not None:
            self._linear(matrix)
        elif is_experts(module):
            self._counts["experts"] += replace_experts(module, self._kernels, self._scheme, self._path(path))
        elif (norm := _norm(module, self._kernels)) is not None:
            self._shadow("norms", module, norm_forward(self._kernels, norm), norm)
        elif not self._gated(module, path):
            done = self._together(module, path)
            routes = any(is_experts(child) or isinstance(child, nn.ModuleList) for child in module.children())
            for name, child in module.named_children():
                matrix = _matrix(child, _below(path, name))
                if matrix is None:
                    self._visit(child, _below(path, name))
                elif name in _read_by(module):
                    self._fill(matrix)
                elif name not in done:
                    self._linear(matrix, quantize=not routes)

    def _path(self, path: str) -> str:
        return ".".join(part for part in (self._name, path) if part)

    def _shadow(self, kind: str, module: Any, forward: Forward, prepared: Part | GatedMlp | Norm) -> None:
        """Let ``forward`` compute a module; ``prepared`` is what it does so with."""
        module.forward = forward
        module.prepared = prepared
        self._counts[kind] += 1

    def _linear(self, matrix: _Matrix, *, quantize: bool = True) -> None:
        self._fill(matrix)
        x = sample(matrix.inputs, matrix.weight)
        if not _is_product(matrix, x):
            return
        weight = self._weight(matrix, quantize=quantize)
        theirs = matrix.module(x)
        linear = self._prepared(weight, matrix.bias)
        forward = self._multiply(linear, matrix.outputs, logits=matrix.module is self._head)
        self._check(matrix.module, matrix.path, forward(x).to(x.dtype), theirs, [weight])
        matrix.free()
        self._shadow("linear layers", matrix.module, forward, Part(linear, 0, matrix.outputs))

    def _gated(self, module: nn.Module, path: str) -> bool:
        """Replace a gated MLP; False if the module is none."""
        found = _matrices(module, path)
        if not 2 <= len(found) <= 3 or not _has_only(module, found):
            return False
        for matrix in found:
            self._fill(matrix)
        gated = _as_gated(module, found)
        if gated is None or not _read_by(module).isdisjoint(dict(module.named_children())):
            return False
        weights = [self._weight(part) for part in gated.parts]
        if len(weights) == 1:
            weights = gated.ordered(_halves(weights[0]))
        merged, down = _merged(weights), self._weight(gated.down)
        if merged is None:
            return False
        x = sample(gated.parts[0].inputs, gated.down.weight)
        theirs = module(x)
        biases = _biases(gated.parts)
        if biases is not None and len(gated.parts) == 1:
            biases = torch.cat(gated.ordered(list(biases.chunk(2))))
        mlp = GatedMlp(
            self._prepared(merged, biases), self._prepared(down, gated.down.bias), gated.activation
        )
        forward = self._compute(mlp, gated.down.outputs)
        self._check(module, path, forward(x), theirs, [merged, down])
        for matrix in found:
            matrix.free()
        self._shadow("gated MLPs", module, forward, mlp)
        return True

    def _compute(self, mlp: GatedMlp, outputs: int) -> Forward:
        linear, act = self._kernels.linear, self._kernels.gated_activation
        (first, first_bias), (second, second_bias), activation = mlp

        def forward(x: Tensor) -> Tensor:
            rows = act(linear(x.reshape(-1, x.shape[-1]), first, first_bias), activation)
            return linear(rows, second, second_bias).view(*x.shape[:-1], outputs)

        return forward

    def _together(self, module: nn.Module, path: str) -> set[str]:
        """Replace linears of one input by one product; returns their names."""
        done: set[str] = set()
        for names in _TOGETHER:
            children = [(name, getattr(module, name, None)) for name in names]
            found = {name: m for name, child in children if (m := _matrix(child, _below(path, name)))}
            free = not (done | _read_by(module)) & found.keys()
            if len(found) > 1 and free and self._merge(list(found.values())):
                done |= found.keys()
        return done

    def _merge(self, matrices: list[_Matrix]) -> bool:
        for matrix in matrices:
            self._fill(matrix)
        if len({(m.inputs, m.weight.dtype) for m in matrices}) > 1:
            return False
        x = sample(matrices[0].inputs, matrices[0].weight)
        if not all(_is_product(m, x) for m in matrices):
            return False
        weights = [self._weight(m) for m in matrices]
        merged = _merged(weights)
        if merged is None:
            return False
        theirs = [m.module(x) for m in matrices]
        linear, sizes = self._prepared(merged, _biases(matrices)), [m.outputs for m in matrices]
        product = _Product(self._multiply(linear, sum(sizes)), sizes)
        for index, (matrix, expected) in enumerate(zip(matrices, theirs, strict=True)):
            forward, begin = product.part(index), sum(sizes[:index])
            self._check(matrix.module, matrix.path, forward(x), expected, weights)
            matrix.free()
            self._shadow("linear layers", matrix.module, forward, Part(linear, begin, begin + sizes[index]))
        return True

    def _prepared(self, weight: Weight, bias: Tensor | None) -> Linear:
        return Linear(self._kernels.prepare_linear(weight), bias)

    def _multiply(self, product: Linear, outputs: int, *, logits: bool = False) -> Forward:
        """The product for x [..., in]."""
        linear = self._kernels.logits if logits else self._kernels.linear
        weight, bias = product

        def forward(x: Tensor) -> Tensor:
            if x.dim() == 2:
                return linear(x, weight, bias)
            return linear(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], outputs)

        return forward

    def _fill(self, matrix: _Matrix) -> None:
        """Give a linear that is stored quantized its dequantized weight."""
        stored = self._stored.get(matrix.path)
        if stored is not None and matrix.module.weight.is_meta:
            matrix.take(stored.dequantized(matrix.module.weight.dtype))

    def _weight(self, matrix: _Matrix, *, quantize: bool = True) -> Weight:
        """The weight to compute with; the module itself gets the dequantized one, so that both can be compared."""
        stored = self._stored.get(matrix.path)
        if stored is not None:
            return matrix.weight if stored.in_fp8 and not self._kernels.fp8 else stored
        if self._scheme is None or not quantize:
            return matrix.weight
        try:
            weight = round_to_nearest(matrix.weight, self._scheme)
        except ValueError as error:
            raise ModelError(f"--quantization: {self._path(matrix.path)}: {error}") from error
        matrix.take(weight.dequantized(matrix.weight.dtype))
        return weight

    def _check(
        self, module: nn.Module, path: str, ours: Tensor, theirs: object, weights: Sequence[Weight]
    ) -> None:
        """Raise ModelError unless the kernels gave the result of the module."""
        rough = any(isinstance(weight, QuantizedWeight) and weight.activation_bits == 8 for weight in weights)
        if not agree(ours, theirs, rough=rough):
            raise ModelError(
                f"kernels '{self._kernels.name}' give another result than {type(module).__name__} at"
                f" {self._path(path)}; use other --kernels"
            )


def _matrix(module: object, path: str) -> _Matrix | None:
    """A module as a linear, if it is one by its kind; `_is_product` says whether it computes only a product."""
    if not isinstance(module, nn.Module) or "prepared" in vars(module):
        return None
    held = dict(module.named_parameters())
    weight = held.get("weight")
    if weight is None or weight.dim() != 2 or not held.keys() <= {"weight", "bias"}:
        return None
    if isinstance(module, nn.Linear):
        return _Matrix(module, path, transposed=False)
    if (
        getattr(module, "nf", None) == weight.shape[1] and "bias" in held
    ):  # GPT-2's layer, which has [in, out]
        return _Matrix(module, path, transposed=True)
    return None


def _matrices(module: nn.Module, path: str) -> list[_Matrix]:
    """The linears directly in a module."""
    children = module.named_children()
    return [m for name, child in children if (m := _matrix(child, _below(path, name))) is not None]


def _is_product(matrix: _Matrix, x: Tensor) -> bool:
    """Whether a linear computes the product with its weight and nothing else, for sample inputs ``x``."""
    module = matrix.module
    if type(module).forward is nn.Linear.forward:
        return True
    return _one_argument(module) and agree(matrix.plain(x), result(module, x))


def _has_only(module: nn.Module, matrices: Sequence[_Matrix]) -> bool:
    """Whether a module takes one tensor, and has no parameters but those of its linears."""
    known = {id(each) for matrix in matrices for each in matrix.module.parameters()}
    return all(id(each) in known for each in module.parameters()) and _one_argument(module)


def _as_gated(module: nn.Module, matrices: Sequence[_Matrix]) -> _Gated | None:
    """The gated MLP that a module with these linears computes, or None."""
    found: list[_Gated] = []
    for down in matrices:
        parts = tuple(each for each in matrices if each is not down)
        kinds = {(part.outputs, part.inputs, part.weight.dtype) for part in parts}
        if len(kinds) > 1:
            continue
        for activation in _activations(module):
            if len(parts) == 2 and parts[0].outputs == down.inputs:
                found += [_Gated(parts, down, activation), _Gated(parts[::-1], down, activation)]
            elif len(parts) == 1 and parts[0].outputs == 2 * down.inputs:
                found += [_Gated(parts, down, activation, first) for first in (True, False)]
    for gated in found:
        x = sample(gated.parts[0].inputs, gated.parts[0].weight)
        if agree(gated.plain(x), result(module, x)):
            return gated
    return None


def _activations(module: nn.Module) -> list[Activation]:
    """The activations of a module that the kernels know, by what its functions give for float32.

    If it has no such function, it can only be SiLU: the forms of GELU are too close to tell them apart in 16 bits.
    """
    x = torch.linspace(-6, 6, 241)
    children = [child for child in module.children() if not list(child.parameters())]
    functions = [each for each in (*children, *vars(module).values()) if callable(each)]
    results = [result(function, x) for function in functions]
    given = [each for each in results if isinstance(each, Tensor) and each.shape == x.shape]
    known = {name: activation(x) for name, activation in ACTIVATIONS.items()}
    same = [name for name, y in known.items() if any(torch.allclose(y, each, atol=1e-6) for each in given)]
    return same or ["silu"]


def norm_forward(kernels: Kernels, norm: Norm) -> Forward:
    """The kernels' norm of x [..., width]."""
    compute, (weight, eps) = kernels.rms_norm, norm
    return lambda x: compute(x, weight, eps)


def _norm(module: nn.Module, kernels: Kernels) -> Norm | None:
    """The RMS norm that a module computes; None if it computes something else.

    Its weight may count from 0 or 1, and it may be multiplied before or after rounding to the type of the input.
    """
    held = dict(module.named_parameters())
    weight = held.get("weight")
    if weight is None or len(held) > 1 or weight.dim() != 1 or not _one_argument(module):
        return None
    inputs = [sample(len(weight), like, _NORM_SCALES) for like in (weight.detach().float(), weight.detach())]
    expected = [result(module, x) for x in inputs]
    small = {
        each for each in vars(module).values() if isinstance(each, float) and 0 < each < _LARGEST_EPSILON
    }
    for offset, eps in itertools.product((0.0, 1.0), sorted(small)):
        norm = Norm(weight.detach().float() + offset, eps)
        ours = norm_forward(kernels, norm)
        if all(agree(ours(x), y) for x, y in zip(inputs, expected, strict=True)):
            return norm
    return None


def _one_argument(module: nn.Module) -> bool:
    """Whether a module is called with one tensor and nothing else."""
    return len(inspect.signature(module.forward).parameters) == 1


def _read_by(module: nn.Module) -> frozenset[str]:
    """Names of children whose weights the code of a module reads itself, apart from type, device and shape."""
    return _read_weights(type(module))  # type: ignore[arg-type] # a class can be hashed


@cache
def _read_weights(kind: type[nn.Module]) -> frozenset[str]:
    names: set[str] = set()
    for each in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        try:
            source = inspect.getsource(each)
        except (OSError, TypeError):
            continue
        names.update(re.findall(r"self\.(\w+)\.weight\b(?!\.(?:dtype|device|shape)\b)", source))
    return frozenset(names)


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _halves(weight: Weight) -> list[Weight]:
    """The first and the second half of a weight's outputs."""
    half = weight.shape[0] // 2
    if isinstance(weight, QuantizedWeight):
        return [weight.rows(0, half), weight.rows(half, 2 * half)]
    return [*weight.chunk(2)]


def _merged(weights: Sequence[Weight]) -> Weight | None:
    """Weights of the same inputs as one, outputs after outputs; None: they are quantized in different ways."""
    plain = [weight for weight in weights if isinstance(weight, Tensor)]
    if len(plain) == len(weights):
        return torch.cat(plain)
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if len(quantized) < len(weights):
        return None
    try:
        return stacked(quantized)
    except ValueError:
        return None


def _biases(matrices: Sequence[_Matrix]) -> Tensor | None:
    """The biases of linears one after another, 0 for those that have none; None: none has one."""
    if all(matrix.bias is None for matrix in matrices):
        return None
    none = [matrix.weight.new_zeros(matrix.outputs) for matrix in matrices]
    return torch.cat([n if m.bias is None else m.bias for m, n in zip(matrices, none, strict=True)])
