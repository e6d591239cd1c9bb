"""Encoders: texts to vectors, for embeddings and the semantic cache, and pairs of texts to scores.

- `models`: embedding models and cross-encoders, ready to run: their files, their texts as tokens, one vector per
  input or the score of a pair.
- `sentences`: encoder and second judge of the semantic cache.
- `families`: the supported encoders as data, and their sizes. `networks`: the forward passes over a batch without
  padding; a decoder as an encoder.
"""
