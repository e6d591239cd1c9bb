"""The type of keys and values, and whether the kernels compute with the types that were asked for."""

from __future__ import annotations

import torch

from headrace.compute.kernels import Kernels
from headrace.config import ConfigError, ModelOptions

_KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def kv_dtype(model: ModelOptions, computed: torch.dtype, kernels: Kernels) -> torch.dtype:
    """The type of keys and values of a model that is computed in ``computed``.

    Raises:
        ConfigError: an option asks for fp8, and the kernels do not compute with it on their device.
    """
    for option, value in (("quantization", model.quantization), ("kv-cache-dtype", model.kv_cache_dtype)):
        if value == "fp8" and not kernels.fp8:
            raise ConfigError(
                f"--{option} fp8: kernels '{kernels.name}' do not compute with fp8 on this device; --kernels triton"
                f" does on NVIDIA GPUs of compute capability 8.9 or later. Elsewhere use --{option} int8"
            )
    return _KV_DTYPES.get(model.kv_cache_dtype, computed)
