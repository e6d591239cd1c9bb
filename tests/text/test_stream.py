""""""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.text.stream import (
    AFTER_CALL,
    FirstCallStream,
    Match,
    PieceDetokenizer,
    Pieces,
    StopMatcher,
    TextStream,
    TextStreams,
    WindowDetokenizer,
    decoder_steps,
    has_pieces,
)
from headrace.text.tokenizer import Tokenizer
from tests.text.parsing.corpus_files import REASONING, SCHEMAS, TOOLS, Case, cases, machine_for, read
from tests.text.vocabularies import byte_fallback, byte_level, metaspace, word_piece

reproducible = settings(derandomize=True)

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


LETTERS = st.text("abc", max_size=30)
STOP_CASES = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


def cut_by_the_book(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Read character by character; the longest stop string that ends here ends the text."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@reproducible
@given(LETTERS, STOP_CASES, st.booleans(), st.lists(st.integers(1, 6), max_size=30))
def test_the_result_does_not_depend_on_how_the_text_is_cut(
    text: str, stops: list[str], include: bool, sizes: list[int]
) -> None:
    matcher = StopMatcher(stops, include)
    shown, stopped, at = "", None, 0
    for size in [*sizes, len(text)]:
        seen = matcher.push(text[at : at + size])
        at += size
        if isinstance(seen, Match):
            shown, stopped = shown + seen.text, seen.stop
            break
        shown += seen
    else:
        shown += matcher.flush()
    assert (shown, stopped) == cut_by_the_book(text, stops, include)


@reproducible
@given(LETTERS, STOP_CASES)
def test_no_more_is_held_back_than_may_become_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen = ""
    for char in text:
        if isinstance(matcher.push(char), Match):
            return
        seen += char
        longest = max(
            (n for stop in stops for n in range(1, len(stop)) if seen.endswith(stop[:n])), default=0
        )
        assert matcher.held == longest


REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
BY_REGEX = {"type": "Replace", "pattern": {"Regex": "▁+"}, "content": " "}
FALLBACK, FUSE = {"type": "ByteFallback"}, {"type": "Fuse"}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([{"type": "ByteLevel"}], True),
        ([{"type": "Metaspace"}], True),
        ([REPLACE, FALLBACK, FUSE, STRIP], True),
        ([REPLACE, FALLBACK, FUSE], True),
        ([REPLACE, FUSE], True),
        ([], False),
        ([{"type": "WordPiece"}], False),
        ([BY_REGEX, FALLBACK, FUSE], False),
        ([REPLACE, FALLBACK, FUSE, {**STRIP, "stop": 1}], False),
        ([REPLACE, FALLBACK, FUSE, {**STRIP, "content": "x"}], False),
        ([REPLACE, STRIP, FUSE], False),
        ([FALLBACK, REPLACE, FUSE], False),
    ],
)
def test_which_decoders_work_piece_by_piece(steps: list[dict[str, Any]], expected: bool) -> None:
    assert has_pieces(steps) is expected


def test_the_families_served_work_piece_by_piece() -> None:
    assert all(has_pieces(decoder_steps(make())) for make in (byte_level, byte_fallback, metaspace))
    assert not has_pieces(decoder_steps(word_piece()))


def test_a_piece_is_text_if_it_is_whole_and_bytes_if_not() -> None:
    tokenizer = byte_level()
    pieces = Pieces(tokenizer, decoder_steps(tokenizer))
    assert pieces[tokenizer.backend.token_to_id("Ġthe")] == " the"
    assert pieces[tokenizer.backend.token_to_id("ð")] == b"\xf0"
    assert pieces[tokenizer.backend.token_to_id(" \u00a0plain — added")] == " \u00a0plain — added"
    assert pieces[10_000] == ""


@reproducible
@given(st.text(max_size=40))
def test_both_ways_give_the_same_text(text: str) -> None:
    tokenizer = byte_level()
    pieces = PieceDetokenizer(Pieces(tokenizer, decoder_steps(tokenizer)), frozenset())
    window = WindowDetokenizer(tokenizer, frozenset())
    tokens = tokenizer.encode(text)
    one = "".join(map(pieces.push, tokens)) + pieces.finish()
    other = "".join(map(window.push, tokens)) + window.finish()
    assert one == other


def test_a_window_stays_small() -> None:
    window = WindowDetokenizer(byte_level(), frozenset())
    broken = byte_level().backend.token_to_id("Ģ")
    for token in byte_level().encode("The quick brown 日本 fox ") * 5 + [broken] * 50:
        window.push(token)
        assert len(window._window) <= 8


TOKENIZER = byte_level()
CALL_STREAMS = TextStreams(TOKENIZER)


def stream_for(case: Case, **more) -> FirstCallStream:
    reasoning = REASONING[case.reasoning_format] if case.reasoning_format else None
    return FirstCallStream(CALL_STREAMS.open(**more), TOOLS[case.format], reasoning, case.opened, SCHEMAS)


@pytest.mark.parametrize("name", sorted(TOOLS))
@pytest.mark.parametrize("step", [1, pytest.param(3, marks=pytest.mark.slow), 1000])
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


def test_a_window_keeps_a_character_that_begins_behind_a_broken_one() -> None:
    tokenizer = byte_level()
    tokens = tokenizer.encode("é𐀀")
    assert len(tokens) == 5
    window = WindowDetokenizer(tokenizer, frozenset())
    assert "".join(map(window.push, tokens)) + window.finish() == tokenizer.decode(tokens)
