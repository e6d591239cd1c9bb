"""Encoders: texts to vectors, for embeddings and the semantic cache, and pairs of texts to scores.

- `models`: embedding models and cross-encoders, ready to run. `sentences`, `pairs`: encoder and second judge
  of the semantic cache.
- `texts`: tokens of texts and pairs. `folder`: the files of sentence-transformers. `pooling`: one vector per input.
- `families`: the supported encoders as data. `spec`: their sizes. `tensors`: the tensors of a checkpoint.
- `bert`, `modern_bert`: forward passes. `causal`: a decoder as an encoder. `heads`: scores of cross-encoders.
- `packed`: a batch without padding, and its attention.
"""
