"""Post-processing of vectors: truncation, normalization, cosine similarity."""

from __future__ import annotations

import base64
import json

import numpy as np

from headrace.service.embedding.models import Values

_SMALLEST = 1e-12


def finish(vectors: Values, dimensions: int | None, normalize: bool) -> Values:
    """The first ``dimensions`` of each vector (arXiv:2205.13147), scaled to length 1 if ``normalize``."""
    shorter = vectors if dimensions is None else vectors[:, :dimensions]
    return unit(shorter) if normalize else shorter


def unit(vectors: Values) -> Values:
    """Vectors scaled to length 1; a vector of zeros is not changed."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    result: Values = vectors / np.maximum(lengths, _SMALLEST)
    return result


def cosine(one: Values, other: Values) -> list[float]:
    """The cosine similarity of each pair of rows; a single row is compared with all."""
    products: Values = (unit(one) * unit(other)).sum(1)
    return [float(each) for each in products]


def as_base64(vector: Values) -> str:
    """A vector as packed little-endian float32 in base64, as OpenAI sends it."""
    return base64.b64encode(np.ascontiguousarray(vector, "<f4").tobytes()).decode()


def as_json(vector: Values) -> str:
    """A vector as a JSON list."""
    return json.dumps(vector.tolist())
