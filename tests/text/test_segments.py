import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from headrace.text import tokenizer as segments
from headrace.text.tokenizer import Segments, Tokenizer
from tests.text.vocabularies import byte_fallback, byte_level, metaspace, word_piece

KINDS = [byte_level, byte_fallback, metaspace, word_piece]
LONG = "The quick brown fox jumps over the lazy dog. " * 8
PIECES = [
    "<s>",
    "</s>",
    "<pad>",
    "<",
    "/s>",
    " ",
    "\n",
    "the fox",
    "é",
    " \u00a0plain — added",
    "日本 ",
    LONG,
    LONG[1:],
]


def encode(tokenizer: Tokenizer, known: Segments, text: str, scope: str = "") -> list[int]:
    parts = known.cut(text, scope)
    missing = [part.text for part in parts if part.tokens is None]
    return known.join(parts, tokenizer.encode_batch(missing, add_special_tokens=False), scope)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(texts=st.lists(st.lists(st.sampled_from(PIECES), max_size=12).map("".join), min_size=1, max_size=4))
def test_in_parts_and_known_is_as_at_once(kind, texts: list[str]) -> None:
    tokenizer = kind()
    known = Segments(tokenizer)
    for text in [*texts, *texts]:
        assert encode(tokenizer, known, text) == tokenizer.encode(text, add_special_tokens=False)


def unknown(known: Segments, text: str, scope: str = "") -> list[str]:
    return [part.text for part in known.cut(text, scope) if part.tokens is None]


def test_a_long_part_is_tokenized_once_for_each_scope() -> None:
    tokenizer = byte_level()
    known = Segments(tokenizer)
    encode(tokenizer, known, f"<s>{LONG}</s><s>one</s>", "a")
    assert unknown(known, f"<s>{LONG}</s><s>other</s>", "a") == ["</s><s>other</s>"]
    assert unknown(known, f"<s>{LONG}</s><s>other</s>", "b") == [f"<s>{LONG}", "</s><s>other</s>"]


def test_what_was_used_longest_ago_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level()
    known = Segments(tokenizer)
    texts = [f"<s>{number}{LONG}" for number in range(3)]
    monkeypatch.setattr(segments, "KEPT_CHARACTERS", 2 * len(texts[0]))
    for text in (texts[0], texts[1], texts[0], texts[2]):
        encode(tokenizer, known, text)
    assert [bool(unknown(known, text)) for text in texts] == [False, True, False]


def test_a_mark_that_takes_blanks_cuts_nothing() -> None:
    backend = byte_level().backend.from_str(byte_level().backend.to_str())
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    known = Segments(Tokenizer(backend))
    assert unknown(known, f"<s>{LONG}</s>{LONG}") == [f"<s>{LONG}</s>{LONG}"]
