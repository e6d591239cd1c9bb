"""Where a model cannot sleep, and why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.config import options
from headrace.service.sleep import Part
from headrace.wiring.sleep import refused_parts


def refused(
    *, kind: str = "cpu", states: int = 0, pooling: tuple[str, ...] = (), **given: Any
) -> dict[Part, str]:
    shape = SimpleNamespace(state_bytes=states, architecture="Lfm2ForCausalLM")
    loaded: Any = SimpleNamespace(name="fox", facts=SimpleNamespace(kind=kind), shape=shape)
    return refused_parts(loaded, options(given), pooling)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"kind": "cuda"}, "a GPU"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        (
            {
                "kv_transfer_config": '{"kv_connector": "SharedMemoryConnector", "kv_role": "kv_both", "kv_port": 1}'
            },
            "--kv-transfer-config",
        ),
        ({"record_trace": "trace.db"}, "--record-trace"),
    ],
)
def test_nothing_sleeps(given: dict[str, Any], named: str) -> None:
    found = refused(**given)
    assert found.keys() == set(Part)
    assert all(named in why for why in found.values())


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"states": 64}, "Lfm2ForCausalLM"),
        ({"speculative_config": '{"method": "draft_model", "model": "builtin"}'}, "a draft model"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"pooling": ("other", "fox")}, "--embedding-model"),
    ],
)
def test_weights_stay(given: dict[str, Any], named: str) -> None:
    found = refused(**given)
    assert found.keys() == {Part.WEIGHTS}
    assert named in found[Part.WEIGHTS]


def test_a_plain_model_sleeps() -> None:
    assert refused(pooling=("other",), speculative_config='{"method": "ngram"}') == {}
