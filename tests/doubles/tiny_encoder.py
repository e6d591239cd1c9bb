"""Folders of tiny encoders with random weights: an embedding model, and a cross-encoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz"]
HIDDEN, INNER, LAYERS, POSITIONS = 8, 12, 2, 32
CONFIG: dict[str, Any] = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "hidden_act": "gelu",
    "vocab_size": len(WORDS),
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "max_position_embeddings": POSITIONS,
    "layer_norm_eps": 1e-12,
}


def shapes() -> dict[str, tuple[int, ...]]:
    """The tensors of the encoder."""
    found: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (len(WORDS), HIDDEN),
        "embeddings.position_embeddings.weight": (POSITIONS, HIDDEN),
        "embeddings.token_type_embeddings.weight": (2, HIDDEN),
    }
    norms = ["embeddings.LayerNorm"]
    for index in range(LAYERS):
        layer = f"encoder.layer.{index}."
        norms += [f"{layer}attention.output.LayerNorm", f"{layer}output.LayerNorm"]
        linears = {f"{layer}attention.self.{part}": (HIDDEN, HIDDEN) for part in ("query", "key", "value")}
        linears |= {f"{layer}attention.output.dense": (HIDDEN, HIDDEN)}
        linears |= {f"{layer}intermediate.dense": (INNER, HIDDEN), f"{layer}output.dense": (HIDDEN, INNER)}
        for name, shape in linears.items():
            found |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for norm in norms:
        found |= {f"{norm}.weight": (HIDDEN,), f"{norm}.bias": (HIDDEN,)}
    return found


def write_embedding_model(folder: Path, pooling: str = "mean_tokens", **more: Any) -> Path:
    """An embedding model that makes vectors of length one; ``more`` is ``config_sentence_transformers.json``."""
    _write(folder, CONFIG, shapes())
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(more))
    return folder


def write_cross_encoder(folder: Path, **config: Any) -> Path:
    """A cross-encoder with one label; ``config`` are further fields of its ``config.json``."""
    named = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}} | config
    head = {"bert.pooler.dense.weight": (HIDDEN, HIDDEN), "bert.pooler.dense.bias": (HIDDEN,)}
    head |= {"classifier.weight": (len(named["id2label"]), HIDDEN)}
    head |= {"classifier.bias": (len(named["id2label"]),)}
    _write(folder, CONFIG | named, {f"bert.{name}": shape for name, shape in shapes().items()} | head)
    return folder


def tokenizer() -> Tokenizer:
    """One token for each letter, between the special tokens of BERT."""
    made = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return made


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, tuple[int, ...]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    drawn = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=drawn) for name, shape in tensors.items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer().save(str(folder / "tokenizer.json"))
