"""Writes a shape's folder: config, vocabulary, and weights drawn from a seed, as Hugging Face's checkpoints are."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.peers.shapes import Shape
from benchmarks.peers.vocabulary import END, WORDS, tokenizer

DEVIATION = 0.02
"""Of the normal distribution that matrices are drawn from: what models of the family are initialized with."""

SEED = 0


def write_folder(shape: Shape, folder: Path) -> Path:
    """Writes ``folder`` unless it is there and returns it. Norms are 1; rows of ids that must not be drawn are 0."""
    done = folder / "tokenizer.json"  # written last
    if done.exists():
        return folder
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    drawn = torch.Generator().manual_seed(SEED)
    tensors = {}
    for name, size in shape.tensors():
        if len(size) == 1:
            tensors[name] = torch.ones(size, dtype=torch.bfloat16)
        else:
            tensors[name] = (torch.randn(size, generator=drawn) * DEVIATION).to(torch.bfloat16)
    tensors["model.embed_tokens.weight"][:WORDS] = 0.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return write_config(shape, folder)


def write_config(shape: Shape, folder: Path) -> Path:
    """Writes what ``--load-format dummy`` needs of ``folder``: config and vocabulary; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "config.json", shape.config())
    _write(folder / "generation_config.json", {"eos_token_id": 0, "pad_token_id": 0})
    _write(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "model_max_length": shape.positions},
    )
    _write(folder / "tokenizer.json", tokenizer(shape.vocabulary))
    return folder


def _write(path: Path, told: object) -> None:
    path.write_text(json.dumps(told, ensure_ascii=False), encoding="utf-8")
