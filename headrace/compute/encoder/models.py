"""Embedding models and cross-encoders, ready to run: rows of tokens in, vectors or scores out.

Both compute a batch as a generator that yields after each layer or part, so that the calling code can interleave other
work. `service.embedding` batches and paces them.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.compute.encoder import bert, modern_bert
from headrace.compute.encoder.bert import Bert
from headrace.compute.encoder.causal import BLOCK_SIZE, CausalEncoder
from headrace.compute.encoder.families import MODERN, parse_encoder_config
from headrace.compute.encoder.folder import Sentence, read_sentence
from headrace.compute.encoder.heads import Activation, Head, activation_of, read_head, same_label
from headrace.compute.encoder.modern_bert import ModernBert
from headrace.compute.encoder.packed import Packed, pack
from headrace.compute.encoder.pooling import Dense, pool
from headrace.compute.encoder.spec import EncoderSpec
from headrace.compute.encoder.tensors import Tensors, prefix_before, read_tensors
from headrace.compute.encoder.texts import TextTokenizer
from headrace.compute.kernels import Kernels, select
from headrace.compute.model.hub import read_config
from headrace.compute.model.spec import ModelError
from headrace.core.embedding import TokenRow

Values = NDArray[np.float32]
ResultT = TypeVar("ResultT")

BATCH_TOKENS = {"cpu": 4096, "cuda": 16384}
"""Maximum tokens of a batch, which limit its activation memory; a longer input is a batch of its own."""


class Sizes(Protocol):
    """The required sizes of a model."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...


class Encoder(Protocol):
    """Hidden states [T, hidden] of packed rows, with a pause after each layer or part."""

    @property
    def spec(self) -> Sizes: ...

    @property
    def device(self) -> torch.device: ...

    def layers(self, rows: Packed) -> Generator[None, None, Tensor]: ...


class EmbeddingModel:
    """Vectors of texts.

    ``dimensions`` is the length of a vector, ``max_tokens`` the longest input, ``unit_tokens`` what the length of an
    input is rounded up to in a batch. ``normalize``: vectors have length one unless a request says otherwise.
    """

    def __init__(
        self,
        name: str,
        encoder: Encoder,
        tokenizer: TextTokenizer,
        sentence: Sentence,
        max_tokens: int,
        dense: Sequence[Dense] = (),
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.vocab_size = encoder.spec.vocab_size
        self.dimensions = sentence.dense[-1].outputs if sentence.dense else encoder.spec.hidden_size
        self.max_tokens = max_tokens
        self.normalize = sentence.normalize
        self.prompts = sentence.prompts
        self.default_prompt = sentence.default_prompt
        self.batch_tokens = max(BATCH_TOKENS[encoder.device.type], max_tokens)
        self.unit_tokens = 1
        if isinstance(encoder, CausalEncoder):
            self.batch_tokens, self.unit_tokens = encoder.batch_tokens, BLOCK_SIZE
        self._encoder = encoder
        self._pooling = sentence.pooling
        self._dense = tuple(dense)

    @torch.inference_mode()
    def run(self, rows: Sequence[TokenRow]) -> Generator[None, None, Values]:
        """Compute the vectors [rows, dimensions], not normalized; yields after each layer or part."""
        packed, order = _sorted(rows, self._encoder.device)
        hidden = yield from self._encoder.layers(packed)
        pooled = pool(self._pooling, hidden, packed)
        for dense in self._dense:
            pooled = dense.activation(dense.linear(pooled))
        return _unsorted(pooled, order)


class CrossEncoder:
    """Scores of pairs of texts; the attributes are those of `EmbeddingModel`.

    ``boundary`` is the score from which on a pair rather has the label than not.
    """

    def __init__(
        self,
        name: str,
        encoder: Encoder,
        tokenizer: TextTokenizer,
        max_tokens: int,
        head: Head,
        activation: Activation,
    ) -> None:
        self.name = name
        self.boundary = activation.boundary
        self.tokenizer = tokenizer
        self.vocab_size = encoder.spec.vocab_size
        self.max_tokens = max_tokens
        self.batch_tokens = max(BATCH_TOKENS[encoder.device.type], max_tokens)
        self.unit_tokens = 1
        self._encoder = encoder
        self._head = head
        self._activation = activation.of

    @torch.inference_mode()
    def run(self, rows: Sequence[TokenRow]) -> Generator[None, None, Values]:
        """Compute the scores [rows, 1]; yields after each layer."""
        packed, order = _sorted(rows, self._encoder.device)
        hidden = yield from self._encoder.layers(packed)
        return _unsorted(self._activation(self._head(hidden, packed)), order)


def run(computing: Generator[None, None, ResultT]) -> ResultT:
    """The result of a model's `run`, without a pause."""
    while True:
        try:
            next(computing)
        except StopIteration as end:
            result: ResultT = end.value
            return result


def _sorted(rows: Sequence[TokenRow], device: torch.device) -> tuple[Packed, list[int]]:
    order = sorted(range(len(rows)), key=lambda index: len(rows[index].tokens))
    return pack([rows[index] for index in order], device), order


def _unsorted(values: Tensor, order: Sequence[int]) -> Values:
    result = np.empty(tuple(values.shape), np.float32)
    result[list(order)] = values.float().cpu().numpy()
    return result


def read_embedding_model(name: str, folder: Path, device: torch.device) -> EmbeddingModel:
    """The encoder in a folder, with pooling from its sentence-transformers files (default: mean).

    Raises:
        ModelError: the folder needs something that is not supported.
    """
    spec = parse_encoder_config(read_config(folder))
    sentence = read_sentence(folder, pooling="mean")
    kernels = select("auto", device)
    encoder, _ = read_encoder(spec, read_tensors(folder), kernels, device)
    return EmbeddingModel(
        name,
        encoder,
        TextTokenizer.from_folder(folder, sentence.lower_case),
        sentence,
        min(sentence.max_tokens or spec.max_tokens, spec.max_tokens),
        [each.read(kernels, device) for each in sentence.dense],
    )


def read_cross_encoder(name: str, folder: Path, device: torch.device) -> CrossEncoder:
    """The cross-encoder in a folder.

    Raises:
        ModelError: it is not one, it has more than one label, or the folder needs something that is not supported.
    """
    config, spec = _classifier(folder)
    if spec.num_labels != 1:
        raise ModelError(f"{folder} has {spec.num_labels} labels; a cross-encoder for scores has one")
    return _read_classifier(name, folder, device, spec, activation_of(config))


def read_pair_classifier(name: str, folder: Path, device: torch.device) -> CrossEncoder:
    """The model in a folder that says whether two texts mean the same: a cross-encoder, or one with two labels.

    The score of two labels is the probability of the one for the same meaning, as in Quora's pairs and MRPC.

    Raises:
        ModelError: as `read_cross_encoder`, or it is not clear which label means the same.
    """
    config, spec = _classifier(folder)
    if spec.num_labels not in (1, 2):
        raise ModelError(
            f"{folder} has {spec.num_labels} labels; a judge of pairs has one score, or two labels"
        )
    of = same_label(config) if spec.num_labels == 2 else activation_of(config)
    return _read_classifier(name, folder, device, spec, of)


def _classifier(folder: Path) -> tuple[Mapping[str, Any], EncoderSpec]:
    config = read_config(folder)
    if not is_cross_encoder(config):
        raise ModelError(
            f"{folder} is not a cross-encoder: its architecture is not *ForSequenceClassification"
        )
    return config, parse_encoder_config(config)


def _read_classifier(
    name: str, folder: Path, device: torch.device, spec: EncoderSpec, activation: Activation
) -> CrossEncoder:
    tensors = read_tensors(folder)
    encoder, of = read_encoder(spec, tensors, select("auto", device), device)
    return CrossEncoder(
        name,
        encoder,
        TextTokenizer.from_folder(folder),
        spec.max_tokens,
        read_head(spec, of),
        activation,
    )


def is_cross_encoder(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` describes a model with a classification head."""
    names = config.get("architectures") or ()
    return any(str(name).endswith("ForSequenceClassification") for name in names)


def read_encoder(
    spec: EncoderSpec, tensors: Mapping[str, Tensor], kernels: Kernels, device: torch.device
) -> tuple[Bert | ModernBert, Tensors]:
    """The encoder of a checkpoint, and its tensors by their names without a common prefix.

    Raises:
        ModelError: a tensor is missing or does not have the shape in ``spec``.
    """
    modern = spec.family == MODERN
    prefix = prefix_before(tensors, modern_bert.WORDS if modern else bert.WORDS)
    of = Tensors(tensors, prefix, kernels, device)
    return ModernBert(spec, of) if modern else Bert(spec, of), of
