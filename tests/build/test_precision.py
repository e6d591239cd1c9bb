"""What asks for fp8 is refused where the kernels do not compute with it."""

from __future__ import annotations

import pytest
import torch

from headrace.build.precision import kv_dtype
from headrace.compute.kernels.reference import TorchKernels
from headrace.config import ConfigError, ModelOptions


@pytest.mark.parametrize("option", ["quantization", "kv_cache_dtype"])
def test_fp8_needs_kernels_for_it(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, asked = TorchKernels(), ModelOptions(model="builtin", **{option: "fp8"})
    with pytest.raises(
        ConfigError, match=f"--{option.replace('_', '-')} fp8: kernels 'torch' do not compute with fp8"
    ):
        kv_dtype(asked, torch.bfloat16, kernels)
    monkeypatch.setattr(kernels, "fp8", True)
    expected = torch.float8_e4m3fn if option == "kv_cache_dtype" else torch.bfloat16
    assert kv_dtype(asked, torch.bfloat16, kernels) == expected
