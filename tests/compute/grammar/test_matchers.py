"""The state of grammars per slot: it follows the tokens drawn, belongs to one sequence, and fails for it alone."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from llguidance import LLParserLimits

from headrace.compute.grammar import compiler as compiler_module
from headrace.compute.grammar import matchers as module
from headrace.compute.grammar.compiler import Compiler
from headrace.compute.grammar.matchers import EVERYTHING, LONGEST, Matchers
from headrace.core.constraint import ANY_TEXT, ReasoningLimit, UnusableConstraint
from headrace.core.drafting.proposal import DraftRow
from headrace.core.plan import Entry
from headrace.core.request import Request
from tests.compute.fakes import entry
from tests.compute.grammar.conftest import END, SIZE, TOKENIZER


def tokens_of(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def constrained(slot: int, regex: str, said: str = "") -> Entry:
    return entry(slot, (5, 6, *tokens_of(said)), prompt_tokens=2, structured_outputs={"regex": regex})


def allowed_at(matchers: Matchers, slot: int, beside: int = 3) -> set[int]:
    found = matchers.allowed(np.array([beside, slot]))
    assert found is not None
    (lines, words, _), failures = found
    assert lines.tolist() == [1]
    assert not failures
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    return set(np.flatnonzero(bits[0, :SIZE]).tolist())


def draw(matchers: Matchers, *drawn: tuple[int, int]) -> None:
    slots, tokens = zip(*drawn, strict=True)
    matchers.note(np.array(slots), torch.tensor(tokens))


def test_the_mask_follows_the_tokens_that_are_drawn(matchers):
    matchers.admit(constrained(1, "ab?c"))
    a, b, c = (tokens_of(letter)[0] for letter in "abc")
    assert allowed_at(matchers, 1) == {a}
    draw(matchers, (1, a), (3, 77))
    assert allowed_at(matchers, 1) == {b, c}
    draw(matchers, (1, c))
    assert allowed_at(matchers, 1) == {END}
    draw(matchers, (1, END))
    assert allowed_at(matchers, 1) == {END}  # a row that is in flight when the answer ends goes on harmlessly


def test_a_sequence_that_comes_back_goes_on_where_it_was(matchers):
    matchers.admit(constrained(1, "[a-z]{3}[0-9]", said="xyz"))
    assert allowed_at(matchers, 1) == {tokens_of(digit)[0] for digit in "0123456789"}


def test_a_slot_belongs_to_its_last_sequence(matchers):
    a, b = tokens_of("a")[0], tokens_of("b")[0]
    matchers.admit(constrained(1, "a+"))
    draw(matchers, (1, a))
    matchers.admit(constrained(1, "b+"))
    assert allowed_at(matchers, 1) == {b}
    matchers.admit(entry(1, (5,)))
    assert matchers.allowed(np.array([1])) is None


def test_what_a_grammar_cannot_follow_fails_its_row_alone(matchers):
    matchers.admit(constrained(0, "a+"))
    matchers.admit(constrained(1, "b+"))
    draw(matchers, (0, tokens_of("x")[0]), (1, tokens_of("b")[0]))
    (lines, words, _), failures = matchers.allowed(np.array([0, 1]))
    assert lines.tolist() == [0, 1]
    assert failures.keys() == {0}
    assert failures[0].startswith("structured output failed: ")
    assert (words[0] == EVERYTHING).all()
    assert (words[1] != EVERYTHING).any()
    matchers.admit(constrained(0, "a+"))
    assert allowed_at(matchers, 0) == {token for token in allowed_at(matchers, 0) if token != END}


def test_a_fault_in_place_of_a_token_is_not_followed(matchers):
    matchers.admit(constrained(1, "ab"))
    draw(matchers, (1, -2))
    assert allowed_at(matchers, 1) == set(tokens_of("a"))


def test_a_constraint_that_cannot_be_compiled_is_refused_and_frees_the_slot(matchers):
    matchers.admit(constrained(1, "a+"))
    with pytest.raises(UnusableConstraint, match="structured output failed: the regex"):
        matchers.admit(constrained(1, "("))
    assert matchers.allowed(np.array([1])) is None


def test_a_library_that_panics_fails_the_rows_and_not_the_engine(matchers, monkeypatch):
    class Panic(BaseException):
        pass

    class Executor:
        def unsafe_compute_mask_ptr(self, *given):
            raise Panic

    matchers._executor = Executor()
    matchers.admit(constrained(1, "a+"))
    _, failures = matchers.allowed(np.array([1]))
    assert "Panic" in failures[0]


def test_tokens_that_are_still_on_a_device_are_waited_for_beside_the_runner(matchers, monkeypatch):
    arrived = threading.Event()

    class Later:
        def __init__(self, device):
            pass

        def add(self, tensor):
            self.tokens = tensor.on_device

        def seal(self):
            pass

        def wait(self):
            assert arrived.wait(60)
            return [torch.tensor(self.tokens)]

    monkeypatch.setattr(module, "Download", Later)
    matchers.admit(constrained(1, "ab"))
    matchers.admit(constrained(2, "ab"))
    matchers.allowed(np.array([1, 2]))
    a, b = tokens_of("a")[0], tokens_of("b")[0]
    drawn = SimpleNamespace(device=SimpleNamespace(type="cuda"), on_device=[77, a, -1])
    matchers.note(np.array([3, 1, 2]), drawn)  # returns before they have arrived
    arrived.set()
    assert allowed_at(matchers, 1) == {b}
    assert allowed_at(matchers, 2) == {a}


def walk(matchers: Matchers, *drafts: int) -> tuple[list[set[int]], int]:
    """What slot 1 may draw after each of these drafts, and how many of them are legal."""
    matchers.walk({1: drafts})
    (_, words, _), failures = matchers.allowed(np.array([1] * (len(drafts) + 1)), np.arange(len(drafts) + 1))
    assert not failures
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :SIZE]
    return [set(np.flatnonzero(line).tolist()) for line in bits], matchers.legal()[1]


def test_masks_along_a_draft_leave_the_matcher_where_it_was(matchers):
    matchers.admit(constrained(1, "ab?c"))
    a, b, c = (tokens_of(letter)[0] for letter in "abc")
    assert walk(matchers, a, b, c) == ([{a}, {b, c}, {c}, {END}], 3)
    assert walk(matchers, a, c) == ([{a}, {b, c}, {END}], 2)
    assert allowed_at(matchers, 1) == {a}
    draw(matchers, (1, a))
    assert walk(matchers, b) == ([{b, c}, {c}], 1)


def test_a_draft_ends_at_its_first_illegal_token_and_at_an_end(matchers):
    matchers.admit(constrained(1, "ab?c"))
    a, b, c, x = (tokens_of(letter)[0] for letter in "abcx")
    everything = set(range(SIZE))
    assert walk(matchers, a, x, c) == ([{a}, {b, c}, everything, everything], 1)
    assert walk(matchers, x, a) == ([{a}, everything, everything], 0)
    assert walk(matchers, a, c, END, END) == ([{a}, {b, c}, {END}, everything, everything], 2)
    assert allowed_at(matchers, 1) == {a}


def test_a_walk_that_fails_costs_the_draft_and_not_the_sequence(matchers, monkeypatch):
    class Panic(BaseException):
        pass

    class Copied:
        def deep_copy(self):
            raise Panic

    matchers.admit(constrained(1, "ab?c"))
    a = tokens_of("a")[0]
    assert allowed_at(matchers, 1) == {a}
    real = matchers._matchers[1]
    matchers._matchers[1] = Copied()
    assert walk(matchers, a) == ([{a}, set(range(SIZE))], 0)
    matchers._matchers[1] = real
    assert walk(matchers, a)[1] == 1


def test_several_tokens_of_a_slot_are_followed_as_far_as_they_count(matchers):
    matchers.admit(constrained(1, "ab?c"))
    a, b, c = (tokens_of(letter)[0] for letter in "abc")
    drawn, counting = torch.tensor([77, a, b, c]), torch.tensor([True, True, True, False])
    matchers.note(np.array([3, 1, 1, 1]), drawn, counting)
    assert allowed_at(matchers, 1) == {c}


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
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 3600)  # it is late, so no other step waits for it
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
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.01)
    name = admitted(matchers, 1, "a")
    matchers.note(np.array([1, 1]), torch.tensor([tokens_of("a")[0], END]))
    draft_row = DraftRow(Request(name, PROMPT), [*PROMPT, *tokens_of("a"), END], 9)
    assert matchers.forced.forced_tokens([draft_row]) == [()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PATIENCE_SECONDS", 3600)
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


def test_rows_go_on_when_the_lexer_that_they_share_has_reached_its_limits(monkeypatch):
    """All copies of a compiled grammar share a lexer: each text adds states, and its limits end all copies for ever."""
    limits = LLParserLimits(initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, max_lexer_states=300)
    monkeypatch.setattr(compiler_module, "LIMITS", limits)
    compiler = Compiler(TOKENIZER.backend.to_str, SIZE, [END])
    matchers, letters = Matchers(compiler, 4), "abcdefghijklmnop"
    try:
        shared, seven = "|".join(f"{letter}[0-9]{{0,100}}{letter}" for letter in letters), tokens_of("7")[0]
        matchers.admit(constrained(0, shared, said="a" + "1" * 60))
        matchers.admit(constrained(1, shared, said="b"))
        for letter in letters[2:] + letters[2:]:
            matchers.admit(constrained(2, shared, said=letter + "3" * 70))
            draw(matchers, (1, seven), (2, seven))
            assert all(seven in allowed_at(matchers, slot) for slot in range(3))
        draw(matchers, *[(1, seven)] * (100 - 2 * len(letters[2:])))
        assert allowed_at(matchers, 1) == {*tokens_of("b")}
        assert compiler.remembered == 1
        texts = {f"{each}{'7' * 99}{each}": True for each in letters} | {
            f"a{'7' * 101}a": False,
            "a7b": False,
        }
        constraint = constrained(0, shared).params.structured_outputs
        assert {text: compiler.is_complete(constraint, text) for text in texts} == texts
        draw(matchers, (0, tokens_of("x")[0]))
        assert matchers.allowed(np.array([0]))[1].keys() == {0}
    finally:
        matchers.close()
        compiler.close()
