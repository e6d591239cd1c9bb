"""A tokenizer with more tokens than the model: a text that contains one is refused on every endpoint."""

from __future__ import annotations

import pytest

from tests.api.test_defaults import DOORS

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("path", DOORS)
def test_a_text_with_a_token_that_the_model_does_not_have(house, monkeypatch, path):
    body = {"model": "fox"} | DOORS[path]
    assert house.client.post(path, json=body).status_code == 200
    monkeypatch.setattr(house.model, "vocab_size", 5)
    answer = house.client.post(path, json=body)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "which the model does not have (its ids are 0 to 4)" in message
    assert "remove this text" in message


def test_a_prediction_with_a_token_that_the_model_does_not_have(house, monkeypatch):
    why = house.model.tokenizer.why_unreadable
    spelled = house.model.tokenizer.encode("zebra", add_special_tokens=False)
    monkeypatch.setattr(
        house.model.tokenizer,
        "why_unreadable",
        lambda tokens, size: why(tokens, 0) if list(tokens) == spelled else None,
    )
    body = {"model": "fox", "prediction": {"type": "content", "content": "zebra"}} | DOORS[CHAT]
    answer = house.client.post(CHAT, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("prediction: the tokenizer gives")
    assert answer.json()["error"]["param"] == "prediction"
