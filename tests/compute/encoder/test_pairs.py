"""The cross-encoder as a judge of pairs: symmetric, in batches, and silent about what it cannot read."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.compute.encoder import sentences
from headrace.compute.encoder.sentences import PairJudge
from headrace.compute.model.spec import ModelError
from tests.doubles.tiny_encoder import write_cross_encoder


def test_pairs_are_scored_in_both_orders_and_in_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sentences, "_PAIR_BATCH", 2)
    judge = PairJudge.from_name(str(write_cross_encoder(tmp_path)))
    asked = [("a b c", "d e"), ("d e", "a b c"), ("a", "a"), ("x y z", "a")]
    scores = judge.score(asked)
    assert scores[0] == pytest.approx(scores[1], abs=1e-6)
    alone = [judge.score([pair])[0] for pair in asked]
    assert scores == pytest.approx(alone, abs=1e-6)
    assert len({round(score, 6) for score in scores if score is not None}) == 3
    assert all(0.0 < score < 1.0 for score in scores if score is not None)
    assert judge.boundary == 0.5
    assert judge.name.startswith(f"{tmp_path.name}@")


def test_a_pair_that_is_too_long_has_no_score(tmp_path: Path) -> None:
    judge = PairJudge.from_name(str(write_cross_encoder(tmp_path)))
    long, short = judge.score([("a " * 20, "b " * 20), ("a", "b")])
    assert long is None
    assert short is not None


def test_another_checkpoint_has_another_name(tmp_path: Path) -> None:
    identity = {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}
    one = PairJudge.from_name(str(write_cross_encoder(tmp_path / "a" / "m")))
    other = PairJudge.from_name(str(write_cross_encoder(tmp_path / "b" / "m", **identity)))
    assert other.boundary == 0.0
    assert one.name != other.name
    with pytest.raises(ModelError):
        PairJudge.from_name(str(tmp_path / "gone"))
