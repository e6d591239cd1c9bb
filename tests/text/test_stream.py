from collections.abc import Callable, Sequence
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.text.stream import TextStream, TextStreams
from headrace.text.tokenizer import Tokenizer
from tests.text.test_stops import cut_by_the_book
from tests.text.vocabularies import byte_fallback, byte_level, metaspace, word_piece

reproducible = settings(deadline=None, derandomize=True)

MAKERS = [byte_level, byte_fallback, metaspace, word_piece]
STREAMS = {make: TextStreams(make()) for make in MAKERS}
IDS = st.lists(st.integers(0, 450), max_size=40)  # some beyond each vocabulary
STOPS = st.lists(
    st.sampled_from(["the", " fox", "er", "\n\n", "é", "\ufffd", "日本", "e d", "a", "over the"]), max_size=3
)
every_tokenizer = pytest.mark.parametrize("make", MAKERS)


def run(stream: TextStream, tokens: Sequence[int], size: int = 1) -> tuple[str, str | None]:
    shown = ""
    for at in range(0, len(tokens), size):
        shown += stream.push(tokens[at : at + size]).text
    last = stream.finish()
    return shown + last.text, last.stopped


def decoded(tokenizer: Tokenizer, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
    """All at once, by the library; but good characters in a broken run of byte-fallback tokens stay."""
    tokens = [token for token in tokens if tokenizer.token(token) is not None]
    if tokenizer is not byte_fallback():
        return tokenizer.decode(tokens, skip_special_tokens)
    if skip_special_tokens:
        tokens = [token for token in tokens if token not in tokenizer.special_token_ids]
    text = ""
    for is_byte, run_ in groupby(tokens, lambda token: (tokenizer.token(token) or "").startswith("<0x")):
        names = [tokenizer.token(token) or "" for token in run_]
        if is_byte:
            raw = bytes(int(name[3:5], 16) for name in names)
            text += raw.decode("utf-8", "headrace.replace_each_byte")
        else:
            text += "".join(names).replace("▁", " ")
    return text.removeprefix(" ")


@every_tokenizer
@reproducible
@given(tokens=IDS, size=st.integers(1, 4), skip=st.booleans())
def test_deltas_join_up_to_the_whole_text(
    make: Callable[[], Tokenizer], tokens: list[int], size: int, skip: bool
) -> None:
    stream = STREAMS[make].open(skip_special_tokens=skip)
    assert run(stream, tokens, size) == (decoded(make(), tokens, skip), None)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@reproducible
@given(text=st.text(max_size=40))
def test_any_text_is_streamed_exactly(make: Callable[[], Tokenizer], text: str) -> None:
    tokens = make().encode(text)
    assert run(STREAMS[make].open(), tokens)[0] == make().decode(tokens)


@every_tokenizer
@reproducible
@given(tokens=IDS, stops=STOPS, size=st.integers(1, 4), include=st.booleans())
def test_stop_strings_cut_the_text_wherever_tokens_begin(
    make: Callable[[], Tokenizer], tokens: list[int], stops: list[str], size: int, include: bool
) -> None:
    stream = STREAMS[make].open(stop=stops, include_stop_str_in_output=include)
    assert run(stream, tokens, size) == cut_by_the_book(decoded(make(), tokens), stops, include)


@every_tokenizer
@reproducible
@given(tokens=IDS, prompt=IDS)
def test_an_answer_goes_on_where_its_prompt_ends(
    make: Callable[[], Tokenizer], tokens: list[int], prompt: list[int]
) -> None:
    tokenizer = make()
    visible = [
        token
        for token in prompt
        if tokenizer.token(token) is not None and token not in tokenizer.special_token_ids
    ]
    before, whole = decoded(tokenizer, visible), decoded(tokenizer, visible + tokens)
    if "\ufffd" in before + whole:
        return  # a broken end of the prompt is told with the prompt, and may be mended by the answer
    text, _ = run(STREAMS[make].open(prompt=visible), tokens)
    assert before + text == whole


def test_a_character_begun_by_the_prompt_is_finished_by_the_answer() -> None:
    first, *rest = [byte_level().backend.token_to_id(char) for char in "ðŁĺĢ"]  # the bytes of 😀
    assert run(STREAMS[byte_level].open(prompt=[first]), rest) == ("😀", None)


def test_no_delta_ends_inside_a_character() -> None:
    tokens = byte_level().encode("日本 😀 ü")
    stream = STREAMS[byte_level].open()
    deltas = [stream.push([token]).text for token in tokens]
    assert len(tokens) > len("日本 😀 ü")
    assert "".join(deltas) == "日本 😀 ü"
    assert not any("\ufffd" in delta for delta in deltas)


def test_a_broken_tail_becomes_one_replacement_character() -> None:
    tokens = byte_level().encode("a😀")[:-1]
    stream = STREAMS[byte_level].open()
    assert "".join(stream.push([token]).text for token in tokens) == "a"
    assert stream.finish().text == "\ufffd"


def test_endless_broken_bytes_are_shown_and_not_gathered() -> None:
    token = byte_level().backend.token_to_id("Ģ")  # the byte 0x80, which begins no character
    stream = STREAMS[byte_level].open()
    assert [stream.push([token]).text for _ in range(20)] == ["\ufffd"] * 20


def test_the_first_word_loses_its_space_only_where_nothing_is_before_it() -> None:
    the, fox = (byte_fallback().backend.token_to_id(word) for word in ("▁the", "▁fox"))
    assert run(STREAMS[byte_fallback].open(), [the, fox])[0] == "the fox"
    assert run(STREAMS[byte_fallback].open(prompt=[1, the]), [fox])[0] == " fox"
    assert run(STREAMS[byte_fallback].open(prompt=[1]), [fox])[0] == "fox"


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    stream = STREAMS[byte_level].open(stop=["STOP"])
    shown = [stream.push(byte_level().encode(part)).text for part in ("a S", "T", "x", "ST")]
    assert shown == ["a ", "", "STx", ""]
    assert stream.finish().text == "ST"


def test_nothing_is_shown_after_a_stop_string() -> None:
    stream = STREAMS[byte_level].open(stop=["END"])
    delta = stream.push(byte_level().encode("oneENDtwo"))
    assert (delta.text, delta.stopped) == ("one", "END")
    assert "".join(delta.texts).startswith("oneEND")
    after = stream.push(byte_level().encode("more"))
    assert (after.text, after.stopped, after.texts) == ("", "END", ())
    assert stream.finish().text == ""


def test_stop_strings_are_not_looked_for_in_the_first_min_tokens() -> None:
    one = byte_level().encode("a")
    stream = STREAMS[byte_level].open(stop=["a"], min_tokens=2)
    assert [stream.push(one).stopped for _ in range(3)] == [None, None, "a"]


@every_tokenizer
@reproducible
@given(tokens=IDS, stops=STOPS)
def test_texts_of_tokens_have_their_place_in_the_answer(
    make: Callable[[], Tokenizer], tokens: list[int], stops: list[str]
) -> None:
    stream = STREAMS[make].open(stop=stops)
    whole = decoded(make(), tokens)
    used = 0
    for at in range(0, len(tokens), 3):
        delta = stream.push(tokens[at : at + 3])
        used += len(delta.texts)
        assert whole[delta.offset :].startswith("".join(delta.texts))
    assert used == len(tokens) or stream.finish().stopped is not None
