"""Reads whole texts with a decoder, one at a time, without an engine: for calibration and for measuring quality."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.compute.batch import Batch
from headrace.compute.kernels import Kernels
from headrace.compute.kv import PagedKV
from headrace.compute.model.decoder import Decoder
from headrace.compute.model.spec import DecoderSpec
from headrace.compute.model.weights import DecoderWeights

_BLOCK = 16


class Reader:
    """Reads texts of up to ``max_tokens`` tokens and returns logits.

    Args:
        spec: the model.
        weights: its weights, whose layers are moved out of it.
        kernels: the backend.
        max_tokens: length of the longest text.
        kv_dtype: dtype of the KV pages; None: that of the weights.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        kernels: Kernels,
        max_tokens: int,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self._decoder = Decoder(spec, weights, kernels, max_tokens)
        self._blocks = -(-max_tokens // _BLOCK)
        dtype = kv_dtype or self._decoder.dtype
        self._kv = PagedKV(spec.shape, self._blocks, _BLOCK, dtype, self._decoder.device)

    def logits(self, tokens: Sequence[int], wanted: int) -> Tensor:
        """Float32 logits [wanted, vocab] after each of the last ``wanted`` of the tokens."""
        count, device = len(tokens), self._decoder.device
        places = torch.arange(count, device=device)
        batch = Batch(
            tokens=torch.tensor(tokens, dtype=torch.int32, device=device),
            positions=places,
            slot_mapping=places,
            query_starts=torch.tensor([0, count], dtype=torch.int32, device=device),
            context_lens=torch.tensor([count], dtype=torch.int32, device=device),
            block_tables=torch.arange(self._blocks, dtype=torch.int32, device=device)[None],
            logits_indices=places[count - wanted :],
            lengths=(count,),
            contexts=(count,),
            decode_rows=int(count == 1),
            block_size=_BLOCK,
        )
        return self._decoder.forward(batch, self._kv)
