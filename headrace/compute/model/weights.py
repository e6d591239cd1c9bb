"""A decoder's weights: where each tensor of a checkpoint goes, and filling them tensor by tensor.

All tensors are allocated once at their final dtype and place, merged ones whole; a checkpoint is then read one
tensor at a time into views of them, so that loading peaks near the size of the model. Safetensors only: the older
``.bin``/``.pt`` files are pickles, which can run code when opened.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.compute.model.spec import DecoderSpec, ModelError

_INDEX = "model.safetensors.index.json"
_SAMPLED = 1024
_HARMLESS = ("rotary_emb.inv_freq",)
_OTHER_PARTS = (
    "vision_tower.",
    "model.vision_tower.",
    "multi_modal_projector.",
    "model.multi_modal_projector.",
)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Linear weights are [out, in]; norm weights float32 with the family's offset added.

    ``qkv`` stacks queries, keys, values; ``gate_up`` gate, up. ``qk_norm`` is [heads + kv_heads, head_dim].
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    post_attention_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    post_mlp_norm: Tensor | None


@dataclass(slots=True)
class DecoderWeights:
    """All weights; ``head`` is ``embedding`` itself where the model ties them.

    The decoder takes the layers out one by one as it prepares them, so that no weight lies in memory twice;
    ``nbytes`` stays what all of them took when they were allocated.
    """

    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Tensor
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors())

    def fingerprint(self) -> str:
        """A digest of every tensor's shape and of elements spread over it: other weights have another."""
        digest = hashlib.sha256()
        for tensor in self.tensors():
            flat = tensor.detach().reshape(-1)
            sample = flat[:: max(1, flat.numel() // _SAMPLED)].cpu().contiguous()
            digest.update(f"{tuple(tensor.shape)} {tensor.dtype};".encode())
            digest.update(sample.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor once."""
        yield self.embedding
        for layer in self.layers:
            for name in LayerWeights.__slots__:
                tensor = getattr(layer, name)
                if tensor is not None:
                    yield tensor
        yield self.norm
        if self.head is not self.embedding:
            yield self.head

    def norms(self) -> Iterator[Tensor]:
        """Every norm weight once."""
        yield self.norm
        for layer in self.layers:
            norms = (layer.input_norm, layer.qk_norm, layer.mlp_norm)
            after = (layer.post_attention_norm, layer.post_mlp_norm)
            yield from (norm for norm in norms + after if norm is not None)


def empty_weights(spec: DecoderSpec, dtype: torch.dtype, device: torch.device | str) -> DecoderWeights:
    """Allocate all weights of a model, unfilled."""
    hidden, heads, kv_heads, size = spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim

    def linear(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def bias(present: bool, count: int) -> Tensor | None:
        return linear(count) if present else None

    def norm(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    def layer() -> LayerWeights:
        return LayerWeights(
            input_norm=norm(hidden),
            qkv=linear((heads + 2 * kv_heads) * size, hidden),
            qkv_bias=bias(spec.qkv_bias, (heads + 2 * kv_heads) * size),
            qk_norm=norm(heads + kv_heads, size) if spec.qk_norm else None,
            output=linear(hidden, heads * size),
            output_bias=bias(spec.output_bias, hidden),
            post_attention_norm=norm(hidden) if spec.post_norms else None,
            mlp_norm=norm(hidden),
            gate_up=linear(2 * spec.intermediate_size, hidden),
            gate_up_bias=bias(spec.mlp_bias, 2 * spec.intermediate_size),
            down=linear(hidden, spec.intermediate_size),
            down_bias=bias(spec.mlp_bias, hidden),
            post_mlp_norm=norm(hidden) if spec.post_norms else None,
        )

    embedding = linear(spec.vocab_size, hidden)
    head = embedding if spec.tied_embeddings else linear(spec.vocab_size, hidden)
    return DecoderWeights(embedding, [layer() for _ in range(spec.num_layers)], norm(hidden), head)


def destinations(spec: DecoderSpec, weights: DecoderWeights) -> dict[str, Tensor]:
    """Hugging Face tensor name -> the (part of a) weight that it fills."""
    table: dict[str, Tensor | None] = {
        "model.embed_tokens.weight": weights.embedding,
        "model.norm.weight": weights.norm,
    }
    if not spec.tied_embeddings:
        table["lm_head.weight"] = weights.head
    for index, layer in enumerate(weights.layers):
        table.update(_layer_destinations(spec, layer, f"model.layers.{index}."))
    return {name: tensor for name, tensor in table.items() if tensor is not None}


def _layer_destinations(spec: DecoderSpec, layer: LayerWeights, prefix: str) -> dict[str, Tensor | None]:
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    heads, kv_heads, size = spec.num_heads, spec.num_kv_heads, spec.head_dim
    table: dict[str, Tensor | None] = {
        f"{prefix}input_layernorm.weight": layer.input_norm,
        f"{attention}o_proj.weight": layer.output,
        f"{attention}o_proj.bias": layer.output_bias,
        f"{mlp}down_proj.weight": layer.down,
        f"{mlp}down_proj.bias": layer.down_bias,
    }
    if spec.post_norms:
        table[f"{prefix}post_attention_layernorm.weight"] = layer.post_attention_norm
        table[f"{prefix}pre_feedforward_layernorm.weight"] = layer.mlp_norm
        table[f"{prefix}post_feedforward_layernorm.weight"] = layer.post_mlp_norm
    else:
        table[f"{prefix}post_attention_layernorm.weight"] = layer.mlp_norm
    if layer.qk_norm is not None:
        # One weight for every head: the view repeats it while copying.
        table[f"{attention}q_norm.weight"] = layer.qk_norm[:heads]
        table[f"{attention}k_norm.weight"] = layer.qk_norm[heads:]
    qkv_parts = {"q_proj": heads * size, "k_proj": kv_heads * size, "v_proj": kv_heads * size}
    mlp_parts = {"gate_proj": spec.intermediate_size, "up_proj": spec.intermediate_size}
    if spec.merged_checkpoint:
        qkv_parts, mlp_parts = {"qkv_proj": len(layer.qkv)}, {"gate_up_proj": len(layer.gate_up)}
    for parts, where, weight, bias in (
        (qkv_parts, attention, layer.qkv, layer.qkv_bias),
        (mlp_parts, mlp, layer.gate_up, layer.gate_up_bias),
    ):
        begin = 0
        for part, count in parts.items():
            table[f"{where}{part}.weight"] = weight[begin : begin + count]
            if bias is not None:
                table[f"{where}{part}.bias"] = bias[begin : begin + count]
            begin += count
    return table


def load_weights(
    folder: Path, spec: DecoderSpec, dtype: torch.dtype, device: torch.device | str
) -> DecoderWeights:
    """Read a checkpoint's safetensors into place, converted to ``dtype``.

    Raises:
        ModelError: no safetensors, a broken file, or tensors that are missing, unexpected or of another shape;
            the message names them.
    """
    files = _files(folder)
    weights = empty_weights(spec, dtype, device)
    pending = destinations(spec, weights)
    unexpected: list[str] = []
    for file in files:
        try:
            with safe_open(file, framework="pt", device="cpu") as checkpoint:
                for name in checkpoint.keys():  # noqa: SIM118 (not a mapping)
                    plain = _plain_name(name) if spec.nested_checkpoint else name
                    target = pending.pop(plain, None)
                    if target is not None:
                        _fill(name, target, checkpoint.get_tensor(name), file)
                    elif not _ignored(plain, spec):
                        unexpected.append(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} cannot be read as safetensors: {error}") from error
    if pending:
        raise ModelError(f"{folder} lacks {_listed(pending)}")
    if unexpected:
        raise ModelError(f"{folder} has tensors that {spec.architecture} does not use: {_listed(unexpected)}")
    _add_norm_offset(spec, weights)
    return weights


def dummy_weights(
    spec: DecoderSpec, dtype: torch.dtype, device: torch.device | str, seed: int = 0
) -> DecoderWeights:
    """Random weights of the model's shape, the same for the same seed and kind of device; for benchmarks."""
    weights = empty_weights(spec, dtype, device)
    generator = torch.Generator(device=device).manual_seed(seed)
    for tensor in weights.tensors():
        tensor.normal_(0.0, 0.02, generator=generator)
    for norm in weights.norms():
        norm.fill_(1.0)
    return weights


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        try:
            shards: Mapping[str, str] = json.loads(index.read_text())["weight_map"]
            files = [folder / name for name in sorted(set(shards.values()))]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{index} is not an index of safetensors: {error!r}") from error
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ModelError(f"{folder} lacks {_listed(missing)}, named by {_INDEX}")
        return files
    whole = folder / "model.safetensors"
    files = [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
    if files:
        return files
    pickles = sorted(path.name for kind in ("*.bin", "*.pt", "*.pth") for path in folder.glob(kind))
    if pickles:
        raise ModelError(
            f"{folder} has weights only as pickle ({_listed(pickles)}), which can run code when opened; "
            "convert them to safetensors first"
        )
    raise ModelError(f"{folder} has no *.safetensors")


def _fill(name: str, target: Tensor, source: Tensor, file: Path) -> None:
    shape = target.shape[1:] if "q_norm" in name or "k_norm" in name else target.shape
    if source.shape != shape:
        raise ModelError(f"{file}: {name} has shape {list(source.shape)}, the config says {list(shape)}")
    target.copy_(source)


def _ignored(name: str, spec: DecoderSpec) -> bool:
    tied = spec.tied_embeddings and name == "lm_head.weight"
    other_part = spec.nested_checkpoint and name.startswith(_OTHER_PARTS)
    return tied or other_part or name.endswith(_HARMLESS)


def _plain_name(name: str) -> str:
    """The text model's tensor as it is called when the model stands alone; older and newer nesting."""
    for nested, plain in (("language_model.model.", "model."), ("model.language_model.", "model.")):
        if name.startswith(nested):
            return plain + name.removeprefix(nested)
    return name.removeprefix("language_model.")


def _listed(names: Mapping[str, object] | list[str], limit: int = 8) -> str:
    shown = ", ".join(sorted(names)[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _add_norm_offset(spec: DecoderSpec, weights: DecoderWeights) -> None:
    if spec.norm_offset:
        for norm in weights.norms():
            norm.add_(spec.norm_offset)
