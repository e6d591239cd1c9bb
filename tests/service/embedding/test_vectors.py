"""Vectors after the model, by hand."""

from __future__ import annotations

import base64
import json
import struct

import numpy as np
import pytest

from headrace.service.embedding.vectors import as_base64, as_json, cosine, finish

VECTORS = np.array([[3.0, 4.0, 12.0], [0.0, 0.0, 0.0]], np.float32)


def test_fewer_dimensions_are_normalized_again() -> None:
    np.testing.assert_allclose(finish(VECTORS, 2, normalize=True), [[0.6, 0.8], [0, 0]])
    np.testing.assert_allclose(finish(VECTORS, 2, normalize=False), [[3, 4], [0, 0]])
    np.testing.assert_allclose(finish(VECTORS, None, normalize=True)[0], [3 / 13, 4 / 13, 12 / 13], rtol=1e-6)


def test_cosine() -> None:
    one = np.array([[1.0, 0.0], [2.0, 2.0]], np.float32)
    other = np.array([[5.0, 0.0], [0.0, 1.0]], np.float32)
    assert cosine(one, other) == pytest.approx([1.0, 2**-0.5])
    assert cosine(one[:1], other) == pytest.approx([1.0, 0.0])


def test_encodings() -> None:
    assert struct.unpack("<3f", base64.b64decode(as_base64(VECTORS[0]))) == (3.0, 4.0, 12.0)
    assert json.loads(as_json(VECTORS[0])) == [3.0, 4.0, 12.0]
