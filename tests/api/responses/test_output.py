"""Output items and their events do not depend on how an answer was cut into steps."""

import random

import pytest

from headrace.api.compile.model import Dialect
from headrace.api.responses.output import SLICE, Output, joined, slices
from headrace.text.parsing.machine import Reading
from headrace.text.template import ChatTemplate
from tests.api.tool_scenes import TOOL_TEMPLATE

DIALECT = Dialect(ChatTemplate({"default": TOOL_TEMPLATE}))
READING = Reading(DIALECT.tools(None), DIALECT.reasoning(None))
CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Pa\\"ris 😀"}}\n</tool_call>'
TEXTS = [
    "",
    "Hello there, this is a text.",
    "<think>Hm.</think>Well.",
    "<think>Only thoughts",
    CALL,
    f"Before. {CALL}\n{CALL} After, and more.",
    f"<think>a</think>{CALL}x{CALL}",
    "<tool_call>{broken",
]


def spelt(cuts):
    """The items and the events of an answer that comes in pieces."""
    reader, output, events = READING.open(), Output(), []
    for cut in cuts:
        for text in slices(cut):
            events += output.add(reader.push(text))
    events += output.add(reader.finish())
    return output.items, joined(events + output.finish("completed"))


def plain(value):
    """Without ids, which are always new."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items() if key not in ("id", "item_id", "call_id")}
    return value


@pytest.mark.parametrize("text", TEXTS)
def test_every_split_has_the_same_items(text):
    chance = random.Random(3)
    whole, _ = spelt([text])
    for _ in range(40):
        cuts, at = [], 0
        while at < len(text):
            length = chance.randint(1, 2 * SLICE)
            cuts.append(text[at : at + length])
            at += length
        items, events = spelt(cuts)
        assert plain(items) == plain(whole)
        for index, item in enumerate(items):
            own = [event for event in events if event["output_index"] == index]
            assert own[0]["type"] == "response.output_item.added"
            assert own[-1] == {"type": "response.output_item.done", "output_index": index, "item": item}
            assert item["status"] == "completed"


def test_pieces_of_one_text_are_joined():
    _, events = spelt(["A text of more than eight characters."])
    assert [event["delta"] for event in events if "delta" in event] == [
        "A text of more than eight characters."
    ]


def test_a_part_is_added_without_the_log_probabilities_of_its_first_step():
    reader, output = READING.open(), Output()
    events = output.add(reader.push("Hello there, this is a text."))
    output.score([{"token": "Hello"}], events)
    (added,) = [event for event in events if event["type"] == "response.content_part.added"]
    assert added["part"] == {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    assert output.items[0]["content"][0]["logprobs"] == [{"token": "Hello"}]


def test_the_last_item_of_a_cut_off_answer_is_incomplete():
    output = Output()
    reader = READING.open()
    output.add(reader.push("<think>a</think>b"))
    output.add(reader.finish())
    output.finish("incomplete")
    assert [item["status"] for item in output.items] == ["completed", "incomplete"]
