"""Sentence encoders: text to one unit vector each, for the semantic cache.

- `sentences`: tokenizes, encodes and pools texts.
- `bert`: the forward pass of BERT-like encoders.
"""
