"""A draft model beside the built-in model: its options, its memory, and the same text with and without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.compute.drafting.draft_model import DraftModel
from headrace.compute.model.hub import resolve_folder
from headrace.config import ConfigError, options
from headrace.core.drafting.drafter import BudgetedDrafter
from headrace.core.drafting.forced import ForcedTokenDrafter
from headrace.core.drafting.proposal import DraftRow
from headrace.core.events import Emitted, Finished, Verified
from headrace.core.request import Request, SamplingParams
from headrace.wiring import model
from headrace.wiring.drafting import proposer_of

DRAFTS = {"method": "draft_model", "model": "builtin-draft"}
FIXED = DRAFTS | {"adaptive": False, "num_speculative_tokens": 4}
BYTES = 24 << 20


def load(drafts: dict[str, Any] | None, **more: Any) -> model.Loaded:
    given = {
        "max_model_len": 256,
        "kv_cache_memory_bytes": BYTES,
        "max_num_seqs": 6,
        "dtype": "float32",
        "speculative_config": drafts and json.dumps(drafts),
    }
    return model.load(options(given | more))


def drafter_of(loaded: model.Loaded) -> BudgetedDrafter:
    first = loaded.engine.scheduler._drafted._drafter
    assert isinstance(first, ForcedTokenDrafter)
    found = first.fallback
    assert isinstance(found, BudgetedDrafter)
    return found


def answers(loaded: model.Loaded, temperature: float) -> tuple[dict[str, list[int]], list[Verified]]:
    engine, texts, verified = loaded.engine, dict[str, list[int]](), list[Verified]()
    for i in range(9):  # more than may run at once
        prompt = (
            1,
            3,
            *loaded.tokenizer.encode(f"Tell me a story about {i} birds.", add_special_tokens=False),
        )
        params = SamplingParams(temperature=temperature, max_tokens=20 + 5 * i, ignore_eos=i % 2 == 0)
        # With these seeds no draw is nearer than 1e-6 to the edge between two tokens, where rounding would decide.
        engine.submit(Request(f"r{i}", prompt, params, seed=40 + i), 0.0)
    left, now = 9, 0.0
    while left:
        now += 0.01
        for event in engine.step(now):
            if isinstance(event, Emitted):
                texts.setdefault(event.request_id, []).extend(event.tokens)
            elif isinstance(event, Verified):
                verified.append(event)
            left -= isinstance(event, Finished)
    engine.check_consistency()
    return texts, verified


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_the_same_with_and_without_a_draft_model(temperature: float) -> None:
    plain, drafted = load(None), load(FIXED)
    expected, _ = answers(plain, temperature)
    found, verified = answers(drafted, temperature)
    assert found == expected
    assert sum(event.accepted for event in verified) > 0.3 * sum(event.drafted for event in verified) > 0
    (proposer,) = drafter_of(drafted).proposers
    assert isinstance(proposer, DraftModel)
    assert not len(proposer.pages), "pages of requests that have ended"
    proposer.pages.check()
    model.close(plain)
    model.close(drafted)


def test_a_draft_model_that_fails_costs_its_drafts_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, drafted = load(None), load(FIXED)
    expected, _ = answers(plain, 0.0)
    proposer = proposer_of(drafter_of(drafted), DraftModel)
    assert proposer is not None

    def fail(*call: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(proposer._forward, "draft", fail)
    found, verified = answers(drafted, 0.0)
    assert found == expected
    assert not verified
    warned = [record.getMessage() for record in caplog.records if "draft model" in record.getMessage()]
    assert warned == ["the draft model failed (out of memory); requests continue without its drafts"]
    model.close(plain)
    model.close(drafted)


def test_the_memory_plan_has_the_draft_model_within_the_bytes_of_the_options() -> None:
    plain, loaded = load(None), load(DRAFTS)
    proposer = proposer_of(drafter_of(loaded), DraftModel)
    assert proposer is not None
    ledger, kv = loaded.ledger, proposer._forward._kv
    assert kv.nbytes == ledger.draft_kv_bytes
    assert ledger.draft_weight_bytes == proposer._forward._decoder.nbytes  # type: ignore[attr-defined]
    assert 0.95 * BYTES < ledger.kv_bytes + ledger.draft_kv_bytes <= BYTES
    assert ledger.kv_bytes < plain.ledger.kv_bytes
    added = (
        ledger.total_bytes - ledger.process_bytes - (plain.ledger.total_bytes - plain.ledger.process_bytes)
    )
    activations = ledger.activation_bytes - plain.ledger.activation_bytes
    assert abs(added - ledger.draft_weight_bytes - activations) < 0.05 * BYTES
    assert any(line.startswith("draft model") for line in model.describe(loaded))
    model.close(plain)
    model.close(loaded)


def test_a_draft_model_is_quantized_if_asked() -> None:
    plain, small = load(DRAFTS), load(DRAFTS | {"quantization": "int8"})
    assert small.ledger.draft_weight_bytes < plain.ledger.draft_weight_bytes
    proposer = proposer_of(drafter_of(small), DraftModel)
    assert proposer is not None
    proposer._least_confidence = 0.0
    assert proposer.propose([DraftRow(Request("r", (1,)), [1, 3, 900, 5], 3)])[0] is not None
    model.close(plain)
    model.close(small)


def test_another_vocabulary_is_refused_with_both_sizes(tmp_path: Path) -> None:
    config = json.loads((resolve_folder("builtin-draft") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 5000}))
    with pytest.raises(ConfigError) as caught:
        load(DRAFTS | {"model": str(tmp_path)})
    message = str(caught.value)
    assert message.startswith("--speculative-config: draft model: ")
    assert "5,000" in message
    assert "4,096" in message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"intermediate_size": 10**9}, "the weights need at least"),
        ({"model_type": "unheard-of", "architectures": ["Unheard"]}, "Unheard"),
    ],
)
def test_a_draft_model_that_cannot_be_loaded_is_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    config = json.loads((resolve_folder("builtin-draft") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(ConfigError, match=f"--speculative-config: draft model: .*{message}"):
        load(DRAFTS | {"model": str(tmp_path)}, load_format="dummy")
    with pytest.raises(ConfigError, match=r"--speculative-config: draft model: .*does not exist"):
        load(DRAFTS | {"model": "/nowhere/at/all"})
