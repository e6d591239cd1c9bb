import re

from headrace.text.parsing.message import CallPiece, MessageReader, Reading, new_id
from tests.text.parsing.corpus_files import REASONING, TOOLS

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
