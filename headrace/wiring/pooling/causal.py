"""Loads a decoder as an embedding model: its own weights without a head, or the weights of the served decoder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.compute.checkpoint import ModelError
from headrace.compute.device import device_facts, resolve_device, resolve_dtype
from headrace.compute.encoder.causal import BLOCK_SIZE, CausalEncoder
from headrace.compute.encoder.models import (
    BATCH_TOKENS,
    EmbeddingModel,
    Sentence,
    TextTokenizer,
    read_sentence,
)
from headrace.compute.kernels import select
from headrace.compute.model.decoder import Decoder, ModelDecoder
from headrace.compute.model.families import FAMILIES, parse_config
from headrace.compute.model.hub import read_config
from headrace.compute.model.weights import load_weights
from headrace.config import ModelOptions

MAX_TOKENS = 8192
"""Maximum tokens of an input of a decoder, which limits the memory of its keys and values."""


def read_causal_model(name: str, folder: Path, options: ModelOptions) -> EmbeddingModel:
    """The decoder in a folder as an embedding model, pooled at the last token unless its files say otherwise.

    Raises:
        ModelError: the model is not supported.
        ConfigError: the device does not support the dtype.
    """
    sentence = read_sentence(folder, pooling="last")
    spec = parse_config(_generating(read_config(folder)))
    device = resolve_device(options.device)
    choice = resolve_dtype(options.dtype, spec.dtype, device_facts(device), quantized=bool(spec.stored))
    weights = load_weights(folder, spec, choice.dtype, device, head=False)
    weights.head = weights.embedding[:1]  # no logits are computed, so no copy of the table is prepared
    most = _max_tokens(sentence, spec.max_positions)
    decoder = Decoder(spec, weights, select(options.kernels, device, dtype=choice.dtype), most)
    return share_decoder(name, folder, decoder, most)


def share_decoder(name: str, folder: Path, decoder: ModelDecoder, max_model_len: int) -> EmbeddingModel:
    """An embedding model over a loaded decoder, for inputs of at most ``max_model_len`` tokens.

    Raises:
        ModelError: the model is not supported.
    """
    if decoder.shape.state_bytes:
        raise ModelError(f"{decoder.shape.architecture} keeps recurrent states of running sequences only")
    sentence = read_sentence(folder, pooling="last")
    most = _max_tokens(sentence, max_model_len)
    batch = max(BATCH_TOKENS[decoder.device.type], -(-most // BLOCK_SIZE) * BLOCK_SIZE)
    kernels = decoder.kernels
    return EmbeddingModel(
        name,
        CausalEncoder(decoder, batch),
        TextTokenizer.from_folder(folder, sentence.lower_case),
        sentence,
        most,
        [each.read(kernels, decoder.device) for each in sentence.dense],
    )


def _max_tokens(sentence: Sentence, limit: int) -> int:
    return min(sentence.max_tokens or limit, limit, MAX_TOKENS)


def _generating(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the name of the architecture with a head, instead of the one without."""
    names = config.get("architectures")
    whole = (
        [str(name).removesuffix("Model") + "ForCausalLM" for name in names] if isinstance(names, list) else []
    )
    known = [name for name in whole if name in FAMILIES]
    return {**config, "architectures": known} if known else dict(config)
