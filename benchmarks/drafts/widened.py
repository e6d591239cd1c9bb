"""The built-in model and its draft model at a usual size: real text at the cost of matrices of a published model.

Speculative decoding needs real text, because drafts of random weights are all wrong. In a model of three million
parameters the work of the host decides. So the matrices of the built-in model are laid into larger ones, with the same
function up to rounding:

- Added dimensions of the hidden state are 0: the embedding, ``o_proj`` and ``down_proj`` write nothing there.
- Added heads, columns of the feed-forward and whole layers write nothing: their ``o_proj`` and ``down_proj`` are 0.
- RMSNorm takes the mean over more dimensions, which its weights and its epsilon make up for.
- Added tokens are never the likeliest: one dimension is the same for all of the model's own tokens, the last RMSNorm
  lets it through, and the added tokens have a large negative weight there.

All weights that do not matter are random, so that only ``o_proj``, ``down_proj`` and the embedding have zeros.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.peers.shapes import CONSTANT, PACKAGED, WIDENED, Shape
from benchmarks.peers.weights import DEVIATION, SEED
from headrace.compute.model.hub import resolve_folder

FAR = 2.0**15
"""How far below those of the model's own tokens the logits of added tokens are: 2^10, divided by the last RMS."""

Tensors = dict[str, torch.Tensor]


def widen(weights: Tensors, own: Shape, wide: Shape) -> Tensors:
    """The tensors of ``own`` in those of ``wide``, which `shapes.widened` made of it."""
    drawn = torch.Generator().manual_seed(SEED)
    found = {name: _filling(name, size, drawn) for name, size in wide.tensors()}
    heads = _places(own, wide)
    for name, tensor in weights.items():
        if tensor.ndim == 1:
            found[name][: own.hidden] = tensor.float() * (own.hidden / wide.hidden) ** 0.5
            continue
        rows = heads if "q_proj" in name else torch.arange(tensor.shape[0])
        columns = heads if "o_proj" in name else torch.arange(tensor.shape[1])
        found[name][rows[:, None], columns] = tensor.float()
    embedding = found["model.embed_tokens.weight"]
    embedding[: own.vocabulary, -1] = CONSTANT
    embedding[own.vocabulary :] = torch.randn(embedding[own.vocabulary :].shape, generator=drawn) * DEVIATION
    embedding[own.vocabulary :, -1] = -FAR
    found["model.norm.weight"][-1] = 1.0
    return found


def _filling(name: str, size: tuple[int, ...], drawn: torch.Generator) -> torch.Tensor:
    """What is in a tensor where no weights are laid: random numbers where they do not matter."""
    if name.endswith(("norm.weight", "o_proj.weight", "down_proj.weight", "embed_tokens.weight")):
        return torch.zeros(size)
    return torch.randn(size, generator=drawn) * DEVIATION


def _places(own: Shape, wide: Shape) -> torch.Tensor:
    """Where the rows of the query heads go: those of a key head stay with it, though it gets more of them."""
    few, many = own.heads // own.kv_heads, wide.heads // wide.kv_heads
    heads = [head // few * many + head % few for head in range(own.heads)]
    return torch.arange(wide.heads * wide.head_dim).view(wide.heads, -1)[heads].flatten()


def write_widened(own: Shape, wide: Shape, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Writes ``folder`` unless it is there and returns it: the packaged model ``own``, in the sizes of ``wide``."""
    done = folder / "model.safetensors"
    if not done.exists():
        source = resolve_folder({"builtin-target": "builtin"}.get(own.name, own.name))
        shutil.copytree(
            source, folder, ignore=shutil.ignore_patterns("model.safetensors"), dirs_exist_ok=True
        )
        own_config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        kept = {name: own_config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        config = wide.config() | kept | {"torch_dtype": str(dtype).removeprefix("torch.")}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        tensors = widen(load_file(source / "model.safetensors"), own, wide)
        part = done.with_suffix(".part")  # what an interrupt leaves is made anew
        save_file({name: each.to(dtype) for name, each in tensors.items()}, part, metadata={"format": "pt"})
        part.replace(done)
    return folder


def write_pair(name: str, home: Path) -> tuple[Path, Path]:
    """The folders of the target and its draft model at a size of `shapes.WIDENED`, below ``home``."""
    own = (PACKAGED["builtin-target"], PACKAGED["builtin-draft"])
    target, draft = (
        write_widened(one, wide, home / wide.name) for one, wide in zip(own, WIDENED[name], strict=True)
    )
    return target, draft
