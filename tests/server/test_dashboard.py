"""The dashboard in a real browser, of a real server under load: every page, live, accessible, and without an error."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator

import httpx
import pytest

from tests.server.browser import Browser
from tests.server.conftest import Server, serving

ADMIN, ACME = "admin-key", "acme-key"
PAGES = ("Overview", "Requests", "Caches", "Tenants", "Experiments", "Tuner")
EXPERIMENT = {
    "setting": "max_running",
    "treatment": 3,
    "metric": "requests_per_second",
    "window_seconds": 0.2,
    "burn_in_seconds": 0.05,
    "max_seconds": 600.0,
    "alpha": 1e-6,
}


class Loaded:
    """A server with keys, and clients of two tenants that send one request after another."""

    def __init__(self, server: Server) -> None:
        self.url = server.url
        self.admin = httpx.Client(
            base_url=server.url, headers={"Authorization": f"Bearer {ADMIN}"}, timeout=60, trust_env=False
        )
        self._stop = threading.Event()
        self._clients = [threading.Thread(target=self._send, args=(tenant,)) for tenant in ("acme", "globex")]
        for client in self._clients:
            client.start()

    def page(self, name: str) -> str:
        """The address of a page."""
        return f"{self.url}/dashboard#/{name.lower()}"

    def _send(self, tenant: str) -> None:
        body = {"prompt": "Once upon a time there was a", "max_tokens": 24, "ignore_eos": True}
        while not self._stop.is_set():
            self._stop.wait(
                0.05
            )  # or evaluations of the tuner, which have the lowest priority, would find no idle core
            answer = self.admin.post("/v1/completions", json=body, headers={"X-Tenant-Id": tenant})
            assert answer.status_code in (200, 503), answer.text

    def close(self) -> None:
        """End the load."""
        self._stop.set()
        for client in self._clients:
            client.join()
        self.admin.close()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{ADMIN} - admin\n{ACME} acme\n")
    flags = [
        "--api-key-file",
        str(keys),
        "--max-num-seqs",
        "4",
        "--device-price",
        "2.5/h",
        "--currency",
        "EUR",
    ]
    with serving(*flags, "--max-num-queued-reqs", "2000", "--tuner-window", "1") as server:
        running = Loaded(server)
        yield running
        running.close()


@pytest.fixture
def browser(session: Browser) -> Iterator[Browser]:
    """The session, as a wide window in light colours. A test that leaves something on the console fails."""
    session.emulate("light", 1280, 900)
    session.refusals = ()
    session.complaints()
    yield session
    if session.refusals:
        session.driver.get("about:blank")  # what is still to be reported comes before this has loaded
    assert not session.complaints()


@pytest.fixture
def inside(browser: Browser, loaded: Loaded) -> Browser:
    """The browser with the administrator's key."""
    browser.open(loaded.url)
    browser.run("sessionStorage.setItem('headrace.key', arguments[0])", ADMIN)
    return browser


@pytest.mark.parametrize("name", PAGES)
def test_every_page_opens_under_load_and_has_no_barrier(inside: Browser, loaded: Loaded, name: str) -> None:
    inside.open(loaded.page(name))
    inside.shows(name, "h1")
    inside.shows("Live", ".connection")
    inside.eventually(lambda: inside.all(".panel, .virtual"))
    assert inside.driver.title == f"{name} · Headrace"
    assert inside.text("nav [aria-current=page]") == name
    assert not inside.barriers()


@pytest.mark.parametrize("name", PAGES)
def test_every_page_fits_a_phone_in_the_dark(inside: Browser, loaded: Loaded, name: str) -> None:
    inside.emulate("dark", 390, 844)
    inside.open(loaded.page(name))
    inside.shows("Live", ".connection")
    inside.eventually(lambda: inside.all(".panel, .virtual"))
    inside.fits(390)
    red, green, blue = json.loads(
        inside.run("return getComputedStyle(document.body).backgroundColor")
        .replace("rgb(", "[")
        .replace(")", "]")
    )
    assert max(red, green, blue) < 64
    assert not inside.barriers()


@pytest.mark.parametrize("start", ["dashboard", "chat"])
def test_every_page_is_reached_from_every_other_on_a_phone(
    inside: Browser, loaded: Loaded, start: str
) -> None:
    inside.emulate("light", 390, 844)
    inside.open(f"{loaded.url}/{start}")
    names = inside.eventually(lambda: [each for each in inside.text("nav a").split("\n") if each])
    assert names == [*PAGES, "Step by step", "Guided tour", "Chat"]
    for name in ("Overview", "Guided tour", "Chat", "Tenants"):
        inside.all("nav a")[names.index(name)].send_keys("\n")  # the bar scrolls to a link that has the focus
        inside.eventually(lambda name=name: inside.text("nav [aria-current=page]") == name)
    inside.fits(390)


def test_the_first_page_links_to_the_others(browser: Browser, loaded: Loaded) -> None:
    browser.open(loaded.url)
    assert not browser.barriers()
    paths = [link.get_attribute("href") for link in browser.all("main a")]
    assert f"{loaded.url}/dashboard" in paths
    assert {loaded.admin.get(path).status_code for path in paths} == {200}


def test_the_overview_is_live_and_says_what_bounds_the_server(inside: Browser, loaded: Loaded) -> None:
    inside.open(loaded.page("overview"))
    script = "return document.querySelector('[aria-label^=\"Throughput\"]')?.ariaLabel ?? ''"
    inside.eventually(lambda: re.search(r"output [\d,.]+", inside.run(script)))
    first = inside.run(script)
    inside.eventually(lambda: inside.run(script) != first)
    kinds = ("Slots", "Memory", "Arithmetic", "Bandwidth", "Front end", "Idle")
    assert inside.text(".bottleneck strong") in kinds
    assert inside.text(".bottleneck p").endswith(".")
    for title in (
        "Throughput",
        "Latency",
        "Queue",
        "Batch size",
        "KV cache",
        "Cache hit rates",
        "Goodput",
        "Cost",
    ):
        inside.shows(title, "h2")
    inside.eventually(lambda: "EUR" in inside.text("dl.figures"))


def test_a_thousand_requests_are_a_list_of_few_elements(inside: Browser, loaded: Loaded) -> None:
    body = {
        "prompt": [f"{number} is a number" for number in range(1000)],
        "max_tokens": 1,
        "ignore_eos": True,
    }
    waiting = threading.Thread(target=loaded.admin.post, args=("/v1/completions",), kwargs={"json": body})
    inside.open(loaded.page("requests"))
    inside.shows("Live", ".connection")
    waiting.start()
    rows = "return Number(document.querySelector('.virtual')?.ariaRowCount ?? 0)"
    inside.eventually(lambda: inside.run(rows) > 1000)
    seen = "[...document.querySelectorAll('.virtual .body .row')].map(e => Number(e.ariaRowIndex))"
    assert len(inside.run(f"return {seen}")) < 60
    inside.run("document.querySelector('.virtual').scrollTop = 1e9")
    inside.eventually(
        lambda: (
            inside.run(f"return Math.max(...{seen}) - document.querySelector('.virtual').ariaRowCount") == 0
        )
    )
    assert len(inside.run(f"return {seen}")) < 60
    inside.one("input[type=search]").send_keys("globex")
    inside.eventually(lambda: set(inside.run(f"return {CELLS}")) == {"globex"})
    waiting.join()


CELLS = "[...document.querySelectorAll('.virtual .body .row')].map(e => e.children[3].innerText)"
"""The tenants of the rows on the screen."""


def test_a_key_is_asked_for_and_stays_in_the_tab(browser: Browser, loaded: Loaded) -> None:
    browser.refusals = ("401", "403")
    browser.open(loaded.url)
    browser.run("sessionStorage.clear()")
    browser.open(loaded.page("tenants"))
    field = browser.one("input[type=password]")
    assert not browser.barriers()
    browser.run("arguments[0].dataset.old = 'yes'", field)
    field.send_keys("wrong-key\n")
    field = browser.one("input[type=password]:not([data-old])")
    assert "API key" in browser.text("form p")
    field.send_keys(f"{ACME}\n")
    browser.shows("of acme", "h1")
    browser.eventually(lambda: "acme" in browser.text("tbody"))
    assert "globex" not in browser.text("main")
    assert browser.run("return sessionStorage.getItem('headrace.key')") == ACME
    assert ACME not in browser.driver.current_url
    browser.open(loaded.page("tuner"))
    browser.shows("admin", ".notice")


def test_a_keyboard_reaches_the_pages_and_the_content(inside: Browser, loaded: Loaded) -> None:
    inside.open(loaded.page("overview"))
    inside.shows("Live", ".connection")
    focused = "return document.activeElement.innerText"
    body = inside.one("body")
    body.send_keys("\ue004")
    assert inside.run(focused) == "Skip to content"
    for name in ("Headrace", "Overview", "Requests", "Caches"):
        inside.driver.switch_to.active_element.send_keys("\ue004")
        assert inside.run(focused) == name
    inside.driver.switch_to.active_element.send_keys("\n")
    inside.shows("Caches", "h1")
    inside.eventually(
        lambda: inside.run("return document.activeElement.tagName") == "H1"
    )  # no longer the link
    assert inside.run(focused) == "Caches"


def press(browser: Browser, selector: str, words: str, inner: str = "") -> None:
    """Press the space bar on what begins with these words; a pointer could miss it while the page moves."""
    script = (
        "const [selector, words, inner] = arguments;"
        "const found = [...document.querySelectorAll(selector)].find(e => e.innerText.startsWith(words));"
        "return found && inner ? found.querySelector(inner) : found;"
    )
    browser.eventually(lambda: browser.run(script, selector, words, inner)).send_keys(" ")


def test_an_experiment_is_shown_beside_its_dry_run_and_stopped(
    inside: Browser, loaded: Loaded, tmp_path
) -> None:
    started = loaded.admin.post("/v1/experiments", json=EXPERIMENT)
    assert started.status_code == 201, started.text
    inside.open(loaded.page("experiments"))
    inside.shows("max running", "main")
    inside.eventually(lambda: inside.all(".plot"))
    inside.eventually(lambda: "to +" in inside.text("table") or "to -" in inside.text("table"))
    dry = tmp_path / "dry.json"
    report = loaded.admin.get(f"/v1/experiments/{started.json()['id']}").json()
    dry.write_text(json.dumps({"experiments": [report | {"id": "replica 0", "status": "better"}]}))
    inside.one("input[type=file]").send_keys(str(dry))
    inside.shows("dry run, replica 0", "main")
    assert not inside.barriers()
    other = tmp_path / "other.json"
    other.write_text("{}")
    inside.one("input[type=file]").send_keys(str(other))
    inside.shows("is not the result of a dry run", "[role=alert]")
    press(inside, "button", "Stop this experiment")
    inside.shows("stopped", "tbody .state")


FILL = """
const [label, value] = arguments;
const found = [...document.querySelectorAll(".fields label")].find(e => e.innerText.startsWith(label));
const control = document.getElementById(found.htmlFor);
const prototype = control.tagName === "SELECT" ? HTMLSelectElement : HTMLInputElement;
Object.getOwnPropertyDescriptor(prototype.prototype, "value").set.call(control, value);
control.dispatchEvent(new Event("input", { bubbles: true }));
control.dispatchEvent(new Event("change", { bubbles: true }));
"""


def test_an_experiment_is_simulated_started_and_stopped(inside: Browser, loaded: Loaded) -> None:
    inside.refusals = ("400",)  # of the first attempt
    inside.open(loaded.page("experiments"))
    inside.eventually(lambda: inside.all("form.fields"))
    inside.run(FILL, "Setting", "max_running")
    inside.run(FILL, "Treatment", "99")
    inside.run(FILL, "Metric", "requests_per_second")
    press(inside, "button", "Add a guard")
    inside.eventually(lambda: inside.all(".guard"))
    inside.run(FILL, "Guard 1: worse", "900")
    press(inside, "button", "Start on live traffic")
    inside.shows("99 is not between 0 and 4", ".field .error")
    # The field takes the focus after the error is drawn.
    inside.eventually(
        lambda: inside.run("return document.activeElement.getAttribute('aria-invalid')") == "true"
    )
    assert not inside.barriers()
    for label, value in (("Treatment", "1"), ("Length", "0.4"), ("Burn-in", "0.1"), ("Maximum", "4")):
        inside.run(FILL, label, value)
    inside.run(FILL, "Name", "one slot")
    press(inside, "button", "Dry run")
    inside.shows("dry run, replica 0", "tbody")
    inside.shows("The newest dry run simulated", "main")
    inside.run(FILL, "Length", "30")  # so that nothing is decided before it is stopped
    inside.run(FILL, "Maximum", "600")
    press(inside, "button", "Start on live traffic")
    inside.shows("one slot", "tbody")
    inside.shows("live", "tbody")
    inside.emulate("dark", 390, 844)
    inside.fits(390)
    assert not inside.barriers()
    inside.emulate("light", 1280, 900)
    press(inside, "button", "Stop this experiment")
    inside.eventually(lambda: loaded.admin.get("/v1/experiments").json()["data"][0]["status"] != "running")


REHEARSED = """
const plain = window.fetch;
window.fetch = async (...given) => {
  const answer = await plain(...given);
  if (!String(given[0]).endsWith("v1/tuner")) return answer;  // relative to the page
  return Response.json({...await answer.json(), measured_to_rehearsed: 1.25});
};
"""
"""Under load a rehearsal, which has the lowest priority, takes minutes; `test_experiments` waits for a real one."""


def test_the_tuner_is_turned_on_and_off_with_its_reasons(inside: Browser, loaded: Loaded) -> None:
    inside.open(loaded.page("tuner"))
    inside.eventually(lambda: len(inside.all("input[type=radio]")) == 3)
    press(inside, "label.choice", "Advise", "input")
    inside.eventually(lambda: loaded.admin.get("/v1/tuner").json()["mode"] == "advise")
    inside.run(REHEARSED)
    inside.shows("1.25 times as long as rehearsed", "main")
    press(inside, "label.choice", "Off", "input")
    inside.eventually(lambda: loaded.admin.get("/v1/tuner").json()["mode"] == "off")
    inside.shows("No change is on probation", "main")
