"""Official clients, unchanged, send images to a server with a tiny model: each dialect, and the chat page."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import anthropic
import openai
import pytest

from tests.api.image_text import data_url
from tests.llm.test_images import file, made_llava
from tests.server.browser import Browser, browsing
from tests.server.conftest import Server, serving

pytestmark = pytest.mark.slow

MODEL = "fox"
URL, OTHER = data_url(file(1)[1]), data_url(file(2)[1])
IMAGE_TOKENS = 4
"""Positions of an image of this model."""
NODE = os.environ.get("CLIENT_MATRIX", "")
"""The folder of `scripts.client_matrix`, which has the libraries for node."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = made_llava(tmp_path_factory)
    flags = ["--max-model-len", "120", "--served-model-name", MODEL, "--max-image-bytes", "50000"]
    with serving(str(folder), *flags, "--limit-mm-per-prompt", "image=3") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def parts(*urls: str) -> list[dict[str, object]]:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [{"type": "text", "text": "w1"}, *images]}]


def test_openai_chat(client: openai.OpenAI) -> None:
    words = {"allowed_token_ids": list(range(1, 150))}
    asked = {"model": MODEL, "max_tokens": 6, "temperature": 0, "extra_body": words}
    whole = client.chat.completions.create(messages=parts(URL, OTHER), **asked)
    assert whole.choices[0].message.content
    assert whole.usage.prompt_tokens_details.image_tokens == 2 * IMAGE_TOKENS
    stream = client.chat.completions.create(messages=parts(URL, OTHER), **asked, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == whole.choices[0].message.content
    plain = client.chat.completions.create(messages=parts(), **asked)
    assert "image_tokens" not in plain.usage.prompt_tokens_details.model_dump(exclude_none=True)
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(messages=parts(data_url(b"GIF89a")), **asked)
    assert refused.value.code == "invalid_image"


def test_what_a_request_used_is_explained(client: openai.OpenAI, server: Server) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=parts(URL, OTHER), max_tokens=2)
    shown = server.get(f"/v1/requests/{answer.id}").json()
    assert shown["images"] == [{"tokens": IMAGE_TOKENS}] * 2
    assert shown["image_tokens"] == 2 * IMAGE_TOKENS
    assert server.get(f"/v1/requests/{answer.id}/timeline").json()["image_tokens"] == 2 * IMAGE_TOKENS


def test_a_model_that_takes_images_says_so(client: openai.OpenAI) -> None:
    card = client.models.retrieve(MODEL).model_dump()
    assert card["input_modalities"] == ["text", "image"]
    assert card["image_limits"] == {"per_prompt": 3, "bytes": 50000, "pixels": 16_000_000}


def test_openai_responses(client: openai.OpenAI) -> None:
    content = [
        {"type": "input_text", "text": "w1"},
        {"type": "input_image", "image_url": URL, "detail": "auto"},
    ]
    answer = client.responses.create(
        model=MODEL, input=[{"role": "user", "content": content}], max_output_tokens=6, temperature=0
    )
    assert answer.usage.input_tokens_details.model_dump()["image_tokens"] == IMAGE_TOKENS
    more = client.responses.create(
        model=MODEL, input="w2", previous_response_id=answer.id, max_output_tokens=6, temperature=0
    )
    assert more.usage.input_tokens > answer.usage.input_tokens


def test_anthropic_messages(server: Server) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(file(1)[1]).decode()}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "w1"}]
    messages = [{"role": "user", "content": content}]
    answer = client.messages.create(model=MODEL, messages=messages, max_tokens=6)
    assert client.messages.count_tokens(model=MODEL, messages=messages).input_tokens == (
        answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    )


@pytest.mark.parametrize("responses", [False, True])
def test_langchain(server: Server, responses: bool) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    messages = pytest.importorskip("langchain_core.messages")
    chat = langchain_openai.ChatOpenAI(
        model=MODEL,
        base_url=server.url + "/v1",
        api_key="none",
        max_tokens=6,
        temperature=0,
        max_retries=0,
        use_responses_api=responses,
    )
    image = {"type": "image", "base64": base64.b64encode(file(1)[1]).decode(), "mime_type": "image/png"}
    answer = chat.invoke([messages.HumanMessage(content=[{"type": "text", "text": "w1"}, image])])
    with_image = answer.usage_metadata["input_tokens"]
    assert with_image == chat.invoke("w1").usage_metadata["input_tokens"] + IMAGE_TOKENS


@pytest.mark.parametrize("provider", ["openai", "openai-chat", "compatible", "anthropic"])
def test_vercel_ai_sdk(server: Server, provider: str) -> None:
    program = Path(__file__).parents[2] / "scripts/client_matrix/node/ai_sdk_images.mjs"
    if not NODE or not shutil.which("node"):
        pytest.skip("no node, or no folder of `python -m scripts.client_matrix --at FOLDER` in CLIENT_MATRIX")
    place = Path(NODE, "node", program.name)
    shutil.copy(program, place)
    ended = subprocess.run(
        ["node", place, server.url + "/v1", MODEL, provider, base64.b64encode(file(1)[1]).decode()],
        cwd=place.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert told["inputTokens"] == told["plainInputTokens"] + IMAGE_TOKENS


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as session:
        yield session


TYPE = """
const [element, value] = arguments;
element.value = value;
element.dispatchEvent(new Event("input", { bubbles: true }));
"""
DROP = """
const [target, kind, name, type, base64] = arguments;
const bytes = Uint8Array.from(atob(base64), each => each.charCodeAt(0));
const transfer = new DataTransfer();
transfer.items.add(new File([bytes], name, { type }));
const given = { bubbles: true, cancelable: true };
target.dispatchEvent(kind === "paste"
  ? new ClipboardEvent(kind, { ...given, clipboardData: transfer })
  : new DragEvent(kind, { ...given, dataTransfer: transfer }));
"""


def test_the_chat_page_sends_images(browser: Browser, server: Server, tmp_path: Path) -> None:
    browser.open(f"{server.url}/chat")
    browser.one("input[type=file]")
    browser.run(TYPE, browser.all("input[type=number]")[2], "8")

    def put(kind: str, name: str, data: bytes, media: str = "image/png") -> None:
        encoded = base64.b64encode(data).decode()
        browser.run(DROP, browser.one("#message"), kind, name, media, encoded)

    put("paste", "a.png", file(1)[1])
    browser.eventually(lambda: len(browser.all(".pictures img")) == 1)
    put("drop", "b.png", file(2)[1])
    browser.eventually(lambda: len(browser.all(".pictures img")) == 2)
    (tmp_path / "c.png").write_bytes(file(3)[1])
    browser.one("input[type=file]").send_keys(str(tmp_path / "c.png"))
    browser.eventually(lambda: len(browser.all(".pictures img")) == 3)
    put("drop", "d.png", file(4)[1])
    browser.shows("at most 3 images", "[role=alert]")
    browser.one("button[aria-label='Remove image 3']").click()
    browser.eventually(lambda: len(browser.all(".pictures img")) == 2)
    put("drop", "broken.png", b"no image")
    browser.shows("broken.png cannot be read", "[role=alert]")
    put("drop", "large.png", bytes(60_000))
    browser.shows("large.png has", "[role=alert]")
    assert browser.run(
        "return [...document.querySelectorAll('.pictures img')].every(e => e.naturalWidth === 64)"
    )
    browser.one("#message").send_keys("w1 w2\n")
    browser.eventually(lambda: browser.all(".numbers a"))
    assert len(browser.all(".user .pictures img")) == 2
    assert not browser.all("form ~ .pictures, .talk > .pictures")
    request = browser.one(".numbers a").get_attribute("href").rpartition("/")[2]
    assert server.get(f"/v1/requests/{request}").json()["image_tokens"] == 2 * IMAGE_TOKENS
    browser.run("location.reload()")
    browser.eventually(lambda: browser.all(".past button.link"))
    browser.one(".past button.link").click()
    browser.shows("2 images, no longer in this browser", ".user")
    assert "base64" not in browser.run("return JSON.stringify(localStorage)")
    assert not browser.complaints()
    browser.open(f"{server.url}/dashboard#/request/{request}")
    browser.shows(f"{2 * IMAGE_TOKENS} of images")
