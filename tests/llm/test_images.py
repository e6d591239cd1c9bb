"""Conversations with images: the answers of `LLM` and `AsyncLLM` are those of the server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from starlette.testclient import TestClient

from headrace import LLM, AsyncLLM, SamplingParams
from headrace.config import ConfigError, options
from headrace.core.request import InvalidParameter
from headrace.wiring.server import build_app
from tests.api.image_text import data_url
from tests.oracle.test_images import IMAGE, make, picture

TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }} {% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<image> {% else %}{{ part.text }} {% endif %}{% endfor %}"
    "{% endif %}{% endfor %}w3"
)
SIZES: dict[str, Any] = {
    "max_model_len": 120,
    "block_size": 4,
    "kv_cache_memory_bytes": "1MiB",
    "dtype": "float32",
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def file(number: int, kind: str = "PNG") -> tuple[Image.Image, bytes]:
    made = picture(number)
    image = Image.frombytes("RGB", made[:2], made.pixels)
    written = BytesIO()
    image.save(written, kind)
    return image, written.getvalue()


def url_part(number: int, **more: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(file(number)[1]), **more}}


def user(*parts: Any) -> list[dict[str, Any]]:
    shown = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": shown}]


def made_llava(folders: pytest.TempPathFactory) -> Path:
    """The folder of a tiny LLaVA with a chat template."""
    made = folders.mktemp("llava")
    make("llava", made)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_llava(tmp_path_factory)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **SIZES, limit_mm_per_prompt={"image": 3}, max_image_pixels=10_000) as made:
        yield made


def said(llm: LLM, messages: Any) -> tuple[list[int], list[int]]:
    (output,) = llm.chat(messages, GREEDY, progress=False)
    return output.prompt_token_ids, output.outputs[0].token_ids


@pytest.mark.slow
def test_urls_and_images_of_pillow_are_equal_and_other_images_are_not(llm: LLM) -> None:
    by_url = said(llm, user("w1", url_part(1), "w2"))
    assert by_url[0].count(IMAGE) > 1
    pil = {"type": "image_pil", "image_pil": file(1)[0]}
    assert said(llm, user("w1", pil, "w2")) == by_url
    assert said(llm, user("w1", url_part(2), "w2"))[1] != by_url[1]


@pytest.mark.slow
def test_answers_are_those_of_the_server(llm: LLM, folder: Path) -> None:
    app, _ = build_app(options({"model": str(folder), **SIZES}))
    conversations = [
        user("w1", url_part(1), "w2", url_part(2)),
        user(url_part(3, detail="low"), "w9"),
        [
            {"role": "system", "content": "w4"},
            *user("w1"),
            {"role": "assistant", "content": "w2"},
            *user(url_part(2)),
        ],
    ]
    outputs = llm.chat(conversations, GREEDY, progress=False)
    with TestClient(app) as client:
        for messages, output in zip(conversations, outputs, strict=True):
            body = {"messages": messages, "temperature": 0, "max_tokens": 6, "ignore_eos": True}
            answer = client.post("/v1/chat/completions", json=body | {"return_token_ids": True}).json()
            assert answer["usage"]["prompt_tokens"] == len(output.prompt_token_ids)
            assert answer["choices"][0]["message"]["content"] == output.outputs[0].text
            assert answer["choices"][0]["token_ids"] == output.outputs[0].token_ids


@pytest.mark.slow
def test_tasks_and_threads_get_the_answers_of_one_call(llm: LLM, folder: Path) -> None:
    conversations = [user("w1", url_part(number), "w2") for number in range(1, 5)]
    alone = [said(llm, each)[1] for each in conversations]
    found: dict[int, list[int]] = {}
    threads = [
        threading.Thread(target=lambda at=at: found.update({at: said(llm, conversations[at])[1]}))
        for at in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[at] for at in range(4)] == alone

    async def run() -> tuple[list[Any], list[int]]:
        async with AsyncLLM(str(folder), **SIZES) as other:
            outputs = await asyncio.gather(*[other.chat(each, GREEDY) for each in conversations])
            tokens: list[int] = []
            async for delta in other.stream_chat(conversations[0], GREEDY):
                tokens += delta.token_ids
            with pytest.raises(InvalidParameter, match="no image in PNG"):
                async for _ in other.stream_chat(
                    user({"type": "image_url", "image_url": {"url": data_url(b"x")}})
                ):
                    pass
            return outputs, tokens

    outputs, tokens = asyncio.run(run())
    assert [output.outputs[0].token_ids for (output,) in outputs] == alone
    assert tokens == alone[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            {"type": "image_url", "image_url": {"url": "/etc/hosts"}},
            r"messages\[0\].content\[1\].image_url.url",
        ),
        ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, "fetches no images"),
        (
            {"type": "image_url", "image_url": {"url": data_url(b"no image")}},
            r"image_url.url.*no image in PNG",
        ),
        ({"type": "image_url", "image_url": "data:,"}, r"content\[1\].image_url: expected"),
        ({"type": "image_url", "image_url": {"url": "data:,", "detail": "all"}}, r"image_url.detail: "),
        ({"type": "image_url", "image_url": {"url": "data:,", "size": 3}}, r"image_url.size: "),
        ({"type": "image_pil", "image_pil": b"GIF89a"}, r"image_pil: expected an image of Pillow, got bytes"),
        ({"type": "image_pil", "image_pil": Image.new("L", (101, 100))}, r"image_pil.*at most 10000 in all"),
    ],
)
def test_images_that_cannot_be_used_are_refused_by_name(llm: LLM, part: Any, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        llm.chat(user("w1", part), GREEDY, progress=False)


@pytest.mark.slow
def test_conversations_that_cannot_have_their_images_are_refused(llm: LLM) -> None:
    image = url_part(1)
    for chat, params, message in (
        (user(*[image] * 4), GREEDY, "the prompt has 4 images; at most 3 are allowed"),
        (user(image, {"type": "video_url", "video_url": {}}), GREEDY, r"content\[1\].*'video_url'"),
        ([{"role": "assistant", "content": [image]}], GREEDY, "of the role user or tool"),
        (user(image), SamplingParams(max_tokens=1, prompt_logprobs=1), "prompt_logprobs is not supported"),
    ):
        with pytest.raises(InvalidParameter, match=message):
            llm.chat([user("w1"), chat], params, progress=False)
    assert said(llm, user("w1"))[1]  # and the engine has no request of them


def test_images_of_a_model_that_takes_text_only_are_refused() -> None:
    refused = pytest.raises(InvalidParameter, match=r"content\[0\].*images are not supported: .*text only")
    with LLM("builtin", kv_cache_memory_bytes="32MiB") as builtin, refused:
        builtin.chat(user(url_part(1)), progress=False)


def test_limits_of_images_are_options_of_the_engine() -> None:
    with pytest.raises(ConfigError, match="only images are"):
        LLM("builtin", limit_mm_per_prompt={"image": 1, "video": 1}, kv_cache_memory_bytes="32MiB")
