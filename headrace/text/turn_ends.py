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


def turn_ends(control: Mapping[str, int]) -> list[int]:
    """The ids of those ``control`` tokens, text and id, that end an answer wherever they are."""
    known = {text: id for text, id in control.items() if text in _ENDS}
    if {"<|return|>", "<|call|>"} <= known.keys():
        known.pop("<|end|>", None)  # in gpt-oss it ends a message, after which the answer goes on
    return sorted(known.values())


def shown_ends(control: Mapping[str, int], templates: Iterable[str]) -> list[int]:
    """As `turn_ends`, of the tokens that a chat template writes."""
    text = "\n".join(templates)
    return turn_ends({token: id for token, id in control.items() if token in text})
