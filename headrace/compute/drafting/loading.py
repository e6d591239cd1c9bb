"""Loads a draft model with the target's device, data type and kernels, and its sizes for the memory plan."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.compute.batch import Ints
from headrace.compute.checkpoint import Checkpoint, ModelError, listed
from headrace.compute.device import device_facts
from headrace.compute.drafting.draft_model import CATCH_UP_TOKENS, DraftModel
from headrace.compute.drafting.head import (
    Head,
    HeadDrafts,
    HeadSpec,
    HeadWeights,
    pending_states,
    scratch_blocks,
)
from headrace.compute.kernels import Kernels
from headrace.compute.memory_plan import DraftSize, check_room
from headrace.compute.model.config_reader import ConfigReader
from headrace.compute.model.decoder import Decoder
from headrace.compute.model.families import parse_config
from headrace.compute.model.hub import read_config, resolve_folder, resolve_model
from headrace.compute.model.kv import PagedKV, bytes_per_block
from headrace.compute.model.shape import ModelShape
from headrace.compute.model.weights import dummy_weights, load_weights, read_spec
from headrace.config import ConfigError
from headrace.config.objects import SpeculativeConfig
from headrace.core.capacity import activation_bytes, blocks_needed

ROW_TOKENS = 16
"""Maximum tokens of a caught-up row in a pass, for the estimate of the activations."""


class Beside(NamedTuple):
    """The target model with its device, dtype and kernels, which the draft model also uses."""

    shape: ModelShape
    max_model_len: int
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    kernels: Kernels
    embedding: torch.Tensor | None
    head: Any  # as the kernels prepared it


class StepSizes(NamedTuple):
    """The limits of a step of the target, and its block size."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model with its weights, without pages yet. It continues sequences of up to ``max_model_len`` tokens."""

    name: str
    decoder: Decoder
    max_model_len: int
    device: torch.device
    kv_dtype: torch.dtype
    most: int

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return self.decoder.nbytes

    def size(self, sizes: StepSizes) -> DraftSize:
        """Its sizes for the memory plan."""
        shape, (block_size, max_num_seqs, _) = self.decoder.shape, sizes
        return DraftSize(
            weight_bytes=self.decoder.nbytes,
            block_bytes=bytes_per_block(shape, block_size, self.kv_dtype),
            activation_bytes=activation_bytes(
                hidden_size=shape.hidden_size,
                intermediate_size=shape.intermediate_size,
                vocab_size=shape.vocab_size,
                itemsize=self.decoder.dtype.itemsize,
                max_num_batched_tokens=CATCH_UP_TOKENS[self.device.type] + ROW_TOKENS * max_num_seqs,
                max_num_seqs=max_num_seqs,
            ),
            most_blocks=max_num_seqs * blocks_needed(self.max_model_len, block_size),
        )

    def proposer(self, num_blocks: int, sizes: StepSizes, warn: Callable[[str], None]) -> DraftModel:
        """The proposer, with pages of ``num_blocks`` blocks; ``warn`` receives why drafting was disabled."""
        kv = PagedKV(self.decoder.shape, num_blocks, sizes.block_size, self.kv_dtype, self.device)
        return DraftModel(self.decoder, kv, max_model_len=self.max_model_len, warn=warn, most=self.most)


def load_draft(config: SpeculativeConfig, target: Beside, dummy_seed: int | None = None) -> LoadedDraft:
    """Load the draft model that ``config`` names, beside the loaded ``target``.

    ``dummy_seed`` draws random weights.

    Raises:
        ConfigError: there is no such model, its vocabulary is of another size, or its weights do not fit.
    """
    name, quantization = config.model, config.quantization
    assert name is not None
    try:
        folder = resolve_model(name, config.revision, with_weights=dummy_seed is None)
        spec = read_spec(folder)
        if spec.shape.state_bytes:
            raise ConfigError(f"{name} keeps recurrent states; use a draft model without them")
        if spec.latent is not None and target.kv_dtype.itemsize == 1:
            raise ConfigError(
                f"{name} keeps latents, which have no form of 8 bits; omit --kv-cache-dtype, or use another draft model"
            )
        _check_vocabulary(name, spec.vocab_size, target.shape.vocab_size)
        max_model_len = min(target.max_model_len, spec.reach)
        each = 0.5 if spec.stored or quantization else target.dtype.itemsize
        room = device_facts(target.device), int(spec.num_parameters * each), spec.shape.position_bytes
        check_room(*room, max_model_len)
        if dummy_seed is None:
            computed = (target.dtype, target.device, quantization)
            weights = load_weights(folder, spec, *computed, fp8=target.kernels.fp8)
        else:
            weights = dummy_weights(spec, target.dtype, target.device, dummy_seed, quantization)
        decoder = Decoder(spec, weights, target.kernels, max_model_len)
    except (ModelError, ConfigError) as error:
        raise ConfigError(f"--speculative-config: draft model: {error}") from error
    kv_dtype = target.kv_dtype if spec.latent is None else target.dtype
    return LoadedDraft(name, decoder, max_model_len, target.device, kv_dtype, config.num_speculative_tokens)


def _check_vocabulary(name: str, drafts: int, target: int) -> None:
    if drafts != target:
        raise ConfigError(
            f"{name} has a vocabulary of {drafts:,} tokens and the model one of {target:,}; a draft model needs the"
            " same vocabulary"
        )


# Loads an EAGLE-3 head for a target, from the layout that SpecForge and the EAGLE authors publish.
#
#  fc.weight                                     [hidden, states * target hidden]
#  midlayer.{hidden_norm,input_layernorm}.weight norms of the state and of the token
#  midlayer.self_attn.{q,k,v}_proj.weight        [.., 2 * hidden];  o_proj, post_attention_layernorm, mlp.* as in a
# Llama
#  norm.weight, lm_head.weight                   [draft_vocab_size, hidden]; without the latter, the target's is used
#  d2t, t2d                                      token of logit i is i + d2t[i];  t2d is redundant and not read
#  embed_tokens.weight                           if it is not the target's
# A name may begin with ``model.``, and ``layers.0`` is another name of ``midlayer``.

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """A head with its weights, without pages yet."""

    name: str
    head: Head
    target: Beside
    most: int

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return self.head.nbytes

    def size(self, sizes: StepSizes) -> DraftSize:
        """Its sizes for the memory plan: as many blocks as the target has."""
        head, spec = self.head, self.head.spec.layer
        block = bytes_per_block(spec.shape, sizes.block_size, self.target.kv_dtype)
        slot = scratch_blocks(self.most, sizes.block_size) * block
        slot += pending_states(self.most) * head.state_width * head.dtype.itemsize
        passing = activation_bytes(
            hidden_size=2 * spec.hidden_size + head.state_width,
            intermediate_size=spec.intermediate_size,
            vocab_size=head.spec.draft_vocab_size,
            itemsize=head.dtype.itemsize,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            max_num_seqs=sizes.max_num_seqs,
        )
        return DraftSize(
            weight_bytes=self.nbytes,
            block_bytes=block,
            activation_bytes=sizes.max_num_seqs * slot + passing,
            most_blocks=sys.maxsize,
        )

    def proposer(self, num_blocks: int, sizes: StepSizes, warn: Callable[[str], None]) -> HeadDrafts:
        """The proposer, with pages of ``num_blocks`` blocks; ``warn`` receives why drafting was disabled."""
        target, rows = self.target, sizes.max_num_seqs
        blocks = num_blocks + rows * scratch_blocks(self.most, sizes.block_size)
        return HeadDrafts(
            self.head,
            PagedKV(self.head.spec.layer.shape, blocks, sizes.block_size, target.kv_dtype, target.device),
            name=self.name,
            layer_count=target.shape.num_layers,
            max_num_seqs=rows,
            max_model_len=target.max_model_len,
            warn=warn,
            most=self.most,
        )


def load_head(config: SpeculativeConfig, target: Beside, dummy_seed: int | None = None) -> LoadedHead:
    """Load the head that ``config`` names for the loaded ``target``; ``dummy_seed`` draws random weights.

    Raises:
        ConfigError: there is no such head, or it does not fit the target.
    """
    assert config.model is not None
    if target.embedding is None:
        raise ConfigError(
            f"--speculative-config: method eagle3 reads states inside the model, which {target.shape.architecture}"
            " of transformers does not give; use another method"
        )
    try:
        folder = resolve_folder(config.model, config.revision, with_weights=dummy_seed is None)
        spec = read_head_spec(read_config(folder), target.shape)
        if dummy_seed is None:
            with Checkpoint(folder, _plain_name) as checkpoint:
                _check_names(checkpoint, spec, target.shape)
                head = _head(checkpoint, spec, target)
        else:
            head = _head(None, spec, target, dummy_seed)
    except (ModelError, ConfigError) as error:
        raise ConfigError(f"--speculative-config: eagle3: {error}") from error
    return LoadedHead("eagle3", head, target, config.num_speculative_tokens)


def read_head_spec(config: Mapping[str, Any], target: ModelShape) -> HeadSpec:
    """The head that a ``config.json`` describes, for a target.

    Raises:
        ModelError: it is not an EAGLE-3 head, has more than one layer, or does not fit the target.
    """
    named = ConfigReader("config", config, {}).names("architectures") or []
    if not set(named) & set(ARCHITECTURES):
        raise ModelError(
            f"the config names {', '.join(named) or 'no architecture'}; expected {ARCHITECTURES[0]}"
        )
    if target.residual_scale != 1.0:
        raise ModelError(
            f"{target.architecture} with a residual_multiplier: heads would read scaled hidden states; use another "
            "method"
        )
    layer = parse_config({**config, "architectures": ["LlamaForCausalLM"]})
    read = ConfigReader(ARCHITECTURES[0], config, {})
    _refuse("num_hidden_layers", layer.num_layers, 1)
    _refuse("vocab_size", layer.vocab_size, target.vocab_size)
    hidden = read.optional_integer("target_hidden_size") or layer.hidden_size
    _refuse(
        "target_hidden_size" if config.get("target_hidden_size") else "hidden_size",
        hidden,
        target.hidden_size,
    )
    return HeadSpec(
        layer,
        _layers(read, target.num_layers),
        read.optional_integer("draft_vocab_size") or layer.vocab_size,
        read.flag("norm_before_residual"),
    )


def _refuse(field: str, found: int, needed: int) -> None:
    if found != needed:
        raise ModelError(f"{field} is {found:,}, and this model needs {needed:,}")


def _layers(read: ConfigReader, count: int) -> tuple[int, ...]:
    """The target's layers before which states are read.

    ``eagle_config`` lists the layers after which they are, as SpecForge does; the outer list those before which they
    are, as vLLM does. Without either, they are the states that EAGLE-3 is published with.
    """
    field, after = "eagle_aux_hidden_state_layer_ids", 0
    ids = read.get(field)
    if ids is None:
        ids, after = read.object("eagle_config").get(field), 1
    if ids is None:
        ids, after = (2, count // 2, count - 3), 0
    whole = isinstance(ids, list | tuple) and ids and all(type(each) is int for each in ids)
    if not whole or not all(0 <= each + after <= count for each in ids):
        raise ModelError(f"{field}: expected numbers of the {count} layers of this model, got {ids!r:.80}")
    return tuple(each + after for each in ids)


def _plain_name(name: str) -> str:
    name = name.removeprefix("model.")
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def _shapes(spec: HeadSpec, target: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every tensor that a head needs, by name."""
    layer = spec.layer
    hidden, wide = layer.hidden_size, layer.intermediate_size
    queries, keys = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(spec.layers) * target.hidden_size),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, queries),
        "midlayer.mlp.gate_proj.weight": (wide, hidden),
        "midlayer.mlp.up_proj.weight": (wide, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, wide),
        "norm.weight": (hidden,),
    }
    for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        shapes[f"midlayer.{norm}.weight"] = (hidden,)
    for biased, modules in ((layer.qkv_bias, ("q", "k", "v")), (layer.output_bias, ("o",))):
        for module in modules if biased else ():
            name = f"midlayer.self_attn.{module}_proj"
            shapes[f"{name}.bias"] = shapes[f"{name}.weight"][:1]
    if layer.mlp_bias:
        for module in ("gate", "up", "down"):
            name = f"midlayer.mlp.{module}_proj"
            shapes[f"{name}.bias"] = shapes[f"{name}.weight"][:1]
    if spec.draft_vocab_size != layer.vocab_size:
        shapes |= {"lm_head.weight": (spec.draft_vocab_size, hidden), "d2t": (spec.draft_vocab_size,)}
    if hidden != target.hidden_size:
        shapes |= {
            "embed_tokens.weight": (layer.vocab_size, hidden),
            "lm_head.weight": (spec.draft_vocab_size, hidden),
        }
    return shapes


def _check_names(checkpoint: Checkpoint, spec: HeadSpec, target: ModelShape) -> None:
    shapes = _shapes(spec, target)
    missing = shapes.keys() - set(checkpoint.names)
    if missing:
        raise ModelError(f"{checkpoint.folder} lacks {listed(missing)}")
    optional = {"lm_head.weight", "embed_tokens.weight", "d2t", "t2d"}
    unexpected = {
        name for name in set(checkpoint.names) - shapes.keys() - optional if not name.endswith("inv_freq")
    }
    if unexpected:
        raise ModelError(
            f"{checkpoint.folder} has tensors that an EAGLE-3 head does not use: {listed(unexpected)}"
        )


def _head(checkpoint: Checkpoint | None, spec: HeadSpec, target: Beside, seed: int | None = None) -> Head:
    shapes, layer = _shapes(spec, target.shape), spec.layer
    present = shapes.keys() | (set(checkpoint.names) if checkpoint else set())
    generator = torch.Generator(device=target.device).manual_seed(seed or 0)
    own_bytes = 0

    def read(*names: str, dtype: torch.dtype = target.dtype) -> Tensor:
        """Tensors of these names, one below the other, in new memory."""
        nonlocal own_bytes
        parts = []
        for name in names:
            shape = shapes.get(name) or (layer.vocab_size, layer.hidden_size)
            if checkpoint is not None:
                parts.append(checkpoint.read(name, shape).to(target.device, dtype))
            elif name.endswith("norm.weight"):
                parts.append(torch.ones(shape, dtype=dtype, device=target.device))
            else:
                drawn = torch.empty(shape, dtype=dtype, device=target.device)
                parts.append(drawn.normal_(0.0, 0.02, generator=generator))
        whole = torch.cat(parts)
        own_bytes += whole.nbytes
        return whole

    attention, mlp = "midlayer.self_attn.{}_proj.{}", "midlayer.mlp.{}_proj.{}"

    def linear(template: str, *modules: str) -> tuple[Tensor, Tensor | None]:
        bias = [template.format(module, "bias") for module in modules]
        weight = read(*(template.format(module, "weight") for module in modules))
        return weight, read(*bias) if bias[0] in shapes else None

    def norm(name: str) -> Tensor:
        return read(f"{name}.weight", dtype=torch.float32)

    def optional(name: str, shared: Tensor | None) -> Tensor | None:
        return read(name) if name in present else shared

    embedding = optional("embed_tokens.weight", target.embedding)
    assert embedding is not None
    weights = HeadWeights(
        embedding,
        read("fc.weight"),
        *linear(attention, "q", "k", "v"),
        *linear(attention, "o"),
        *linear(mlp, "gate", "up"),
        *linear(mlp, "down"),
        token_norm=norm("midlayer.input_layernorm"),
        state_norm=norm("midlayer.hidden_norm"),
        mlp_norm=norm("midlayer.post_attention_layernorm"),
        norm=norm("norm"),
        head=optional("lm_head.weight", None),
        names=_names(checkpoint, spec) if "d2t" in present else None,
    )
    return Head(spec, weights, target.kernels, target.head, own_bytes, target.max_model_len)


def _names(checkpoint: Checkpoint | None, spec: HeadSpec) -> Ints:
    """The token of each of the head's logits."""
    size, vocab_size = spec.draft_vocab_size, spec.layer.vocab_size
    names = np.arange(size, dtype=np.int64)
    if checkpoint is not None:
        names += checkpoint.read("d2t", (size,)).to(torch.int64).numpy()
        if (names < 0).any() or (names >= vocab_size).any():
            raise ModelError(f"d2t names tokens beyond the vocabulary of {vocab_size:,}")
    return names
