"""What is read is what was written, and it does not matter how the text is cut."""

from __future__ import annotations

import itertools
import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.api.compile.bodies import CallRule, Tool
from headrace.api.compile.constrain import constraint_for_tools
from headrace.text.parsing.catalogue import PLAIN_JSON, REASONING_FORMATS, TOOL_FORMATS
from headrace.text.parsing.machine import CallPiece, Machine, MessageReader, Reading, new_id
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


TWO = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "g", "arguments": {}}</tool_call>'


def reader(reading: Reading) -> MessageReader:
    ids = iter("abcdef")
    return MessageReader(reading, lambda short: next(ids))


def test_a_call_has_its_name_once_and_then_pieces_of_its_arguments():
    message = reader(Reading(TOOLS["hermes"], None))
    pieces = [message.push(TWO[at : at + 7]) for at in range(0, len(TWO), 7)]
    calls = [call for piece in pieces for call in piece.calls]
    assert [(call.index, call.id, call.name) for call in calls if call.name] == [(0, "a", "f"), (1, "b", "g")]
    assert all(call.id is None for call in calls if not call.name)
    assert "".join(call.arguments for call in calls if call.index == 0) == '{"a": 1}'
    assert "".join(call.arguments for call in calls if call.index == 1) == "{}"
    assert not message.finish()
    assert message.calls == 2


def test_a_step_adds_one_piece_per_call():
    message = reader(Reading(TOOLS["hermes"], None))
    assert message.push(TWO).calls == [CallPiece(0, "a", "f", '{"a": 1}'), CallPiece(1, "b", "g", "{}")]


def test_without_parallel_calls_only_the_first_is_returned():
    message = reader(Reading(TOOLS["hermes"], None, parallel=False))
    assert message.push(TWO).calls == [CallPiece(0, "a", "f", '{"a": 1}')]


def test_reasoning_is_counted_in_tokens_and_may_be_left_out():
    texts = ["<think>", "a ", "b", "</think>", "\n\n", "answer"]
    for show in (True, False):
        message = reader(Reading(None, REASONING["think"], show_reasoning=show))
        for text in texts:
            piece = message.push(text, [text])
        assert piece.content == "answer"
        assert message.reasoning_tokens == 4
    message = reader(Reading(None, REASONING["think"]))
    assert message.push("".join(texts), texts).reasoning == "a b"
    assert message.reasoning_tokens == 4


def test_reasoning_that_goes_on_counts_all_tokens():
    message = reader(Reading(None, REASONING["think"], opened=True))
    message.push("a b", ["a", " b"])
    assert message.reasoning_tokens == 2
    assert reader(Reading(None, None)).reasoning_tokens == 0


def test_the_text_may_lag_behind_its_tokens():
    message = reader(Reading(None, REASONING["think"], opened=True))
    message.push("", ["a"])
    message.push("a</think>", ["</think>", "b"])
    message.push("b")
    assert message.reasoning_tokens == 2


def test_ids_are_as_templates_demand_them():
    assert re.fullmatch("call_[0-9a-f]{24}", new_id(False))
    assert re.fullmatch("[A-Za-z0-9]{9}", new_id(True))
    short = Reading(TOOLS["mistral"], None).open().push("[TOOL_CALLS]f[ARGS]{}")
    assert re.fullmatch("[A-Za-z0-9]{9}", short.calls[0].id or "")


def test_the_markers_of_both_formats_must_be_seen():
    markers = Reading(TOOLS["hermes"], REASONING["think"]).markers()
    assert {"<tool_call>", "</tool_call>", "<think>", "</think>"} == markers


CALL_FORMATS = {each.name: each for each in (*TOOL_FORMATS, PLAIN_JSON)}
NAMES = ("get_weather", "3d_render", "-x", "a-b", "_", "n" * 128)
ARGUMENTS = {"city": 'a <b> {"[x]"} \\ 日本\n</tool_call>', "days": -1, "deep": True, "tags": ["a", ""]}


def tools(*names):
    return [Tool.model_validate({"type": "function", "function": {"name": name}}) for name in names]


def written(structure, arguments):
    """The arguments in the structure's notation."""
    if "python" in structure:
        return ", ".join(f"{key}={_python(value)}" for key, value in arguments.items())
    mark = structure.get("quote")
    if mark is None:
        return json.dumps(arguments, ensure_ascii=False)
    return ",".join(f"{key}:{_marked(value, mark)}" for key, value in arguments.items())


def _python(value):
    return str(value) if isinstance(value, bool) else json.dumps(value, ensure_ascii=False)


def _marked(value, mark):
    if isinstance(value, list):
        return "[" + ",".join(_marked(each, mark) for each in value) + "]"
    return f"{mark}{value}{mark}" if isinstance(value, str) else json.dumps(value)


def read_message(reading, texts):
    """The calls as name and arguments, the content and the reasoning."""
    reader = reading.open()
    pieces = [*(reader.push(text) for text in texts), reader.finish()]
    calls = []
    for call in (call for piece in pieces for call in piece.calls):
        if call.name is not None:
            calls.append([call.name, ""])
        calls[call.index][1] += call.arguments
    return calls, "".join(piece.content for piece in pieces), "".join(piece.reasoning for piece in pieces)


def forced(name, *functions, **more):
    """What a grammar forces in a format: the text of calls of ``functions``, and how it is parsed."""
    tag = constraint_for_tools(tools(*functions), CallRule("required"), CALL_FORMATS[name])
    structures = tag["structures"] if tag["many"] else tag["structures"][:1]
    text = "".join(each["begin"] + written(each, ARGUMENTS) + each["end"] for each in structures)
    return text, Reading(
        CALL_FORMATS[name], None, schemas={each: {} for each in functions}, forced=True, **more
    )


@pytest.mark.parametrize("function", NAMES)
@pytest.mark.parametrize("name", CALL_FORMATS)
def test_a_whole_call_of_any_name_is_read(name, function):
    text, reading = forced(name, function)
    calls, content, _ = read_message(reading, [text])
    assert [(each, json.loads(arguments)) for each, arguments in calls] == [(function, ARGUMENTS)]
    assert content == ""


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_a_call_that_is_cut_anywhere_has_no_content_and_the_beginning_of_its_arguments(name):
    text, reading = forced(name, "get_weather", "get_time")
    whole, _, _ = read_message(reading, [text])
    assert [each for each, _ in whole] == ["get_weather", "get_time"][: len(whole)]
    seen = set()
    for cut in range(len(text) + 1):
        by_character = [list(text[:cut])] if cut % 5 == 0 or cut == len(text) else []
        for pieces in ([text[:cut]], *by_character):
            calls, content, _ = read_message(reading, pieces)
            assert content == "", (cut, pieces)
            assert len(calls) <= len(whole)
            for (function, arguments), (expected, complete) in zip(calls, whole, strict=False):
                assert function == expected
                assert complete.startswith(arguments), (cut, arguments)
            seen.add(len(calls))
    assert seen == set(range(len(whole) + 1))


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_without_parallel_calls_there_is_one_and_no_content(name):
    text, reading = forced(name, "get_weather", "get_time", parallel=False)
    for cut in range(len(text) + 1):
        calls, content, _ = read_message(reading, [text[:cut]])
        assert (content, len(calls) < 2) == ("", True)


@pytest.mark.parametrize("reasoning", REASONING_FORMATS, ids=lambda each: each.name)
@pytest.mark.parametrize("name", ["hermes", "json", "mistral", "harmony", "pythonic"])
def test_reasoning_before_a_forced_call_is_kept(name, reasoning):
    text, plain = forced(name, "get_weather")
    reading = Reading(plain.tools, reasoning, opened=True, schemas=plain.schemas, forced=True)
    text = "Hm." + reasoning.end[0] + text
    for cut in range(len(text) + 1):
        calls, content, thought = read_message(reading, [text[:cut]])
        assert content == ""
        assert thought.startswith("Hm."[:cut])
    assert thought == "Hm."
    assert json.loads(calls[0][1]) == ARGUMENTS
