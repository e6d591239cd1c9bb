from __future__ import annotations

import json

from tokenizers import Tokenizer

from benchmarks.peers.vocabulary import WORDS, tokenizer, tokens


def test_every_id_has_a_text_of_its_own():
    assert len(set(tokens(1000))) == 1000
    read = Tokenizer.from_str(json.dumps(tokenizer(1000)))
    assert read.get_vocab_size() == 1000
    assert read.decode([WORDS, 999]) == f" w{WORDS} w999"


def test_any_text_can_be_encoded_and_comes_back():
    read = Tokenizer.from_str(json.dumps(tokenizer(1000)))
    assert read.decode(read.encode("about naïve 漢").ids) == "about naïve 漢"
