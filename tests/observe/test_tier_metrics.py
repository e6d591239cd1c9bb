from __future__ import annotations

from headrace.core.events import Moved, MoveReason, RestoreDeclined, TransferFailed
from headrace.core.plan import Tier
from headrace.observe.metrics import Metrics
from headrace.observe.metrics_page import MetricsPage
from tests.observe.test_metrics import page


def test_copies_between_tiers_are_counted_in_bytes_and_what_they_were_good_for() -> None:
    sheet = MetricsPage()
    metrics = Metrics(sheet)
    for event in (
        Moved(Tier.DEVICE, Tier.HOST, 1, 100, MoveReason.EVICTED),
        Moved(Tier.DEVICE, Tier.HOST, 1, 100, MoveReason.EVICTED),
        Moved(Tier.HOST, Tier.DEVICE, 3, 300, MoveReason.RESTORED, "r"),
        RestoreDeclined("r", 32),
        TransferFailed(Tier.HOST, Tier.DISK),
    ):
        metrics.fold(event, 1.0)
    shown = page(sheet)
    moved = "headrace:kv_offload_bytes_total"
    assert shown[f"{moved}{{reason=evicted,source=device,target=host}}"] == 200
    assert shown[f"{moved}{{reason=restored,source=host,target=device}}"] == 300
    assert shown["headrace:kv_offload_hits_total"] == 3
    assert shown["headrace:kv_offload_declined_tokens_total"] == 32
    assert shown["headrace:kv_offload_failures_total{source=host,target=disk}"] == 1
