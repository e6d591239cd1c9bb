"""Calls in slices: when they run, how they end, and that parts of operations equal the whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.compute.images import slices
from headrace.compute.images.slices import SlicedCall, Stopped


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as opened:
        yield opened


def counting(noted: list[int], operations: int = 3) -> Callable[[], str]:
    def function() -> str:
        for number in range(operations):
            noted.append(number)
            torch.add(torch.ones(1), 1)
        return "result"

    return function


def test_it_runs_only_while_it_is_asked_to_and_at_least_one_operation_each_time(
    thread: ThreadPoolExecutor,
) -> None:
    noted = list[int]()
    call = SlicedCall(thread, counting(noted))
    assert not noted
    found = []
    while not call.done:
        call.advance(0.0)
        found.append(len(noted))
    assert found[0] == 1
    assert found == sorted(found)
    assert found[-1] == 3
    assert call.result() == "result"


def test_without_a_limit_it_runs_to_the_end(thread: ThreadPoolExecutor) -> None:
    noted = list[int]()
    call = SlicedCall(thread, counting(noted))
    call.advance(math.inf)
    assert (call.done, noted) == (True, [0, 1, 2])


def test_what_the_function_raises_is_raised_with_its_result(thread: ThreadPoolExecutor) -> None:
    call = SlicedCall(thread, lambda: 1 // 0)
    call.advance(math.inf)
    assert call.done
    with pytest.raises(ZeroDivisionError):
        call.result()


def test_a_stopped_call_ends_where_it_is_and_the_next_one_runs(thread: ThreadPoolExecutor) -> None:
    noted = list[int]()
    unbegun, paused = SlicedCall(thread, counting(noted)), SlicedCall(thread, counting(noted, 1000))
    unbegun.stop()
    paused.advance(0.0)
    before = len(noted)
    paused.stop()
    after = SlicedCall(thread, counting([]))
    after.advance(math.inf)
    assert after.result() == "result"
    assert len(noted) == before < 1000
    for each in (unbegun, paused):
        with pytest.raises(Stopped):
            each.result()
    after.stop()  # it has ended: nothing happens
    assert after.result() == "result"


def test_a_call_that_is_stopped_during_a_slice_ends_the_slice(thread: ThreadPoolExecutor) -> None:
    noted = list[int]()

    def function() -> None:
        counting(noted)()
        call.stop()
        counting(noted, 1000)()

    call = SlicedCall(thread, function)
    call.advance(math.inf)
    assert len(noted) < 1000
    with pytest.raises(Stopped):
        call.result()


def attention(mask: Tensor | None) -> Callable[[Tensor], Tensor]:
    def compute(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x + 1, x - 1, attn_mask=mask)

    return compute


def eager(x: Tensor) -> Tensor:
    scores = torch.matmul(x, x.transpose(2, 3))
    return torch.matmul(F.softmax(scores, dim=-1, dtype=torch.float32), x)


WEIGHT, BIAS = torch.randn(7, 5), torch.randn(7)
OPERATIONS = {
    "linear": (lambda x: F.linear(x, WEIGHT, BIAS), True),
    "module": (torch.nn.Linear(5, 7, bias=False), True),
    "eager": (eager, True),
    "attention": (attention(None), True),
    "one mask": (attention(torch.randn(1, 1, 6, 6)), True),
    "a mask for each head": (attention(torch.randn(2, 4, 6, 6)), False),
    "softmax over heads": (lambda x: F.softmax(x, dim=1), False),
    "softmax over heads by place": (lambda x: F.softmax(x, 1), False),
    "arguments by name": (lambda x: torch.matmul(input=x, other=x.transpose(2, 3)), False),
    "other operations": (lambda x: F.gelu(x).sum(1), False),
}


@pytest.mark.parametrize("name", OPERATIONS)
@torch.inference_mode()
def test_large_operations_are_computed_in_parts(
    name: str, thread: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation, divided = OPERATIONS[name]
    x = torch.randn(2, 4, 6, 5, generator=torch.Generator().manual_seed(0))

    def found() -> tuple[Tensor, int]:
        call, count = SlicedCall(thread, lambda: torch.inference_mode()(operation)(x)), 0
        while not call.done:
            call.advance(0.0)
            count += 1
        return call.result(), count

    whole, few = found()
    monkeypatch.setattr(slices, "PART_PRODUCTS", 7 * 5 * 10)
    monkeypatch.setattr(slices, "MIN_ROWS", 1)
    monkeypatch.setattr(slices, "PART_SCORES", 4 * 6)
    parts, many = found()
    assert (many > few) == divided
    torch.testing.assert_close(whole, operation(x))
    torch.testing.assert_close(parts, whole)
