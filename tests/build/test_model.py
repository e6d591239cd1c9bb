"""The composition root, as far as the room tests and the real servers of `tests/api` do not show it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from headrace.build import model
from headrace.config import options


def test_warming_up_waits_for_no_gang(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = model.load(
        options(
            {
                "scheduling_policy": "static",
                "static_batch_timeout": 3600.0,
                "max_model_len": 256,
                "max_num_seqs": 4,
                "kv_cache_memory_bytes": 16 << 20,
            }
        )
    )
    ticks = iter(range(1000))
    clock = SimpleNamespace(monotonic=lambda: float(next(ticks)), perf_counter=lambda: 0.0)
    monkeypatch.setattr(model, "time", clock)
    model.warm_up(loaded)
    assert loaded.engine.wake_at(0.0) is None
    loaded.engine.check_books()
