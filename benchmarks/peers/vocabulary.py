"""A vocabulary of any size for all engines: byte-level BPE in which every id has its own text.

Requests are token ids and answers are only counted, so words need no meaning. They need a text: a server that
streams text sends nothing for a token without one, and such tokens could not be timed. Ids below `WORDS` (the end
token and single bytes, which need not be whole characters) are never drawn: their embeddings, and by the tie their
logits, are zero (`benchmarks.peers.weights`), and the largest of thousands of random logits is not.
"""

from __future__ import annotations

import re
from typing import Any

END = "<|end|>"
MERGE = ("a", "b")
"""The one merge: the formats want a list of them that is not empty."""

WORDS = 258
"""Id of the first word; before it are the end token, the bytes, and what `MERGE` makes."""


def byte_letters() -> list[str]:
    """The printable letter that stands for each byte in byte-level BPE (Radford et al., 2019)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def tokens(size: int) -> list[str]:
    """All ``size`` tokens in the order of their ids."""
    words = (f"Ġw{i}" for i in range(WORDS, size))
    return [END, *byte_letters(), "".join(MERGE), *words]


def read(text: str) -> list[int]:
    """The ids of the tokens in a text that was generated; bytes of characters beyond ASCII cannot be told apart."""
    found = re.findall(r" w(\d+)|(.)", text, re.DOTALL)
    return [int(word) if word else ord(letter) + 1 for word, letter in found]


def tokenizer(size: int) -> dict[str, Any]:
    """The contents of ``tokenizer.json``."""
    end = {"id": 0, "content": END, "special": True}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [end | plain],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens(size))},
            "merges": [list(MERGE)],
        },
    }
