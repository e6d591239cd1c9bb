"""Copies between host and device: what goes up in one piece comes apart again, and a line is read and written."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.compute.transfer import Line, joined, split, upload

ARRAYS = [
    np.array([1, -2, 2**62], dtype=np.int64),
    np.array([7, -8, 9], dtype=np.int32),
    np.array([], dtype=np.int32),
    np.array([0.5, -1e300], dtype=np.float64),
    np.array([3], dtype=np.int32),
]


def test_one_copy_holds_arrays_of_several_types() -> None:
    words = torch.from_numpy(joined(ARRAYS))
    parts = split(words, ARRAYS)
    assert words.numel() == 3 + 2 + 0 + 2 + 1
    assert [part.dtype for part in parts] == [
        torch.int64,
        torch.int32,
        torch.int32,
        torch.float64,
        torch.int32,
    ]
    assert [part.tolist() for part in parts] == [array.tolist() for array in ARRAYS]


def test_on_a_cpu_nothing_is_copied() -> None:
    for array, tensor in zip(ARRAYS, upload(torch.device("cpu"), *ARRAYS), strict=True):
        assert tensor.tolist() == array.tolist()
        assert not array.size or tensor.data_ptr() == array.ctypes.data


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_line_is_read_and_written_at_places(dtype: torch.dtype) -> None:
    tensor = torch.arange(12, dtype=torch.int32).view(3, 4)
    line = Line(tensor)
    assert line.take(np.array([11, 0, 5])).tolist() == [11, 0, 5]
    line.write(8, np.array([8, 90], dtype=np.int64))
    assert line.take(np.array([7, 8, 9, 10])).tolist() == [7, 8, 90, 10]
    line.put(np.array([2, 9, 4]), torch.tensor([50, -2, 0], dtype=dtype), least=0)
    assert tensor.tolist() == [[0, 1, 50, 3], [0, 5, 6, 7], [8, 0, 10, 11]]


def test_tensors_of_the_device_stay_what_they_are() -> None:
    tensors = [torch.arange(3), torch.ones(2, dtype=torch.float64)]
    assert all(a is b for a, b in zip(upload(torch.device("cpu"), *tensors), tensors, strict=True))
    with pytest.raises(TypeError, match="cannot be uploaded together"):
        upload(torch.device("cpu"), tensors[0], np.arange(3))
