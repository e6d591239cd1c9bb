"""Step by step, the guided tour, the request page and the chat in a real browser, of a real server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from headrace.lab.tour import STOPS
from headrace.wiring.step_documents import simulated_steps
from tests.server.browser import Browser
from tests.server.conftest import Server, serving

ADMIN, ACME = "admin-key", "acme-key"
MARKUP = "<img src=x onerror=\"document.title='broken'\">"
TYPE = """
const [element, value] = arguments;
const prototype = element.tagName === "TEXTAREA" ? HTMLTextAreaElement : HTMLInputElement;
Object.getOwnPropertyDescriptor(prototype.prototype, "value").set.call(element, value);
element.dispatchEvent(new Event("input", { bubbles: true }));
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{ADMIN} - admin\n{ACME} acme\n")
    with serving("--api-key-file", str(keys), "--max-num-seqs", "2", "--device-price", "2.5/h") as server:
        yield server


@pytest.fixture
def browser(session: Browser, served: Server) -> Iterator[Browser]:
    """The session with the administrator's key. A test that leaves something on the console fails."""
    session.emulate("light", 1280, 900)
    session.open(served.url)
    session.run("localStorage.clear(); sessionStorage.setItem('headrace.key', arguments[0])", ADMIN)
    session.refusals = ()
    session.complaints()
    yield session
    if session.refusals:
        session.driver.get("about:blank")  # what is still to be reported comes before this has loaded
    assert not session.complaints()


def complete(served: Server, number: int, **fields: object) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 40, "ignore_eos": True, "request_id": f"r{number}"}
    headers = {"Authorization": f"Bearer {ACME}"}
    with httpx.Client(base_url=served.url, headers=headers, timeout=60, trust_env=False) as client:
        assert client.post("/v1/completions", json=body | fields).status_code == 200


@pytest.mark.parametrize("stop", STOPS[1::2], ids=[stop.name for stop in STOPS[1::2]])
def test_a_stop_of_the_tour_can_be_played(browser: Browser, served: Server, stop) -> None:
    browser.open(f"{served.url}/dashboard#/tour/{stop.name}")
    browser.eventually(lambda: len(browser.all(".grid")) == len(stop.runs))
    browser.shows(stop.title, ".panel h2")
    before = browser.text(".controls output")
    browser.one("[aria-label='Step forward']").click()
    browser.eventually(lambda: browser.text(".controls output") != before)
    browser.one("[aria-label='Last step']").click()
    browser.shows("0 waited")
    assert len(browser.all(".mark-finished")) > 0
    assert not browser.barriers()


def test_the_tour_fits_a_phone_in_the_dark(browser: Browser, served: Server) -> None:
    browser.emulate("dark", 390, 844)
    browser.open(f"{served.url}/dashboard#/tour/continuous-batching")
    browser.eventually(lambda: len(browser.all(".grid")) == 2)
    browser.fits(390)
    assert not browser.barriers()


def test_steps_of_the_server_are_followed(browser: Browser, served: Server) -> None:
    browser.open(f"{served.url}/dashboard#/steps")
    browser.shows("No step has run since")
    threads = [threading.Thread(target=complete, args=(served, number)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    browser.eventually(lambda: browser.all(".mark-finished"))
    browser.one("[aria-pressed='true']").click()
    browser.one("[aria-label='First step']").click()
    assert browser.all("rect.prefill")
    assert not browser.barriers()


def test_a_simulation_is_made_and_moved_by_keys(browser: Browser, served: Server) -> None:
    browser.open(f"{served.url}/dashboard#/steps")
    browser.eventually(lambda: len(browser.all("input[name=source]")) == 3)
    browser.all("input[name=source]")[1].click()
    browser.run(TYPE, browser.one("textarea"), "64 8\n32 4 0.01 16")
    browser.one("form.scenario button").click()
    browser.eventually(lambda: browser.all(".grid"))
    assert browser.text(".lanes") == "A\nB"
    stage = browser.one(".stage")
    place = browser.text(".controls output")
    stage.send_keys("\ue014")  # arrow right
    browser.eventually(lambda: browser.text(".controls output") != place)
    browser.all(".lanes button")[0].click()
    browser.shows("Block table of A")
    browser.run(TYPE, browser.one("textarea"), "64 eight")
    browser.one("form.scenario button").click()
    browser.shows("Line 1", "[role=alert]")
    browser.run(TYPE, browser.one("textarea"), "64 1000")
    browser.one("form.scenario button").click()
    browser.shows("requests[0].output_tokens must be 1 to 256", "[role=alert]")
    (refused,) = browser.eventually(browser.complaints)  # the browser logs the status 400 of that answer
    assert "/v1/simulations" in refused


def test_a_recording_is_opened_from_a_file(browser: Browser, served: Server, tmp_path: Path) -> None:
    [stop] = [each for each in STOPS if each.name == "preemption"]
    document = simulated_steps(stop.runs[0][1]) | {"source": "recording"}
    (tmp_path / "steps.json").write_text(json.dumps(document))
    (tmp_path / "other.json").write_text("{}")
    browser.open(f"{served.url}/dashboard#/steps")
    browser.eventually(lambda: len(browser.all("input[name=source]")) == 3)
    browser.all("input[name=source]")[2].click()
    browser.one("input[type=file]").send_keys(str(tmp_path / "steps.json"))
    browser.shows(f"1 of {len(document['steps'])}", ".controls output")
    browser.one("[aria-label='Last step']").click()
    browser.eventually(lambda: browser.all(".mark-preempted"))
    browser.one("input[type=file]").send_keys(str(tmp_path / "other.json"))
    browser.shows("This file holds no steps", "[role=alert]")


def test_a_request_shows_its_timeline_and_cost(browser: Browser, served: Server) -> None:
    complete(served, 77)
    browser.open(f"{served.url}/dashboard#/request/cmpl-r77")
    browser.shows("Time to first token")
    browser.eventually(lambda: len(browser.all(".timeline rect.token")) >= 40)
    assert "USD" in browser.text(".figures")
    assert browser.all(".timeline rect.prefill")
    assert not browser.barriers()
    browser.emulate("dark", 390, 844)
    browser.fits(390)


def ask(browser: Browser, text: str) -> None:
    browser.run(TYPE, browser.one("#message"), text)
    browser.one("#message").send_keys("\n")


def test_the_chat_streams_shows_numbers_and_keeps_conversations(browser: Browser, served: Server) -> None:
    browser.open(f"{served.url}/chat")
    browser.eventually(lambda: browser.all("option"))
    browser.all("input[type=checkbox]")[0].click()
    ask(browser, f"Hello {MARKUP}")
    browser.eventually(lambda: browser.all(".numbers"))
    assert MARKUP in browser.text(".user")
    assert not browser.all(".messages img")
    for number in ("first token", "tokens/s", "USD"):
        assert number in browser.text(".numbers")
    browser.one(".tokens").send_keys("\ue014")
    browser.shows("%", ".alternatives")
    assert not browser.barriers()
    browser.one(".ask button.quiet").click()
    browser.eventually(lambda: len(browser.all(".assistant")) == 1 and browser.all(".numbers"))
    assert ADMIN not in browser.run("return JSON.stringify(localStorage)")
    browser.run("location.reload()")
    browser.eventually(lambda: browser.all(".past button.link"))
    browser.one(".past button.link").click()
    assert MARKUP in browser.text(".user")
    browser.one(".past [aria-label^=Delete]").click()
    browser.eventually(lambda: not browser.all(".past"))
    assert browser.run("return localStorage.getItem('headrace.chat')") == "[]"


def test_an_answer_is_stopped_with_a_key(browser: Browser, served: Server) -> None:
    browser.emulate("dark", 390, 844)
    browser.open(f"{served.url}/chat")
    browser.eventually(lambda: browser.all("option"))
    ask(browser, "Tell me a story.")
    browser.eventually(lambda: len(browser.text(".assistant")) > 10 or browser.all(".numbers"))
    browser.one("#message").send_keys("\ue00c")  # escape
    browser.eventually(lambda: browser.all(".numbers"))
    browser.fits(390)
    assert not browser.barriers()


def test_the_chat_asks_for_a_key(browser: Browser, served: Server) -> None:
    browser.refusals = ("401",)  # of the first answer
    browser.run("sessionStorage.clear()")
    browser.open(f"{served.url}/chat")
    browser.shows("API key", "form")
    assert not browser.barriers()
    browser.run(TYPE, browser.one("input[type=password]"), ACME)
    browser.one("form button").click()
    browser.eventually(lambda: browser.all("option"))
