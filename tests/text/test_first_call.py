"""An answer ends at the token that completes its first tool call, in every format."""

from __future__ import annotations

import pytest

from headrace.text.stream import AFTER_CALL, FirstCallStream, TextStreams
from tests.text.parsing.corpus_files import REASONING, SCHEMAS, TOOLS, Case, cases, machine_for, read
from tests.text.vocabularies import byte_level

TOKENIZER = byte_level()
STREAMS = TextStreams(TOKENIZER)


def stream_for(case: Case, **more) -> FirstCallStream:
    reasoning = REASONING[case.reasoning_format] if case.reasoning_format else None
    return FirstCallStream(STREAMS.open(**more), TOOLS[case.format], reasoning, case.opened, SCHEMAS)


@pytest.mark.parametrize("name", sorted(TOOLS))
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_what_is_shown_has_the_first_call_and_no_other(name, step):
    several = 0
    for case in cases(name):
        tokens = TOKENIZER.encode(case.text, add_special_tokens=False)
        stream, shown, used, stopped = stream_for(case), "", 0, None
        for at in range(0, len(tokens), step):
            text, stopped, texts, _ = stream.push(tokens[at : at + step])
            shown, used = shown + text, used + len(texts)
            if stopped is not None:
                break
        _, _, calls = read(machine_for(case), [case.text])
        if stopped is None:
            shown += stream.finish().text
            assert shown == case.text, case
            assert len(calls) < 2, case
        else:
            assert stopped == AFTER_CALL
            several += len(calls) > 1
            assert read(machine_for(case), [shown])[2] == calls[:1], case
            assert used == len(tokens) or read(machine_for(case), [TOKENIZER.decode(tokens[:used])])[2]
    assert several, name


def test_a_stop_string_that_comes_first_ends_the_answer():
    case = cases("hermes")[0]
    stream = stream_for(case, stop=["<tool"])
    delta = stream.push(TOKENIZER.encode("Well. " + case.text, add_special_tokens=False))
    assert (delta.stopped, delta.text) == ("<tool", "Well. ")
