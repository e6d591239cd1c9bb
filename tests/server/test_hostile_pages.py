"""Markup, scripts and characters that turn text around, in answers and names, on the pages in a real browser."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from tests.server.browser import Browser
from tests.server.conftest import Server, serving

BROKEN = "document.title='broken'"
TURNED = "\u202e"
MARKUP = (
    f'<img src=x onerror="{BROKEN}"><svg onload="{BROKEN}"></svg><script>{BROKEN}</script>'
    f'<iframe srcdoc="<script>top.{BROKEN}</script>"></iframe><a href="javascript:{BROKEN}">here</a>'
    f'<style>body {{ display: none }}</style><base href="//x.invalid/"><meta http-equiv=refresh content=0>'
)
ANSWER = f"{MARKUP}\n\n[link](javascript:{BROKEN}) ![image](//x.invalid/x.png)\n\n```html\n{MARKUP}\n```\n{TURNED}abc"
NAME = f"<img/src=x/onerror={BROKEN}>{TURNED}eman"
TENANT = NAME.replace(TURNED, "")
"""A name in a header has no characters beyond ASCII."""
ADMIN = "admin-key"
PAGES = ("overview", "requests", "caches", "tenants", "experiments", "tuner", "steps")

ANSWERED = """
const [content] = arguments, plain = window.fetch;
const top = [{token: content, logprob: -0.1}, {token: "</output>" + content, logprob: -2}];
const logprobs = {content: [{token: content, logprob: -0.1, top_logprobs: top}]};
const choice = {index: 0, delta: {content, reasoning_content: content}, logprobs, finish_reason: null};
const chunk = {id: content, model: content, choices: [choice]};
const end = {...chunk, choices: [{index: 0, delta: {}, finish_reason: content}]};
const body = [chunk, end].map((each) => `data: ${JSON.stringify(each)}\\n\\n`).join("") + "data: [DONE]\\n\\n";
window.fetch = (url, init) =>
  String(url).includes("v1/chat/completions")
    ? Promise.resolve(new Response(body, {headers: {"Content-Type": "text/event-stream"}}))
    : plain(url, init);
"""
MADE_BY_MARKUP = (
    "img, iframe, base, style, meta[http-equiv], [onerror], [onload], [href^=javascript], body script"
)
TYPE = """
const [element, value] = arguments;
Object.getOwnPropertyDescriptor(HTMLTextAreaElement.prototype, "value").set.call(element, value);
element.dispatchEvent(new Event("input", { bubbles: true }));
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{ADMIN} - admin\n")
    with serving(
        "--api-key-file", str(keys), "--served-model-name", NAME, "--response-cache", "memory"
    ) as server:
        with httpx.Client(
            base_url=server.url, headers={"Authorization": f"Bearer {ADMIN}"}, timeout=60, trust_env=False
        ) as client:
            for user in (None, NAME):
                body = {"prompt": ANSWER[:200], "max_tokens": 2} | ({"user": user} if user else {})
                answer = client.post("/v1/completions", json=body, headers={"X-Tenant-Id": TENANT})
                assert answer.status_code == 200, answer.text
        yield server


@pytest.fixture
def browser(session: Browser, served: Server) -> Browser:
    session.open(served.url)
    session.run("localStorage.clear(); sessionStorage.setItem('headrace.key', arguments[0])", ADMIN)
    session.refusals = ()
    session.complaints()
    return session


def unbroken(browser: Browser) -> None:
    assert not browser.all(MADE_BY_MARKUP)
    assert browser.run("return document.title") != "broken"
    assert browser.text("body")
    assert not browser.complaints()


def test_an_answer_is_text_whatever_it_contains(browser: Browser, served: Server) -> None:
    browser.refusals = ("404",)  # of the page of a request with such an id
    browser.open(f"{served.url}/chat")
    browser.eventually(lambda: browser.all("option"))
    browser.all("input[type=checkbox]")[0].click()
    browser.run(ANSWERED, ANSWER)
    browser.run(TYPE, browser.one("#message"), "Hello")
    browser.one("#message").send_keys("\n")
    browser.eventually(lambda: browser.all(".numbers"))
    assert MARKUP in browser.text(".assistant")
    assert NAME in browser.text("option")
    browser.one(".tokens").send_keys("\ue014")
    browser.shows("%", ".alternatives")
    assert TURNED not in browser.text(".alternatives")
    unbroken(browser)
    browser.run("location.reload()")
    browser.eventually(lambda: browser.all(".past button.link"))
    browser.one(".past button.link").click()
    browser.eventually(lambda: MARKUP in browser.text(".assistant"))
    unbroken(browser)


@pytest.mark.parametrize("page", PAGES)
def test_names_are_text_on_every_page(browser: Browser, served: Server, page: str) -> None:
    browser.open(f"{served.url}/dashboard#/{page}")
    browser.eventually(lambda: len(browser.text("main")) > 20)
    if page in ("requests", "tenants"):
        browser.shows(TENANT, "main")
    unbroken(browser)


def test_text_that_is_turned_around_ends_with_its_element(browser: Browser, served: Server) -> None:
    browser.open(f"{served.url}/dashboard#/tenants")
    browser.shows(TENANT, "main")
    inline = "a, b, code, em, output, small, span, strong, td, th, option, button"
    script = (
        "return [...document.querySelectorAll(arguments[0])].filter(e => !['isolate', 'plaintext', "
        "'isolate-override'].includes(getComputedStyle(e).unicodeBidi)).map(e => e.outerHTML.slice(0, 80))"
    )
    assert browser.run(script, inline) == []


def test_a_request_with_a_hostile_name_has_a_page(browser: Browser, served: Server) -> None:
    browser.refusals = ("404",)
    browser.open(f"{served.url}/dashboard#/request/{TENANT}")
    browser.eventually(lambda: len(browser.text("main")) > 20)
    unbroken(browser)


def test_names_are_json_in_the_api(served: Server) -> None:
    with httpx.Client(
        base_url=served.url, headers={"Authorization": f"Bearer {ADMIN}"}, trust_env=False
    ) as c:
        models = c.get("/v1/models")
        assert models.json()["data"][0]["id"] == NAME
        assert models.headers["content-type"] == "application/json"
        refused = c.post("/v1/completions", json={"model": MARKUP, "prompt": "x"})
        assert refused.headers["content-type"] == "application/json"
        assert json.loads(refused.text)["error"]["code"] == "model_not_found"
