"""Heads of cross-encoders: the score of a pair of texts from the last hidden states of an encoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.compute.checkpoint import ModelError
from headrace.compute.encoder.families import FAMILIES, MODERN, EncoderSpec
from headrace.compute.encoder.networks import Packed, Tensors

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


_ACTIVATIONS: Mapping[str, Activation] = {
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
    if name not in _ACTIVATIONS:
        raise ModelError(
            f"the activation {named!r:.80} of scores is not supported, only {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]
