from __future__ import annotations

import json

from tokenizers import Tokenizer

from benchmarks.peers.vocabulary import WORDS, read, tokenizer, tokens


def test_every_id_has_a_text_of_its_own():
    assert len(set(tokens(1000))) == 1000
    words = Tokenizer.from_str(json.dumps(tokenizer(1000)))
    assert words.get_vocab_size() == 1000
    assert words.decode([WORDS, 999]) == f" w{WORDS} w999"


def test_any_text_can_be_encoded_and_comes_back():
    words = Tokenizer.from_str(json.dumps(tokenizer(1000)))
    assert words.decode(words.encode("about naïve 漢").ids) == "about naïve 漢"


def test_the_ids_of_generated_text_are_read_back():
    ids = [14, WORDS, 999, 120, 998, 1]
    assert read(Tokenizer.from_str(json.dumps(tokenizer(1000))).decode(ids)) == ids
