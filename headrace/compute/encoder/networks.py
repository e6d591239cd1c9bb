"""The forward passes of encoders over a batch of inputs that is packed without padding.

```
 rows, short ones first   [a b] [c d] [e f g]        lengths (2, 2, 3)
 packed                   [ a b c d e f g ]          groups  2 rows of 2, 1 row of 3
```
Linear layers and norms see all tokens of the batch as one matrix. Attention takes the rows of equal length together,
so that no token of padding is computed and no mask is needed.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.compute.batch import Batch
from headrace.compute.checkpoint import Checkpoint, ModelError
from headrace.compute.encoder.families import FAMILIES, EncoderSpec, LayerNames, RotaryLayer
from headrace.compute.kernels import Kernels
from headrace.compute.model.decoder import ModelDecoder
from headrace.compute.model.kv import PagedKV
from headrace.core.capacity import blocks_needed
from headrace.core.embedding import TokenRow

_QUERIES = 512
"""Queries of local attention that are computed at once: more would mostly be masked."""


class Group(NamedTuple):
    """``rows`` rows of equal ``length``, whose first token is at ``start``."""

    start: int
    rows: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.rows * self.length


class Packed(NamedTuple):
    """The tokens of a batch. ``positions`` count from 0 in each row; ``second`` is 1 for tokens of a second text."""

    tokens: Tensor
    positions: Tensor
    second: Tensor
    lengths: tuple[int, ...]
    groups: tuple[Group, ...]

    @property
    def starts(self) -> list[int]:
        """Where each row starts."""
        return [0, *accumulate(self.lengths)][:-1]


def pack(rows: Sequence[TokenRow], device: torch.device) -> Packed:
    """Pack rows, which must be sorted by length."""
    lengths = tuple(len(row.tokens) for row in rows)
    groups: list[Group] = []
    start = 0
    for length, equal in groupby(lengths):
        groups.append(Group(start, len(list(equal)), length))
        start = groups[-1].end
    longest = torch.arange(max(lengths))
    second = [index >= row.second > 0 for row in rows for index in range(len(row.tokens))]
    return Packed(
        torch.tensor([token for row in rows for token in row.tokens], device=device),
        torch.cat([longest[: group.length].repeat(group.rows) for group in groups]).to(device),
        torch.tensor(second, dtype=torch.int64, device=device),
        lengths,
        tuple(groups),
    )


def attend(
    qkv: Tensor, groups: Sequence[Group], bias: Tensor | None = None, reach: int | None = None
) -> Tensor:
    """Attention of each row over itself: packed [T, 3, heads, size] to [T, heads * size].

    ``bias`` [heads, L, L] is added to the scores of a query and a key. ``reach`` is how far to each side a token
    attends.
    """
    out = qkv.new_empty((len(qkv), *qkv.shape[2:]))
    for group in groups:
        rows = qkv[group.start : group.end].view(group.rows, group.length, *qkv.shape[1:])
        query, key, value = rows.permute(2, 0, 3, 1, 4)
        if reach is not None and group.length > reach + 1:
            attended = _local(query, key, value, reach)
        else:
            mask = None if bias is None else bias[None, :, : group.length, : group.length]
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        out[group.start : group.end].view(group.rows, group.length, *qkv.shape[2:]).copy_(
            attended.transpose(1, 2)
        )
    return out.view(len(qkv), -1)


def _local(query: Tensor, key: Tensor, value: Tensor, reach: int) -> Tensor:
    """Attention to keys at a distance of at most ``reach``; for each part of the queries only the keys in reach."""
    length = query.shape[2]
    parts = []
    for begin in range(0, length, _QUERIES):
        end = min(length, begin + _QUERIES)
        low, high = max(0, begin - reach), min(length, end + reach)
        at = torch.arange(begin, end, device=query.device)[:, None]
        mask = (at - torch.arange(low, high, device=query.device)).abs() <= reach
        keys, values = key[:, :, low:high], value[:, :, low:high]
        parts.append(F.scaled_dot_product_attention(query[:, :, begin:end], keys, values, attn_mask=mask))
    return torch.cat(parts, 2)


def slices(packed: Packed) -> Iterator[slice]:
    """The tokens of each row."""
    for start, length in zip(packed.starts, packed.lengths, strict=True):
        yield slice(start, start + length)


# The tensors of an encoder's checkpoint by their Hugging Face names, and the layers that are made of them.


class Linear(NamedTuple):
    """A linear layer in the kernels' form."""

    kernels: Kernels
    weight: Any  # as the kernels prepared it
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernels.linear(x, self.weight, self.bias)


class Norm(NamedTuple):
    """A layer norm (arXiv:1607.06450), with or without a bias."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


class Tensors:
    """The tensors below ``prefix``; each must have the shape that is asked for.

    Args:
        tensors: all of the checkpoint.
        prefix: what the names begin with.
        kernels, device: where the layers are computed, in float32.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], prefix: str, kernels: Kernels, device: torch.device
    ) -> None:
        self._tensors = tensors
        self._prefix = prefix
        self._kernels = kernels
        self._device = device

    @property
    def device(self) -> torch.device:
        return self._device

    def below(self, prefix: str) -> Tensors:
        """The same checkpoint with another prefix."""
        return Tensors(self._tensors, prefix, self._kernels, self._device)

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor."""
        return self._prefix + name in self._tensors

    def get(self, name: str, *shape: int) -> Tensor:
        """A tensor in float32.

        Raises:
            ModelError: it is missing or has another shape.
        """
        tensor = self._tensors.get(self._prefix + name)
        if tensor is None:
            raise ModelError(f"the encoder's weights lack {self._prefix}{name}")
        if tensor.shape != shape:
            raise ModelError(f"{self._prefix}{name} is {list(tensor.shape)}, the config says {list(shape)}")
        return tensor.to(self._device, torch.float32)

    def table(self, name: str, width: int) -> Tensor:
        """A table of rows of ``width`` elements."""
        return self.get(name, len(self._tensors[self._prefix + name]), width)

    def norm(self, name: str, size: int, eps: float, *, bias: bool = True) -> Norm:
        """A layer norm."""
        return Norm(self.get(f"{name}.weight", size), self.get(f"{name}.bias", size) if bias else None, eps)

    def linear(self, outputs: int, inputs: int, *names: str, bias: bool = True) -> Linear:
        """A linear layer; with several ``names``, their outputs one after the other, ``outputs`` each."""
        weight = torch.cat([self.get(f"{name}.weight", outputs, inputs) for name in names])
        biases = torch.cat([self.get(f"{name}.bias", outputs) for name in names]) if bias else None
        return Linear(self._kernels, self._kernels.prepare_linear(weight), biases)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors.

    Raises:
        ModelError: there are none (pickled weights are not opened), or a file is damaged.
    """
    with Checkpoint(folder) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.names}


def prefix_before(tensors: Mapping[str, Tensor], anchor: str) -> str:
    """What stands before ``anchor`` in the checkpoint's names: ``bert.``, or nothing."""
    return next((name[: -len(anchor)] for name in tensors if name.endswith(anchor)), "")


# The forward pass of encoders of BERT's shape (arXiv:1810.04805): RoBERTa, XLM-R, DistilBERT, MPNet.
#
# It uses only a few dozen torch calls, because for one short text the calls cost as much as the arithmetic. `layers`
# yields after each layer, so that other work can run in between.

BERT_WORDS = "embeddings.word_embeddings.weight"
_BUCKETS, _FARTHEST = 32, 128


class _BertLayer(NamedTuple):
    qkv: Linear
    attended: Linear
    attended_norm: Norm
    up: Linear
    down: Linear
    down_norm: Norm


class Bert:
    """An encoder with the sizes ``spec`` and the weights ``of`` a checkpoint.

    Raises:
        ModelError: a tensor is missing or does not have the shape in ``spec``.
    """

    def __init__(self, spec: EncoderSpec, of: Tensors) -> None:
        self.spec = spec
        self.device = of.device
        family = FAMILIES[spec.family]
        hidden, rows = spec.hidden_size, spec.first_position + spec.max_tokens
        self._words = of.get(BERT_WORDS, spec.vocab_size, hidden)
        positions = of.get("embeddings.position_embeddings.weight", rows, hidden)[spec.first_position :]
        self._second: Tensor | None = None
        kinds = "embeddings.token_type_embeddings.weight"
        if family.typed and of.has(kinds):
            types = of.table(kinds, hidden)
            # Most tokens have type 0, so its embedding is added to the position embeddings once.
            positions = positions + types[0]
            self._second = types[1] - types[0] if len(types) > 1 else None
        self._positions = positions
        self._embedding_norm = of.norm("embeddings.LayerNorm", hidden, spec.norm_eps)
        self._layers = [
            _bert_layer(of, spec, family.names, family.names.layer.format(index))
            for index in range(spec.num_layers)
        ]
        self._distances = (
            of.get("encoder.relative_attention_bias.weight", _BUCKETS, spec.num_heads)
            if family.relative
            else None
        )

    @torch.inference_mode()
    def layers(self, rows: Packed) -> Generator[None, None, Tensor]:
        """Compute the last hidden states [T, hidden] of packed rows; yields after each layer."""
        x = self._words[rows.tokens] + self._positions[rows.positions]
        if self._second is not None and bool(rows.second.any()):
            x += rows.second[:, None] * self._second
        x = self._embedding_norm(x)
        bias = None if self._distances is None else _bias(self._distances, max(rows.lengths))
        for layer in self._layers:
            yield
            qkv = layer.qkv(x).view(len(x), 3, self.spec.num_heads, -1)
            x = layer.attended_norm(layer.attended(attend(qkv, rows.groups, bias)).add_(x))
            x = layer.down_norm(layer.down(F.gelu(layer.up(x))).add_(x))
        return x


def _bert_layer(of: Tensors, spec: EncoderSpec, names: LayerNames, prefix: str) -> _BertLayer:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    qkv = (f"{prefix}{name}" for name in (names.query, names.key, names.value))
    return _BertLayer(
        qkv=of.linear(hidden, hidden, *qkv),
        attended=of.linear(hidden, hidden, prefix + names.attended),
        attended_norm=of.norm(prefix + names.attended_norm, hidden, spec.norm_eps),
        up=of.linear(inner, hidden, prefix + names.up),
        down=of.linear(hidden, inner, prefix + names.down),
        down_norm=of.norm(prefix + names.down_norm, hidden, spec.norm_eps),
    )


def _bias(distances: Tensor, length: int) -> Tensor:
    """The bias [heads, L, L] of each query and key by their distance, as in T5 (arXiv:1910.10683).

    Half of the buckets are for keys after the query. Near distances have a bucket each, far ones share them by their
    logarithm.
    """
    at = torch.arange(length, device=distances.device)
    ahead = at[None, :] - at[:, None]
    half, exact = _BUCKETS // 2, _BUCKETS // 4
    far = ahead.abs()
    scaled = torch.log(far.clamp(min=1).float() / exact) / math.log(_FARTHEST / exact) * (half - exact)
    shared = (exact + scaled.long()).clamp(max=half - 1)
    buckets = torch.where(far < exact, far, shared) + half * (ahead > 0)
    return distances[buckets].permute(2, 0, 1).contiguous()


# The forward pass of ModernBERT (arXiv:2412.13663): norms before the layers, rotary positions, local attention.

MODERN_WORDS = "embeddings.tok_embeddings.weight"


class _ModernLayer(NamedTuple):
    kind: RotaryLayer
    norm: Norm | None
    qkv: Linear
    attended: Linear
    mlp_norm: Norm
    up: Linear
    down: Linear


class ModernBert:
    """An encoder with the sizes ``spec`` and the weights ``of`` a checkpoint.

    Raises:
        ModelError: a tensor is missing or does not have the shape in ``spec``.
    """

    def __init__(self, spec: EncoderSpec, of: Tensors) -> None:
        self.spec = spec
        self.device = of.device
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self._words = of.get(MODERN_WORDS, spec.vocab_size, hidden)

        def norm(name: str) -> Norm:
            return of.norm(name, hidden, spec.norm_eps, bias=False)

        def linear(name: str, outputs: int, inputs: int) -> Linear:
            return of.linear(outputs, inputs, name, bias=False)

        self._embedding_norm = norm("embeddings.norm")
        self._final_norm = norm("final_norm")
        self._layers = [
            _ModernLayer(
                kind=kind,
                norm=norm(f"layers.{index}.attn_norm") if index else None,
                qkv=linear(f"layers.{index}.attn.Wqkv", 3 * hidden, hidden),
                attended=linear(f"layers.{index}.attn.Wo", hidden, hidden),
                mlp_norm=norm(f"layers.{index}.mlp_norm"),
                up=linear(f"layers.{index}.mlp.Wi", 2 * inner, hidden),
                down=linear(f"layers.{index}.mlp.Wo", hidden, inner),
            )
            for index, kind in enumerate(spec.layers)
        ]

    @torch.inference_mode()
    def layers(self, rows: Packed) -> Generator[None, None, Tensor]:
        """Compute the last hidden states [T, hidden] of packed rows; yields after each layer."""
        x = self._embedding_norm(self._words[rows.tokens])
        rotations = {
            layer.kind.theta: self._rotation(rows.positions, layer.kind.theta) for layer in self._layers
        }
        for layer in self._layers:
            yield
            qkv = layer.qkv(x if layer.norm is None else layer.norm(x))
            qkv = qkv.view(len(x), 3, self.spec.num_heads, -1)
            _rotate(qkv[:, :2], rotations[layer.kind.theta])
            x = layer.attended(attend(qkv, rows.groups, reach=layer.kind.reach)).add_(x)
            inner, gate = layer.up(layer.mlp_norm(x)).chunk(2, -1)
            x = layer.down(F.gelu(inner) * gate).add_(x)
        return self._final_norm(x)

    def _rotation(self, positions: Tensor, theta: float) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, 1, 1, half a head]."""
        size = self.spec.head_dim
        each = torch.arange(0, size, 2, dtype=torch.float32, device=positions.device)
        angles = (positions[:, None].float() * theta ** (-each / size))[:, None, None, :]
        return angles.cos(), angles.sin()


def _rotate(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> None:
    """Rotate heads [T, n, heads, size] in place (arXiv:2104.09864)."""
    cos, sin = rotation
    first, second = heads.chunk(2, -1)
    turned = first * cos - second * sin
    second.copy_(second * cos + first * sin)
    first.copy_(turned)


# -- a decoder as an encoder
#
# The parts limit the time of one call, as chunked prefill does. The cache has room for one batch, and the next batch
# reuses it.

BLOCK_SIZE = 16
PART_TOKENS = 128
"""Tokens that one part computes on a CPU; a GPU computes a whole batch at once."""


class CausalEncoder:
    """The hidden states of a decoder after its last norm, computed in parts over a KV cache of its own.

    A batch has at most ``batch_tokens`` tokens, where each row counts as a multiple of `BLOCK_SIZE`.
    """

    def __init__(self, decoder: ModelDecoder, batch_tokens: int) -> None:
        self.spec = decoder.shape
        self.device = decoder.device
        self.batch_tokens = batch_tokens
        self._decoder = decoder
        self._part = PART_TOKENS if decoder.device.type == "cpu" else batch_tokens
        blocks = blocks_needed(batch_tokens, BLOCK_SIZE)
        self._kv = PagedKV(decoder.shape, blocks, BLOCK_SIZE, decoder.dtype, decoder.device)

    def layers(self, rows: Packed) -> Generator[None, None, Tensor]:
        """Compute the last hidden states [T, hidden] of packed rows; yields after each part of them."""
        tables = _tables(rows.lengths)
        parts = []
        for begin in range(0, len(rows.tokens), self._part):
            yield
            batch = self._batch(rows, tables, begin, min(begin + self._part, len(rows.tokens)))
            parts.append(self._decoder.hidden(batch, self._kv).float())
        return torch.cat(parts)

    def _batch(self, rows: Packed, tables: Tensor, begin: int, end: int) -> Batch:
        """The packed tokens ``[begin, end)``, which may begin and end within a row."""
        starts = rows.starts
        owners, lengths, contexts = list[int](), list[int](), list[int]()
        for row, (start, length) in enumerate(zip(starts, rows.lengths, strict=True)):
            first, last = max(begin, start), min(end, start + length)
            if first < last:
                owners.append(row)
                lengths.append(last - first)
                contexts.append(last - start)
        positions = rows.positions[begin:end]
        owner = torch.tensor([row for row, count in zip(owners, lengths, strict=True) for _ in range(count)])
        slots = tables[owner, positions.cpu() // BLOCK_SIZE] * BLOCK_SIZE + positions.cpu() % BLOCK_SIZE

        def on(values: Tensor, dtype: torch.dtype) -> Tensor:
            return values.to(self.device, dtype)

        return Batch(
            tokens=on(rows.tokens[begin:end], torch.int32),
            positions=on(positions, torch.int64),
            slot_mapping=on(slots, torch.int64),
            query_starts=on(torch.tensor([0, *accumulate(lengths)]), torch.int32),
            context_lens=on(torch.tensor(contexts), torch.int32),
            block_tables=on(tables[torch.tensor(owners)], torch.int32),
            logits_indices=torch.arange(end - begin, device=self.device),
            lengths=tuple(lengths),
            contexts=tuple(contexts),
            decode_rows=next((row for row, length in enumerate(lengths) if length != 1), len(lengths)),
            block_size=BLOCK_SIZE,
        )


def _tables(lengths: tuple[int, ...]) -> Tensor:
    """The blocks of each row, one row's after the other's."""
    counts = [blocks_needed(length, BLOCK_SIZE) for length in lengths]
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int64)
    first = 0
    for row, count in enumerate(counts):
        tables[row, :count] = torch.arange(first, first + count)
        first += count
    return tables
