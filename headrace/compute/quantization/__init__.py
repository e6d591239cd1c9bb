"""Quantized weights: one internal layout, the formats on disk, and the methods that make them.

- `weight`: the internal layout of a quantized weight.
- `scheme`: bits, groups and scales; rounding to nearest.
- `gptq`, `awq`: better values than the nearest. `calibration`: the second moments that they need.
- `stored`: the interface of a format on disk. `formats`: reads a ``quantization_config``.
- `gptq_format`, `awq_format`, `compressed_tensors`, `fp8_format`: one format each.
- `words`: small integers in 32-bit words.
- `writing`: writes a quantized checkpoint.
- `quality`: perplexity and divergence of a quantized model.
"""
