"""Ends of turns as published chat templates write them, where no other file names them."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken

from headrace.config import ModelOptions
from headrace.text.tokenizer import Tokenizer
from headrace.text.turn_ends import shown_ends, turn_ends
from headrace.wiring.loading.text import load_text
from tests.text.test_tokenizer import write_folder
from tests.text.vocabularies import byte_level

TEMPLATES = {
    "chatml": ("{{ '<|im_start|>' + role + content + '<|im_end|>' }}", ["<|im_end|>"]),
    "cohere": (
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>{{ c }}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
        ["<|END_OF_TURN_TOKEN|>"],
    ),
    "exaone4": ("{{ '[|assistant|]' + c + '[|endofturn|]' }}", ["[|endofturn|]"]),
    "gemma4": ("{{ '<|turn>model\\n' + c + '<turn|>' }}", ["<turn|>"]),
    "glm45": (
        "<|user|>{{ c }}<|assistant|>{{ c }}<|observation|><tool_response>",
        [],
    ),
    "granite": (
        "<|start_of_role|>assistant<|end_of_role|>{{ c }}<|end_of_text|>",
        ["<|end_of_text|>"],
    ),
    "harmony": ("<|start|>assistant<|message|>{{ c }}<|end|><|call|><|return|>", ["<|call|>", "<|return|>"]),
    "lfm2": ("{{ '<|im_start|>assistant\\n' + c + '<|im_end|>' }}", ["<|im_end|>"]),
    "llama4": ("<|header_start|>assistant<|header_end|>{{ c }}<|eot|>", ["<|eot|>"]),
    "minimax_m2": ("{{ ']~b]ai\\n' + c + '[e~[' }}", ["[e~["]),
    "phi4": ("<|user|>{{ c }}<|end|><|assistant|>", ["<|end|>"]),
    "seed_oss": ("<seed:bos>assistant\n{{ c }}<seed:eos>", ["<seed:eos>"]),
}
MARKS = sorted(
    {mark for _, ends in TEMPLATES.values() for mark in ends} | {"<|im_start|>", "<|start|>", "<|user|>"}
)
HARMONY = {"<|call|>", "<|return|>"}
CONTROL = {mark: 100 + place for place, mark in enumerate(MARKS)}


@pytest.mark.parametrize("family", TEMPLATES)
def test_ends_that_a_template_writes(family: str) -> None:
    template, ends = TEMPLATES[family]
    # The tokens of gpt-oss say that its <|end|> ends no answer, so that no other vocabulary has them.
    control = {mark: id for mark, id in CONTROL.items() if family == "harmony" or mark not in HARMONY}
    assert shown_ends(control, [template]) == sorted(CONTROL[end] for end in ends)


@pytest.mark.parametrize("beside", [("<|return|>", "<|call|>"), ("<|begin|>", "<|content|>")])
def test_the_end_of_a_message_ends_no_answer(beside: tuple[str, ...]) -> None:
    """Whatever else the template writes: one that is given with ``--chat-template`` may not write calls."""
    control = {mark: number for number, mark in enumerate(("<|end|>", *beside))}
    template = "<|begin|>assistant<|content|>{{ c }}<|end|>"
    assert control["<|end|>"] not in shown_ends(control, [template])
    assert control["<|end|>"] not in turn_ends(control)


def test_of_no_template_none() -> None:
    assert shown_ends(CONTROL, []) == []
    assert turn_ends({"<|im_start|>": 1, "<tool_call>": 2}) == []


def folder(tmp_path, template: str, *, special: bool) -> ModelOptions:
    tokenizer = byte_level()
    tokenizer.backend.add_tokens([AddedToken("<|im_end|>", special=special, normalized=False)])
    files = {
        "tokenizer_config": {"chat_template": template, "eos_token": "</s>"},
        "generation_config": {"eos_token_id": tokenizer.backend.token_to_id("</s>")},
        "config": {"architectures": ["LlamaForCausalLM"]},
    }
    path = write_folder(tmp_path, tokenizer, **files)
    return ModelOptions(model=str(path), load_format="dummy")


@pytest.mark.parametrize("special", [True, False])
def test_a_model_that_names_another_end_stops_at_that_of_its_template_too(tmp_path, special: bool) -> None:
    tokenizer = load_text(folder(tmp_path, "{{ content }}<|im_end|>", special=special), "auto").tokenizer
    names = {tokenizer.token(id) for id in tokenizer.eos_token_ids}
    assert names == ({"</s>", "<|im_end|>"} if special else {"</s>"})  # else it is a word of texts
    assert Tokenizer.from_folder(tmp_path).eos_token_ids < tokenizer.eos_token_ids or not special


def test_a_token_that_the_template_does_not_write_ends_nothing(tmp_path) -> None:
    tokenizer = load_text(folder(tmp_path, "{{ content }}</s>", special=True), "auto").tokenizer
    assert {tokenizer.token(id) for id in tokenizer.eos_token_ids} == {"</s>"}
