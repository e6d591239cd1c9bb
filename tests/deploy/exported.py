"""What a server exports, as the code that writes the metrics page declares it."""

from __future__ import annotations

from typing import Any

from headrace.core.memory.departure import PromptMemory
from headrace.observe.cost.ledger import CostLedger, CostMeter
from headrace.observe.cost.prices import Pricing
from headrace.observe.goodput import Goodput
from headrace.observe.metrics import Metrics, Traffic
from headrace.observe.metrics_page import MetricsPage
from headrace.observe.prefixes import PrefixBook
from headrace.observe.resources import ResourceMeter
from headrace.observe.work import ModelWork, Peaks, WorkMeter


class Measured:
    """Stands for sources of resources that this machine may not have."""

    measurable = measures_energy = True

    def __getattr__(self, name: str) -> Any:
        return {"seconds": dict, "memory": lambda: (0, 0)}.get(name, float)


def metrics_page() -> MetricsPage:
    """The page of a server that has done nothing yet."""
    page = MetricsPage("headrace", {"model_name": "tiny"})
    Metrics(page, cache_config={"block_size": "16", "num_gpu_blocks": "1"})
    Goodput(page)
    ledger, source = CostLedger(Pricing()), Measured()
    CostMeter(page, ledger, float)
    WorkMeter(page, ledger, ModelWork(1, 1, 1, 1, 1), float, slots=1, peaks=Peaks(1.0, 1.0))
    Traffic(page)
    ResourceMeter(page, int, source, source, source)
    PrefixBook(PromptMemory(0), 16, page)
    return page


def registry() -> dict[str, set[str]]:
    """The names of all series without their prefix, each with its labels."""
    page = metrics_page()
    named: dict[str, set[str]] = {}
    for counter in page.counters:
        named[f"{counter.name}_total"] = set(counter.labels)
    for gauge in page.gauges:
        named[gauge.name] = set(gauge.labels)
    for histogram in page.histograms:
        named |= {f"{histogram.name}_{part}": set(histogram.labels) for part in ("sum", "count")}
        named[f"{histogram.name}_bucket"] = {*histogram.labels, "le"}
    return {name.removeprefix("headrace:"): labels for name, labels in named.items()}
