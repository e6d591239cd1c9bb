"""Warnings made from events are counted and limited in rate."""

from __future__ import annotations

import logging

import pytest

from headrace.core.events import (
    Audited,
    DraftingFailed,
    Layer,
    Preempted,
    PreemptReason,
    Stepped,
    TransferFailed,
    TurnedAway,
)
from headrace.core.plan import Tier
from headrace.core.request import RejectReason
from headrace.observe.log.warnings import STORM_PREEMPTIONS, STORM_REPORT_SECONDS, WarningLog

STEP = Stepped(1, 0, 1, 24, 1, 0, 3, 10, 48, 40)


def counts(caplog: pytest.LogCaptureFixture) -> list[tuple[str, int]]:
    return [(record.getMessage().partition(":")[0], record.fields["count"]) for record in caplog.records]


@pytest.fixture(autouse=True)
def _warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "headrace")


def test_overload_is_logged_at_once_and_then_with_its_count(caplog) -> None:
    log = WarningLog()
    for number in range(50):
        log.fold(TurnedAway(f"r{number}", "acme", "default", RejectReason.QUEUE_FULL), 100.0 + number / 10)
    assert counts(caplog) == [("request rejected", 1)]
    log.fold(STEP, 109.0)
    assert len(caplog.records) == 1
    log.fold(STEP, 110.5)  # no further rejection is needed for the rest to be logged
    assert counts(caplog) == [("request rejected", 1), ("request rejected", 49)]
    assert "--max-num-queued-reqs" in caplog.text
    assert "acme" not in caplog.text
    log.fold(STEP, 200.0)
    assert len(caplog.records) == 2


def test_reasons_are_logged_apart(caplog) -> None:
    log = WarningLog()
    log.fold(TurnedAway("a", "t", "default", RejectReason.QUEUE_FULL), 1.0)
    log.fold(TurnedAway("b", "t", "default", RejectReason.TENANT_LIMIT), 1.0)
    assert len(caplog.records) == 2


def test_a_preemption_storm_is_logged_once_a_minute(caplog) -> None:
    log = WarningLog()
    for number in range(STORM_PREEMPTIONS - 1):
        log.fold(Preempted("r", PreemptReason.NO_BLOCKS, 10), number * 0.1)
    assert not caplog.records
    for number in range(30):
        log.fold(Preempted("r", PreemptReason.NO_BLOCKS, 10), 2.0 + number)
    assert counts(caplog) == [("preemption storm", STORM_PREEMPTIONS)]
    assert caplog.records[0].fields["lost_tokens"] == 10 * STORM_PREEMPTIONS
    for number in range(STORM_PREEMPTIONS):
        log.fold(Preempted("r", PreemptReason.NO_BLOCKS, 10), 2.0 + STORM_REPORT_SECONDS + number * 0.1)
    assert len(caplog.records) == 2


def test_few_preemptions_are_no_storm(caplog) -> None:
    log = WarningLog()
    for number in range(100):
        log.fold(Preempted("r", PreemptReason.NO_BLOCKS, 10), number * 1.0)
    assert not caplog.records


def test_failed_audits_and_transfers_are_logged(caplog) -> None:
    log = WarningLog()
    log.fold(Audited("r", Layer.SEMANTIC, True), 1.0)
    assert not caplog.records
    log.fold(Audited("r", Layer.SEMANTIC, False), 1.0)
    log.fold(TransferFailed(Tier.HOST, Tier.DISK), 1.0)
    assert counts(caplog) == [("audit failed", 1), ("copy of KV blocks from host to disk failed", 1)]


def test_drafting_that_failed_is_logged(caplog) -> None:
    WarningLog().fold(DraftingFailed("RuntimeError: no"), 1.0)
    assert "speculative decoding failed and is switched off: RuntimeError: no" in caplog.text
