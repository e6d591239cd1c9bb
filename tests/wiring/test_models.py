from __future__ import annotations

import pytest

from headrace.config import ConfigError
from headrace.service.model_servers import Report
from headrace.wiring.models import check_memory

GIB = 1 << 30


def model(name: str, total: int, room: int, device: str = "CPU") -> tuple[str, Report]:
    return name, Report([name], device, total * GIB, room * GIB)


def test_models_that_fit_together():
    check_memory([model("a", 3, 8)])
    check_memory([model("a", 3, 8), model("b", 5, 7)])


def test_models_that_fit_alone_only():
    with pytest.raises(
        ConfigError, match=r"9\.00 GiB together \(a 3\.00 GiB, b 6\.00 GiB\), and CPU had 8\.00"
    ):
        check_memory([model("a", 3, 8), model("b", 6, 8)])


def test_devices_are_counted_apart():
    check_memory([model("a", 7, 8), model("b", 6, 8, "GPU"), model("c", 1, 8)])


def test_a_model_without_an_engine_reports_no_memory():
    check_memory([("embedder", Report(["embedder"])), model("b", 7, 8)])
