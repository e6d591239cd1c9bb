"""Embedding models and cross-encoders, ready to run: rows of tokens in, vectors or scores out.

Both compute a batch as a generator that yields after each layer or part, so that the calling code can interleave other
work. `service.embedding_worker` batches and paces them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from headrace.compute.checkpoint import ModelError
from headrace.compute.encoder.families import FAMILIES, MODERN, EncoderSpec, parse_encoder_config
from headrace.compute.encoder.networks import (
    BERT_WORDS,
    BLOCK_SIZE,
    MODERN_WORDS,
    Bert,
    CausalEncoder,
    ModernBert,
    Packed,
    Tensors,
    pack,
    prefix_before,
    read_tensors,
)
from headrace.compute.kernels import Kernels, select
from headrace.compute.model.config_reader import ConfigReader
from headrace.compute.model.hub import read_config
from headrace.core.embedding import TokenRow
from headrace.files import read_json_file

# Heads of cross-encoders: the score of a pair of texts from the last hidden states of an encoder.

# Pooling: one vector of an input from the hidden states of its tokens.


class Dense(NamedTuple):
    """A linear layer after pooling, and its activation."""

    linear: Callable[[Tensor], Tensor]
    activation: Callable[[Tensor], Tensor]


def pool(mode: str, hidden: Tensor, rows: Packed) -> Tensor:
    """Vectors [rows, hidden] of the first token (``cls``), the last one (``last``), or the mean of all tokens."""
    if mode == "mean":
        means = [
            hidden[group.start : group.end].view(group.rows, group.length, -1).mean(1)
            for group in rows.groups
        ]
        return means[0] if len(means) == 1 else torch.cat(means)
    at = torch.tensor(rows.starts, device=hidden.device)
    if mode == "last":
        at += torch.tensor(rows.lengths, device=hidden.device) - 1
    return hidden[at]


Head = Callable[[Tensor, Packed], Tensor]
"""Logits [rows, labels] of hidden states [T, hidden]."""


class Activation(NamedTuple):
    """Scores [rows, 1] of logits [rows, labels]; from ``boundary`` on, the label is likelier than not."""

    of: Callable[[Tensor], Tensor]
    boundary: float


_HEAD_ACTIVATIONS: Mapping[str, Activation] = {
    "Sigmoid": Activation(torch.sigmoid, 0.5),
    "Identity": Activation(lambda logits: logits, 0.0),
}
_SAME = frozenset(
    ("duplicate", "is_duplicate", "paraphrase", "equivalent", "same", "similar", "yes", "label_1", "1")
)


def read_head(spec: EncoderSpec, of: Tensors) -> Head:
    """The classification head of a checkpoint; ``of`` are the encoder's own tensors.

    Raises:
        ModelError: the checkpoint has none.
    """
    kind = MODERN if spec.family == MODERN else FAMILIES[spec.family].head
    return _HEADS[kind](spec, of.below(""), of)


def _bert(spec: EncoderSpec, whole: Tensors, encoder: Tensors) -> Head:
    pooler = encoder.linear(spec.hidden_size, spec.hidden_size, "pooler.dense")
    classifier = whole.linear(spec.num_labels, spec.hidden_size, "classifier")
    return lambda hidden, rows: classifier(torch.tanh(pooler(pool("cls", hidden, rows))))


def _roberta(spec: EncoderSpec, whole: Tensors, encoder: Tensors) -> Head:
    dense = whole.linear(spec.hidden_size, spec.hidden_size, "classifier.dense")
    output = whole.linear(spec.num_labels, spec.hidden_size, "classifier.out_proj")
    return lambda hidden, rows: output(torch.tanh(dense(pool("cls", hidden, rows))))


def _distilbert(spec: EncoderSpec, whole: Tensors, encoder: Tensors) -> Head:
    dense = whole.linear(spec.hidden_size, spec.hidden_size, "pre_classifier")
    classifier = whole.linear(spec.num_labels, spec.hidden_size, "classifier")
    return lambda hidden, rows: classifier(F.relu(dense(pool("cls", hidden, rows))))


def _modern(spec: EncoderSpec, whole: Tensors, encoder: Tensors) -> Head:
    dense = whole.linear(spec.hidden_size, spec.hidden_size, "head.dense", bias=False)
    norm = whole.norm("head.norm", spec.hidden_size, spec.norm_eps, bias=False)
    classifier = whole.linear(spec.num_labels, spec.hidden_size, "classifier")
    mode = spec.classifier_pooling
    return lambda hidden, rows: classifier(norm(F.gelu(dense(pool(mode, hidden, rows)))))


_HEADS = {"bert": _bert, "roberta": _roberta, "distilbert": _distilbert, MODERN: _modern}


def same_label(config: Mapping[str, Any]) -> Activation:
    """The probability of the label for the same meaning, of two.

    Raises:
        ModelError: the names of the labels do not tell which one that is.
    """
    named = config.get("id2label")
    names = (
        {str(key): str(value).lower() for key, value in named.items()} if isinstance(named, Mapping) else {}
    )
    same = [int(key) for key, value in names.items() if value in _SAME and key in ("0", "1")]
    if names and len(same) != 1:
        raise ModelError(
            f"the labels {', '.join(sorted(names.values()))} do not say which one means the same: one must be called "
            "duplicate, paraphrase, equivalent or LABEL_1"
        )
    label = same[0] if same else 1
    return Activation(lambda logits: logits.softmax(-1)[:, label : label + 1], 0.5)


def activation_of(config: Mapping[str, Any]) -> Activation:
    """The function from a pair's logit to its score: as configured for sentence-transformers, otherwise sigmoid.

    Raises:
        ModelError: it names another function.
    """
    nested = config.get("sentence_transformers")
    named = nested.get("activation_fn") if isinstance(nested, Mapping) else None
    named = named or config.get("sbert_ce_default_activation_function") or "Sigmoid"
    name = str(named).rpartition(".")[2]
    if name not in _HEAD_ACTIVATIONS:
        raise ModelError(
            f"the activation {named!r:.80} of scores is not supported, only {', '.join(_HEAD_ACTIVATIONS)}"
        )
    return _HEAD_ACTIVATIONS[name]


# The files of sentence-transformers in a model's folder: pooling, prompts, and the longest input.
#
# It reads JSON only. A folder without these files is used with the defaults of its kind of model.

_MODES = {
    "cls_token": "cls",
    "cls": "cls",
    "mean_tokens": "mean",
    "mean": "mean",
    "lasttoken": "last",
    "last": "last",
}
"""Names of pooling modes in older and newer files."""

_ACTIVATIONS = {"Tanh": torch.tanh, "Identity": lambda x: x, "GELU": F.gelu, "ReLU": F.relu}


@dataclass(frozen=True, slots=True)
class DenseFile:
    """A linear layer after pooling, in a folder of its own."""

    folder: Path
    inputs: int
    outputs: int
    bias: bool
    activation: str

    def read(self, kernels: Kernels, device: torch.device) -> Dense:
        """Load its weights.

        Raises:
            ModelError: a tensor is missing or has another shape.
        """
        of = Tensors(read_tensors(self.folder), "linear.", kernels, device)
        weight = of.get("weight", self.outputs, self.inputs)
        bias = of.get("bias", self.outputs) if self.bias else None

        def linear(x: Tensor) -> Tensor:
            return F.linear(x, weight, bias)

        return Dense(linear, _ACTIVATIONS[self.activation])


@dataclass(frozen=True, slots=True)
class Sentence:
    """How a folder's texts become vectors.

    ``max_tokens`` is the longest input that it was trained for (None: the model's limit). ``prompts`` are texts to put
    before an input, by name; ``default_prompt`` names the one to use if a request names none.
    """

    pooling: str
    normalize: bool
    dense: tuple[DenseFile, ...] = ()
    max_tokens: int | None = None
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None


def read_sentence(folder: Path, pooling: str) -> Sentence:
    """What the files of a folder say. Without ``modules.json``: ``pooling``, and vectors of length one.

    Raises:
        ModelError: a file is damaged, or names something that is not supported.
    """
    limits = _object(folder / "sentence_bert_config.json")
    normalize, dense = True, list[DenseFile]()
    modules = _list(folder / "modules.json")
    if modules:
        normalize = False
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        path = folder / str(module.get("path", ""))
        if kind == "Pooling":
            pooling = _pooling(folder, _object(path / "config.json"))
        elif kind == "Normalize":
            normalize = True
        elif kind == "Dense":
            dense.append(_dense(path))
        elif kind != "Transformer":
            raise ModelError(f"{folder}: a module {kind!r:.80} after the encoder is not supported")
    prompts, default = _prompts(folder / "config_sentence_transformers.json")
    return Sentence(
        pooling,
        normalize,
        tuple(dense),
        ConfigReader("sentence_bert_config.json", limits, {}).optional_integer("max_seq_length"),
        limits.get("do_lower_case") is True,
        prompts,
        default,
    )


def _pooling(folder: Path, config: Mapping[str, Any]) -> str:
    prefix = "pooling_mode_"
    chosen = [
        name.removeprefix(prefix) for name, on in config.items() if name.startswith(prefix) and on is True
    ]
    if config.get("pooling_mode"):
        named = config["pooling_mode"]
        chosen = [str(each) for each in (named if isinstance(named, list) else [named])]
    if len(chosen) != 1 or chosen[0] not in _MODES:
        shown = ", ".join(sorted(chosen)) or "none"
        raise ModelError(f"{folder}: pooling {shown} is not supported, only cls, mean or lasttoken")
    if config.get("include_prompt") is False:
        raise ModelError(
            f"{folder}: include_prompt false is not supported: prompts are pooled like other tokens"
        )
    return _MODES[chosen[0]]


def _dense(path: Path) -> DenseFile:
    config = _object(path / "config.json")
    read = ConfigReader(f"module 'Dense' in {path}", config, {})
    activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise ModelError(f"{path}: activation_function {activation} is not supported")
    return DenseFile(
        path,
        read.integer("in_features"),
        read.integer("out_features"),
        config.get("bias") is not False,
        activation,
    )


def _prompts(path: Path) -> tuple[dict[str, str], str | None]:
    config = _object(path)
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelError(f"{path}: prompts must be an object of texts")
    if default is not None and default not in prompts:
        raise ModelError(f"{path}: default_prompt_name {default!r:.80} is not among the prompts")
    return prompts, default


def _list(path: Path) -> list[dict[str, Any]]:
    value = _json(path, [])
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ModelError(f"{path} is not a list of JSON objects")
    return value


def _object(path: Path) -> dict[str, Any]:
    value = _json(path, {})
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


def _json(path: Path, missing: Any) -> Any:
    if not path.is_file():
        return missing
    try:
        return read_json_file(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


# Tokens of one text or of a pair of texts for an encoder, cut at a limit without losing the special tokens.

_AT_ONCE = 32
"""Texts in one call of the library, which uses all cores for a call and none between two."""


class TextTokenizer:
    """The tokenizer of a folder; one instance serves all threads.

    ``lower_case``: texts are converted to lower case first.
    """

    def __init__(self, backend: tokenizers.Tokenizer, lower_case: bool = False) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.lower_case = lower_case

    @classmethod
    def from_text(cls, text: str, lower_case: bool) -> TextTokenizer:
        """The tokenizer that `text` describes."""
        return cls(tokenizers.Tokenizer.from_str(text), lower_case)

    def text(self) -> str:
        """The tokenizer as JSON, for another process."""
        described: str = self._backend.to_str()
        return described

    @classmethod
    def from_folder(cls, folder: Path, lower_case: bool = False) -> TextTokenizer:
        """Read ``tokenizer.json``.

        Raises:
            ModelError: it is missing or damaged.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{folder} contains no tokenizer.json")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)), lower_case)
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"{path} cannot be read: {error}") from error

    def texts(self, texts: Sequence[str], limit: int | None = None) -> list[TokenRow]:
        """The tokens of each text with its special tokens; at most ``limit``, cut at the text's end.

        Raises:
            ValueError: a text is not valid Unicode, or the limit leaves no room for the special tokens.
        """
        if limit is None:
            return [TokenRow(tuple(each.ids)) for each in self._encode(texts, special=True)]
        room = self._room(limit, pair=False)
        heads = (_head(each, room) for each in self._encode(texts, special=False))
        return [TokenRow(tuple(self._backend.post_process(head).ids)) for head in heads]

    def pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        limit: int | None = None,
        second_limit: int | None = None,
    ) -> list[TokenRow]:
        """The tokens of each pair: at most ``limit``, cut from the longer text; of the second ``second_limit``.

        Raises:
            ValueError: a text is not valid Unicode, or the limit leaves no room for the special tokens.
        """
        room = None if limit is None else self._room(limit, pair=True)
        distinct = list(dict.fromkeys(text for pair in pairs for text in pair))
        encoded = dict(zip(distinct, self._encode(distinct, special=False), strict=True))
        rows = []
        for one, other in pairs:
            first, second = encoded[one], encoded[other]
            lengths = len(first), min(len(second), second_limit or len(second))
            if room is not None:
                lengths = _shares(*lengths, room)
            rows.append(self._joined(first, second, *lengths))
        return rows

    def _joined(
        self, first: tokenizers.Encoding, second: tokenizers.Encoding, one: int, other: int
    ) -> TokenRow:
        joined = self._backend.post_process(_head(first, one), _head(second, other))
        kinds = joined.type_ids
        return TokenRow(tuple(joined.ids), kinds.index(1) if 1 in kinds else 0)

    def _room(self, limit: int, *, pair: bool) -> int:
        special = self._backend.num_special_tokens_to_add(pair)
        if limit <= special:
            raise ValueError(f"a limit of {limit} tokens leaves no room beside {special} special tokens")
        return limit - special

    def _encode(self, texts: Sequence[str], *, special: bool) -> list[tokenizers.Encoding]:
        lowered = [text.lower() for text in texts] if self.lower_case else texts
        encoded: list[tokenizers.Encoding] = []
        for begin in range(0, len(lowered), _AT_ONCE):
            part = list(lowered[begin : begin + _AT_ONCE])
            try:
                encoded += self._backend.encode_batch(part, add_special_tokens=special)
            except (TypeError, UnicodeError) as error:
                raise ValueError("text must be valid Unicode (it contains a lone surrogate)") from error
        return encoded


def _head(encoding: tokenizers.Encoding, length: int) -> tokenizers.Encoding:
    """The first tokens of a text, ready for its special tokens.

    ``Encoding.truncate`` keeps what it cuts off, as pieces of this length, and each of them gets special tokens too: a
    second for a million tokens, during which the library holds the interpreter.
    """
    if len(encoding) <= length:
        return encoding
    state: dict[str, Any] = {
        "ids": encoding.ids[:length],
        "type_ids": [0] * length,
        "tokens": [""] * length,
        "words": [None] * length,
        "offsets": [(0, 0)] * length,
        "special_tokens_mask": [0] * length,
        "attention_mask": [1] * length,
        "overflowing": [],
        "sequence_ranges": {},
    }
    head = tokenizers.Encoding()
    head.__setstate__(json.dumps(state).encode())
    return head


def _shares(one: int, other: int, room: int) -> tuple[int, int]:
    """The lengths of two texts that fit into ``room`` together, cut from the longer one."""
    if one + other <= room:
        return one, other
    half = room // 2
    if one <= half:
        return one, room - one
    if other <= half:
        return room - other, other
    return half, room - half


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
    prefix = prefix_before(tensors, MODERN_WORDS if modern else BERT_WORDS)
    of = Tensors(tensors, prefix, kernels, device)
    return ModernBert(spec, of) if modern else Bert(spec, of), of
