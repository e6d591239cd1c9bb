"""Small tokenizers of the three kinds that matter, made on the spot."""

import json
from functools import cache
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from headrace.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox does not.",
    "naïve café, über große Straßen, 日本語の文章、中文字符 😀😃🎉 👩‍👩‍👧 e\u0301",
    "def f(x):\n    return x * 2  # comment\n\nUser: stop here\nAssistant: END of STOP strings",
] * 8
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


@cache
def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen: tokens are bytes, characters may be cut anywhere."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([" \u00a0plain — added", "é"])  # added tokens are spelt in plain text, not in bytes
    return Tokenizer(backend, SPECIAL_TOKENS)


@cache
def byte_fallback() -> Tokenizer:
    """As Llama 2, Mistral and Gemma: words with a space mark, and bytes for what has no token."""
    words = ["▁", "▁the", "▁The", "▁fox", "fox", "▁a", "er", "▁over", "▁▁▁", "é", "日", ".", ",", "\n", "END"]
    letters = [chr(code) for code in range(ord("A"), ord("z") + 1)]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    names = ["<unk>", "<s>", "</s>", "<pad>", *bytes_, *dict.fromkeys([*words, *letters])]
    vocabulary = {name: index for index, name in enumerate(names)}
    pairs = [("▁", "a"), ("e", "r")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, pairs, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")],
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>", "<pad>"])
    return Tokenizer(backend, SPECIAL_TOKENS)


@cache
def metaspace() -> Tokenizer:
    """As T5 and other Unigram tokenizers: the decoder drops the first token's space marks."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "</s>", "<pad>"], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return Tokenizer(backend, SPECIAL_TOKENS)


@cache
def word_piece() -> Tokenizer:
    """As BERT: its decoder is none that is understood piece by piece."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=["[UNK]", "<s>", "</s>", "<pad>"], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return Tokenizer(backend, SPECIAL_TOKENS)


def metadata(backend: tokenizers.Tokenizer, pre: str | None = None) -> dict[str, Any]:
    """What a GGUF file says of a BPE tokenizer, with the name of its rules if it is byte-level, else with scores."""
    described = json.loads(backend.to_str())
    names = {id: text for text, id in described["model"]["vocab"].items()}
    added = {each["id"]: each for each in described["added_tokens"]}
    names |= {id: each["content"] for id, each in added.items()}
    tokens = [names[id] for id in range(len(names))]
    kinds = [
        (3 if added[id]["special"] else 4) if id in added else 6 if text.startswith("<0x") else 1
        for id, text in enumerate(tokens)
    ]
    own: dict[str, Any] = {"model": "llama", "scores": [-float(id) for id in range(len(tokens))]}
    if pre is not None:
        merges = [each if isinstance(each, str) else " ".join(each) for each in described["model"]["merges"]]
        own = {"model": "gpt2", "pre": pre, "merges": merges}
    ids = {"bos": "<s>", "eos": "</s>", "padding": "<pad>", "unknown": "<unk>"}
    roles = {f"{role}_token_id": tokens.index(text) for role, text in ids.items() if text in tokens}
    values = {**own, "tokens": tokens, "token_type": kinds, **roles}
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}
