"""Quantized weights: one internal layout, rounding to it, and the formats on disk; `quantizing` writes them."""
