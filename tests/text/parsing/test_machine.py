"""What is read is what was written, and it does not matter how the text is cut."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.text.parsing.machine import Machine
from headrace.text.parsing.reader import Kind
from tests.text.parsing.corpus_files import FOLDER, REASONING, SCHEMAS, TOOLS, cases, machine_for, read

FORMATS = sorted(TOOLS)


def test_every_format_has_a_file_of_at_least_40_texts():
    assert sorted(path.stem for path in FOLDER.glob("*.jsonl")) == FORMATS
    assert min(len(cases(name)) for name in FORMATS) >= 40


@pytest.mark.parametrize("name", FORMATS)
def test_the_corpus_is_read_as_it_was_written(name):
    for case in cases(name):
        content, reasoning, calls = read(machine_for(case), [case.text])
        assert (content, reasoning) == (case.content, case.reasoning), case
        assert [call for call, _ in calls] == [call["name"] for call in case.calls], case
        for (_, arguments), expected in zip(calls, case.calls, strict=True):
            if "arguments_text" in expected:
                assert arguments == expected["arguments_text"], case
            else:
                assert json.loads(arguments) == expected["arguments"], case


@pytest.mark.parametrize("apart", [7, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FORMATS)
def test_every_cut_into_two_pieces_gives_the_same_message(name, apart):
    for number, case in enumerate(cases(name)):  # texts of a format are alike: not each place of each
        whole = read(machine_for(case), [case.text])
        for at in range(number % apart, len(case.text) + 1, apart):
            assert read(machine_for(case), [case.text[:at], case.text[at:]]) == whole, (case, at)


@pytest.mark.parametrize("name", FORMATS)
def test_single_characters_and_random_cuts_give_the_same_message(name):
    chance = random.Random(name)
    for case in cases(name):
        whole = read(machine_for(case), [case.text])
        assert read(machine_for(case), case.text) == whole, case
        for _ in range(8):
            cuts = sorted(chance.choices(range(len(case.text) + 1), k=chance.randint(1, 12)))
            edges = [0, *cuts, len(case.text)]
            pieces = [case.text[a:b] for a, b in itertools.pairwise(edges)]
            assert read(machine_for(case), pieces) == whole, (case, cuts)


SHORT = [  # each character more doubles the number of cuts
    pytest.param(case, marks=[pytest.mark.slow] if len(case.text) > 11 else [], id=str(case))
    for name in FORMATS
    for case in cases(name)
    if 0 < len(case.text) <= 14
]


@pytest.mark.parametrize("case", SHORT)
def test_short_texts_give_the_same_message_for_every_cut_there_is(case):
    whole = read(machine_for(case), [case.text])
    for bits in range(2 ** (len(case.text) - 1)):
        pieces, start = [], 0
        for at in range(1, len(case.text)):
            if bits >> (at - 1) & 1:
                pieces.append(case.text[start:at])
                start = at
        assert read(machine_for(case), [*pieces, case.text[start:]]) == whole, pieces


def fragments(name: str) -> st.SearchStrategy[str]:
    """Texts of markers, brackets, quotes and pieces of real calls, in any order."""
    markers = sorted(TOOLS[name].markers() | {"<think>", "</think>"})
    real = [case.text[a:b] for case in cases(name)[:20] for a, b in ((0, 30), (10, 60), (-40, None))]
    pieces = [
        *markers,
        *real,
        *"{}[]()\"\\:,=<>`\n '",
        '{"name": "get_time", ',
        '"arguments": {',
        "get_time(",
        "x",
    ]
    return st.lists(st.sampled_from(pieces), max_size=12).map("".join)


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, str, str | None, list[str]]:
    name = draw(st.sampled_from(FORMATS))
    text = draw(st.one_of(fragments(name), st.text(max_size=60)))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    edges = [0, *cuts, len(text)]
    reasoning = draw(st.sampled_from([None, "think", *(["harmony"] if name == "harmony" else [])]))
    return name, text, reasoning, [text[a:b] for a, b in itertools.pairwise(edges)]


@settings(max_examples=300)
@given(cut_texts(), st.booleans())
def test_whatever_comes_nothing_is_raised_and_no_cut_matters(cut, opened):
    name, text, reasoning, pieces = cut

    def machine() -> Machine:
        format = REASONING[reasoning] if reasoning else None
        return Machine(TOOLS[name], format, opened=opened, schemas=SCHEMAS)

    whole = read(machine(), [text])
    assert read(machine(), pieces) == whole
    assert read(machine(), text) == whole
    content, thought, calls = whole
    for said in (content, thought, *(part for call in calls for part in call)):
        said.encode()


@settings(max_examples=100)
@given(st.text(max_size=80))
def test_plain_text_is_content_unchanged(text):
    for name in FORMATS:
        if any(marker in text for marker in TOOLS[name].silent):
            continue
        assert read(Machine(TOOLS[name], None, schemas={}), text) == (text, "", [])


@pytest.mark.parametrize(
    "name", ["hermes", "mistral", "qwen3_coder", "pythonic", "gemma4", "deepseek", "harmony"]
)
def test_arguments_lag_behind_the_text_by_no_more_than_a_marker(name):
    case = next(case for case in cases(name) if len(case.text) > 500)
    machine = machine_for(case)
    reported = lag = 0
    for number, char in enumerate(case.text, start=1):
        reported += sum(len(text) for _, text in machine.push(char))
        if reported:
            lag = max(lag, number - reported)
    never_told = len(case.text) - reported
    assert lag <= never_told + 32


def test_the_name_is_sent_as_soon_as_the_arguments_begin():
    machine = Machine(TOOLS["hermes"], None)
    assert machine.push('<tool_call>{"name": "f", "arguments": ') == []
    assert machine.push("{") == [(Kind.NAME, "f"), (Kind.ARGUMENTS, "{")]
    assert machine.push('"a": "long te') == [(Kind.ARGUMENTS, '"a": "long te')]


def test_only_what_may_become_a_marker_is_held_back():
    machine = Machine(TOOLS["hermes"], None)
    assert machine.push("a < b") == [(Kind.CONTENT, "a < b")]
    assert machine.push(" <tool") == []
    assert machine.push("s>") == [(Kind.CONTENT, " <tools>")]


def test_json_that_is_no_call_is_not_held_back_to_its_end():
    machine = Machine(TOOLS["llama3_json"], None, schemas={"f": {}})
    assert machine.push('{"name": "Ann", ') == [(Kind.CONTENT, '{"name": "Ann",')]
