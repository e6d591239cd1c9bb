from __future__ import annotations

import pytest

from headrace.api.compile.call import Choice
from headrace.core.events import Emitted, Finished
from headrace.core.plan import TokenLogprob
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.text.stream import TextStreams
from tests.text.vocabularies import byte_level

TOKENIZER = byte_level()


STREAMS = TextStreams(TOKENIZER)


EOS = TOKENIZER.eos_token_id


def choice(mute: bool = False, complete=None, **given) -> Choice:
    params = SamplingParams(**given)
    stream = STREAMS.open(
        stop=params.stop,
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
    )
    return Choice(0, Request("r", (1,), params), stream, mute, complete)


def encode(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def finished(reason: FinishReason, stop_token: int | None = None) -> Finished:
    return Finished("r", reason, 1, 0, 0, "", stop_token)


def text_of(made: Choice) -> str:
    delta = made.gained()
    return "" if delta is None else delta.text


def test_steps_join_up_to_the_text():
    made, shown = choice(), ""
    for token in encode("naïve 😀 fox"):
        made.take([Emitted("r", (token,))])
        delta = made.gained()
        assert delta is not None
        assert "\ufffd" not in delta.text
        shown += delta.text
    made.take([finished(FinishReason.LENGTH)])
    assert shown == "naïve 😀 fox"
    assert made.finish_reason == "length"
    assert made.output_tokens == len(encode("naïve 😀 fox"))


def test_several_steps_are_merged_into_one_chunk():
    made = choice()
    made.take([Emitted("r", (token,)) for token in encode("the fox")])
    made.take([Emitted("r", encode(" ran"))])
    delta = made.gained()
    assert delta is not None
    assert delta.text == "the fox ran"
    assert delta.tokens == encode("the fox") + encode(" ran")
    assert delta.offset == 0
    assert made.gained() is None


def test_the_end_token_counts_and_is_not_shown():
    made = choice(skip_special_tokens=False)
    made.take([Emitted("r", (*encode("hi"), EOS)), finished(FinishReason.STOP, EOS)])
    assert text_of(made) == "hi"
    assert made.output_tokens == len(encode("hi")) + 1
    assert (made.finish_reason, made.stop_reason) == ("stop", None)


@pytest.mark.parametrize(("include", "shown"), [(False, "the"), (True, "the fox")])
def test_a_stop_token_is_hidden_unless_it_shall_be_shown(include, shown):
    fox = encode(" fox")
    assert len(fox) == 1
    made = choice(stop_token_ids=fox, include_stop_str_in_output=include)
    made.take([Emitted("r", encode("the")), Emitted("r", fox), finished(FinishReason.STOP, fox[0])])
    assert text_of(made) == shown
    assert made.stop_reason == fox[0]
    assert made.output_tokens == len(encode("the")) + 1


def test_a_stop_string_ends_the_answer_and_later_text_is_dropped():
    made = choice(stop=("END",))
    assert not made.take([Emitted("r", encode("a E"))])
    assert text_of(made) == "a "
    assert made.take([Emitted("r", encode("ND of"))])
    assert (made.finish_reason, made.stop_reason) == ("stop", "END")
    assert made.stopped_by_text
    counted = made.output_tokens
    assert not made.take([Emitted("r", encode("more")), finished(FinishReason.LENGTH)])
    assert text_of(made) == ""
    assert (made.finish_reason, made.output_tokens) == ("stop", counted)


def test_text_held_back_for_a_stop_string_is_sent_at_the_end():
    made = choice(stop=("END",))
    made.take([Emitted("r", encode("the E"))])
    assert text_of(made) == "the "
    made.take([finished(FinishReason.LENGTH)])
    assert text_of(made) == "E"
    assert made.stop_reason is None


def test_logprobs_go_with_the_tokens_that_are_shown():
    made = choice(stop=("END",), logprobs=0)
    tokens = encode("fox END more")
    made.take([Emitted("r", (token,), (TokenLogprob(token, -1.0, 1, ()),)) for token in tokens])
    delta = made.gained()
    assert delta is not None
    assert [entry.token for entry in delta.logprobs] == list(delta.tokens)
    assert len(delta.tokens) < len(tokens)
    assert made.mean_logprob < 0


def test_a_mute_choice_says_nothing():
    made = choice(mute=True)
    made.take([Emitted("r", encode("x")), finished(FinishReason.STOP, 5)])
    assert made.gained() is None
    assert (made.finish_reason, made.output_tokens) == ("length", 0)


@pytest.mark.parametrize("steps_at_once", [1, 100])
def test_a_mean_logprob_does_not_depend_on_what_came_after_the_stop_string(steps_at_once):
    made, tokens = choice(stop=("fox",), logprobs=0), encode("the fox ran and ran")
    events = [Emitted("r", (t,), (TokenLogprob(t, -1.0 - i, 1, ()),)) for i, t in enumerate(tokens)]
    while events:
        made.take(events[:steps_at_once])
        del events[:steps_at_once]
    used = len(encode("the fox"))
    assert made.output_tokens == used
    assert made.mean_logprob == pytest.approx(-1.0 - (used - 1) / 2)


def test_a_hidden_stop_token_counts_in_the_mean_logprob():
    made = choice(stop_token_ids=(7,), logprobs=0)
    made.take(
        [
            Emitted("r", (70, 7), (TokenLogprob(70, -1.0, 1, ()), TokenLogprob(7, -3.0, 1, ()))),
            finished(FinishReason.STOP, 7),
        ]
    )
    assert (made.output_tokens, made.mean_logprob) == (2, -2.0)


@pytest.mark.parametrize(("whole", "reason"), [("{}", "stop"), ("{", "length")])
def test_a_stop_string_before_the_structure_is_whole_is_a_cut(whole, reason):
    made = choice(complete=lambda text: text == "{}", stop="END")
    for token in encode(whole + "END"):
        made.take([Emitted("r", (token,))])
    assert (made.finish_reason, made.stop_reason) == (reason, "END")


def test_a_stop_token_before_the_structure_is_whole_is_a_cut_and_an_end_token_never_is():
    (comma,) = encode(",")
    for token, reason in ((comma, "length"), (EOS, "stop")):
        made = choice(complete=lambda text: False, stop_token_ids=(comma,))
        made.take([Emitted("r", encode("[1"))])
        made.take([Emitted("r", (token,)), finished(FinishReason.STOP, token)])
        assert made.finish_reason == reason
