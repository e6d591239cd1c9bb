from __future__ import annotations

import pytest

from headrace.observe.fairness import FairnessWindow


def test_a_tenant_that_asks_for_little_and_gets_it_is_served_fairly() -> None:
    window = FairnessWindow()
    window.wait("flood", 1e6, 0.0)
    for second in range(10):
        window.serve("light", 10.0, second + 0.1)
        window.serve("flood", 90.0, second + 0.2)
    window.close()
    assert window.index() == pytest.approx(1.0)


def test_a_tenant_that_is_held_back_by_another_is_not() -> None:
    window = FairnessWindow()
    window.wait("flood", 1e6, 0.0)
    window.wait("light", 1e6, 0.0)
    for second in range(10):
        window.serve("flood", 99.0, second + 0.1)
        window.serve("light", 1.0, second + 0.2)
    window.close()
    assert window.index() == pytest.approx(0.51, abs=0.01)


def test_weights_are_shares() -> None:
    weights = {"gold": 3.0, "iron": 1.0}
    window = FairnessWindow(weights.__getitem__)
    for tenant in weights:
        window.wait(tenant, 1e6, 0.0)
    for second in range(4):
        window.serve("gold", 75.0, second)
        window.serve("iron", 25.0, second)
    window.close()
    assert window.index() == pytest.approx(1.0)


def test_what_is_older_than_the_window_is_forgotten() -> None:
    window = FairnessWindow(slices=2)
    window.wait("a", 1e6, 0.0)
    window.wait("b", 1e6, 0.0)
    window.serve("a", 100.0, 0.5)
    window.close()
    assert window.index() == pytest.approx(0.5)
    for second in (1, 2, 3):
        window.serve("a", 50.0, second)
        window.serve("b", 50.0, second)
    assert window.index() == pytest.approx(1.0)


def test_a_tenant_without_waiting_requests_is_dropped() -> None:
    """Work is a fraction where answers are foretold by a mean: added and taken away again it must be nothing."""
    window = FairnessWindow()
    for tokens in (0.1, 0.2, 0.3):
        window.wait("a", tokens, 0.0)
    for tokens in (0.1, 0.2, 0.3):
        window.wait("a", -tokens, 0.0)
    assert not window._waiting


def test_nothing_is_fair() -> None:
    window = FairnessWindow()
    assert window.index() == 1.0
    window.wait("a", 10.0, 0.0)
    window.wait("a", -10.0, 5.0)
    assert window.index() == 1.0
