"""The book of prefixes on prompts and events made by hand."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from headrace.core.events import AdmitReason, Admitted, Finished, Layer, Spared
from headrace.core.images import ImageSpan
from headrace.core.memory.departure import NOWHERE, Place, PromptMemory
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.observe import prefixes as module
from headrace.observe.metrics_page import MetricsPage
from headrace.observe.prefixes import PrefixBook

HEAD = tuple(range(1000, 1400))


def make(**more):
    page = MetricsPage(constant={})
    return PrefixBook(PromptMemory(1 << 20), 16, page, **more), page


def serve(book, id, tokens, cached, *, place=NOWHERE, find=None, output=3, tenant="a", **more):
    params, images = more.pop("params", SamplingParams()), more.pop("images", ())
    request = Request(id, tuple(tokens), tenant=tenant, params=params, images=images)
    book.enter(request, find or (lambda at: place), **more)
    book.fold(Admitted(id, AdmitReason.NEW, cached, len(tokens)), 1.0)
    book.fold(Finished(id, FinishReason.STOP, len(tokens), output, cached), 2.0)
    return book.explain(id)


def recomputed(page):
    lines = page.render().decode().splitlines()
    return {
        line.split('"')[1]: float(line.split()[-1])
        for line in lines
        if line.startswith("headrace:prefix_recomputed_tokens_total{")
    }


def test_a_departure_is_explained_and_counted_by_cause():
    book, page = make()
    assert serve(book, "one", HEAD, 0)["cause"] == "new"
    place = Place("system", "system", "current_date", before="Today: 2", after="6")
    reported = serve(book, "two", (*HEAD[:20], 7, *HEAD[21:]), 16, place=place)
    assert (reported["cause"], reported["section"], reported["marker"]) == (
        "marker_changed",
        "system",
        "current_date",
    )
    assert (reported["left_at_token"], reported["compared_with"]) == (20, "one")
    assert "text" not in reported
    assert recomputed(page) == {"marker_changed": reported["recomputed_tokens"]}
    assert json.loads(json.dumps(reported)) == reported


def test_another_image_is_the_cause():
    book, page = make()
    one, other = (ImageSpan(100, 50, bytes([number]) * 32) for number in (1, 2))
    serve(book, "one", HEAD, 0, images=(one,))
    reported = serve(book, "two", HEAD, 96, images=(other,))
    assert (reported["cause"], reported["left_at_token"]) == ("image_changed", 100)
    assert recomputed(page) == {"image_changed": reported["recomputed_tokens"]}
    assert serve(book, "three", HEAD, 399, images=(one,))["cause"] == "whole_prompt"
    reported = serve(book, "four", (*HEAD[:160], 7, *HEAD[161:]), 160, images=(one,))
    assert (reported["cause"], reported["left_at_token"]) == ("text_changed", 160)


def test_words_of_the_prompt_are_shown_only_if_that_is_allowed():
    book, _ = make(show_text=True)
    serve(book, "one", HEAD, 0)
    place = Place("system", "system", before="Today: 2", after="6")
    reported = serve(book, "two", (*HEAD[:20], 7, *HEAD[21:]), 16, place=place)
    assert reported["text"] == {"before": "Today: 2", "after": "6"}


def test_requests_of_another_tenant_are_shown_to_administrators_only():
    book, page = make()
    serve(book, "one", HEAD, 0, tenant="b")
    reported = serve(book, "two", HEAD, 0)
    assert (reported["cause"], reported["recomputed_tokens"]) == ("new", 0)
    assert book.explain("two", True)["cause"] == "other_tenant"
    assert recomputed(page) == {"other_tenant": 399.0}


def test_a_prompt_that_was_not_computed_is_no_comparison():
    book, _ = make()
    serve(book, "one", HEAD, 0, output=0)
    assert serve(book, "two", HEAD, 0)["cause"] == "new"


def test_without_a_lookup_nothing_is_compared():
    book, _ = make()
    scored = SamplingParams(prompt_logprobs=0)
    assert serve(book, "one", HEAD, 0, params=scored)["cause"] == "not_looked_up"
    assert serve(make(caching=False)[0], "one", HEAD, 0)["cause"] == "not_looked_up"


def test_requests_that_never_reach_the_engine_are_dropped():
    book, _ = make()
    book.enter(Request("spared", HEAD))
    book.fold(Spared("spared", "a", Layer.EXACT, 400, 3, 0.0), 1.0)
    book.enter(Request("refused", HEAD))
    book.fold(Finished("refused", FinishReason.REJECTED, 400, 0, 0), 1.0)
    for id in ("spared", "refused", "unknown"):
        book.fold(Admitted(id, AdmitReason.NEW, 0, 400), 2.0)
        assert book.explain(id) is None


def test_a_resumed_request_is_explained_by_its_first_admission():
    book, _ = make()
    first = serve(book, "one", HEAD, 0)
    book.fold(Admitted("one", AdmitReason.RESUMED, 300, 400), 3.0)
    assert book.explain("one") == first


@pytest.mark.parametrize("bound", ["MOST_WAITING", "MOST_EXPLAINED"])
def test_the_book_is_bounded(monkeypatch, bound):
    monkeypatch.setattr(module, bound, 2)
    book, _ = make()
    for n in range(3):
        book.enter(Request(f"r{n}", HEAD))
    for n in range(3):
        book.fold(Admitted(f"r{n}", AdmitReason.NEW, 0, 400), 1.0)
    assert [book.explain(f"r{n}") is None for n in range(3)] == [True, False, False]


def test_what_normalization_did_is_shown():
    book, _ = make()
    done = [{"marker": "billing_header", "action": "removed", "times": 1}]
    assert serve(book, "one", HEAD, 0, normalized=done)["normalized"] == done


def test_a_text_that_cannot_be_searched_costs_only_the_place():
    def broken(at):
        raise ValueError("no such character")

    book, _ = make()
    serve(book, "one", HEAD, 0)
    prompt = (*HEAD[:20], 7, *HEAD[21:])
    book.enter(Request("two", prompt, tenant="a"), broken)
    book.fold(Admitted("two", AdmitReason.NEW, 16, len(prompt)), 1.0)
    reported = book.explain("two")
    assert (reported["cause"], reported["section"]) == ("text_changed", None)


def test_a_short_prompt_is_not_compared():
    book, _ = make(least_tokens=len(HEAD) + 1)
    assert serve(book, "one", HEAD, 0)["cause"] == "short"
    assert serve(book, "two", [*HEAD, 1], 0)["cause"] == "new"


def test_a_long_text_is_searched_beside_the_loop_and_its_explanation_waits_for_it():
    place = Place("system", "system", "current_date")
    begun, may_end = threading.Event(), threading.Event()

    def slow(at):
        begun.set()
        assert may_end.wait(60)
        return place

    async def scene():
        book, page = make(beside=lambda find: asyncio.get_running_loop().run_in_executor(None, find))
        serve(book, "one", HEAD, 0)
        assert serve(book, "two", (*HEAD[:20], 7, *HEAD[21:]), 16, find=slow, long=True) is None
        other = serve(book, "three", (*HEAD[:20], 8, *HEAD[21:]), 16, place=place)
        assert other["cause"] == "marker_changed"
        asked = asyncio.ensure_future(book.settled("two"))
        assert await asyncio.to_thread(begun.wait, 60)
        assert not asked.done()
        may_end.set()
        await asked
        explained = book.explain("two")
        assert (explained["cause"], explained["compared_with"]) == ("marker_changed", "one")
        tokens = explained["recomputed_tokens"] + other["recomputed_tokens"]
        assert recomputed(page) == {"marker_changed": tokens}
        await book.settled("two")

    asyncio.run(scene())


def test_a_long_prompt_is_hashed_beside_the_loop(monkeypatch):
    monkeypatch.setattr("headrace.observe.prefixes.LONG_TOKENS", 16)
    threads, may_end, hashed = [], threading.Event(), module.fingerprint

    def slow(contents):
        threads.append(threading.current_thread())
        assert may_end.wait(60)
        return hashed(contents)

    monkeypatch.setattr(module, "fingerprint", slow)

    async def scene():
        book, _ = make(beside=lambda work: asyncio.get_running_loop().run_in_executor(None, work))
        assert serve(book, "one", HEAD, 0) is None
        may_end.set()
        await book.settled("one")
        assert book.explain("one")["cause"] == "new"
        assert [each.output_tokens for each in book._memory._by_id.values()] == [3]
        assert serve(book, "two", (*HEAD[:20], 7, *HEAD[21:]), 16) is None
        await book.settled("two")
        assert book.explain("two")["compared_with"] == "one"

    asyncio.run(scene())
    assert threading.main_thread() not in threads
