"""The served model, and the threads for templates."""

from __future__ import annotations

import asyncio
import threading

import pytest

from headrace.api.compile.model import MAX_WAITING, ServedModel, TemplateLanes
from headrace.api.errors import ApiError
from headrace.text.template import ChatTemplate
from tests.api.test_defaults import DOORS
from tests.text.vocabularies import byte_level

FOLDER = "/srv/models/secret-place/qwen"


def model(**more):
    return ServedModel("qwen", byte_level(), ChatTemplate({}), 100, 400, source=FOLDER, **more)


def test_the_card_shows_no_path():
    card = model(aliases=(FOLDER,)).card
    assert card["id"] == card["root"] == "qwen"
    assert "secret-place" not in str(card)


def test_a_request_may_name_the_model_as_it_was_given_at_the_start():
    named = model(aliases=(FOLDER,))
    for name in ("qwen", FOLDER, None):
        named.check_name(name)
    with pytest.raises(ApiError, match="other"):
        named.check_name("other")
    with pytest.raises(ApiError):
        model().check_name(FOLDER)


def test_the_fingerprint_tells_folders_apart():
    other = ServedModel("qwen", byte_level(), ChatTemplate({}), 100, 400, source="/elsewhere/qwen")
    assert other.fingerprint != model().fingerprint


def test_a_tenant_has_one_at_a_time_in_order_and_another_tenant_does_not_wait() -> None:
    async def scene() -> list[str]:
        lanes, begun, gate = TemplateLanes(), list[str](), threading.Event()

        def work(name: str) -> str:
            begun.append(name)
            if name != "b1":
                assert gate.wait(60)
            return name

        first = [
            asyncio.ensure_future(lanes.run("a", lambda n=n: work(f"a{n}"), "messages")) for n in range(3)
        ]
        await asyncio.sleep(0)
        assert await lanes.run("b", lambda: work("b1"), "messages") == "b1"
        assert "a1" not in begun
        gate.set()
        assert await asyncio.gather(*first) == ["a0", "a1", "a2"]
        await asyncio.sleep(0)
        assert lanes._lanes == {}
        return [name for name in begun if name != "b1"]

    assert asyncio.run(scene()) == ["a0", "a1", "a2"]


def test_the_turn_of_a_client_that_has_left_ends_with_its_work() -> None:
    async def scene() -> None:
        lanes, gate, ran = TemplateLanes(), threading.Event(), list[int]()
        left = asyncio.ensure_future(lanes.run("a", lambda: gate.wait(60), "messages"))
        waiting = asyncio.ensure_future(lanes.run("a", lambda: ran.append(1), "messages"))
        also_left = asyncio.ensure_future(lanes.run("a", lambda: ran.append(2), "messages"))
        await asyncio.sleep(0)
        left.cancel()
        also_left.cancel()
        await asyncio.sleep(0.01)
        assert not waiting.done()
        gate.set()
        await waiting
        await asyncio.sleep(0)
        assert ran == [1]
        assert lanes._lanes == {}

    asyncio.run(scene())


def test_too_many_templates_of_one_tenant_are_refused_and_models_own_are_not() -> None:
    async def scene() -> None:
        lanes, gate = TemplateLanes(), threading.Event()
        waiting = [
            asyncio.ensure_future(lanes.run("a", lambda: gate.wait(60), "chat_template"))
            for _ in range(MAX_WAITING + 1)
        ]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match=f"{MAX_WAITING} requests of this tenant wait") as raised:
            await lanes.run("a", lambda: None, "chat_template")
        assert (raised.value.status, raised.value.param) == (429, "chat_template")
        waiting.append(asyncio.ensure_future(lanes.run("a", lambda: True, "messages")))
        gate.set()
        assert all(await asyncio.gather(*waiting))

    asyncio.run(scene())


def test_an_error_of_the_work_is_raised_and_ends_the_turn() -> None:
    async def scene() -> None:
        lanes = TemplateLanes()
        with pytest.raises(ZeroDivisionError):
            await lanes.run("a", lambda: 1 // 0, "messages")
        assert await lanes.run("a", lambda: 2, "messages") == 2

    asyncio.run(scene())


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
