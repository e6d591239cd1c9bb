"""Forced tokens follow the tokens that the scheduler knows, wherever the worker is."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.compute.grammar.matchers import LONGEST, Matchers
from headrace.core.constraint import ANY_TEXT, ReasoningLimit
from headrace.core.drafting.proposal import DraftRow
from headrace.core.request import Request
from tests.compute.fakes import entry
from tests.compute.grammar.conftest import END
from tests.compute.grammar.test_matchers import draw, tokens_of

PROMPT = (5, 6)


def admitted(made: Matchers, slot: int, regex: str, said: str = "", name: str = "r") -> str:
    """A request that may say ``regex``, in a slot; its id."""
    given = entry(slot, (*PROMPT, *tokens_of(said)), prompt_tokens=2, structured_outputs={"regex": regex})
    made.admit(given._replace(request_id=name))
    return name


def after(made: Matchers, request_id: str, said: str, ahead: int = 0) -> tuple[int, ...]:
    """What is forced once the worker has done all."""
    if made._last is not None:
        made._last.result()
    return found(made, request_id, said, ahead)


def found(made: Matchers, request_id: str, said: str, ahead: int = 0) -> tuple[int, ...]:
    """What a step finds now."""
    draft_row = DraftRow(Request(request_id, PROMPT), [*PROMPT, *tokens_of(said)], 99, ahead)
    (run,) = made.forced.forced_tokens([draft_row])
    return run


def test_the_only_continuation_follows_what_was_said(matchers):
    name = admitted(matchers, 1, 'name=[a-z]+; size="(large|largest)"')
    assert after(matchers, name, "") == tokens_of("name=")
    draw(matchers, *((1, token) for token in tokens_of("name=fox; ")))
    assert after(matchers, name, "name=fox; ")[:4] == tokens_of("size")
    assert matchers.allowed(np.array([1])) is not None


def test_a_step_in_flight_is_a_part_of_what_follows(matchers):
    name = admitted(matchers, 1, "name=[a-z]+; size")
    draw(matchers, (1, tokens_of("n")[0]), (1, tokens_of("a")[0]))
    matchers.allowed(np.array([1]))
    assert after(matchers, name, "n", ahead=1) == tokens_of("ame=")  # the worker is ahead
    assert after(matchers, name, "name") == tokens_of("=")  # the worker is behind


def test_a_run_says_nothing_of_another_text(matchers):
    name = admitted(matchers, 1, "name=[a-z]+; size")
    draw(matchers, (1, tokens_of("n")[0]))
    matchers.allowed(np.array([1]))
    assert after(matchers, name, "x") == ()
    assert after(matchers, name, "naX") == ()
    assert after(matchers, name, "name=fox; size") == ()
    assert after(matchers, "another", "") == ()


def test_a_step_waits_for_the_worker_but_not_for_long(matchers, monkeypatch):
    name = admitted(matchers, 1, "[ab]cde")
    go, waiting = threading.Event(), threading.Event()

    def held() -> None:
        waiting.set()
        assert go.wait(60)

    matchers._worker.submit(held)
    assert waiting.wait(60)
    draw(matchers, (1, tokens_of("a")[0]))
    assert found(matchers, name, "a") == ()
    monkeypatch.setattr(matchers, "PATIENCE_SECONDS", 3600)  # it is late, so no other step waits for it
    assert found(matchers, name, "a") == ()
    go.set()
    assert after(matchers, name, "a") == tokens_of("cde")
    go.clear()
    matchers._worker.submit(held)
    draw(matchers, (1, tokens_of("c")[0]))
    threading.Timer(0.01, go.set).start()
    assert found(matchers, name, "ac") == tokens_of("de")


def test_a_sequence_that_comes_back_is_followed_anew(matchers):
    name = admitted(matchers, 1, "[ab]cde")
    draw(matchers, (1, tokens_of("a")[0]))
    same = admitted(matchers, 2, "[ab]cde", said="a", name=name)
    assert same == name
    assert after(matchers, name, "a") == tokens_of("cde")
    admitted(matchers, 1, "x", name="another")  # its old slot has another sequence now
    assert after(matchers, name, "a") == tokens_of("cde")


def test_nothing_is_followed_after_the_end(matchers):
    assert matchers.forced.idle
    name = admitted(matchers, 1, "abc")
    assert not matchers.forced.idle
    matchers.forced.ended(name)
    assert matchers.forced.idle
    draw(matchers, (1, tokens_of("a")[0]))  # a row was in flight
    matchers.allowed(np.array([1]))
    assert matchers.forced.idle
    other = admitted(matchers, 2, "abc", name="other")
    matchers.admit(entry(2, (5,)))
    assert matchers.forced.idle
    assert after(matchers, other, "") == ()


def test_a_long_run_is_published_in_parts(matchers):
    text = "x" * 3 * LONGEST
    name = admitted(matchers, 1, text)
    run = after(matchers, name, "")
    assert len(run) == LONGEST
    draw(matchers, *((1, token) for token in run))
    assert len(after(matchers, name, "x" * LONGEST)) == LONGEST


def test_an_end_marker_of_the_reasoning_is_forced(matchers):
    limit = ReasoningLimit(2, ("<t>",), ("</t>",), opened=True)
    given = entry(1, PROMPT, prompt_tokens=2, structured_outputs=replace(ANY_TEXT, reasoning=limit))
    matchers.admit(given)
    draw(matchers, *((1, token) for token in tokens_of("ab")))
    assert after(matchers, given.request_id, "ab") == tokens_of("</t>")


def test_a_grammar_that_fails_forces_nothing(matchers):
    name = admitted(matchers, 1, "abc")
    draw(matchers, (1, tokens_of("x")[0]))
    matchers.allowed(np.array([1]))
    assert after(matchers, name, "x") == ()


def test_the_end_is_not_waited_for(matchers, monkeypatch):
    monkeypatch.setattr(matchers, "PATIENCE_SECONDS", 0.01)
    name = admitted(matchers, 1, "a")
    matchers.note(np.array([1, 1]), torch.tensor([tokens_of("a")[0], END]))
    draft_row = DraftRow(Request(name, PROMPT), [*PROMPT, *tokens_of("a"), END], 9)
    assert matchers.forced.forced_tokens([draft_row]) == [()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matchers, "PATIENCE_SECONDS", 3600)
        assert matchers.forced.forced_tokens([draft_row]) == [()]


def test_no_step_waits_in_a_long_text_and_what_follows_it_is_still_found(matchers):
    name = admitted(matchers, 1, '"[a-z]{20}", size')
    text = '"' + "a" * 20
    for token in tokens_of(text[:-1]):
        draw(matchers, (1, token))
    matchers.allowed(np.array([1]))
    assert matchers.forced.idle
    draw(matchers, (1, tokens_of("a")[0]))
    matchers.allowed(np.array([1]))
    assert not matchers.forced.idle
    assert after(matchers, name, text)[:2] == tokens_of('",')
