"""Embeddings in the cost ledger: their slices are divided by tokens, and all time is still counted once."""

from __future__ import annotations

import pytest

from headrace.core.embedding import Embedded, EmbeddingSlice, SlicedCall
from headrace.core.request import FinishReason, RejectReason
from headrace.observe.cost.account import NOTHING, Key
from headrace.observe.cost.ledger import CostLedger
from headrace.observe.cost.prices import Pricing, TokenPrices
from tests.observe.cost.test_ledger import admitted, arrived, finished, stepped


def sliced(began: float, ended: float, **tokens: int) -> EmbeddingSlice:
    """Calls of tenants with the same names."""
    return EmbeddingSlice(
        began, ended, tuple(SlicedCall(name, name, count) for name, count in tokens.items())
    )


def ended(call: str, tokens: int, rejected: RejectReason | None = None) -> Embedded:
    return Embedded(call, call, "embed", 1, tokens, tokens, 1.0, FinishReason.STOP, rejected)


def check(ledger: CostLedger, **parts: float) -> None:
    balance = ledger.balance()
    assert balance.error < 1e-9
    assert {name: getattr(balance, name) for name in parts} == pytest.approx(parts)


def test_slices_on_an_idle_device() -> None:
    ledger = CostLedger(Pricing(0.5), began=0.0)
    ledger.fold(sliced(10, 14, a=3, b=1), 14)
    ledger.fold(sliced(15, 16, a=1), 16)  # of an open call: what lies between is no idle time
    check(ledger, wall=16, attributed=5, idle=10, overhead=1)
    assert ledger.cost("a").device_seconds == pytest.approx(3 + 1)
    ledger.fold(ended("a", 4), 16)
    ledger.fold(ended("b", 1), 16)
    assert ledger.cost("a").total == pytest.approx(0.5 * 4)
    assert ledger.cost("b").total == pytest.approx(0.5 * 1)
    account = ledger.accounts[Key(0, "a", "default")]
    assert (account.requests, account.prompt_tokens, account.output_tokens) == (1, 4, 0)
    ledger.fold(sliced(20, 21, c=1), 21)
    check(ledger, wall=21, attributed=6, idle=14, overhead=1)


def test_slices_between_the_steps_of_a_request() -> None:
    ledger = CostLedger(Pricing(1.0), began=0.0)
    ledger.fold(arrived("r", 1), 4)
    ledger.fold(admitted("r"), 4)
    ledger.fold(stepped(2, ("r", 0, 4)), 4)
    ledger.fold(sliced(5, 7, a=9), 7)
    ledger.fold(finished("r"), 9)
    ledger.fold(stepped(8, ("r", 4, 1)), 9)
    check(ledger, wall=9, attributed=2 + 2 + 1, idle=1, overhead=1 + 1 + 1)
    assert ledger.cost("r").device_seconds == pytest.approx(3)
    assert ledger.cost("a").device_seconds == pytest.approx(2)


def test_a_slice_during_a_step_is_counted_once() -> None:
    ledger = CostLedger(Pricing(1.0), began=0.0)
    ledger.fold(arrived("r", 0), 3)
    ledger.fold(admitted("r"), 3)
    ledger.fold(sliced(1, 2, a=9), 2)  # the step is computed beside it
    ledger.fold(stepped(0, ("r", 0, 4)), 3)
    ledger.fold(sliced(2.5, 3, a=9), 3)  # told late
    check(ledger, wall=3, attributed=2, idle=0, overhead=1)


def test_prices_of_tokens_hold_for_embeddings_too() -> None:
    ledger = CostLedger(Pricing(tokens=TokenPrices(2e6, 1e6, 9e6)), began=0.0)
    ledger.fold(sliced(0, 1, a=7), 1)
    ledger.fold(ended("a", 7), 1)
    assert ledger.cost("a").total == pytest.approx(14)


def test_a_call_of_which_nothing_was_computed_costs_nothing() -> None:
    ledger = CostLedger(Pricing(1.0), began=0.0)
    ledger.fold(ended("a", 0, RejectReason.TENANT_LIMIT), 1)
    assert ledger.cost("a") == NOTHING
    assert not ledger.accounts
