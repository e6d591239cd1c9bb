"""The C++ kernels of the CPU: checks tensors and passes their addresses to the extension module `_cpu`.

`Kernels` defines each call. The extension itself rejects slots and blocks outside the pages; this file checks dtype
and layout. Each call uses few Python operations, because they dominate the step time of a small model.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.compute.batch import Batch, StepInterrupted
from headrace.compute.device import limit_threads
from headrace.compute.kernels import (
    Activation,
    Counts,
    Drafted,
    Greedy,
    HeadNorm,
    HeadShape,
    KernelsUnavailable,
    Pages,
    experts,
    linear,
)
from headrace.compute.kernels.adapters import LayerChanges, StepChanges
from headrace.compute.kernels.cpp_checks import (
    ACTIVATIONS,
    ALL_KEYS,
    DTYPES,
    HEAD_NORMS,
    NEVER,
    check_cpu,
    check_rope,
    extension,
    joint_address,
    page_words,
    row_lines,
    shown,
)
from headrace.compute.kernels.experts import AddOfTokens, Mlp, Router
from headrace.compute.kernels.latent import FewTokens, absorbed
from headrace.compute.kernels.linear import Prepared
from headrace.compute.kernels.mixers import LineRows, Mixer, StepRows
from headrace.compute.kernels.native_adapters import NativeAdapter
from headrace.compute.kernels.native_calls import (
    NativeStack,
    Room,
    Rotation,
    StackCall,
    greedy_call,
    layers_call,
    native,
    run_drafts,
    run_greedy,
    stack_call,
)
from headrace.compute.kernels.native_experts import NativeExperts, NativeRouter, address, is_native
from headrace.compute.kernels.native_latent import NativeExpansion, attend_natively, expansion_of
from headrace.compute.kernels.native_mixers import NativeMixer, run_mixer
from headrace.compute.kernels.packed import (
    PackedIntegers,
    PackedWeight,
    WeightMemory,
    code,
    narrowed,
    pack,
    pack_integers,
    pack_screen,
)
from headrace.compute.kernels.per_layer import inputs_of
from headrace.compute.kernels.stack import Stack, apply, embedded
from headrace.compute.quantization.weight import QuantizedWeight
from headrace.compute.sampling.choice import TokenChoice, likeliest
from headrace.compute.sampling.penalties import Allowed, penalize

_SCREENED = ("avx512_vnni", "avx512_bf16")
"""Levels on which a screen of 8 bits is quicker than the head: tiles are limited by memory alone, and not measured."""
_CODED = ("avx512_bf16", "avx512_vnni", "avx512", "avx2")
"""Levels that multiply coded weights: tiles read their words from memory."""


class AttentionPlan(NamedTuple):
    """The rows of a step in the form of the extension; ``lines`` own the memory that ``rows`` points into.

    ``blocks`` is one more than the highest block that is read.
    """

    lines: tuple[Tensor, ...]
    rows: tuple[int, ...]
    tokens: int
    block_size: int
    blocks: int


class CppKernels:
    """Vectorized kernels for x86-64 (AMX, AVX-512 with or without BF16 and VNNI, AVX2) and any other CPU.

    Args:
        level: which of the machine's instruction sets to use (`levels`); None: the best.

    Raises:
        KernelsUnavailable: the extension is not built, or this machine does not have the level.
    """

    name = "cpp"
    layout = "head, word, token and head, token, word"
    fp8 = False
    narrow_pages = True
    narrow = True
    penalize = staticmethod(penalize)

    def __init__(self, level: str | None = None) -> None:
        self._cpu = extension()
        self.threads = limit_threads()
        supported: dict[str, int] = self._cpu.supported_levels()
        self.levels = tuple(supported)
        self.isa = self.levels[0] if level is None else level
        if self.isa not in supported:
            raise KernelsUnavailable(f"level '{level}' is not on this machine; it has {', '.join(supported)}")
        self._level = supported[self.isa]
        self.coded = self.isa in _CODED
        self._panel: int = self._cpu.panel(self._level)
        self._memory = WeightMemory()
        self._room = Room()

    @property
    def threads(self) -> int:
        """Number of threads that share a kernel's work, for all such kernels in the process (`csrc/team.h`)."""
        threads: int = self._cpu.threads()
        return threads

    @threads.setter
    def threads(self, count: int) -> None:
        self._cpu.set_threads(count)

    def read(self, words: Tensor, threads: int) -> int:
        """The sum of ``words`` int64, modulo 2⁶⁴: it only reads, to measure the memory bandwidth."""
        check_cpu(words)
        if words.dtype != torch.int64 or not words.is_contiguous():
            raise ValueError(f"words must be int64 and contiguous, not {shown(words)}")
        total: int = self._cpu.read(words.data_ptr(), words.numel(), threads)
        return total

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See `Kernels.copy`: by the threads of the kernels, past the caches."""
        check_cpu(target, source)
        if target.nbytes != source.nbytes or not (target.is_contiguous() and source.is_contiguous()):
            raise ValueError(
                f"a copy of {shown(source)} to {shown(target)}, which are not as large and contiguous"
            )
        self._cpu.copy(target.data_ptr(), source.data_ptr(), source.nbytes)

    def prepare_linear(
        self, weight: Tensor | QuantizedWeight, *, consume: bool = False
    ) -> PackedWeight | PackedIntegers | linear.Prepared:
        if isinstance(weight, QuantizedWeight):
            return pack_integers(weight, self._panel, self._memory, consume=consume)
        return self._pack(weight, consume, coded=self.coded)

    def _pack(self, weight: Tensor, consume: bool, *, coded: bool) -> PackedWeight | Tensor:
        """``weight`` in the fewest bits that hold it exactly; as it is, if the extension does not multiply it."""
        narrow = narrowed(self._cpu, weight, consume=consume) if self.narrow else None
        held, consume = (weight, consume) if narrow is None else (narrow, True)
        packed = None
        if coded:
            packed = code(self._cpu, self._level, held, self._panel, self._memory, consume=consume)
        if packed is None:
            packed = pack(held, self._panel, self._memory, consume=consume)
        if packed is None:
            return weight
        return packed if narrow is None else packed._replace(dtype=weight.dtype, narrow=True)

    def prepare_head(
        self, weight: Tensor | QuantizedWeight, *, consume: bool = False
    ) -> PackedWeight | PackedIntegers | linear.Prepared:
        """See `Kernels.prepare_head`: where the CPU multiplies bytes, the head has a `Screen`.

        It is not coded: few of its outputs are computed from it then, in another order than panels.
        """
        if self.isa not in _SCREENED or isinstance(weight, QuantizedWeight):
            return self.prepare_linear(weight, consume=consume)
        screen = pack_screen(weight, self._panel, self._memory)  # first, as the weight may be consumed
        packed = self._pack(weight, consume, coded=False)
        return packed._replace(screen=screen) if isinstance(packed, PackedWeight) else packed

    def linear(
        self, x: Tensor, weight: PackedWeight | PackedIntegers | linear.Prepared, bias: Tensor | None = None
    ) -> Tensor:
        """See `Kernels.linear`.

        Activations of 16 bits are also multiplied with a quantized weight as integers, of 16 bits (of 23 in float32)
        with one scale per token: `csrc/quantized.h` explains why that rounds less than their own type.
        """
        if not isinstance(weight, PackedWeight | PackedIntegers):
            return linear.apply(x, weight, bias)
        return self._product(x, weight, bias, x.dtype)

    def logits(
        self, x: Tensor, weight: PackedWeight | PackedIntegers | Prepared, bias: Tensor | None = None
    ) -> Tensor:
        """See `Kernels.logits`: in float32 if this backend has the product."""
        if not isinstance(weight, PackedWeight | PackedIntegers):
            return linear.apply(x, weight, bias)
        return self._product(x, weight, bias, torch.float32)

    def _product(
        self, x: Tensor, weight: PackedWeight | PackedIntegers, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """``x @ weight.T + bias`` in the dtype of ``x`` or in float32, in which it is summed anyway."""
        count, width = x.shape
        inputs, outputs = weight.inputs, weight.outputs
        if width != inputs or (bias is not None and (bias.dtype != x.dtype or bias.shape != (outputs,))):
            raise ValueError(
                f"linear of {x.dtype} [{count}, {width}] by [{outputs}, {inputs}], bias {shown(bias)}"
            )
        self._check_panel(weight.panel)
        check_cpu(x, bias)
        x = x.contiguous()
        out = x.new_empty((count, outputs), dtype=dtype)
        wide = dtype != x.dtype
        bias = None if bias is None else bias.contiguous()
        bias_at = 0 if bias is None else bias.data_ptr()
        if isinstance(weight, PackedIntegers):
            self._cpu.quantized_linear(
                self._level,
                x.data_ptr(),
                *weight.addresses,
                bias_at,
                out.data_ptr(),
                count,
                inputs,
                outputs,
                weight.group_size,
                weight.planes(x.dtype),
                DTYPES[x.dtype],
                weight.bits,
                wide,
            )
            return out
        if x.dtype != weight.dtype:
            raise ValueError(f"linear of {x.dtype} by {weight.dtype}")
        self._cpu.linear(
            self._level,
            x.data_ptr(),
            *weight.weights,
            bias_at,
            out.data_ptr(),
            count,
            inputs,
            outputs,
            DTYPES[x.dtype],
            wide,
        )
        return out

    def _check_panel(self, panel: int) -> None:
        if panel != self._panel:
            raise ValueError(
                f"weights in panels of {panel} were prepared for another level than {self.isa}, which has {self._panel}"
            )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, None, weight, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        residual = residual.contiguous()
        if weight is None:
            return residual.add_(x), residual
        if residual.shape != x.shape or residual.dtype != x.dtype:
            raise ValueError(f"residual {residual.dtype} {list(residual.shape)} of {x.dtype} {list(x.shape)}")
        return self._norm(x, residual, weight, eps), residual

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        check_cpu(x, residual, weight)
        x, weight = x.contiguous(), weight.contiguous()
        size = x.shape[-1]
        if not size or weight.numel() != size or weight.dtype != torch.float32:
            raise ValueError(f"norm of width {size} by {weight.dtype} {list(weight.shape)}")
        out = torch.empty_like(x)
        self._cpu.norm(
            self._level,
            x.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            x.numel() // size,
            size,
            DTYPES[x.dtype],
            eps,
        )
        return out

    def rope_write_kv(
        self,
        qkv: Tensor,
        shape: HeadShape,
        rotation: Tensor,
        qk_norm: Tensor | None,
        eps: float,
        slots: Tensor,
        pages: Pages,
        head_norm: HeadNorm = "head",
    ) -> Tensor:
        qkv, rotation, slots = qkv.contiguous(), rotation.contiguous(), slots.contiguous()
        tokens = len(qkv)
        heads, kv_heads, head_dim = shape
        num_blocks, block_size, _, _ = pages.keys.shape
        rotary = rotation.shape[-1]
        check_rope(qkv, shape, rotation, qk_norm, slots, head_norm)
        lines = page_words(pages, kv_heads or pages.keys.shape[2], head_dim, qkv.dtype)
        qk_norm = None if qk_norm is None else qk_norm.contiguous()
        queries = qkv.new_empty((tokens, heads, head_dim))
        self._cpu.rope_write_kv(
            self._level,
            qkv.data_ptr(),
            rotation.data_ptr(),
            0 if qk_norm is None else qk_norm.data_ptr(),
            slots.data_ptr(),
            *lines,
            queries.data_ptr(),
            tokens,
            heads,
            kv_heads,
            head_dim,
            rotary,
            num_blocks * block_size,
            DTYPES[qkv.dtype],
            HEAD_NORMS[head_norm],
            eps,
        )
        return queries

    def plan_attention(self, batch: Batch, window: int | None, dtype: torch.dtype) -> AttentionPlan:
        lines = row_lines(batch)
        rows, width = lines[2].shape
        starts, contexts, tables = (line.data_ptr() for line in lines)
        seen = ALL_KEYS if window is None else window
        tokens, joint = len(batch.positions), joint_address(batch)
        blocks = self._cpu.check_rows(starts, contexts, tables, rows, width, batch.block_size, seen, tokens)
        rest = (joint, starts, contexts, tables, rows, width, seen)
        alive = lines if batch.joint is None else (*lines, batch.joint)
        return AttentionPlan(alive, rest, tokens, batch.block_size, blocks)

    def paged_attention(
        self,
        queries: Tensor,
        pages: Pages,
        plan: AttentionPlan,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        check_cpu(queries)
        queries = queries.contiguous()
        tokens, heads, head_dim = queries.shape
        num_blocks, block_size, kv_heads, _ = pages.keys.shape
        lines = page_words(pages, kv_heads, head_dim, queries.dtype)
        if plan.blocks > num_blocks:
            raise IndexError(f"the rows read block {plan.blocks - 1}, but the pages have {num_blocks} blocks")
        if not scale > 0:
            raise ValueError(f"the scale of scores must be positive, got {scale}")
        if plan.tokens != tokens or plan.block_size != block_size or heads % kv_heads:
            raise ValueError(
                f"{list(queries.shape)} queries and {list(pages.keys.shape)} keys do not fit the plan: {plan.tokens} "
                f"tokens in blocks of {plan.block_size}"
            )
        out = queries.new_empty((tokens, heads * head_dim))
        self._cpu.attention(
            self._level,
            queries.data_ptr(),
            *lines,
            out.data_ptr(),
            address(sinks, torch.float32, heads),
            *plan.rows,
            heads,
            kv_heads,
            head_dim,
            DTYPES[queries.dtype],
            scale,
            0.0 if softcap is None else softcap,
        )
        return out

    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        check_cpu(gate_up)
        gate_up = gate_up.contiguous()
        count, double = gate_up.shape
        if double % 2:
            raise ValueError(f"gates and their factors of {double} elements together")
        out = gate_up.new_empty((count, double // 2))
        self._cpu.gated_activation(
            self._level,
            gate_up.data_ptr(),
            out.data_ptr(),
            count,
            double // 2,
            DTYPES[gate_up.dtype],
            ACTIVATIONS[activation],
        )
        return out

    def mlp(self, x: Tensor, of: Mlp, activation: Activation) -> Tensor:
        """See `Kernels.mlp`: in one call, if weights are not quantized and gates are whole panels."""
        (gate_up, up_bias), (down, down_bias) = of
        count, width = x.shape
        same = isinstance(gate_up, PackedWeight) and isinstance(down, PackedWeight)
        if not same or activation == "squared_relu" or down.inputs % self._panel:
            return experts.mlp(self, x, of, activation)
        fits = (gate_up.inputs, gate_up.outputs, down.outputs) == (width, 2 * down.inputs, width)
        if not fits or not x.dtype == gate_up.dtype == down.dtype:
            raise ValueError(
                f"{shown(x)} for an MLP of {gate_up.inputs}, {gate_up.outputs} and {down.inputs} elements"
            )
        self._check_panel(gate_up.panel)
        self._check_panel(down.panel)
        check_cpu(x)
        x = x.contiguous()
        out, inner = torch.empty_like(x), x.new_empty((count, down.inputs))
        self._cpu.mlp(
            self._level,
            x.data_ptr(),
            *gate_up.weights,
            address(up_bias, x.dtype, gate_up.outputs),
            *down.weights,
            address(down_bias, x.dtype, width),
            inner.data_ptr(),
            out.data_ptr(),
            count,
            width,
            down.inputs,
            DTYPES[x.dtype],
            ACTIVATIONS[activation],
        )
        return out

    def prepare_router(self, router: Router) -> NativeRouter | Router:
        return NativeRouter(router, self._panel, self._memory) if router.weight.is_cpu else router

    def route(self, x: Tensor, router: NativeRouter | Router) -> tuple[Tensor, Tensor]:
        if isinstance(router, Router):
            return experts.route(x, router)
        self._check_panel(router.panel)
        check_cpu(x)
        x = x.contiguous()
        if x.dim() != 2 or x.shape[1] != router.hidden or not router.takes(x.dtype):
            raise ValueError(f"{shown(x)} for a router of {router.hidden} elements in {router.packed.dtype}")
        shape = (len(x), router.routing.columns)
        indices, weights = torch.empty(shape, dtype=torch.int64), torch.empty(shape)
        addresses = (each.data_ptr() for each in (x, indices, weights))
        self._cpu.route(self._level, router.address, *addresses, len(x), DTYPES[x.dtype])
        return indices, weights

    def prepare_experts(self, each: Sequence[Mlp], dtype: torch.dtype) -> NativeExperts | Sequence[Mlp]:
        packed = all(is_native(linear.weight, dtype) for mlp in each for linear in mlp)
        return NativeExperts(each, dtype) if packed else each

    def experts(
        self,
        x: Tensor,
        indices: Tensor,
        weights: Tensor,
        each: NativeExperts | Sequence[Mlp],
        activation: Activation,
        add: AddOfTokens | None = None,
    ) -> Tensor:
        if not isinstance(each, NativeExperts):
            return experts.apply(self, x, indices, weights, each, activation, add)
        if add is not None:
            return experts.apply(self, x, indices, weights, each.each, activation, add)
        self._check_panel(each.panel)
        check_cpu(x, indices, weights)
        x, indices, weights = x.contiguous(), indices.contiguous(), weights.float().contiguous()
        if (
            (x.dtype, x.shape[1:]) != (each.dtype, (each.hidden,))
            or indices.shape[:1] != x.shape[:1]
            or indices.shape != weights.shape
            or indices.dim() != 2
            or indices.dtype != torch.int64
        ):
            raise ValueError(
                f"{shown(x)}, indices {shown(indices)} and weights {shown(weights)} for experts of {each.hidden} "
                f"elements in {each.dtype}"
            )
        if each.gated != (activation != "squared_relu"):
            raise ValueError(f"{activation} of experts with{'' if each.gated else 'out'} gates")
        out = torch.empty_like(x)
        addresses = (one.data_ptr() for one in (x, indices, weights, out))
        sizes = (*indices.shape, DTYPES[x.dtype], ACTIVATIONS[activation])
        self._cpu.experts(self._level, each.address, *addresses, *sizes)
        return out

    def prepare_expansion(self, keys: Tensor, values: Tensor) -> NativeExpansion | tuple[Tensor, Tensor]:
        return expansion_of(keys, values, self._panel, self._memory) or (keys, values)

    def attend_latents(
        self,
        query: Tensor,
        expansion: NativeExpansion | tuple[Tensor, Tensor],
        pages: Tensor,
        rows: FewTokens,
        scale: float,
    ) -> Tensor:
        if not isinstance(expansion, NativeExpansion):
            return absorbed(query, expansion, pages, rows, scale)
        self._check_panel(expansion.panel)
        return attend_natively(self._cpu, self._level, query, expansion, pages, rows, scale)

    def prepare_mixer(self, mixer: Mixer) -> NativeMixer:
        return NativeMixer(mixer)

    def mix(
        self,
        inputs: Sequence[Tensor],
        mixer: NativeMixer,
        rows: StepRows | LineRows,
        states: Sequence[Tensor],
    ) -> Tensor:
        assert isinstance(rows, StepRows), "a CPU has no graphs"
        check_cpu(*inputs, *states)
        return run_mixer(self._cpu, self._level, inputs, mixer, rows, states)

    def prepare_stack(self, stack: Stack) -> NativeStack | Stack:
        return native(stack) or stack

    def step_changes(self, batch: Batch) -> StepChanges:
        return StepChanges(batch)

    def prepare_adapter(
        self, layers: LayerChanges, stack: NativeStack | Stack
    ) -> NativeAdapter | LayerChanges:
        return layers if isinstance(stack, Stack) else NativeAdapter(layers, stack.stack, stack.panel)

    def run_stack(
        self,
        stack: NativeStack | Stack,
        batch: Batch,
        pages: Sequence[Pages],
        seconds: Tensor | None = None,
    ) -> Tensor:
        """See `Kernels.run_stack`.

        ``seconds``, float64 [3] or None, is increased by the time of linear layers (including what is done to their
        outputs at once), of attention, and of elementwise operations: only for a `NativeStack`.
        """
        if isinstance(stack, Stack):
            return apply(self, stack, batch, pages)
        with stack.lock:
            inputs = self._inputs(stack, batch)
            call = self._stack_call(stack, batch, pages, seconds, inputs)
            if not self._cpu.run_stack(self._level, *call.arguments):
                raise StepInterrupted
        return call.out

    def prepare_greedy(self, stack: NativeStack | Stack, head: object) -> Greedy | None:
        """See `Kernels.prepare_greedy`: if the extension runs the layers, and the head is not quantized."""
        if isinstance(stack, Stack) or not isinstance(head, PackedWeight):
            return None
        self._check_panel(stack.panel)
        if (head.panel, head.inputs, head.dtype) != (stack.panel, stack.hidden, stack.stack.dtype):
            raise ValueError(
                f"a head of {head.dtype} and {head.inputs} inputs in panels of {head.panel} after a stack of "
                f"{stack.stack.dtype}, {stack.hidden} and {stack.panel}"
            )
        return partial(self._run_greedy, stack, head)

    def _run_greedy(
        self, stack: NativeStack, head: PackedWeight, batch: Batch, pages: Sequence[Pages]
    ) -> Counts:
        with stack.lock:
            call = greedy_call(self._cpu, stack, batch, pages, self._inputs(stack, batch))
            tokens = run_greedy(self._cpu, self._level, head, call)
        if tokens is None:
            raise StepInterrupted
        return tokens

    def prepare_layers(self, stack: Stack) -> NativeStack | None:
        """A stack for `run_layers`; None if this backend cannot run it in one call."""
        return native(stack, self._room)

    def run_layers(
        self, layers: NativeStack, states: Tensor, rotation: Rotation, batch: Batch, pages: Sequence[Pages]
    ) -> Tensor:
        """States [T, hidden] after layers, of those before; ``rotation`` of each token, ``pages`` of each layer."""
        with layers.lock:
            self._check_panel(layers.panel)
            call = layers_call(self._cpu, layers, states, rotation, batch, pages)
            if not self._cpu.run_stack(self._level, *call.arguments):
                raise StepInterrupted
        return call.out

    def _inputs(self, stack: NativeStack, batch: Batch) -> Tensor | None:
        """The inputs of the layers of a stack, if they have any."""
        layers = stack.stack
        if layers.per_layer is None:
            return None
        tokens = layers.per_layer.tokens(batch)
        return inputs_of(self, layers.per_layer, tokens, embedded(layers, batch), layers.eps)

    def _stack_call(
        self,
        stack: NativeStack,
        batch: Batch,
        pages: Sequence[Pages],
        seconds: Tensor | None = None,
        inputs: Tensor | None = None,
    ) -> StackCall:
        self._check_panel(stack.panel)
        return stack_call(self._cpu, stack, batch, pages, seconds, inputs)

    def draft(
        self,
        stack: NativeStack | Stack,
        head: object,
        batch: Batch,
        pages: Sequence[Pages],
        most: Counts,
        least: float,
    ) -> Drafted | None:
        if isinstance(stack, Stack) or not isinstance(head, PackedWeight | PackedIntegers):
            return None
        if stack.stack.per_layer is not None:  # the inputs of a drafted token are made outside of the call
            return None
        if stack.stack.recurrent is not None:  # no state may pass a drafted token
            return None
        with stack.lock:
            call = self._stack_call(stack, batch, pages)
            return run_drafts(self._cpu, self._level, stack, head, call, most, least, batch.block_size)

    def likeliest(self, logits: Tensor) -> Tensor:
        if logits.dtype not in (torch.bfloat16, torch.float32):
            return likeliest(logits.float())
        check_cpu(logits)
        logits = logits.contiguous()
        rows, size = logits.shape
        tokens = logits.new_empty(rows, dtype=torch.int64)
        self._cpu.likeliest(
            self._level, logits.data_ptr(), tokens.data_ptr(), rows, size, DTYPES[logits.dtype]
        )
        return tokens

    def likeliest_outputs(self, x: Tensor, weight: PackedWeight | PackedIntegers | Prepared) -> Tensor:
        """See `Kernels.likeliest_outputs`: in one call, if the weight is not quantized; by its screen if it has one."""
        if not isinstance(weight, PackedWeight):
            return self.likeliest(self.logits(x, weight))
        count, width = x.shape
        if width != weight.inputs or x.dtype != weight.dtype:
            raise ValueError(f"{shown(x)} for a head of {weight.dtype} [{weight.outputs}, {weight.inputs}]")
        self._check_panel(weight.panel)
        check_cpu(x)
        x = x.contiguous()
        tokens = x.new_empty(count, dtype=torch.int64)
        given, sizes = (
            (self._level, x.data_ptr(), *weight.weights),
            (count, width, weight.outputs, DTYPES[x.dtype]),
        )
        screen = weight.screen
        if screen is not None and screen.helps():
            screen.note(self._cpu.screen(*given, *screen.addresses, tokens.data_ptr(), *sizes))
        else:
            self._cpu.likeliest_outputs(*given, tokens.data_ptr(), *sizes)
        return tokens

    def accept(self, drawn: Tensor, drafts: Tensor, first: Tensor, offsets: Tensor) -> Tensor:
        check_cpu(drawn, drafts, offsets)
        counting = torch.empty(len(drawn), dtype=torch.bool)
        lines = [line.contiguous() for line in (drawn, drafts, offsets)]
        if any(line.dtype != torch.int64 or len(line) != len(drawn) for line in lines):
            raise ValueError(f"lines of {[(line.dtype, len(line)) for line in lines]}")
        self._cpu.accept(*(line.data_ptr() for line in (*lines, counting)), len(drawn))
        return counting

    def restrict(self, logits: Tensor, allowed: Allowed) -> Tensor:
        check_cpu(logits)
        logits, words = logits.contiguous(), np.ascontiguousarray(allowed.words)
        rows, size = logits.shape
        if words.dtype != np.int32 or words.shape != (len(allowed.lines), -(-size // 32)):
            raise ValueError(f"words are {words.dtype} {list(words.shape)} for logits {list(logits.shape)}")
        lines = np.full(rows, -1, dtype=np.int64)
        lines[allowed.lines] = np.arange(len(words))
        out = torch.empty_like(logits)
        never = NEVER[logits.dtype]
        addresses = (each.ctypes.data for each in (lines, words))
        self._cpu.permit(logits.data_ptr(), out.data_ptr(), *addresses, rows, size, logits.itemsize, never)
        return out

    def choose(self, logits: Tensor, choice: TokenChoice) -> Tensor:
        check_cpu(logits)
        logits = logits.contiguous()
        rows, size = logits.shape
        for name, line in choice._asdict().items():
            dtype = np.int64 if name == "top_k" else np.float64
            if line.dtype != dtype or line.shape != (rows,) or not line.flags.c_contiguous:
                raise ValueError(f"{name} is {line.dtype} {list(line.shape)} for logits {list(logits.shape)}")
        tokens = logits.new_empty(rows, dtype=torch.int64)
        self._cpu.choose(
            self._level,
            logits.data_ptr(),
            *(line.ctypes.data for line in choice),
            tokens.data_ptr(),
            rows,
            size,
            DTYPES[logits.dtype],
        )
        return tokens
