"""Control tokens that end an answer, by their spelling in published models.

A model's files name its end tokens. Fine-tuned chat models often name only that of their base model, and write
another one behind each answer. Without it an answer would go on with turns that the model invents.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_ENDS = frozenset(
    {
        "</s>",
        "<end_of_turn>",
        "<seed:eos>",
        "<turn|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|assistant_end|>",
        "<|call|>",
        "<|end_of_text|>",
        "<|end|>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<|eom|>",
        "<|eot_id|>",
        "<|eot|>",
        "<|im_end|>",
        "<|return|>",
        "<|role_end|>",
        "<\uff5cend▁of▁sentence\uff5c>",
        "[e~[",
        "[|endofturn|]",
    }
)
"""Not beginnings of turns, with which GLM ends an answer: its files name them."""


_OF_MESSAGES = (("<|return|>", "<|call|>"), ("<|begin|>", "<|content|>"))
"""Tokens of gpt-oss and of Solar Open, in which ``<|end|>`` ends a message, after which the answer goes on."""


def turn_ends(control: Mapping[str, int]) -> list[int]:
    """The ids of those ``control`` tokens, text and id, that end an answer wherever they are."""
    return sorted(_ends_of(control).values())


def shown_ends(control: Mapping[str, int], templates: Iterable[str]) -> list[int]:
    """As `turn_ends`, of the tokens that a chat template writes."""
    text = "\n".join(templates)
    return sorted(id for token, id in _ends_of(control).items() if token in text)


def _ends_of(control: Mapping[str, int]) -> dict[str, int]:
    known = {text: id for text, id in control.items() if text in _ENDS}
    if any(control.keys() >= set(each) for each in _OF_MESSAGES):
        known.pop("<|end|>", None)
    return known
