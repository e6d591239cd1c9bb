"""Training of the byte-level BPE tokenizer, and encoding of documents for training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from training.corpus import Document, documents

VOCAB_SIZE = 4096
MAX_LENGTH = 8192
PAD, BOS, END_OF_TEXT, END = "<|pad|>", "<|bos|>", "<|endoftext|>", "<|end|>"
SYSTEM, USER, ASSISTANT, TOOL = "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"
SPECIALS = [PAD, BOS, END_OF_TEXT, SYSTEM, USER, ASSISTANT, TOOL, END]
ROLE_TOKENS = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}
# A space belongs to the word before it: so a text that is asked for has the same tokens as the text that is given,
# whether it stands after a space, a quote, a line break, or first in an answer; copying is then a mere look-up.
SPLIT = r"\p{L}+ ?|\p{N} ?|[^\s\p{L}\p{N}]+ ?|\s+"
_CONTENT = (
    "{% macro text(content) %}{% if content is string %}{{ content | trim }}"
    "{% elif content %}{% for part in content %}{{ part.text | default('') | trim }}{% endfor %}"
    "{% endif %}{% endmacro %}"
)
_TOOLS = (
    "{% if tools %}{{ '<|system|>' }}{% if opens %}{{ text(messages[0].content) }}{{ '\n\n' }}{% endif %}"
    "{{ 'Tools:\n<tools>' }}{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}{{ '\n</tools>\n' }}"
    '{{ \'To call one, answer with <tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call>\' }}'
    "{{ '<|end|>' }}{% endif %}"
)
_CALLS = (
    "{% for call in message.tool_calls or [] %}{% if message.content or not loop.first %}{{ '\n' }}{% endif %}"
    '{{ \'<tool_call>\n{"name": "\' }}{{ call.function.name }}{{ \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}"
)
CHAT_TEMPLATE = (
    f"{_CONTENT}{{{{ bos_token }}}}{{% set opens = messages[0].role in ['system', 'developer'] %}}{_TOOLS}"
    "{% for message in messages %}{% if not (tools and opens and loop.first) %}"
    "{% if message.role in ['system', 'developer'] %}{{ '<|system|>' }}"
    "{% elif message.role == 'assistant' %}{{ '<|assistant|>' }}"
    "{% elif message.role == 'tool' %}{{ '<|tool|>' }}"
    "{% else %}{{ '<|user|>' }}{% endif %}"
    f"{{{{ text(message.content) }}}}{_CALLS}"
    "{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Calls are those of Hermes' format. The model was trained without tools: a prompt without them is what it has seen."""


def _texts(seed: int, count: int) -> Iterator[str]:
    for document in islice(documents(seed), count):
        if document.text:
            yield document.text
        for _, content in document.messages:
            yield content


def train_tokenizer(seed: int, count: int = 30_000) -> Tokenizer:
    """Train the tokenizer on ``count`` documents of the corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIALS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed, count), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer's files in the Hugging Face layout."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": BOS, "eos_token": END, "pad_token": PAD}
    config = {
        **names,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    special = {**names, "additional_special_tokens": [t for t in SPECIALS if t not in names.values()]}
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n")


def encode_batch(
    tokenizer: Tokenizer, batch: list[Document]
) -> list[tuple[NDArray[np.uint16], NDArray[np.bool_], list[int]]]:
    """Encode documents to (token ids, which tokens are to be learned, positions where messages start).

    Of a chat, only the assistant's answers (each with its end token) are learned; of a plain text, all.
    """
    contents = [
        [d.text[: d.cut], d.text[d.cut :]] if d.text else [content for _, content in d.messages]
        for d in batch
    ]
    flat = iter(tokenizer.encode_batch([c for cs in contents for c in cs], add_special_tokens=False))
    ids_of = {token: tokenizer.token_to_id(token) for token in SPECIALS}
    result = []
    for document in batch:
        ids, learned, starts = [ids_of[BOS]], [False], []
        if document.text:
            body = [*next(flat).ids, *next(flat).ids]
            ids += [*body, ids_of[END_OF_TEXT]]
            learned += [True] * (len(body) + 1)
        for role, _ in document.messages:
            body = next(flat).ids
            starts.append(len(ids))
            ids += [ids_of[ROLE_TOKENS[role]], *body, ids_of[END]]
            learned += [False, *[role == "assistant"] * (len(body) + 1)]
        result.append((np.asarray(ids, np.uint16), np.asarray(learned, np.bool_), starts))
    return result
