"""Calls the C++ kernels with wrong arguments, as a program: it prints how many calls were refused, or ends by a signal.

- ``entries``: every function of the extension, with one argument of a right call replaced.
- ``wrappers``: every method of `CppKernels`, with tensors of other shapes, types, places in memory, or devices.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.compute.kernels import HeadShape, Pages
from headrace.compute.kernels.cpp import CppKernels
from headrace.compute.kernels.experts import Mlp, Router, Routing
from headrace.compute.kernels.latent import FewTokens
from headrace.compute.kernels.mixers import Convolution, GatedDelta, StepRows
from headrace.compute.kernels.packed import PackedWeight, code, narrowed, pack_screen
from headrace.compute.kernels.stack import Linear
from headrace.compute.kernels.step_arrays import StepArrays
from headrace.compute.sampling.choice import TokenChoice
from headrace.compute.sampling.penalties import Allowed
from headrace.core.plan import Row
from tests.compute.kernels.stacks import MIXED, make, pages_for
from tests.compute.kernels.test_hybrid_stacks import BATCHES, qwen, with_states
from tests.compute.kernels.weights import quantized_weight
from tests.oracle.harness import pack

WRONG = (-1, -(2**63), 2**63 - 1, 2**64, 2**58, 1.5, "8", None, b"", (), np.zeros(0), np.zeros((0,), "V0"))
EXCEPTIONS = (ValueError, TypeError, IndexError, OverflowError, BufferError, MemoryError, RuntimeError)
MORE = (ArithmeticError, AttributeError, KeyError)  # of Python's own, before anything native runs
EMPTY = replace(
    MIXED,
    tokens=MIXED.tokens[:0],
    positions=MIXED.positions[:0],
    slot_mapping=MIXED.slot_mapping[:0],
    query_starts=MIXED.query_starts[:1],
    context_lens=MIXED.context_lens[:0],
    block_tables=MIXED.block_tables[:0],
    logits_indices=MIXED.logits_indices[:0],
    kept={},
)


class Entries:
    """The extension, each of whose calls is first tried with arguments that are wrong one by one."""

    def __init__(self, cpu: Any) -> None:
        self._cpu = cpu
        self.refused: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._cpu, name)

        def called(*given: Any) -> Any:
            if given and name not in ("set_threads",):
                for place in range(len(given)):
                    zero = (0,) if isinstance(given[place], int) and given[place] > 1 << 32 else ()
                    for wrong in (*WRONG, *zero):
                        self._try(function, name, (*given[:place], wrong, *given[place + 1 :]))
                self._try(function, name, given[:-1])
                self._try(function, name, (*given, 0))
            return function(*given)

        return called

    def _try(self, function: Any, name: str, given: tuple[Any, ...]) -> None:
        try:
            function(*given)
        except EXCEPTIONS:
            self.refused[name] += 1


def screened_head(kernels: CppKernels, outputs: int = 24, inputs: int = 48) -> PackedWeight:
    weight = torch.randn(outputs, inputs)
    packed = kernels.prepare_linear(weight)
    assert isinstance(packed, PackedWeight)
    return packed._replace(screen=pack_screen(weight, kernels._panel, kernels._memory))


def calls(kernels: CppKernels, turn: Callable[[Any], Any]) -> None:
    """One right call of each method, whose arguments pass through ``turn``."""
    x, dtype = torch.randn(3, 16), torch.bfloat16

    def call(method: Callable[..., Any], *given: Any) -> None:
        method(*(turn(each) for each in given))

    zeros = quantized_weight(8, 16, 2, 4, 16, zeros=True)
    for weight in (torch.randn(8, 16), torch.ones(8, 16), quantized_weight(8, 16, 2, 8, 8), zeros):
        call(kernels.linear, x, kernels.prepare_linear(weight), torch.randn(8))
    call(kernels.rms_norm, x, torch.ones(16), 1e-5)
    call(kernels.add_rms_norm, x, x + 1, torch.ones(16), 1e-5)
    call(kernels.gated_activation, x, "silu")
    of = Mlp(*(Linear(kernels.prepare_linear(torch.randn(shape)), None) for shape in ((128, 16), (16, 64))))
    call(kernels.mlp, x, of, "silu")
    router = kernels.prepare_router(Router(torch.randn(3, 16), None, Routing(3, 2)))
    call(kernels.route, x, router)
    linears = [Linear(kernels.prepare_linear(torch.randn(shape)), None) for shape in ((16, 16), (16, 8))]
    experts = kernels.prepare_experts([Mlp(*linears)] * 3, torch.float32)
    call(kernels.experts, x, torch.tensor([[0, 2], [1, 2], [0, 1]]), torch.rand(3, 2), experts, "silu")
    shape, pages = HeadShape(4, 2, 16), pages_for(torch.float32)[0]
    turned = torch.zeros(3, 2, 8)
    slots = torch.tensor([1, 2, 5])
    call(kernels.rope_write_kv, torch.randn(3, 128), shape, turned, torch.ones(6, 16), 1e-5, slots, pages)
    plan = kernels.plan_attention(turn(MIXED), turn(None), torch.float32)
    call(kernels.paged_attention, torch.randn(8, 4, 16), pages, plan, 0.25, None, torch.randn(4))
    call(kernels.likeliest, torch.randn(3, 40).to(dtype))
    call(kernels.likeliest_outputs, x, kernels.prepare_linear(torch.randn(40, 16)))
    call(kernels.likeliest_outputs, x, screened_head(kernels, 40, 16))
    call(kernels.copy, torch.zeros(40), torch.ones(40))
    if kernels.coded:
        weight = turn(torch.randn(70, 4096).to(dtype))
        code(kernels._cpu, kernels._level, weight, kernels._panel, kernels._memory)
    narrowed(kernels._cpu, turn(torch.ones(70, 16)))
    expansion = kernels.prepare_expansion(torch.randn(2, 16, 32), torch.randn(2, 8, 32))
    of_latents = FewTokens((1, 2), (3, 5), torch.tensor([[1, 2], [4, 3]], dtype=torch.int32))
    call(kernels.attend_latents, torch.randn(3, 2, 24), expansion, torch.randn(5, 4, 1, 40), of_latents, 0.3)
    choice = TokenChoice(*(np.full(3, 5 if name == "top_k" else 0.5) for name in TokenChoice._fields))
    call(kernels.choose, torch.randn(3, 40), choice)
    call(kernels.restrict, torch.randn(3, 40), Allowed(np.array([0, 2]), np.zeros((2, 2), np.int32)))
    count = torch.arange(4)
    call(kernels.accept, count, count, count, count)
    call(kernels.read, torch.arange(99), 2)
    stack = kernels.prepare_stack(make(kernels, torch.float32, rich=True))
    call(kernels.run_stack, stack, replace(MIXED, kept={}), pages_for(torch.float32))
    for of_head in (kernels.prepare_linear(torch.randn(24, 48)), screened_head(kernels)):
        run_greedy = kernels.prepare_greedy(stack, of_head)
        assert run_greedy is not None
        call(run_greedy, replace(MIXED, kept={}), pages_for(torch.float32))
    ends = pack([*range(3)], [5, 3], [1, 2], [[1, 2, 7], [4, 5, 6]], [0, 2], 4, torch.device("cpu"))
    head = kernels.prepare_linear(torch.randn(24, 48))
    call(kernels.draft, stack, head, ends, pages_for(torch.float32), np.array([2, 1]), 0.1)
    hybrid = with_states(qwen(kernels, torch.float32, "plain"))
    assert hybrid.recurrent is not None
    with hybrid.recurrent.step(BATCHES[0]):
        call(kernels.run_stack, kernels.prepare_stack(hybrid), BATCHES[0], pages_for(torch.float32)[:1])
    delta = GatedDelta(
        Convolution(torch.randn(4, 32), None), -torch.rand(2), torch.randn(2), torch.rand(8), 1, 2, 8, 8, 1e-6
    )
    inputs, states = (torch.randn(3, 48), torch.randn(3, 4)), (torch.zeros(5, 3, 32), torch.zeros(5, 2, 8, 8))
    of_rows = StepRows(np.array([4, 1]), np.array([0, 1, 3]), np.array([True, False]), np.array([0, 1]))
    call(kernels.mix, inputs, kernels.prepare_mixer(delta), of_rows, states)
    arrays = StepArrays(kernels._cpu, 4)
    rows = (Row(0, 0, 2, (1,), True, ()), Row(1, 3, 3, (), True, (4, 5)))
    call(arrays.columns, rows, 24)
    tables, tokens = np.zeros((2, 4), np.int32), np.zeros((2, 16), np.int32)
    ints = [np.array(each) for each in ([0, 1], [0, 3], [2, 3], [0, 1], [4, 4])]
    arrays.pack(*map(turn, (*ints[:4], tables, ints[4], tokens)), limit=16)
    call(arrays.store, tokens, ints[0], ints[1], ints[2])


def other_tensor(rng: random.Random, tensor: Tensor) -> Tensor:
    """A tensor that does not fit where ``tensor`` does, or has unusual numbers."""
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.int32, torch.int64, torch.bool]
    ways: list[Callable[[], Tensor]] = [
        lambda: tensor.to(rng.choice(dtypes)),
        lambda: tensor.to("meta"),
        lambda: tensor[:0],
        lambda: tensor[1:],
        lambda: tensor[..., :-1],
        lambda: tensor[..., :0],
        lambda: tensor.repeat_interleave(2, -1)[..., ::2],
        lambda: tensor.reshape(-1),
        lambda: tensor[None],
        lambda: tensor.transpose(0, -1),
        lambda: tensor[:1].expand_as(tensor),
        lambda: torch.cat([tensor, tensor]),
        lambda: torch.full_like(tensor, -1),
        lambda: torch.full_like(tensor, 100),
        lambda: torch.full_like(tensor, 2**31 - 1 if tensor.dtype != torch.int8 else 127),
        lambda: torch.full_like(tensor, torch.nan if tensor.is_floating_point() else -(2**31)),
        lambda: tensor.to_sparse(),
        lambda: torch.zeros(()),
    ]
    return rng.choice(ways)()


def other_array(rng: random.Random, array: np.ndarray[Any, Any]) -> Any:
    ways: list[Callable[[], Any]] = [
        lambda: array[:0],
        lambda: array[1:],
        lambda: array.astype(rng.choice(["f4", "i4", "i8", "f8", "V8", "O"])),
        lambda: np.repeat(array, 2, -1)[..., ::2],
        lambda: array[..., :-1],
        lambda: np.full_like(array, -1),
        lambda: np.full_like(array, 10**6),
        lambda: np.full_like(array, np.nan if array.dtype.kind == "f" else np.iinfo(array.dtype).max),
        lambda: np.full_like(array, np.inf if array.dtype.kind == "f" else np.iinfo(array.dtype).min),
        lambda: np.concatenate([array, array]),
        lambda: np.full_like(array, 0),
    ]
    return rng.choice(ways)()


def other(rng: random.Random, value: Any) -> Any:
    """Something wrong in place of ``value``."""
    if isinstance(value, Tensor):
        return other_tensor(rng, value)
    if isinstance(value, np.ndarray):
        return other_array(rng, value)
    if isinstance(value, Pages | TokenChoice | Allowed | HeadShape | StepRows | FewTokens):
        name = rng.choice(value._fields)
        return value._replace(**{name: other(rng, getattr(value, name))})
    if isinstance(value, tuple) and value:
        place = rng.randrange(len(value))
        return rng.choice([value[:-1], (*value[:place], other(rng, value[place]), *value[place + 1 :])])
    if type(value) is type(MIXED):
        names = ["tokens", "positions", "slot_mapping", "query_starts", "context_lens", "block_tables"]
        name = rng.choice([*names, "logits_indices", "block_size", "empty"])
        if name == "empty":
            return EMPTY
        return replace(value, **{name: other(rng, getattr(value, name))}, kept={})
    if isinstance(value, float):
        return rng.choice([0.0, -1.0, float("nan"), float("inf"), "1", None])
    if isinstance(value, int):
        return rng.choice([0, -1, 1, 3, value + 1, 2**40, 2**63, "1", None, 1.5])
    return rng.choice([value, None, 0, -1, 2**62])


def wrappers(kernels: CppKernels, seed: int, rounds: int) -> int:
    """Turn one argument of one call after the other; returns how many were refused."""
    rng, refused, places = random.Random(seed), 0, 0

    def count(value: Any) -> Any:
        nonlocal places
        places += 1
        return value

    calls(kernels, count)
    for number in range(rounds):
        left = number % places

        def turn(value: Any) -> Any:
            nonlocal left
            left -= 1
            return other(rng, value) if left == -1 else value

        try:
            calls(kernels, turn)
        except (*EXCEPTIONS, *MORE, AssertionError):
            refused += 1
    return refused


def entries(kernels: CppKernels) -> int:
    recorded = Entries(kernels._cpu)
    kernels._cpu = recorded
    calls(kernels, lambda value: value)
    functions = {
        name for name in dir(recorded._cpu) if callable(getattr(recorded._cpu, name)) and name[0] != "_"
    }
    untried = functions - set(recorded.refused) - {"threads", "supported_levels", "set_threads", "panel"}
    assert not untried, f"no call of {sorted(untried)} was tried"
    return sum(recorded.refused.values())


if __name__ == "__main__":
    torch.manual_seed(0)
    what, level, number, rounds = sys.argv[1:]
    made = CppKernels(level)
    made.threads = 2
    print(entries(made) if what == "entries" else wrappers(made, int(number), int(rounds)))
