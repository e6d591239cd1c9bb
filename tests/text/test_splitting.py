"""Which regular expressions of tokenizers may take long for a short text."""

from __future__ import annotations

import threading

import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

from headrace.expressions import MAX_WAYS
from headrace.text.splitting import MAX_PARTS, may_take_long
from headrace.text.tokenizer import SHORT_CHARACTERS, Tokenizer


def made(*parts: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({letter: at for at, letter in enumerate("ab!")}, []))
    backend.pre_tokenizer = pre_tokenizers.Sequence(list(parts))
    if normalizer is not None:
        backend.normalizer = normalizer
    return Tokenizer(backend)


def test_expressions_are_found_in_all_parts() -> None:
    split = pre_tokenizers.Split(Regex("a+"), "isolated")
    assert not may_take_long(made(split, pre_tokenizers.ByteLevel()).backend)
    replace = normalizers.Replace(Regex("(b+)+c"), "x")
    for parts, normalizer in (
        ([split], replace),
        ([split, pre_tokenizers.Split(Regex("(a+)+c"), "removed")], None),
    ):
        assert may_take_long(made(*parts, normalizer=normalizer).backend)


def test_many_expressions_and_many_parts_take_long_together() -> None:
    eight = pre_tokenizers.Split(Regex("a{1,8}b"), "isolated")
    assert not may_take_long(made(*[eight] * (MAX_WAYS // 8)).backend)
    assert may_take_long(made(*[eight] * (MAX_WAYS // 8 + 1)).backend)
    assert may_take_long(made(*[pre_tokenizers.Digits()] * (MAX_PARTS + 1)).backend)


def test_only_a_tokenizer_without_slow_expressions_encodes_on_the_calling_thread() -> None:
    plain = made(pre_tokenizers.Split(Regex("a+|b"), "isolated"))
    slow = made(pre_tokenizers.Split(Regex("(a+)+$"), "isolated"))
    assert plain.is_short(SHORT_CHARACTERS)
    assert not plain.is_short(SHORT_CHARACTERS + 1)
    assert not slow.is_short(1)
    assert plain.encode("aab") == slow.encode("aab") == [0, 0, 1]


def test_a_slow_expression_does_not_hold_the_interpreter() -> None:
    """While one thread searches, another must run: the texts are short, and one takes some tenths of a second."""
    slow = made(pre_tokenizers.Split(Regex("(a+)+$"), "isolated"))
    begun, turns = threading.Event(), 0

    def work() -> None:
        begun.set()
        for length in range(14, 20):
            slow.encode("a" * length + "!")

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    while thread.is_alive():
        turns += 1
        thread.join(0.0005)
    assert turns > 3
